"""Attention of one pass over packed rows of many requests.

One request's keys are read as they lie when its pages are one run, and copied together otherwise,
which costs a tenth of the attention itself on a CPU. Several requests with a few rows each, the
rows of a decoding round, are one padded batch: one call a layer in place of one a request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_serve.kv import KVStore, Segment

_MOST_BATCHED_ROWS = 64  # of a request; the rows of a prompt are a call of their own
_MOST_PADDING = 2.0  # times the keys there are


@dataclass(frozen=True)
class Attention:
    """How one layer turns scores into weights."""

    scale: float
    window: int | None = None  # sliding, own position included
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [nq], one more score per head, without a value

    def mix(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """q [B,nkv,groups·R,d], k and v [B,nkv,S,d], bias [B,1,groups·R,S] 0 or -inf -> as q."""
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        if self.sinks is not None:
            num_rows = q.shape[2] * k.shape[1] // len(self.sinks)
            sinks = self.sinks.view(k.shape[1], -1, 1).repeat_interleave(num_rows, 1)
            sinks = sinks.expand(len(q), *sinks.shape)
            scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(q.dtype)
        return weights[..., : k.shape[2]] @ v


class _Group:
    """Segments that attend in one call, padded to the longest: B requests, R rows, S keys."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._num_rows = max(s.num_rows for s in segments)
        self._length = max(s.length for s in segments)
        self._biases: dict[object, Tensor | None] = {}
        first = segments[0]
        self._is_single = len(segments) == 1
        if self._is_single:
            self._rows: slice | Tensor = slice(first.first_row, first.first_row + first.num_rows)
            self._held = first.held
            return
        device = first.device
        # Padding repeats what is there: the last row, and the first key, which nobody sees twice.
        self._rows = torch.tensor(
            [s.first_row + min(i, s.num_rows - 1) for s in segments for i in range(self._num_rows)],
            device=device,
        )
        held = torch.empty(len(segments), self._length, dtype=torch.int64, device=device)
        for slots, s in zip(held, segments, strict=True):
            where = s.held
            if isinstance(where, slice):
                where = torch.arange(where.start, where.stop, device=device)
            slots[: s.length] = where
            slots[s.length :] = where[0]
        self._held = held.flatten()

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, how: Attention, out: Tensor) -> None:
        """q and out [all rows,nq,d]; keys and values [nkv,slots,d] of one layer."""
        kv_heads, width = keys.shape[0], keys.shape[2]
        groups = q.shape[1] // kv_heads
        shape = (len(self._segments), kv_heads, groups, self._num_rows, width)
        # Query heads that share a kv head become rows of it.
        own = q[self._rows].view(shape[0], shape[3], kv_heads, groups, width)
        own = own.permute(0, 2, 3, 1, 4).reshape(shape[0], kv_heads, -1, width)
        mixed = how.mix(
            own,
            self._gather(keys),
            self._gather(values),
            self._bias(how.window, groups, q.dtype),
        )
        # A padding row writes what the row it repeats writes.
        out[self._rows] = mixed.reshape(shape).permute(0, 3, 1, 2, 4).reshape(-1, *out.shape[1:])

    def _gather(self, stored: Tensor) -> Tensor:
        """[nkv,slots,d] -> [B,nkv,S,d]; a view where one run is asked for."""
        if isinstance(self._held, slice):
            return stored[None, :, self._held]
        chosen = stored.index_select(1, self._held)
        return chosen.view(len(stored), len(self._segments), -1, stored.shape[2]).transpose(0, 1)

    def _bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """[B,1,groups·R,S], the same for all layers of a pass; None = everything is seen."""
        key = window, groups
        if key not in self._biases:
            self._biases[key] = self._make_bias(window, groups, dtype)
        return self._biases[key]

    def _make_bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        first = self._segments[0]
        is_one_token = self._is_single and first.num_rows == 1 and first.branches is None
        if is_one_token and (window is None or first.length <= window):
            return None
        bias = torch.full(
            (len(self._segments), 1, groups, self._num_rows, self._length),
            -torch.inf,
            dtype=dtype,
            device=first.device,
        )
        for own, s in zip(bias, self._segments, strict=True):
            visible = s.visible(window)
            rows = torch.arange(self._num_rows, device=s.device).clamp(max=s.num_rows - 1)
            own[..., : s.length].masked_fill_(visible[rows], 0.0)
        return bias.flatten(2, 3)


class _Row:
    """One row alone over its own prefix: the very call that decoding one token at a time makes.

    How many rows or requests there are, and what was drafted beside it, cannot change its bits.
    """

    def __init__(self, segment: Segment, row: int) -> None:
        self._segment, self._row = segment, row
        self._held: dict[int | None, slice | Tensor] = {}

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, how: Attention, out: Tensor) -> None:
        """As `_Group.attend`."""
        row, kv_heads = self._segment.first_row + self._row, len(keys)
        if how.window not in self._held:
            self._held[how.window] = self._seen(how.window)
        held = self._held[how.window]
        own = q[row].view(1, kv_heads, -1, q.shape[-1])
        out[row] = how.mix(own, _slots(keys, held)[None], _slots(values, held)[None], None).view(
            q.shape[1:]
        )

    def _seen(self, window: int | None) -> slice | Tensor:
        s = self._segment
        if s.branches is None:
            end = s.past + self._row + 1
            first = 0 if window is None else max(0, end - window)
            return s.table.index(first, end, s.device)
        slots = s.held
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=s.device)
        return slots[s.visible(window)[self._row]]  # ancestors come in the order of their depth


def _slots(stored: Tensor, which: slice | Tensor) -> Tensor:
    """[nkv,slots,d] -> [nkv,chosen,d]; a copy of one run too: one layout, one rounding."""
    if isinstance(which, slice):
        return stored[:, which].contiguous()
    return stored.index_select(1, which)


class RowContext(ABC):
    """The attention of one pass over packed rows; writes their keys and values to the store.

    Rows after the last segment are padding: they see nothing and come out as zeros.
    """

    sliding_window: int | None  # of the draft's layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1,nq,R,d], k and v [1,nkv,R,d] -> [1,nq,R,d], as the draft's layers call it."""
        how = Attention(q.shape[-1] ** -0.5, self.sliding_window)
        return self.attend_scaled(layer, q, k, v, how)

    def attend_scaled(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> Tensor:
        """The same with a scale, a window and so on of the caller's."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend_rows(layer, q, k, v, how).transpose(0, 1)[None]

    @abstractmethod
    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> Tensor:
        """q [R,nq,d], k and v [R,nkv,d] -> [R,nq,d], contiguous."""


class PackedContext(RowContext):
    """In torch: a call a layer for each group of requests."""

    def __init__(
        self,
        store: KVStore,
        segments: Sequence[Segment],
        sliding_window: int | None = None,
        exact: bool = False,
    ) -> None:
        """`exact`: every row attends alone, so that nothing beside it can change its bits."""
        self.sliding_window = sliding_window
        self._store = store
        self._segments = segments
        self._num_rows = segments[-1].first_row + segments[-1].num_rows
        self._written = written_slots(segments)
        self._groups: Sequence[_Group | _Row] = (
            [_Row(s, row) for s in segments for row in range(s.num_rows)]
            if exact
            else _grouped(segments)
        )

    def attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        keys[:, self._written] = k[: self._num_rows].transpose(0, 1)
        values[:, self._written] = v[: self._num_rows].transpose(0, 1)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            group.attend(keys, values, q, how, out)
        return out


def written_slots(segments: Sequence[Segment]) -> slice | Tensor:
    """Slots of all rows, in their order."""
    if len(segments) == 1:
        return segments[0].written
    return torch.cat(
        [
            torch.arange(w.start, w.stop, device=s.device) if isinstance(w, slice) else w
            for s in segments
            for w in (s.written,)
        ]
    )


def _grouped(segments: Sequence[Segment]) -> list[_Group]:
    """Requests of like lengths with a few rows each together, everybody else alone."""
    few = [s for s in segments if s.num_rows <= _MOST_BATCHED_ROWS]
    groups = [_Group([s]) for s in segments if s.num_rows > _MOST_BATCHED_ROWS]
    few.sort(key=lambda s: s.length)
    while few:
        longest, total, count = few[-1].length, 0, 0
        for s in reversed(few):
            if longest * (count + 1) > _MOST_PADDING * (total + s.length):
                break
            total, count = total + s.length, count + 1
        groups.append(_Group(few[-count:]))
        del few[-count:]
    return groups
