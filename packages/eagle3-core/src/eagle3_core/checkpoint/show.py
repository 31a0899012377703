"""What is known of a checkpoint, for people: its tensors, each decision, and who can serve it."""

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from eagle3_core.checkpoint import describe
from eagle3_core.checkpoint.read import Reading


def show(reading: Reading, *, scanned: bool) -> None:
    """Print on stdout; `scanned` says that all weights have been found finite."""
    console, report = Console(soft_wrap=True), reading.report
    console.print(
        f"[bold]{reading.files.folder}[/bold]  ({report.dialect} layout)", highlight=False
    )
    console.print(_parts_tree(reading))
    table = Table("value", "is", "says", "because", title="Decisions", title_justify="left")
    for name, value, source, why in report.decisions:
        table.add_row(name, str(value), source, why)
    console.print(table)
    for title, lines in (("Warnings", report.warnings), ("Ignored", report.ignored)):
        if lines:
            console.print(f"[bold]{title}[/bold]")
        for line in lines:
            console.print(f"  - {line}", markup=False, highlight=False)
    console.print("[bold]Engines[/bold]")
    for engine, refusals in describe.engines(reading.config).items():
        verdict = f"no: {'; '.join(refusals)}" if refusals else "yes"
        console.print(f"  {engine}: {verdict}", markup=False, highlight=False)
    console.print(
        "Weights: " + ("all finite" if scanned else "headers only, --scan looks for NaN and inf")
    )


def _parts_tree(reading: Reading) -> Tree:
    root = Tree("draft")
    branches: dict[str, Tree] = {"": root}
    for part in describe.parts(reading):
        *path, leaf = part.name.removesuffix(".weight").split(".")
        for depth in range(len(path)):
            key, parent = ".".join(path[: depth + 1]), ".".join(path[:depth])
            if key not in branches:
                branches[key] = branches[parent].add(path[depth])
        origin = "" if part.origin == part.name else f"  <- {part.origin}"
        branches[".".join(path)].add(
            f"{leaf} {list(part.shape)} {part.dtype}{origin}".replace("[", r"\[")
        )
    return root
