"""Results of commands as tables on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eagle3_train.simulate import LAWS


def eval_table(result: Mapping[str, Any]) -> Group:
    """What `eval` found: a row for each file, a column for each law."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("accept length")
    for title in ("rounds", *LAWS.values(), "argmax written", "at T = 1"):
        table.add_column(title, justify="right")
    for dataset in result["datasets"]:
        laws = dataset["laws"]
        table.add_row(
            dataset["name"],
            f"{dataset['rounds']:,}",
            *(_number(laws[law]["accept_length"]) for law in LAWS),
            f"{dataset['argmax_share']:.0%}",
            f"{dataset['argmax_probability']:.0%}",
        )
    shares = result["acceptance_per_position"] or ()
    lines = [
        f"{result['draft']} on {result['samples']} samples; chains of "
        f"{result['num_speculative_tokens']}, trees of that depth with {result['topk']} children "
        f"and {result['num_verify_tokens']} verified tokens.",
        f"Greedy chain over all: accept length {_number(result['accept_length'])}, kept at "
        f"positions 1, 2, …: {' '.join(f'{share:.1%}' for share in shares)}.",
        "Greedy numbers ask for answers written greedily (argmax written: 100%), numbers at T = 1 "
        "for answers drawn at temperature 1 (argmax written as often as the last column says).",
    ]
    return Group(table, Text("\n".join(lines)))


def _number(value: float | None) -> str:
    return "no round" if value is None else f"{value:.3f}"
