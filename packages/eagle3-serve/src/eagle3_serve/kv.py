"""Keys and values of the running requests, and attention over them.

Target and draft keep theirs in stores of their own under the same slot numbers, in pages that a
request's table puts in order. Attention reads a run of pages as it lies, and copies others
together first: a copy costs a tenth of the attention itself on a CPU.

A round's rows are packed without padding between requests: [1, R] tokens, request after request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_serve.pages import PageTable


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
        moved = [i for i, row in enumerate(rows) if row != i]
        if moved:  # a path that is a prefix lies right already
            slots = segment.written
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=self.keys.device)
            source, target = slots[[rows[i] for i in moved]], slots[moved]
            for held in (self.keys, self.values):
                held[:, :, target] = held[:, :, source]  # read whole before it is written

    def copy(self, source: slice, target: slice) -> None:
        """Copy slots."""
        for held in (self.keys, self.values):
            held[:, :, target] = held[:, :, source]


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
    table: PageTable  # with room for them
    past: int  # slots written by passes before, those of a tree included
    device: torch.device
    branches: Branches | None = None

    @property
    def length(self) -> int:
        """Positions held once this round's rows are written."""
        return self.past + self.num_rows

    @cached_property
    def held(self) -> slice | Tensor:
        """Slots of all positions, this round's included."""
        return self.table.index(0, self.length, self.device)

    @cached_property
    def written(self) -> slice | Tensor:
        """Slots of this round's rows."""
        return self.table.index(self.past, self.length, self.device)

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


@dataclass(frozen=True)
class Attention:
    """How one layer turns scores into weights."""

    scale: float
    window: int | None = None  # sliding, own position included
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [nq], one more score per head, without a value

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [1,nkv,groups·R,d], k and v [1,nkv,S,d], mask [groups·R,S] -> as q."""
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            per_row = self.sinks.view(k.shape[1], -1, 1).repeat_interleave(
                q.shape[2] * k.shape[1] // len(self.sinks), 1
            )
            scores = torch.cat([scores, per_row[None].to(scores.dtype)], -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(q.dtype)
        return weights[..., : k.shape[2]] @ v


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
        return self.attend_scaled(
            layer, q, k, v, Attention(q.shape[-1] ** -0.5, self.sliding_window)
        )

    def attend_scaled(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> Tensor:
        """The same with a scale, a window and so on of the caller's."""
        out = torch.zeros_like(q)
        keys, values = self._store.keys[layer], self._store.values[layer]
        kv_heads = len(keys)
        for s in self._segments:
            rows = slice(s.first_row, s.first_row + s.num_rows)
            keys[:, s.written] = k[0, :, rows]
            values[:, s.written] = v[0, :, rows]
            # Query heads that share a kv head become rows of it: [1, nkv, groups·rows, d].
            own = q[0, :, rows]
            mixed = how.mix(
                own.reshape(1, kv_heads, -1, q.shape[-1]),
                _slots(keys, s.held)[None],
                _slots(values, s.held)[None],
                s.mask(how.window, q.shape[1] // kv_heads),
            )
            out[0, :, rows] = mixed.reshape(own.shape)
        return out


def _slots(store: Tensor, which: slice | Tensor) -> Tensor:
    """[nkv, slots, d] -> [nkv, chosen, d]: a view of one run, else a copy."""
    return store[:, which] if isinstance(which, slice) else store.index_select(1, which)
