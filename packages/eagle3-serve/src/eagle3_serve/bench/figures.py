"""What the answers of one level of load say: rates, latencies, errors, acceptance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, quantiles
from typing import Any

from eagle3_serve.bench.client import Answer


def summarise(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of all answers to one level of load, JSON-ready; None where nothing can be said.

    Rates are over the whole time, prompts included. Latencies are of answers that came whole.
    """
    whole = [answer for answer in answers if answer.failure is None]
    failures = [answer.failure for answer in answers if answer.failure is not None]
    num_tokens = sum(answer.num_tokens for answer in whole)
    num_chunks = sum(len(answer.arrivals) for answer in whole)
    return {
        "num_requests": len(answers),
        "errors": dict(Counter(failure.kind for failure in failures)),
        "first_error": failures[0].message if failures else None,
        "seconds": seconds,
        "requests_per_s": len(whole) / seconds,
        "tokens_per_s": num_tokens / seconds,
        "num_output_tokens": num_tokens,
        "num_prompt_tokens": _usage(whole, "prompt_tokens"),
        "num_cached_tokens": _usage(whole, "prompt_tokens_details", "cached_tokens"),
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else None,
        "tokens_counted_by": _counted_by(whole),
        "ttft_ms": _milliseconds([a.arrivals[0].seconds for a in whole if a.arrivals]),
        "inter_token_ms": _milliseconds([gap for a in whole for gap in a.token_gaps]),
        "inter_chunk_ms": _milliseconds([gap for a in whole for gap in a.chunk_gaps]),
        "request_ms": _milliseconds([a.seconds for a in whole]),
        "accept_length": _accept_length(whole),
    }


def ratios(ours: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Ours over the baseline's: rates above 1 and latencies below 1 are better."""
    found: dict[str, Any] = {
        name: _ratio(ours[name], baseline[name]) for name in ("requests_per_s", "tokens_per_s")
    }
    for name in ("ttft_ms", "inter_token_ms"):
        pair = ours[name], baseline[name]
        found[name] = None if None in pair else {k: _ratio(pair[0][k], pair[1][k]) for k in pair[0]}
    return found


def same_texts(ours: Mapping[int, Answer], baseline: Mapping[int, Answer]) -> dict[str, int]:
    """Of the prompts that both answered, how many got the same text."""
    both = [
        (answer.text, baseline[i].text)
        for i, answer in ours.items()
        if i in baseline and answer.failure is None and baseline[i].failure is None
    ]
    return {"num_same": sum(a == b for a, b in both), "num_compared": len(both)}


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = [1e3 * value for value in seconds]
    # One value is all of its percentiles.
    cuts = quantiles(values if len(values) > 1 else values * 2, n=100, method="inclusive")
    return {"mean": mean(values), "p50": cuts[49], "p99": cuts[98]}


def _usage(answers: Sequence[Answer], *path: str) -> int | None:
    """Sum of a count over all answers; None if the server does not give it."""
    total = None
    for answer in answers:
        value: Any = answer.usage
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int):
            total = (total or 0) + value
    return total


def _counted_by(answers: Sequence[Answer]) -> str:
    if answers and all(answer.has_chunk_counts for answer in answers):
        return "usage of each chunk"
    return "usage" if answers and all(answer.usage for answer in answers) else "chunks"


def _accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens a round, of servers whose usage says so (see docs/serving.md)."""
    blocks = [a.usage["speculation"] for a in answers if a.usage.get("speculation")]
    rounds = sum(block["num_rounds"] for block in blocks)
    emitted = sum(block["accept_length"] * block["num_rounds"] for block in blocks)
    return emitted / rounds if rounds else None


def _ratio(ours: float, baseline: float) -> float | None:
    return ours / baseline if baseline else None
