"""The figures of a bench as a table on a terminal."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = ("clients", "", "tokens/s", "requests/s", "first token ms", "a token ms", "accept")


def print_bench(results: Mapping[str, Any]) -> None:
    """A row a level, or three where there is a baseline; latencies are p50 / p99."""
    table = Table(*_COLUMNS, "errors")
    same = compared = 0
    for level in results["levels"]:
        table.add_row(str(level["concurrency"]), "", *_cells(level["figures"]))
        if "baseline" in level:
            table.add_row("", "baseline", *_cells(level["baseline"]))
            table.add_row("", "ratio", *_ratio_cells(level["ratios"]), end_section=True)
            texts = level.get("texts", {})
            same += texts.get("num_same", 0)
            compared += texts.get("num_compared", 0)
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    if compared:
        console.print(f"{same} of {compared} answers are the baseline's, character by character")


def _cells(figures: Mapping[str, Any]) -> list[str]:
    errors = ", ".join(f"{count} x {kind}" for kind, count in figures["errors"].items())
    accept = figures["accept_length"]
    return [
        f"{figures['tokens_per_s']:.1f}",
        f"{figures['requests_per_s']:.2f}",
        _pair(figures["ttft_ms"], "{:.0f}"),
        _pair(figures["inter_token_ms"], "{:.1f}"),
        "-" if accept is None else f"{accept:.2f}",
        errors or "-",
    ]


def _ratio_cells(ratios: Mapping[str, Any]) -> list[str]:
    rates = [ratios["tokens_per_s"], ratios["requests_per_s"]]
    return [
        *("-" if rate is None else f"{rate:.2f}" for rate in rates),
        _pair(ratios["ttft_ms"], "{:.2f}"),
        _pair(ratios["inter_token_ms"], "{:.2f}"),
    ]


def _pair(values: Mapping[str, float | None] | None, form: str) -> str:
    if values is None:
        return "-"
    parts = [values["p50"], values["p99"]]
    return " / ".join("-" if part is None else form.format(part) for part in parts)
