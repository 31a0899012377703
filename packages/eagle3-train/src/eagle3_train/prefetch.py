"""Work done ahead of its use, in a thread: what the next step needs is read during this one."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def ahead(make: Callable[[In], Out], items: Iterable[In], depth: int) -> Generator[Out]:
    """`map(make, items)`, with up to `depth` results made before they are asked for.

    Reading mapped files, checksums and casts leave the interpreter's lock, so a thread is enough.
    An error of `make` is raised where its result would have come. Closing the iterator, as leaving
    a `for` by an exception does in the end, stops the thread after the result it is at.

    Args:
        make: called in the thread, one item after the other.
        items: iterated over in the thread.
        depth: at least 1; bounds the memory that waits.
    """
    done = threading.Event()
    results: queue.Queue[tuple[bool, Out | BaseException | None]] = queue.Queue(depth)

    def put(result: tuple[bool, Out | BaseException | None]) -> bool:
        while not done.is_set():
            try:
                results.put(result, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((True, make(item))):
                    return
        except BaseException as error:
            put((False, error))
        else:
            put((False, None))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            more, result = results.get()
            if more:
                yield result  # pyright: ignore[reportReturnType]
            elif isinstance(result, BaseException):
                raise result
            else:
                return
    finally:
        done.set()
        thread.join()
