"""Work ahead of its use: in order, bounded, its errors in place, its thread gone at the end."""

import threading

import pytest

from eagle3_train.prefetch import ahead


def _threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_results_come_in_order() -> None:
    assert list(ahead(lambda i: i * i, range(50), 3)) == [i * i for i in range(50)]
    assert list(ahead(str, [], 1)) == []
    assert _threads() == 0


def test_no_more_than_depth_waits() -> None:
    made: list[int] = []
    reached = threading.Event()

    def make(i: int) -> int:
        made.append(i)
        if i == 3:
            reached.set()
        return i

    results = ahead(make, range(100), 2)
    assert next(results) == 0
    assert reached.wait(10)  # one taken, two in the queue, one in the thread's hands
    assert made == [0, 1, 2, 3]
    results.close()
    assert made == [0, 1, 2, 3]
    assert _threads() == 0


def test_an_error_comes_where_its_result_would_have() -> None:
    results = ahead(lambda i: 6 // i, [3, 2, 0, 1], 4)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert _threads() == 0
