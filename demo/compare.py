"""Answers of one engine with the draft and one without, side by side in one process."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from eagle3_core import Eagle3Draft, load_draft
from eagle3_core.target import Target, load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.prompts import encode_chat, read_prompts
from eagle3_serve.sampling import SamplingParams
from eagle3_train.display import display

CANDIDATES = (1, 2, 3)  # chain lengths tried
NUM_TRIAL_PROMPTS = 4
MAX_MODEL_LEN = 1024  # tokens of prompt and answer; bounds each engine's memory
_WARM_UP = SamplingParams(max_tokens=4, temperature=0.0)  # the first round allocates


@dataclass(frozen=True)
class Comparison:
    """What the draft is worth: rates are tokens per second of wall clock, prefill included."""

    num_prompts: int
    num_speculative_tokens: int
    num_identical: int
    different: list[str]  # ids of the prompts whose answers differ
    plain_tokens_per_s: float
    draft_tokens_per_s: float
    accept_length: float  # tokens per verification
    acceptance_per_position: list[float]  # share of the k-th proposals that hold, all before too


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt, ready for an engine."""

    name: str
    token_ids: list[int]


def compare(
    target_name: str,
    out: Path,
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    console: Console,
) -> Comparison:
    """Answer the first prompts of a file in both ways, greedy and in fp32, one at a time.

    The chain length is the fastest of `CANDIDATES` on the first few prompts. The result is kept in
    `out/comparison.json` and read from there as long as draft, prompts and sizes are the same.

    Raises:
        UserError: target, draft or prompts cannot be read.
    """
    kept = out / "comparison.json"
    inputs = _fingerprint(out / "draft", prompts_file, target_name, num_prompts, max_tokens)
    if kept.exists() and (stored := json.loads(kept.read_text()))["inputs"] == inputs:
        console.print(f"{kept}: already measured")
        return Comparison(**stored["result"])

    disable_progress_bar()  # one bar is enough
    target = load_target(target_name, torch.float32)
    draft = load_draft(out / "draft", target, dtype=torch.float32).draft
    rows = read_prompts(prompts_file)[:num_prompts]
    # In the demo's files a prompt is what a user says, as `regenerate` takes it too.
    prompts = [
        Prompt(
            row.values["id"],
            encode_chat(target.tokenizer, [{"role": "user", "content": row.values["prompt"]}]),
        )
        for row in rows
    ]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    best = _fastest_length(target, draft, prompts[:NUM_TRIAL_PROMPTS], params)
    result = _measure(target, draft, prompts, params, best)
    _write(kept, {"inputs": inputs, "result": asdict(result)})
    return result


def _fastest_length(
    target: Target,
    draft: Eagle3Draft,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> int:
    """The chain length with the most tokens a second, from the usual time of a round.

    Medians, because a machine that is busy for a moment must not decide.
    """
    engines = {k: _engine(target, draft, k) for k in CANDIDATES}
    rounds: dict[int, list[float]] = {k: [] for k in CANDIDATES}
    with display("trying chain lengths", len(prompts)) as shown:
        for engine in engines.values():
            _answer(engine, prompts[0], _WARM_UP)
            engine.reset_stats()
        for number, prompt in enumerate(prompts, 1):
            for k, engine in engines.items():
                engine.add(prompt.token_ids, params)
                engine.step()  # the prompt
                while engine.has_work:
                    start = time.perf_counter()
                    engine.step()
                    rounds[k].append(time.perf_counter() - start)
            shown.update(number)

    def tokens_per_s(k: int) -> float:
        return engines[k].stats.accept_length / statistics.median(rounds[k])

    return max(CANDIDATES, key=tokens_per_s)


def _measure(
    target: Target,
    draft: Eagle3Draft,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    num_speculative_tokens: int,
) -> Comparison:
    plain = _engine(target, None, 0)
    speculative = _engine(target, draft, num_speculative_tokens)
    _answer(plain, prompts[0], _WARM_UP)
    _answer(speculative, prompts[0], _WARM_UP)
    speculative.reset_stats()  # the warm-up does not count
    num_tokens, plain_seconds, draft_seconds = 0, 0.0, 0.0
    different = []
    with display("with and without the draft", len(prompts)) as shown:
        for number, prompt in enumerate(prompts, 1):
            expected, seconds = _answer(plain, prompt, params)
            plain_seconds += seconds
            found, seconds = _answer(speculative, prompt, params)
            draft_seconds += seconds
            num_tokens += len(expected)
            if found != expected:
                different.append(prompt.name)
            shown.update(number, f"{plain_seconds:.0f} s and {draft_seconds:.0f} s")
    stats = speculative.stats
    return Comparison(
        num_prompts=len(prompts),
        num_speculative_tokens=num_speculative_tokens,
        num_identical=len(prompts) - len(different),
        different=different,
        plain_tokens_per_s=num_tokens / plain_seconds,
        draft_tokens_per_s=num_tokens / draft_seconds,
        accept_length=stats.accept_length,
        acceptance_per_position=stats.accepted_per_position,
    )


def _engine(target: Target, draft: Eagle3Draft | None, num_speculative_tokens: int) -> Engine:
    config = EngineConfig(
        num_speculative_tokens=num_speculative_tokens, max_batch_size=1, max_model_len=MAX_MODEL_LEN
    )
    return Engine(target, draft, config)


def _answer(engine: Engine, prompt: Prompt, params: SamplingParams) -> tuple[list[int], float]:
    """Token ids of one answer, and the seconds it took."""
    start = time.perf_counter()
    engine.add(prompt.token_ids, params)
    token_ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            token_ids += output.token_ids
    return token_ids, time.perf_counter() - start


def _fingerprint(draft: Path, prompts_file: Path, *settings: str | int) -> str:
    digest = hashlib.sha256(repr((settings, CANDIDATES)).encode())
    for path in [*sorted(draft.glob("*")), prompts_file]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, content: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, path)
