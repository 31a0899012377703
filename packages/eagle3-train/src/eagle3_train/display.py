"""Progress on stderr: a live bar on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_SECONDS = 10.0  # between lines where there is no terminal

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
