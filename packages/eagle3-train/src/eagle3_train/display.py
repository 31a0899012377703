"""Progress on stderr: a live bar or table on a terminal, plain lines elsewhere."""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_SECONDS = 10.0  # between lines where there is no terminal
_WINDOW = 20  # steps: one alone holds few slots, its numbers jump

# Of several processes one speaks.
_quiet = os.environ.get("RANK", "0") != "0"
console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=_quiet)


class Display:
    """Progress of one stage with `total` units of work."""

    def __init__(self, name: str, total: int, bar: Progress | None) -> None:
        self._name, self._total, self._bar = name, total, bar
        self._task = None if bar is None else bar.add_task(name, total=total, note="")
        self._started = self._printed = time.monotonic()
        self._first: int | None = None
        self._last: tuple[int, str] | None = None

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` units are finished."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        if self._first is None:
            self._first = done
        self._last = done, note
        if time.monotonic() - self._printed >= _PLAIN_SECONDS:
            self._print()

    def finish(self) -> None:
        """Show where it ended; short work that fails leaves nothing but its error."""
        if self._last is not None:
            self._print()

    def _print(self) -> None:
        assert self._first is not None
        assert self._last is not None
        done, note = self._last
        self._printed = time.monotonic()
        rate = (done - self._first) / max(self._printed - self._started, 1e-9)
        left = f", {(self._total - done) / rate:.0f} s left" if rate and done < self._total else ""
        console.print(f"{self._name} {done}/{self._total}{left}  {note}", markup=False)


@contextmanager
def display(name: str, total: int, enabled: bool = True) -> Iterator[Display]:
    """Open a display; `enabled=False` for processes that must stay silent."""
    if not enabled:
        yield Display(name, total, Progress(disable=True))
        return
    if not console.is_terminal:
        shown = Display(name, total, None)
        yield shown
        shown.finish()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield Display(name, total, bar)


class StepTable:
    """Watches a training run of `total` steps; a sink for their metrics.

    On a terminal a live table of the last steps' means, for each step of the unroll and for the
    whole; elsewhere a line every ten seconds.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_WINDOW)
        self._held_out: float | None = None
        self._started = time.monotonic()
        self._first: int | None = None  # steps that were done before this process
        self._plain = Display(name, total, None)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self.render, refresh_per_second=4, transient=False
            )
            self._live.start()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Show a step."""
        if self._first is None:
            self._first = metrics["step"] - 1
        self._recent.append(metrics)
        self._held_out = metrics.get("eval", {}).get("accept_length", self._held_out)
        if self._live is None:
            self._plain.update(metrics["step"], self._line(metrics))

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
        self._plain.finish()

    def render(self) -> Group | Text:
        """What a terminal shows now."""
        if not self._recent:
            return Text(f"{self._name}: the first of {self._total} steps")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("step of the unroll", "loss", "KL", "right", "right so far"):
            table.add_column(title, justify="right")
        columns = [
            self._means(key)
            for key in (
                "loss_per_step",
                "kl_per_step",
                "accuracy_per_step",
                "acceptance_per_position",
            )
        ]
        for k, (loss, kl, accuracy, acceptance) in enumerate(zip(*columns, strict=True)):
            table.add_row(str(k), f"{loss:.3f}", f"{kl:.3f}", f"{accuracy:.1%}", _share(acceptance))
        return Group(self._progress(), table, self._footer())

    def _progress(self) -> Table:
        step = self._recent[-1]["step"]
        row = Table.grid(padding=(0, 1))
        spent = time.monotonic() - self._started
        row.add_row(
            f"{self._name} {step}/{self._total}",
            ProgressBar(total=self._total, completed=step, width=30),
            f"{_duration(spent)} spent, {_duration(self._left(spent))} left",
        )
        return row

    def _footer(self) -> Text:
        last = self._recent[-1]
        wait, compute = self._sum("data_wait_s"), self._sum("compute_s")
        held_out = "" if self._held_out is None else f" (held out {self._held_out:.3f})"
        return Text(
            f"accept length {self._accept_length():.3f}{held_out}   "
            f"loss {self._mean('loss'):.3f}   "
            f"gradient {self._mean('grad_norm'):.3g}   rate {last['learning_rate']:.3g}\n"
            f"{self._mean('tokens_per_s'):,.0f} tokens/s   "
            f"waiting for data {wait / max(wait + compute, 1e-9):.0%}   memory {_memory(last)}"
        )

    def _line(self, metrics: Mapping[str, Any]) -> str:
        seconds = max(metrics["data_wait_s"] + metrics["compute_s"], 1e-9)
        held_out = "" if self._held_out is None else f"  held-out accept {self._held_out:.3f}"
        return (
            f"loss {metrics['loss']:.3f}  first {metrics['accuracy_per_step'][0]:.3f}  "
            f"accept {metrics['accept_length'] or 1:.2f}  {metrics['tokens_per_s']:.0f} tok/s  "
            f"data wait {metrics['data_wait_s'] / seconds:.0%}  {_memory(metrics)}{held_out}"
        )

    def _left(self, spent: float) -> float:
        step, first = self._recent[-1]["step"], self._first or 0
        return spent / max(step - first, 1) * (self._total - step)

    def _accept_length(self) -> float:
        found = [m["accept_length"] for m in self._recent if m["accept_length"] is not None]
        return sum(found) / len(found) if found else 1.0

    def _mean(self, key: str) -> float:
        return self._sum(key) / len(self._recent)

    def _sum(self, key: str) -> float:
        return sum(metrics[key] for metrics in self._recent)

    def _means(self, key: str) -> list[float | None]:
        """For each step of the unroll; None where no step had a value."""
        length = len(self._recent[-1]["loss_per_step"])  # a growing unroll had fewer before
        values = [metrics[key] for metrics in self._recent]
        found = [value for value in values if value is not None and len(value) == length]
        if not found:
            return [None] * length
        return [sum(column) / len(column) for column in zip(*found, strict=True)]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _memory(metrics: Mapping[str, Any]) -> str:
    now = metrics["rss_bytes"]
    resident = "" if now is None else f"{now / 2**30:.2f} GiB, "
    return f"{resident}peak {metrics['peak_bytes'] / 2**30:.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
