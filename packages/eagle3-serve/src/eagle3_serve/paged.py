"""Attention of one pass on the Triton kernels: pages, ancestor words, positions.

Everything that depends on the round is in tensors of a fixed layout, so the same call serves prompt
chunks, chains and trees, and can be captured into a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_serve.attention import Attention, RowContext, written_slots
from eagle3_serve.kv import KVStore, Segment
from eagle3_serve.ops.rope_kv.triton import rope_kv
from eagle3_serve.ops.tree_attention import MAX_BRANCH_ROWS, Segments
from eagle3_serve.ops.tree_attention.triton import tree_attention


class Rows(NamedTuple):
    """R packed rows of B requests, as `tree_attention` takes them."""

    segments: Segments
    slots: Tensor  # [R] int64, where keys and values of each row go; -1 for padding
    words: Tensor | None = None  # [R] int64
    positions: Tensor | None = None  # [B,M] int32


class PagedContext(RowContext):
    """Two launches a layer, and one more to write keys and values."""

    def __init__(self, store: KVStore, rows: Rows, sliding_window: int | None = None) -> None:
        """`rows` may have less slots than the pass has rows: what is behind them is padding."""
        self.sliding_window = sliding_window
        self._store, self._rows = store, rows

    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> Tensor:
        slots = self._rows.slots
        for held, new in ((self._store.keys[layer], k), (self._store.values[layer], v)):
            held[:, slots] = new[: len(slots)].transpose(0, 1)
        return self._mix(layer, _adjacent(q), how)

    def attend_unrotated(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        how: Attention,
    ) -> Tensor:
        """As `attend_rows`, of what is not rotated yet; cos and sin [R,d]."""
        keys, values = self._store.keys[layer], self._store.values[layer]
        q, k, v = (_adjacent(x) for x in (q, k, v))
        slots = F.pad(self._rows.slots, (0, len(q) - len(self._rows.slots)), value=-1)
        rotated = rope_kv(q, k, v, cos, sin, slots, keys, values)
        return self._mix(layer, rotated, how)

    def _mix(self, layer: int, q: Tensor, how: Attention) -> Tensor:
        return tree_attention(
            q,
            self._store.keys[layer],
            self._store.values[layer],
            self._rows.segments,
            how.scale,
            words=self._rows.words,
            positions=None if how.window is None else self._rows.positions,
            window=how.window,
            sinks=how.sinks,
            softcap=how.softcap,
        )


def rows_of(segments: Sequence[Segment]) -> Rows:
    """The rows of a round whose requests come as they are."""
    first = segments[0]
    grown = {0 if s.branches is None else len(s.branches.positions) - s.num_rows for s in segments}
    assert len(grown) == 1, "levels of trees run together with nothing else"
    (num_grown,) = grown
    pages = [s.table.pages for s in segments]
    width = max(len(own) for own in pages)
    spans = [
        [s.first_row, s.num_rows, s.past - num_grown, *own, *[0] * (width - len(own))]
        for s, own in zip(segments, pages, strict=True)
    ]
    held = torch.tensor(spans, dtype=torch.int32).to(first.device)
    slots = written_slots(segments)
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=first.device)
    first_row, num_rows, past = held[:, :3].T.contiguous()
    layout = Segments(
        first_row,
        num_rows,
        past,
        held[:, 3:],
        first.table.page_size,
        max_rows=max(s.num_rows for s in segments),
        max_length=max(s.length for s in segments),
        grown=num_grown,
    )
    if all(s.branches is None for s in segments):
        return Rows(layout, slots)
    words = torch.cat([_words(s) for s in segments])
    positions = torch.zeros(
        len(segments), num_grown + layout.max_rows, dtype=torch.int32, device=first.device
    )
    for own, s in zip(positions, segments, strict=True):
        at = s.positions if s.branches is None else s.branches.positions
        own[: len(at)] = at
    return Rows(layout, slots, words, positions)


def _words(segment: Segment) -> Tensor:
    """[num_rows] int64; 0 where a row sees all before it."""
    if segment.branches is None:
        return torch.zeros(segment.num_rows, dtype=torch.int64, device=segment.device)
    visible = segment.branches.visible
    assert visible.shape[1] <= MAX_BRANCH_ROWS
    bits = torch.arange(visible.shape[1], device=segment.device)
    return (visible.long() << bits).sum(-1)


def _adjacent(x: Tensor) -> Tensor:
    """[R,n,d], with the heads of a row side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
