"""Keys and values of the running requests: where they lie, and which rows see which.

Target and draft keep theirs in stores of their own under the same slot numbers, in pages that a
request's table puts in order. A round's rows are packed without padding between requests: [1, R]
tokens, request after request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
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

    def visible(self, window: int | None) -> Tensor:
        """[num_rows, length] bool: what each row sees."""
        slots = torch.arange(self.length, device=self.device)
        if self.branches is not None:
            slots[-len(self.branches.positions) :] = self.branches.positions
        distance = self.positions[:, None] - slots
        allowed = distance >= 0
        if self.branches is not None:
            allowed[:, -len(self.branches.positions) :] = self.branches.visible
        return allowed if window is None else allowed & (distance < window)
