"""vLLM serves what `convert --to vllm` writes: the same tokens and acceptance as eagle3-serve.

The demo's draft and target, fp32 and greedy. `scripts/interop.sh vllm` sees to the environment.
"""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from eagle3_core import Eagle3Draft, load_draft, save_draft
from eagle3_core.packaged import packaged_target
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.prompts import encode_chat
from eagle3_serve.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
DEMO_DRAFT = ROOT / "runs/demo/draft"
NUM_PROMPTS, NUM_TOKENS, DEPTH, MAX_MODEL_LEN = 8, 32, 3, 512
START_SECONDS, ANSWER_SECONDS = 1800.0, 600.0  # bounds for a busy machine, not expectations


@dataclass(frozen=True)
class Counts:
    """Of all rounds: how many there were, what was drafted, and what was accepted by position."""

    num_rounds: int
    num_drafted: int
    accepted: list[int]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out questions as token ids, the same ids for both engines."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_target("smollm2-135m"))
    rows = (ROOT / "demo/heldout.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    chats = [[{"role": "user", "content": json.loads(row)["prompt"]}] for row in rows]
    return [encode_chat(tokenizer, chat) for chat in chats]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_same_tokens_and_acceptance(
    num_layers: int, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Token for token and count for count."""
    ours = DEMO_DRAFT
    if num_layers == 2:
        ours = tmp_path / "two-layers"
        save_draft(_with_second_layer(load_draft(DEMO_DRAFT).draft), ours)
    convert = [sys.executable, "-m", "eagle3_core.cli", "convert", str(ours)]
    subprocess.run([*convert, str(tmp_path / "vllm"), "--to", "vllm"], check=True)
    expected, counts = _answers_here(ours, prompts)
    assert all(counts.accepted), "a draft that is never accepted would show nothing"
    with _vllm(tmp_path / "vllm", tmp_path / "vllm.log") as client:
        found = [_answer(client, prompt) for prompt in prompts]
        theirs = _counts(client)
    print(f"{num_layers} layers: eagle3-serve {counts}, vLLM {theirs}")
    assert found == expected
    assert theirs == counts


def _with_second_layer(draft: Eagle3Draft) -> Eagle3Draft:
    """A layer that changes what is proposed, but not so much that nothing is accepted."""
    torch.manual_seed(0)
    deeper = Eagle3Draft(replace(draft.config, num_hidden_layers=2))
    deeper.init_weights(std=0.02)
    missing = deeper.load_state_dict(draft.state_dict(), strict=False).missing_keys
    assert all(name.startswith("layers.1.") for name in missing)
    return deeper


def _answers_here(
    draft_folder: Path, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], Counts]:
    """Greedy answers and counts of eagle3-serve.

    vLLM drafts a full chain and counts all of it in the last round too, of which the answer may
    end in the middle. So answers may run longer here, and are cut after that round.
    """
    target = load_target(str(packaged_target("smollm2-135m")), torch.float32)
    draft = load_draft(draft_folder, target, dtype=torch.float32).draft
    config = EngineConfig(
        num_speculative_tokens=DEPTH, max_batch_size=1, max_model_len=MAX_MODEL_LEN
    )
    engine = Engine(target, draft, config)
    params = SamplingParams(max_tokens=NUM_TOKENS + DEPTH + 1, temperature=0.0, ignore_eos=True)
    answers = []
    for prompt in prompts:
        request, answer = engine.add(prompt, params), []
        while len(answer) < NUM_TOKENS:
            for output in engine.step():
                answer += output.token_ids
        engine.abort(request)
        answers.append(answer[:NUM_TOKENS])
    stats = engine.stats
    return answers, Counts(
        stats.num_rounds, stats.num_drafted_tokens, stats.num_accepted_per_position
    )


@contextmanager
def _vllm(draft: Path, log: Path) -> Iterator[httpx.Client]:
    """vLLM's server on loopback, ended with the block; fails with the end of its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DEPTH}
    command = [
        str(ROOT / ".venv-vllm/bin/python"),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(packaged_target("smollm2-135m")), "--served-model-name", "target"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "1"),
        # One request's rounds one after the other: no round is begun behind the end of an answer.
        *("--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS, trust_env=False
        ) as client:
            _wait_until_ready(client, server, log)
            yield client
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM does not serve the draft:\n{log.read_text(errors='replace')[-4000:]}")


def _answer(client: httpx.Client, prompt: Sequence[int]) -> list[int]:
    body = {
        "model": "target",
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=body).raise_for_status()
    return response.json()["choices"][0]["token_ids"]


def _counts(client: httpx.Client) -> Counts:
    """From vLLM's counters since its start; labels other than the position are of no interest."""
    text = client.get("/metrics").raise_for_status().text
    name = r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$"
    accepted = [0] * DEPTH
    totals: dict[str, int] = {}
    for counter, labels, value in re.findall(name, text, re.MULTILINE):
        if counter == "accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', labels)
            assert position
            accepted[int(position[1])] = int(float(value))
        else:
            totals[counter] = int(float(value))
    return Counts(totals["drafts"], totals["draft_tokens"], accepted)
