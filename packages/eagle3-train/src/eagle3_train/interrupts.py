"""Ctrl-C and SIGTERM: asked once, a run ends after its step and saves; asked twice, it dies."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yields the list of signals received so far."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if asked:
            signal.default_int_handler(number, None)
        asked.append(number)

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
