"""Pages: counted, shared by prefix with one token of lookahead, evicted last used first."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.pages import PagePool, PageTable


class Model:
    """What the slots of every page hold, written down beside the pool under test."""

    def __init__(self, num_pages: int, page_size: int, has_draft: bool) -> None:
        self.pool = PagePool(num_pages, page_size, has_draft)
        self.size, self.has_draft = page_size, has_draft
        self.slots: dict[int, tuple[int, ...]] = {}

    def content(self, tokens: list[int], position: int) -> tuple[int, ...]:
        """Target and draft slot of a position depend on the tokens up to it, and one more."""
        return tuple(tokens[: position + (2 if self.has_draft else 1)])

    def write(self, table: PageTable, tokens: list[int], first: int, end: int) -> None:
        for page, position in zip(self.pages(table, first, end), range(first, end), strict=True):
            self.slots[page] = self.content(tokens, position)

    def pages(self, table: PageTable, first: int, end: int) -> list[int]:
        if first == end:
            return []
        where = table.index(first, end, torch.device("cpu"))
        return list(range(where.start, where.stop)) if isinstance(where, slice) else where.tolist()

    def copy(self, source: int, target: int) -> None:
        for i in range(self.size):
            if source * self.size + i in self.slots:
                self.slots[target * self.size + i] = self.slots[source * self.size + i]


def _run(model: Model, tokens: list[int]) -> tuple[PageTable, int] | None:
    """Start a request, check what it was given, run it whole; its table and the cached tokens."""
    table = PageTable(model.pool)
    if table.num_pages_to_take(tokens, len(tokens)) > model.pool.num_free:
        return None
    cached = table.share_prefix(tokens, model.copy)
    assert cached < len(tokens)
    assert table.reserve(len(tokens)), "counted pages were not there"
    for page, position in zip(model.pages(table, 0, cached), range(cached), strict=True):
        assert model.slots[page] == model.content(tokens, position)
    # The last token has not run; its predecessor's draft slot is known.
    model.write(table, tokens, cached, len(tokens) - 1)
    table.remember(tokens, len(tokens) - 1)
    return table, cached


_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(
    st.integers(1, 5),
    st.booleans(),
    st.integers(14, 30),
    st.lists(st.tuples(st.booleans(), _TOKENS), max_size=30),
)
def test_what_a_request_shares_is_what_it_would_have_written(
    page_size: int, has_draft: bool, num_pages: int, steps: list[tuple[bool, list[int]]]
) -> None:
    model = Model(num_pages, page_size, has_draft)
    held: list[tuple[PageTable, list[int]]] = []
    for start, tokens in steps:
        if start:
            run = _run(model, tokens)
            if run is not None:
                held.append((run[0], tokens))
        elif held:
            held.pop(len(tokens) % len(held))[0].release()
        for table, own in held:  # nobody wrote into anybody's pages
            pages = model.pages(table, 0, len(own) - 1)
            assert [model.slots[p] for p in pages] == [
                model.content(own, i) for i in range(len(own) - 1)
            ]
    for table, _ in held:
        table.release()
    assert model.pool.num_free == num_pages


def test_lookahead_costs_one_token_and_no_page() -> None:
    cached = Counter()
    for has_draft in (False, True):
        for name, tokens in {
            "same": [*range(9)],
            "page and other": [0, 1, 2, 3, 9, 9],
            "half a page": [0, 1, 2, 3, 4, 9],
            "exactly two pages": [*range(8)],
            "other": [9, 1, 2, 3, 4],
        }.items():
            model = Model(20, 4, has_draft)
            _run(model, [*range(9)])
            run = _run(model, tokens)
            assert run is not None
            cached[name, has_draft] = run[1]
    assert [cached[n, False] for n in ("same", "page and other", "half a page")] == [8, 4, 4]
    assert [cached[n, True] for n in ("same", "page and other", "half a page")] == [8, 3, 4]
    # The last token has to run; the rest of its page need not.
    assert [cached["exactly two pages", d] for d in (False, True)] == [7, 7]
    assert [cached["other", d] for d in (False, True)] == [0, 0]


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    model = Model(6, 2, has_draft=False)
    for tokens in ([1, 1, 2, 2, 0], [5, 5, 6, 6, 0]):
        run = _run(model, tokens)
        assert run is not None
        run[0].release()
    assert model.pool.num_free == 6
    again = _run(model, [1, 1, 0])
    assert again is not None
    assert again[1] == 2
    again[0].release()
    other = _run(model, [7] * 9)  # takes all pages but the one used last
    assert other is not None
    other[0].release()
    for tokens, expected in (([1, 1, 0], 2), ([5, 5, 0], 0)):
        run = _run(model, tokens)
        assert run is not None
        assert run[1] == expected
        run[0].release()
