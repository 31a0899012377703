"""A target and a draft whose output is known in closed form, for tests that need exact text.

One token is one UTF-8 byte. Every layer of the target is the identity, so the next token depends on
the last one alone: p(next) = 0.6, p(next of next) = 0.3, p('_') = 0.05, the rest share 0.05.
The greedy chain: a-z and A-Z cycle; 0..9, then <eos>; '!' is followed by <im_end>, the second end
token; the four bytes of U+1F600 cycle; everything else goes to 'a', but <eos> to 'A', so that text
leaking out behind the end is easy to see. The draft proposes the same chain, except that it is
wrong after 'e' and cannot propose 'Q'.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from triton.runtime import interpreter

from eagle3_core import CacheContext, DraftConfig, Eagle3Draft, save_draft
from eagle3_core.target import Target, capture_boundaries, capture_final
from eagle3_core.vocab import vocab_map
from eagle3_serve.engine import Engine
from eagle3_serve.server import EngineWorker, create_app

BOS, EOS, IM_START, IM_END = range(256, 260)
V = H = 272  # twelve padding rows that the tokenizer does not know
EPS = 1e-6
LAYERS = 4
MAX_LENGTH = 256
# RMSNorm of a one-hot vector.
ONE_HOT = 1 / math.sqrt(1 / H + EPS)


@dataclass(frozen=True)
class ChainPair:
    """Folders of the pair, and the chain itself."""

    target: Path
    draft: Path
    next_token: tuple[int, ...]

    def greedy(self, last: int, count: int) -> list[int]:
        """The first `count` tokens that greedy decoding emits after token `last`, ends ignored."""
        out = []
        for _ in range(count):
            last = self.next_token[last]
            out.append(last)
        return out


@pytest.fixture(scope="session")
def chain_pair(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
    tmp_path_factory: pytest.TempPathFactory,
) -> ChainPair:
    """The pair on disk, written once."""
    folder = tmp_path_factory.mktemp("chain")
    chain = _chain()
    _write_target(folder / "target", chain)
    make_tokenizer().save_pretrained(folder / "target")
    _write_draft(folder / "draft", chain)
    return ChainPair(folder / "target", folder / "draft", tuple(chain))


def make_draft(target: Target, seed: int = 1, **choices: object) -> Eagle3Draft:
    """A random draft for a target; `choices` are fields of `DraftConfig`."""
    fields: dict[str, object] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "num_aux_hidden_states": 3,
        "aux_layer_ids": (1, 2, 4),
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    draft = Eagle3Draft(DraftConfig.from_dict(fields | choices))
    generator = torch.Generator().manual_seed(seed)
    draft.init_weights(generator, std=0.3)
    size = draft.config.draft_vocab_size
    if draft.config.is_pruned:
        kept = torch.randperm(target.vocab_size, generator=generator)[:size]
        draft.d2t, draft.t2d = vocab_map(kept, target.vocab_size)
    return draft.to(target.model.dtype).eval().requires_grad_(False)


def reference_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by whole forwards of the model's own code; ends at an end token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in target.eos_token_ids:
            break
    return tokens[len(prompt) :]


def fit_draft(target: Target, draft: Eagle3Draft, prompts: list[list[int]], count: int) -> None:
    """Teach a draft the target's greedy answers to a few prompts, so that it is often right."""
    draft.requires_grad_(True)
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt + reference_greedy(target, prompt, count)])
        boundaries = draft.config.aux_layer_ids
        capturing = (
            capture_final(target.model)
            if boundaries is None
            else capture_boundaries(target.model, boundaries)
        )
        with capturing as capture:
            target.model(ids)
            rows.append((ids, torch.cat(capture.states(), -1)))
    for _ in range(50):
        for ids, aux in rows:
            positions = torch.arange(ids.shape[1] - 1)[None]
            x = draft.project(aux[:, :-1])
            hidden = draft(draft.embed(ids[:, 1:]), x, positions, CacheContext())
            logits = draft.logits(hidden)[0, :-1]
            torch.nn.functional.cross_entropy(logits, ids[0, 2:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    draft.requires_grad_(False)


@dataclass(frozen=True)
class RandomPairs:
    """Makers of random targets and drafts, handed to tests as a fixture."""

    target: Callable[..., Target]
    draft: Callable[..., Eagle3Draft]
    fit: Callable[..., None]
    greedy: Callable[..., list[int]]


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Triton makes its language interpretable for every call of a jitted function; once will do.

    That is two thirds of a kernel's time in the interpreter (triton 3.6 to 3.9). A launch does it
    for its own module, and undoes it; the functions it calls only have to be seen to once.
    """
    seen: set[int] = set()

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in seen:
            interpreter._patch_lang(self.fn)
            seen.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture(scope="session")
def pairs(make_target: Callable[..., Target]) -> RandomPairs:
    """See `RandomPairs`; 48 ids and 128 positions keep exact distributions small."""

    def small(dtype: torch.dtype = torch.float32, vocab_size: int = 48, **fields: Any) -> Target:
        defaults = {
            "vocab_size": vocab_size,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": vocab_size - 1,
        }
        return make_target(dtype, **{**defaults, **fields})

    return RandomPairs(small, make_draft, fit_draft, reference_greedy)


def _chain() -> list[int]:
    following = [ord("a")] * V
    for cycle in (b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "😀".encode()):
        for i, byte in enumerate(cycle):
            following[byte] = cycle[(i + 1) % len(cycle)]
    for digit in b"012345678":
        following[digit] = digit + 1
    following[ord("9")], following[EOS], following[ord("!")] = EOS, ord("A"), IM_END
    return following


def _head(chain: list[int], wrong: frozenset[int] = frozenset()) -> torch.Tensor:
    """[V,H] rows whose logits of a normed one-hot state are log-probabilities."""
    weight = torch.full((V, H), math.log(0.05 / (V - 3)))
    weight[ord("_")] = math.log(0.05)
    for last in range(V):
        best = ord("#") if last in wrong else chain[last]
        weight[chain[best], last], weight[best, last] = math.log(0.3), math.log(0.6)
    return weight / ONE_HOT


def _write_target(folder: Path, chain: list[int]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=EPS,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [EOS, IM_END]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(_head(chain))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)


def _write_draft(folder: Path, chain: list[int]) -> None:
    """The fed-back state walks the chain: the MLP adds e[next] - e[last] to a one-hot state."""
    kept = torch.tensor([i for i in range(V) if i != ord("Q")])
    draft = Eagle3Draft(
        DraftConfig(
            hidden_size=H,
            intermediate_size=H,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=V,
            draft_vocab_size=len(kept),
            target_hidden_size=H,
            num_target_layers=LAYERS,
            num_aux_hidden_states=3,
            aux_layer_ids=(1, 2, 3),
            rms_norm_eps=EPS,
            max_position_embeddings=MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )
    draft.init_weights()
    gain = ONE_HOT**2 / (1 + math.exp(-ONE_HOT))  # of SwiGLU, at the one
    step = torch.zeros(H, H)
    for last, following in enumerate(chain):
        step[following, last] += 1 / gain
        step[last, last] -= 1 / gain
    layer = draft.layers[0]
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(torch.eye(V))
        draft.fc.weight.copy_(torch.eye(H).repeat(1, 3) / 3)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.gate_proj.weight.copy_(torch.eye(H))
        layer.mlp.up_proj.weight.copy_(torch.eye(H))
        layer.mlp.down_proj.weight.copy_(step)
        draft.lm_head.weight.copy_(_head(chain, frozenset(b"e"))[kept])
        draft.d2t, draft.t2d = vocab_map(kept, V)
    save_draft(draft, folder)


SECONDS = 60  # for any one request; a hang fails instead of blocking


class Running:
    """A server on loopback, with one client of each kind: making them takes longer than to ask."""

    def __init__(self, url: str, model: str, engine: Engine, depth: int) -> None:
        self.url, self.model, self.engine, self.depth = url, model, engine, depth
        self.http = httpx.Client(base_url=url, timeout=SECONDS)
        self.client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(timeout=SECONDS),
        )

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def settle(self) -> None:
        """Wait until nothing runs."""
        end = time.monotonic() + SECONDS
        while self.engine.has_work:
            assert time.monotonic() < end, "the engine is still busy"
            time.sleep(0.01)


@contextmanager
def running(
    engine: Engine, target: Target, depth: int = 0, options: Any = None
) -> Iterator[Running]:
    """A server over an engine; ends cleanly, or the test fails."""
    app = create_app(EngineWorker(engine), target, options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + SECONDS
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", target.name, engine, depth)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def run_server() -> Callable[..., Any]:
    """Context manager of a `Running` server: (engine, target, depth, options)."""
    return running
