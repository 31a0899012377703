"""The pruned vocabulary map: maps that users met (data/d2t_maps.json), and the integer laws."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core import UserError
from eagle3_core.vocab import check_vocab_map, most_frequent, target_to_draft, vocab_map

MAPS = json.loads((Path(__file__).parent / "data" / "d2t_maps.json").read_text())
GOOD = MAPS[0]
V = 16

# What was found, with the first offending index.
BROKEN = {
    "absolute ids": r"d2t\[5\]: 5 \+ 15 = 20 is not in 0\.\.15; d2t holds offsets",
    "all zeros, D < V": r"d2t: all 6 offsets are zero although the vocabulary has 16 ids",
    "id beyond vocabulary": r"d2t\[5\]: 5 \+ 11 = 16 is not in 0\.\.15",
    "two draft ids on one target id": r"d2t\[2\]: target id 3 does not follow 3",
    "negative target id": r"d2t\[0\]: 0 \+ -1 = -1 is not in 0\.\.15",
    "mask has five ones": r"t2d\[15\]: False, but d2t maps to target id 15 \(t2d marks 5",
    "mask marks another id": r"t2d\[8\]: True, but d2t never maps to target id 8",
}


def test_every_map_of_the_file_has_an_expectation() -> None:
    assert [case["name"] for case in MAPS if not case["ok"]] == list(BROKEN)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64])
def test_the_good_map(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """Offsets come as int64 from most producers and as int32 from TensorRT-LLM's."""
    d2t = torch.tensor(GOOD["d2t"], dtype=dtype)
    t2d = torch.tensor(GOOD["t2d"], dtype=mask_dtype)
    check_vocab_map(d2t, t2d, V)
    check_vocab_map(d2t, None, V)
    assert int(t2d.sum()) == len(d2t)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_maps_are_refused_by_rule_and_index(name: str) -> None:
    case = next(case for case in MAPS if case["name"] == name)
    d2t, t2d = torch.tensor(case["d2t"]), torch.tensor(case["t2d"], dtype=torch.bool)
    with pytest.raises(UserError, match=BROKEN[name]) as error:
        check_vocab_map(d2t, t2d, V)
    assert "\n" not in str(error.value)


def test_zeros_are_the_identity_where_nothing_is_pruned() -> None:
    check_vocab_map(torch.zeros(V, dtype=torch.int64), torch.ones(V, dtype=torch.bool), V)


def test_the_place_is_named() -> None:
    with pytest.raises(UserError, match=r"^draft/model\.safetensors: d2t\[1\]: "):
        check_vocab_map(torch.tensor([3, 0]), None, V, "draft/model.safetensors: d2t")


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (torch.tensor([[0, 1]]), None, r"d2t: torch.int64 of shape \(1, 2\), expected one row"),
        (torch.tensor([0.0, 1.0]), None, "d2t: torch.float32 of shape"),
        (torch.tensor(GOOD["d2t"]), torch.ones(15), r"t2d: shape \(15,\), expected \(16,\)"),
        (torch.arange(17), None, r"d2t\[8\]: 8 \+ 8 = 16"),
    ],
)
def test_wrong_shapes_are_refused(
    d2t: torch.Tensor, t2d: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_vocab_map(d2t, t2d, V)


kept_ids = st.integers(2, 60).flatmap(
    lambda size: st.tuples(
        st.just(size), st.lists(st.integers(0, size - 1), unique=True, min_size=1, max_size=size)
    )
)


@given(kept_ids)
@settings(derandomize=True, deadline=None)
def test_draft_to_target_to_draft_is_the_identity(case: tuple[int, list[int]]) -> None:
    size, ids = case
    d2t, t2d = vocab_map(torch.tensor(ids), size)
    draft_ids = torch.arange(len(ids))
    target_ids = draft_ids + d2t
    assert target_ids.tolist() == sorted(ids)
    assert t2d.nonzero().flatten().tolist() == sorted(ids)
    assert t2d.dtype == torch.bool
    assert d2t.dtype == torch.int64
    inverse = target_to_draft(d2t, size)
    assert inverse[target_ids].tolist() == draft_ids.tolist()
    outside = sorted(set(range(size)) - set(ids))
    assert inverse[outside].tolist() == [-1] * len(outside)
    if d2t.any() or len(ids) == size:  # keeping the first ids looks like a map never set
        check_vocab_map(d2t, t2d, size)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 9, 4], "draft vocabulary: an id stands twice"),
        ([3, 16], r"draft vocabulary: ids 3\.\.16 leave 0\.\.15"),
        ([-1, 3], r"draft vocabulary: ids -1\.\.3 leave 0\.\.15"),
    ],
)
def test_ids_that_make_no_map_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        vocab_map(torch.tensor(ids), V)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sets(st.integers(0, 29), max_size=5),
)
@settings(derandomize=True, deadline=None)
def test_most_frequent(counts: list[int], size: int, always: set[int]) -> None:
    """Few distinct counts, so that nearly every choice is decided by a tie."""
    always = {i for i in always if i < len(counts)}
    size = min(max(size, len(always), 1), len(counts))
    ranked = sorted(range(len(counts)), key=lambda i: (i not in always, -counts[i], i))
    kept = most_frequent(torch.tensor(counts), size, tuple(always))
    assert kept.tolist() == sorted(ranked[:size])


def test_ties_go_to_the_lower_id_and_unseen_ids_fill_up() -> None:
    counts = torch.tensor([0, 5, 0, 2, 2, 2, 0, 9])
    assert most_frequent(counts, 3).tolist() == [1, 3, 7]
    assert most_frequent(counts, 7).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert most_frequent(counts, 3, always=(6, 6)).tolist() == [1, 6, 7]


def test_counts_beyond_fp32_still_rank() -> None:
    """2^24 + 1 equals 2^24 in fp32; token counts of a real corpus are larger."""
    assert most_frequent(torch.tensor([2**24, 2**24 + 1]), 1).tolist() == [1]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, (), r"draft_vocab_size is 0, expected 1\.\.4"),
        (5, (), r"draft_vocab_size is 5, expected 1\.\.4"),
        (1, (0, 3), r"draft_vocab_size is 1, expected 2\.\.4"),
        (2, (4,), r"draft vocabulary: id 4 is to be kept always, expected 0\.\.3"),
        (2, (-1,), r"draft vocabulary: id -1 is to be kept always, expected 0\.\.3"),
    ],
)
def test_impossible_choices_are_refused(size: int, always: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        most_frequent(torch.tensor([1, 2, 3, 4]), size, always)
