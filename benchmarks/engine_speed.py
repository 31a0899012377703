"""How fast does the engine decode with a draft and without, for one request and for twelve?

    benchmarks/engine_speed.py DRAFT [TARGET] [--dtype bfloat16] [--requests 1 12] [--tokens N]

Greedy answers of fixed length to the demo's held-out questions. Plain decoding and drafting take
turns, so that a machine that slows down slows both; the figure is the median of the turns. Prints
one JSON object: tokens per second over the whole time, prompts included, and milliseconds of each
phase of a round.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle3_core import load_draft
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.prompts import encode_chat
from eagle3_serve.sampling import SamplingParams

PROMPTS = Path(__file__).parents[1] / "demo/heldout.jsonl"


def run(engine: Engine, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Answer all prompts at once."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    _, figures = generate(engine, prompts, params)
    return figures


def summary(turns: list[dict[str, Any]], num_requests: int) -> dict[str, Any]:
    """Medians over the turns of one engine."""
    rounds = turns[0]["num_rounds"] / num_requests
    phases = turns[0]["seconds"]
    return {
        "tokens_per_s": median(turn["tokens_per_s"] for turn in turns),
        "accept_length": turns[0]["accept_length"],
        "ms_per_round": {
            phase: 1e3 * median(turn["seconds"][phase] for turn in turns) / rounds
            for phase in phases
        },
    }


def main() -> None:
    """Measure and print the object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", type=Path)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 12])
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    target = load_target(arguments.target, dtype)
    draft = load_draft(arguments.draft, target, dtype=dtype).draft.eval().requires_grad_(False)
    rows = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    results = []
    for count in arguments.requests:
        chats = [[{"role": "user", "content": text}] for text in rows[:count]]
        prompts = [encode_chat(target.tokenizer, chat) for chat in chats]
        turns: dict[str, list[dict[str, Any]]] = {"plain": [], "draft": []}
        for turn in range(arguments.turns + 1):
            for name, depth in (("plain", 0), ("draft", arguments.num_speculative_tokens)):
                config = EngineConfig(
                    num_speculative_tokens=depth, max_batch_size=count, kv_cache_gib=1.0
                )
                # A fresh engine: nothing is in its prefix cache.
                engine = Engine(target, draft if depth else None, config)
                figures = run(engine, prompts, arguments.tokens if turn else 4)
                if turn:  # the first warms up
                    turns[name].append(figures)
        results.append(
            {"requests": count} | {name: summary(own, count) for name, own in turns.items()}
        )
    facts = {
        "target": arguments.target,
        "draft": str(arguments.draft),
        "dtype": arguments.dtype,
        "K": arguments.num_speculative_tokens,
        "tokens": arguments.tokens,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
    }
    print(json.dumps({"benchmark": "engine_speed", **facts, "results": results}))


if __name__ == "__main__":
    main()
