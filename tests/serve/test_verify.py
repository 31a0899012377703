"""What a round emits, for chains of different lengths in one batch."""

import itertools

from eagle3_serve.verify import emitted


def test_emits_up_to_the_first_difference() -> None:
    drafts = [[5, 6, 7], [5, 9], [], [1, 2, 3], [4]]
    choices = [[5, 6, 7, 8], [5, 6, 0], [3], [9, 2, 3, 4], [4, 4]]
    assert emitted(drafts, choices) == [[5, 6, 7, 8], [5, 6], [3], [9], [4, 4]]


def test_no_drafts_at_all() -> None:
    assert emitted([[], []], [[3], [0]]) == [[3], [0]]


def test_every_pattern_of_hits() -> None:
    for hits in itertools.product([True, False], repeat=4):
        drafts = [1 if hit else 2 for hit in hits]
        first_miss = (*hits, False).index(False)
        assert emitted([drafts], [[1, 1, 1, 1, 1]]) == [[1] * (first_miss + 1)]
