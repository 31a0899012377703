"""Slots are owned by one request at a time; packed attention is plain causal attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_serve.kv import Branches, KVStore, PackedContext, Segment, SlotAllocator

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_runs_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    slots = SlotAllocator(40)
    held: list[tuple[int, int]] = []
    for take, count in steps:
        if take:
            start = slots.allocate(count)
            if start is not None:
                new = set(range(start, start + count))
                assert new <= set(range(40))
                assert all(new.isdisjoint(range(s, s + c)) for s, c in held)
                held.append((start, count))
        elif held:
            slots.free(*held.pop(count % len(held)))
        assert slots.num_free == 40 - sum(c for _, c in held)
    for run in held:
        slots.free(*run)
    # Nothing is left in pieces: the whole is one run again.
    assert slots.allocate(40) == 0


def test_refuses_when_no_run_is_long_enough() -> None:
    slots = SlotAllocator(10)
    first, middle = slots.allocate(4), slots.allocate(2)
    assert (first, middle) == (0, 4)
    slots.free(0, 4)
    assert slots.num_free == 8
    assert slots.allocate(5) is None
    assert slots.allocate(4) == 0


@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_plain_attention(window: int | None) -> None:
    torch.manual_seed(0)
    heads, kv_heads, size, layers = 4, 2, 6, 2
    store = KVStore(layers, kv_heads, size, 40, torch.float64, CPU)
    # (slot, lengths of successive passes): a prompt, single tokens, blocks; runs in any order.
    plans = [(20, (5, 1, 4)), (0, (1, 3, 1)), (9, (7, 2, 2))]
    total = [sum(lengths) for _, lengths in plans]
    q = [torch.randn(heads, n, size, dtype=torch.float64) for n in total]
    k, v = ([torch.randn(kv_heads, n, size, dtype=torch.float64) for n in total] for _ in range(2))
    past = [0] * len(plans)
    for i in range(3):
        segments, parts, row = [], [], 0
        for r, (slot, lengths) in enumerate(plans):
            segments.append(Segment(row, lengths[i], slot, past[r], CPU))
            parts.append(slice(past[r], past[r] + lengths[i]))
            row += lengths[i]
        packed = [
            torch.cat(
                [x[r][:, part] for r, part in enumerate(parts)] + [torch.ones_like(x[0][:, :1])], 1
            )
            for x in (q, k, v)
        ]
        for layer in range(layers):
            context = PackedContext(store, segments, window)
            out = context.attend(layer, *(x[None] for x in packed))[0]
            for r, (segment, part) in enumerate(zip(segments, parts, strict=True)):
                expected = _plain(q[r], k[r], v[r], window)[:, part]
                got = out[:, segment.first_row : segment.first_row + segment.num_rows]
                # Two float64 softmaxes over at most 11 keys.
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
            assert not out[:, row:].any(), "a padding row is not zero"
        past = [p + lengths[i] for p, (_, lengths) in zip(past, plans, strict=True)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("by_level", [False, True])
def test_a_tree_is_as_many_chains(window: int | None, by_level: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, size, past, slot = 4, 2, 6, 5, 3
    parents = [-1, 0, 0, 1, 1, 2, 4]  # by level: 0 | 1 2 | 3 4 5 | 6
    levels = [(0, 1), (1, 3), (3, 6), (6, 7)] if by_level else [(0, 7)]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    positions = torch.tensor([past + len(path) - 1 for path in paths])
    seen = torch.zeros(7, 7, dtype=torch.bool)
    for node, path in enumerate(paths):
        seen[node, path] = True
    total = past + len(parents)
    q = torch.randn(heads, total, size, dtype=torch.float64)
    k, v = (torch.randn(kv_heads, total, size, dtype=torch.float64) for _ in range(2))
    store = KVStore(1, kv_heads, size, 20, torch.float64, CPU)
    segments = [Segment(0, past, slot, 0, CPU)]
    for first, end in levels:
        branches = Branches(positions[:end], seen[first:end, :end])
        segments.append(Segment(0, end - first, slot, past + first, CPU, branches))
    outs = []
    for segment in segments:
        part = slice(segment.past, segment.length)
        context = PackedContext(store, [segment], window)
        outs.append(context.attend(0, *(x[None, :, part] for x in (q, k, v)))[0])
    out = torch.cat(outs, 1)
    for node, path in enumerate(paths):
        own = [*range(past), *(past + i for i in path)]
        expected = _plain(q[:, own], k[:, own], v[:, own], window)[:, -1]
        torch.testing.assert_close(out[:, past + node], expected, rtol=0, atol=1e-13)
    assert [s.positions.tolist() for s in segments[1:]] == [
        positions[a:b].tolist() for a, b in levels
    ]
    whole = Segment(0, 7, slot, past, CPU)
    store.keep(whole, [0, 1, 4, 6])
    held = slice(slot, slot + past + 4)
    own = [*range(past), past, past + 1, past + 4, past + 6]
    assert torch.equal(store.keys[0, :, held], k[:, own])
    assert torch.equal(store.values[0, :, held], v[:, own])


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    out = torch.empty_like(q)
    for head in range(len(q)):
        own = head * len(k) // len(q)
        for t in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            scores = k[own, first : t + 1] @ q[head, t] / q.shape[-1] ** 0.5
            out[head, t] = scores.softmax(0) @ v[own, first : t + 1]
    return out
