"""Results of commands as tables on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eagle3_train.plan import memory_rows
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


def plan_table(result: Mapping[str, Any]) -> Group:
    """What `plan` predicts."""
    sizes = [result[f"{whose}_parameters"] / 1e6 for whose in ("target", "draft", "trained")]
    head = Text(
        f"{result['target']}: {sizes[0]:,.1f} M parameters; draft: {sizes[1]:,.1f} M, of which "
        f"{sizes[2]:,.1f} M train.\n{result['tokens']:,} tokens, "
        f"{result['supervised_fraction']:.0%} supervised, {result['num_steps']:,} steps."
    )
    memory = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    memory.add_column(f"memory of each of {result['num_processes']} ({result['strategy']})")
    memory.add_column("GiB", justify="right")
    for name, size in memory_rows(result):
        memory.add_row(name.replace("_", " "), f"{size / 2**30:.2f}")
    disk = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    disk.add_column("disk")
    disk.add_column("GiB", justify="right")
    for name, size in result["disk_bytes"].items():
        disk.add_row(name, f"{size / 2**30:.2f}")
    hours = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("processes", "capture, hours", "fit, hours"):
        hours.add_column(title, justify="right")
    for row in result["hours"]:
        hours.add_row(str(row["num_processes"]), f"{row['capture']:.3g}", f"{row['fit']:.3g}")
    rate = result["flops_per_s"] / 1e12
    note = Text(
        f"Hours take {result['share_reached']:.0%} of {rate:,.3g} TFLOP/s, the rate of "
        f"{result['device']} in matrix products, for granted, and perfect scaling."
    )
    return Group(head, memory, disk, hours, note)


def _number(value: float | None) -> str:
    return "no round" if value is None else f"{value:.3f}"
