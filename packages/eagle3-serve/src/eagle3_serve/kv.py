"""Keys and values of the running requests, and attention over them.

A request owns one contiguous run of slots for its whole life, sized for the longest sequence it may
reach, so attention reads its keys as a view, nothing is gathered, and no request ever has to give
way to another. Target and draft use the same slot numbers in stores of their own.

A round's rows are packed without padding between requests: [1, R] tokens, request after request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class SlotAllocator:
    """Hands out contiguous runs of slots, first fit."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [(0, num_slots)]  # (start, count), ascending, never adjacent

    @property
    def num_free(self) -> int:
        """Slots that no request owns."""
        return sum(count for _, count in self._free)

    def allocate(self, count: int) -> int | None:
        """Start of a run of `count` slots, or None if there is no such run now."""
        for i, (start, size) in enumerate(self._free):
            if size >= count:
                self._free[i : i + 1] = [(start + count, size - count)] if size > count else []
                return start
        return None

    def free(self, start: int, count: int) -> None:
        """Give a run back."""
        merged: list[tuple[int, int]] = []
        for run in sorted([*self._free, (start, count)]):
            if merged and sum(merged[-1]) == run[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + run[1])
            else:
                assert not merged or sum(merged[-1]) < run[0], "slots were freed twice"
                merged.append(run)
        self._free = merged


class KVStore:
    """Keys and values of all slots: [layers, kv heads, slots, head_dim] each."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeroed: on a CPU the system commits the memory page by page when it is first used.
        shape = (num_layers, num_kv_heads, num_slots, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def keep(self, segment: "Segment", rows: Sequence[int]) -> None:
        """Keep a path of a pass's rows, at the slots right behind the `past` ones.

        Args:
            segment: whose rows have run.
            rows: ascending numbers of its rows, from 0; the rest is up for being overwritten.
        """
        first = segment.slot + segment.past
        moved = [(first + row, first + i) for i, row in enumerate(rows) if row != i]
        if moved:  # a path that is a prefix lies right already
            source, target = torch.tensor(moved, device=self.keys.device).T
            for held in (self.keys, self.values):
                held[:, :, target] = held[:, :, source]  # read whole before it is written


@dataclass(frozen=True)
class Branches:
    """The last m slots of a request, when they are a tree and not a chain.

    Their first m - num_rows were written by passes before, the rest are the rows of this one.
    """

    positions: Tensor  # [m] absolute
    visible: Tensor  # [num_rows,m] bool: the row's ancestors among them and itself


@dataclass(frozen=True)
class Segment:
    """One request's rows in a packed batch: `num_rows` new tokens after `past` held ones.

    Rows see everything held and the rows before them. With `branches` a row sees the slots before
    the last m, and of those m what `branches.visible` says: all rows of a tree in one pass
    (m = num_rows) for the target, level after level (m grows) for a draft. Afterwards
    `KVStore.keep` moves an accepted path together.
    """

    first_row: int
    num_rows: int
    slot: int  # where the request's run starts
    past: int  # slots written by passes before, those of a tree included
    device: torch.device
    branches: Branches | None = None

    @property
    def length(self) -> int:
        """Positions held once this round's rows are written."""
        return self.past + self.num_rows

    @cached_property
    def positions(self) -> Tensor:
        """[num_rows] absolute."""
        if self.branches is not None:
            return self.branches.positions[-self.num_rows :]
        return torch.arange(self.past, self.length, device=self.device)

    def mask(self, window: int | None, groups: int) -> Tensor | None:
        """[groups·num_rows, length] of what each row may see; None = everything."""
        is_chain = self.branches is None
        if is_chain and self.num_rows == 1 and (window is None or self.length <= window):
            return None
        key = f"_mask_{window}_{groups}"
        if key not in self.__dict__:  # the same for all layers of a round
            slots = torch.arange(self.length, device=self.device)
            if self.branches is not None:
                slots[-len(self.branches.positions) :] = self.branches.positions
            distance = self.positions[:, None] - slots
            allowed = distance >= 0
            if self.branches is not None:
                allowed[:, -len(self.branches.positions) :] = self.branches.visible
            if window is not None:
                allowed = allowed & (distance < window)
            self.__dict__[key] = allowed.repeat(groups, 1)
        return self.__dict__[key]


class PackedContext:
    """The attention of one pass over packed rows; writes their keys and values to the store.

    Rows after the last segment are padding: they see nothing and come out as zeros.
    """

    def __init__(
        self, store: KVStore, segments: Sequence[Segment], sliding_window: int | None = None
    ) -> None:
        self.sliding_window = sliding_window
        self._store = store
        self._segments = segments

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1,nq,R,d], k and v [1,nkv,R,d] -> [1,nq,R,d], as the draft's layers call it."""
        return self.attend_scaled(layer, q, k, v, q.shape[-1] ** -0.5, self.sliding_window)

    def attend_scaled(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The same with a scale and a sliding window (own position included) of the caller's."""
        out = torch.zeros_like(q)
        keys, values = self._store.keys[layer], self._store.values[layer]
        kv_heads = len(keys)
        for s in self._segments:
            rows = slice(s.first_row, s.first_row + s.num_rows)
            written = slice(s.slot + s.past, s.slot + s.length)
            keys[:, written] = k[0, :, rows]
            values[:, written] = v[0, :, rows]
            held = slice(s.slot, s.slot + s.length)
            # Query heads that share a kv head become rows of it: [1, nkv, groups·rows, d].
            own = q[0, :, rows]
            mixed = F.scaled_dot_product_attention(
                own.reshape(1, kv_heads, -1, q.shape[-1]),
                keys[None, :, held],
                values[None, :, held],
                attn_mask=s.mask(window, q.shape[1] // kv_heads),
                scale=scale,
            )
            out[0, :, rows] = mixed.reshape(own.shape)
        return out
