"""Offline generation: prompts in, outputs and figures out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams


@dataclass(frozen=True)
class Generation:
    """One prompt's output."""

    token_ids: list[int]
    text: str
    finish_reason: str


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    on_tokens: Callable[[int, bool], None] | None = None,
) -> tuple[list[Generation], dict[str, Any]]:
    """Decode all prompts, as many at a time as the engine takes.

    Args:
        engine: with nothing else to do; its counters start anew.
        prompts: token ids.
        params: for all prompts, or one a prompt.
        on_tokens: called with (new tokens, whether the request ended) as they come.

    Returns:
        Outputs in the order of the prompts, and the figures of this call: tokens_per_s (output
        tokens over the whole time, prompts included), seconds_total and `EngineStats.to_dict`.

    Raises:
        UserError: a prompt does not fit; nothing has been decoded then.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    ids: list[str] = []
    try:
        for prompt, own in zip(prompts, each, strict=True):
            ids.append(engine.add(prompt, own))
        engine.reset_stats()
        start = perf_counter()
        done = _run(engine, ids, on_tokens)
        seconds = perf_counter() - start
    finally:
        for request_id in ids:
            engine.abort(request_id)
    stats = engine.stats.to_dict()
    return done, {
        "tokens_per_s": stats["num_output_tokens"] / seconds if seconds else 0.0,
        "seconds_total": seconds,
        **stats,
    }


def _run(
    engine: Engine, ids: Sequence[str], on_tokens: Callable[[int, bool], None] | None
) -> list[Generation]:
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    texts: dict[str, list[str]] = {i: [] for i in ids}
    reasons: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            texts[output.request_id].append(output.text)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
            if on_tokens is not None:
                on_tokens(len(output.token_ids), output.finish_reason is not None)
    return [Generation(tokens[i], "".join(texts[i]), reasons[i]) for i in ids]
