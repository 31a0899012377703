"""Attention of the training-time-test unroll over packed documents, without an S x S allocation.

Slot t at step k sees the step-0 keys j <= t of its document and its own keys of steps 1..k. Only
the slots that still run are queries. Scores exist for one block of queries at a time; the backward
pass recomputes them from the saved log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 256  # rows; scores of a block are [heads, QUERY_BLOCK, document length]


@dataclass(frozen=True)
class Block:
    """Query rows [row, row_end) and the step-0 keys [key, key_end) that any of them may see."""

    row: int
    row_end: int
    key: int
    key_end: int


class PackedUnroll:
    """Attention context of one packed row [1,S] of documents; `start_step` opens every step."""

    def __init__(self, lengths: Sequence[int], sliding_window: int | None = None) -> None:
        """`lengths`: slots of each document, in order."""
        self.sliding_window = sliding_window
        self._lengths = lengths
        self._step = -1
        self._slots = torch.empty(0, dtype=torch.int64)
        self._blocks: list[Block] = []
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def start_step(self, slots: Tensor, kept: Tensor | None = None) -> None:
        """`slots` [R] int64: those that run, ascending; `kept` [R before] bool: which remain."""
        self._step += 1
        if kept is not None:
            for pairs in self._own.values():
                pairs[:] = [(k[:, :, kept], v[:, :, kept]) for k, v in pairs]
        self._slots = slots
        self._blocks = self._plan(slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1,nq,R,d], k and v [1,nkv,R,d] -> [1,nq,R,d]."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        own = self._own.setdefault(layer, [])
        if self._step == 0:
            self._first[layer] = (k, v)
            own_k = own_v = k.new_empty(k.shape[1], k.shape[2], 0, k.shape[3])
        else:
            own.append((k, v))
            seen = own if self.sliding_window is None else own[-self.sliding_window :]
            own_k = torch.stack([pair[0][0] for pair in seen], dim=2)  # [nkv,R,steps seen,d]
            own_v = torch.stack([pair[1][0] for pair in seen], dim=2)
        first_k, first_v = self._first[layer]
        view = _View(self._slots, self._blocks, self._step, self.sliding_window)
        out = _Attention.apply(q[0], first_k[0], first_v[0], own_k, own_v, view)
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)

    def _plan(self, slots: Tensor) -> list[Block]:
        ends = torch.tensor(list(self._lengths)).cumsum(0)
        rows = torch.searchsorted(slots.cpu(), ends).tolist()  # rows before each document's end
        blocks, row, start = [], 0, 0
        at = slots.tolist()
        for row_end, end in zip(rows, ends.tolist(), strict=True):
            for low in range(row, row_end, QUERY_BLOCK):
                high = min(low + QUERY_BLOCK, row_end)
                blocks.append(Block(low, high, self._oldest(start, at[low]), at[high - 1] + 1))
            row, start = row_end, end
        return blocks

    def _oldest(self, start: int, slot: int) -> int:
        """First step-0 key that `slot`, standing at position slot + step, still sees."""
        if self.sliding_window is None:
            return start
        # Never past the slot itself, so that no block is empty of keys.
        return min(max(start, slot + self._step - self.sliding_window + 1), slot)


@dataclass(frozen=True)
class _View:
    slots: Tensor
    blocks: list[Block]
    step: int
    window: int | None

    def hidden(self, block: Block) -> Tensor:
        """[rows, keys] bool: pairs that must not see each other."""
        slots = self.slots[block.row : block.row_end, None]
        distance = slots - torch.arange(block.key, block.key_end, device=slots.device)
        hidden = distance < 0
        if self.window is None:
            return hidden
        return hidden | (distance + self.step >= self.window)


def _scores(q: Tensor, first_k: Tensor, own_k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """q [n,g,r,d], first_k [n,keys,d], own_k [n,r,k,d] -> scores [n,g,r,keys] and [n,g,r,k]."""
    scale = q.shape[-1] ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    first = (q.flatten(1, 2) @ first_k.transpose(1, 2)).view(*q.shape[:3], -1).to(wide)
    first = first.mul_(scale).masked_fill_(hidden, -torch.inf)
    own = (q.transpose(1, 2) @ own_k.transpose(2, 3)).transpose(1, 2).to(wide) * scale
    return first, own


class _Attention(torch.autograd.Function):
    """q [nq,R,d]; first k, v [nkv,S,d]; own k, v [nkv,R,k,d] -> [nq,R,d]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        first_k: Tensor,
        first_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        view: _View,
    ) -> Tensor:
        groups = q.unflatten(0, (first_k.shape[0], -1))  # [n,g,R,d]
        out = torch.empty_like(groups)
        lse = torch.empty(
            groups.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
        )
        with torch.autocast(q.device.type, enabled=False):
            for b in view.blocks:
                rows, keys = slice(b.row, b.row_end), slice(b.key, b.key_end)
                first, own = _scores(
                    groups[:, :, rows], first_k[:, keys], own_k[:, rows], view.hidden(b)
                )
                norm = (
                    torch.logaddexp(first.logsumexp(-1), own.logsumexp(-1))
                    if view.step
                    else first.logsumexp(-1)
                )
                weights = (first - norm.unsqueeze(-1)).exp_().to(q.dtype)
                mixed = (weights.flatten(1, 2) @ first_v[:, keys]).view_as(out[:, :, rows])
                if view.step:
                    weights = (own - norm.unsqueeze(-1)).exp_().to(q.dtype)
                    mixed += (weights.transpose(1, 2) @ own_v[:, rows]).transpose(1, 2)
                out[:, :, rows], lse[:, :, rows] = mixed, norm
        ctx.save_for_backward(groups, first_k, first_v, own_k, own_v, out, lse)
        ctx.view = view
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, first_k, first_v, own_k, own_v, out, lse = ctx.saved_tensors
        view: _View = ctx.view
        grad = grads[0].view_as(out)
        delta = (grad * out).sum(-1, keepdim=True).to(lse.dtype)
        scale = groups.shape[-1] ** -0.5
        d_q = torch.zeros_like(groups)
        d_first_k, d_first_v = torch.zeros_like(first_k), torch.zeros_like(first_v)
        d_own_k, d_own_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for b in view.blocks:
            rows, keys = slice(b.row, b.row_end), slice(b.key, b.key_end)
            q, g = groups[:, :, rows], grad[:, :, rows]
            first, own = _scores(q, first_k[:, keys], own_k[:, rows], view.hidden(b))
            norm = lse[:, :, rows].unsqueeze(-1)
            flat_g, flat_q = g.flatten(1, 2), q.flatten(1, 2)
            weights = (first - norm).exp_()
            d_first_v[:, keys] += weights.flatten(1, 2).to(g.dtype).transpose(1, 2) @ flat_g
            d_weights = (flat_g @ first_v[:, keys].transpose(1, 2)).view_as(weights)
            d_scores = ((d_weights - delta[:, :, rows]) * weights * scale).to(q.dtype).flatten(1, 2)
            d_q[:, :, rows] = (d_scores @ first_k[:, keys]).view_as(q)
            d_first_k[:, keys] += d_scores.transpose(1, 2) @ flat_q
            if view.step:
                by_row_q, by_row_g = q.transpose(1, 2), g.transpose(1, 2)  # [n,r,g,d]
                weights = (own - norm).exp_().transpose(1, 2)  # [n,r,g,k]
                d_own_v[:, rows] = weights.to(g.dtype).transpose(2, 3) @ by_row_g
                d_weights = by_row_g @ own_v[:, rows].transpose(2, 3)
                d_scores = ((d_weights - delta[:, :, rows].transpose(1, 2)) * weights * scale).to(
                    q.dtype
                )
                d_q[:, :, rows] += (d_scores @ own_k[:, rows]).transpose(1, 2)
                d_own_k[:, rows] = d_scores.transpose(2, 3) @ by_row_q
        return d_q.flatten(0, 1), d_first_k, d_first_v, d_own_k, d_own_v, None
