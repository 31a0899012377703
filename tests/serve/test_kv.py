"""Packed attention over pages is plain causal attention, whatever the pages' order."""

import pytest
import torch

from eagle3_serve.attention import Attention, PackedContext
from eagle3_serve.kv import Branches, KVStore, Segment
from eagle3_serve.pages import PagePool, PageTable

CPU = torch.device("cpu")


def _table(num_slots: int, page_size: int = 3, scattered: bool = False) -> PageTable:
    """Room for that many positions, in one run or in pages here and there."""
    pool = PagePool(40, page_size, has_draft=False)
    other, own = PageTable(pool), PageTable(pool)
    for end in range(page_size, num_slots + page_size, page_size):
        own.reserve(end)
        if scattered:
            other.reserve(end)
    assert isinstance(own.index(0, num_slots, CPU), slice) == (not scattered)
    return own


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        Attention(0.4),
        Attention(0.4, window=3),
        Attention(0.4, softcap=0.7),
        Attention(0.4, window=3, sinks=torch.tensor([0.1, -2.0, 1.0, 3.0]).double()),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_packed_attention_equals_plain_attention(how: Attention, scattered: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, size, layers = 4, 2, 6, 2
    store = KVStore(layers, kv_heads, size, 120, torch.float64, CPU)
    # Lengths of successive passes: a prompt, single tokens, blocks.
    lengths_of = [(5, 1, 4), (1, 3, 1), (7, 2, 2)]
    total = [sum(lengths) for lengths in lengths_of]
    pool = PagePool(40, 3, has_draft=False)
    tables = [PageTable(pool) for _ in lengths_of]
    # Requests that grow by turns scatter each other's pages.
    for end in range(12) if scattered else (11,):
        assert all(table.reserve(end) for table in tables)
    plans = list(zip(tables, lengths_of, strict=True))
    q = [torch.randn(heads, n, size, dtype=torch.float64) for n in total]
    k, v = ([torch.randn(kv_heads, n, size, dtype=torch.float64) for n in total] for _ in range(2))
    past = [0] * len(plans)
    for i in range(3):
        segments, parts, row = [], [], 0
        for r, (table, lengths) in enumerate(plans):
            segments.append(Segment(row, lengths[i], table, past[r], CPU))
            if i == 2:
                assert isinstance(segments[-1].held, slice) == (not scattered)
            parts.append(slice(past[r], past[r] + lengths[i]))
            row += lengths[i]
        packed = [
            torch.cat(
                [x[r][:, part] for r, part in enumerate(parts)] + [torch.ones_like(x[0][:, :1])], 1
            )
            for x in (q, k, v)
        ]
        for layer in range(layers):
            context = PackedContext(store, segments)
            q_, k_, v_ = (x[None] for x in packed)
            out = context.attend_scaled(layer, q_, k_, v_, how)[0]
            for r, (segment, part) in enumerate(zip(segments, parts, strict=True)):
                expected = _plain(q[r], k[r], v[r], how)[:, part]
                got = out[:, segment.first_row : segment.first_row + segment.num_rows]
                # Two float64 softmaxes over at most 11 keys.
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
            assert not out[:, row:].any(), "a padding row is not zero"
        past = [p + lengths[i] for p, (_, lengths) in zip(past, plans, strict=True)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("by_level", [False, True])
def test_a_tree_is_as_many_chains(window: int | None, by_level: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, size, past = 4, 2, 6, 5
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
    store = KVStore(1, kv_heads, size, 120, torch.float64, CPU)
    table = _table(past + len(parents), scattered=by_level)
    segments = [Segment(0, past, table, 0, CPU)]
    for first, end in levels:
        branches = Branches(positions[:end], seen[first:end, :end])
        segments.append(Segment(0, end - first, table, past + first, CPU, branches))
    outs = []
    for segment in segments:
        part = slice(segment.past, segment.length)
        context = PackedContext(store, [segment], window)
        outs.append(context.attend(0, *(x[None, :, part] for x in (q, k, v)))[0])
    out = torch.cat(outs, 1)
    for node, path in enumerate(paths):
        own = [*range(past), *(past + i for i in path)]
        how = Attention(size**-0.5, window)
        expected = _plain(q[:, own], k[:, own], v[:, own], how)[:, -1]
        torch.testing.assert_close(out[:, past + node], expected, rtol=0, atol=1e-13)
    assert [s.positions.tolist() for s in segments[1:]] == [
        positions[a:b].tolist() for a, b in levels
    ]
    whole = Segment(0, 7, table, past, CPU)
    store.keep(whole, [0, 1, 4, 6])
    held = table.index(0, past + 4, CPU)
    own = [*range(past), past, past + 1, past + 4, past + 6]
    assert torch.equal(store.keys[0, :, held], k[:, own])
    assert torch.equal(store.values[0, :, held], v[:, own])


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention) -> torch.Tensor:
    out = torch.empty_like(q)
    for head in range(len(q)):
        own = head * len(k) // len(q)
        for t in range(q.shape[1]):
            first = 0 if how.window is None else max(0, t - how.window + 1)
            scores = k[own, first : t + 1] @ q[head, t] * how.scale
            if how.softcap is not None:
                scores = how.softcap * (scores / how.softcap).tanh()
            if how.sinks is not None:
                scores = torch.cat([scores, how.sinks[head, None]])
            weights = scores.softmax(0)[: t + 1 - first]
            out[head, t] = weights @ v[own, first : t + 1]
    return out
