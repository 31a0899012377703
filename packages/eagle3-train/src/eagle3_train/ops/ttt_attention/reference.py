"""Attention over a range of step-0 keys and a few keys of the row's own, without S x S scores.

Scores exist for one block of rows at a time; the backward pass recomputes them from the saved
log-sum-exp.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # rows; scores of a block are [heads, BLOCK, keys that any of its rows sees]


@dataclass(frozen=True)
class Block:
    """Rows [row, row_end), the keys that any of them sees and those that all of them see."""

    row: int
    row_end: int
    key: int
    key_end: int
    shared: int
    shared_end: int


@dataclass(frozen=True)
class Visible:
    """Which step-0 keys each row sees: those of [low, high), none where low >= high."""

    low: Tensor  # [R] int64 on the keys' device
    high: Tensor  # [R]
    blocks: tuple[Block, ...]

    @classmethod
    def plan(cls, low: Tensor, high: Tensor, device: torch.device) -> "Visible":
        """From ascending bounds on the CPU."""
        # Where a row's keys are disjoint from the one's before, such as at the next document.
        cuts = [0, *((low[1:] >= high[:-1]).nonzero().flatten() + 1).tolist(), len(low)]
        blocks: list[Block] = []
        row = 0
        for start, end in pairwise(cuts):
            # Short documents share a block as long as that costs few masked scores.
            if end - row > BLOCK or int(high[end - 1] - low[row]) > BLOCK:
                if start > row:
                    blocks.append(_block(low, high, row, start))
                row = start
            while end - row > BLOCK:
                blocks.append(_block(low, high, row, row + BLOCK))
                row += BLOCK
        if len(low) > row:
            blocks.append(_block(low, high, row, len(low)))
        return cls(low.to(device), high.to(device), tuple(blocks))

    def hide(self, scores: Tensor, block: Block) -> None:
        """Set scores [..., rows of the block, its keys] of unseen keys to -inf."""
        if block.shared >= block.shared_end:
            self._hide(scores, block, block.key, block.key_end)
        else:
            self._hide(scores, block, block.key, block.shared)
            self._hide(scores, block, block.shared_end, block.key_end)

    def _hide(self, scores: Tensor, block: Block, start: int, end: int) -> None:
        if start >= end:
            return
        keys = torch.arange(start, end, device=self.low.device)
        rows = slice(block.row, block.row_end)
        unseen = (keys < self.low[rows, None]) | (keys >= self.high[rows, None])
        scores[..., start - block.key : end - block.key].masked_fill_(unseen, -torch.inf)


def _block(low: Tensor, high: Tensor, row: int, end: int) -> Block:
    key_end = int(high[end - 1])
    # One key at least: a row that sees none still has its own.
    key = min(int(low[row]), key_end - 1)
    return Block(row, end, key, key_end, int(low[end - 1]), int(high[row]))


def ttt_attention(
    q: Tensor, first_k: Tensor, first_v: Tensor, own_k: Tensor, own_v: Tensor, visible: Visible
) -> Tensor:
    """Softmax over the step-0 keys a row sees and all of its own keys, scaled by d ** -0.5.

    Args:
        q: [nq,R,d].
        first_k: [nkv,S,d] of step 0; nq is a multiple of nkv.
        first_v: [nkv,S,d].
        own_k: [nkv,R,k,d]; every row needs a key, so k = 0 only where it sees a step-0 key.
        own_v: [nkv,R,k,d].
        visible: which step-0 keys each row sees.

    Returns:
        [nq,R,d].
    """
    out = _Attention.apply(q, first_k, first_v, own_k, own_v, visible)
    assert isinstance(out, Tensor)
    return out


def _scores(q: Tensor, first_k: Tensor, own_k: Tensor) -> tuple[Tensor, Tensor]:
    """q [n,g,r,d], first_k [n,keys,d], own_k [n,r,k,d] -> [n,g,r,keys] and [n,g,r,k], fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    first = (q.flatten(1, 2) @ first_k.transpose(1, 2)).view(*q.shape[:3], -1)
    own = (q.transpose(1, 2) @ own_k.transpose(2, 3)).transpose(1, 2)
    return first.to(wide), own.to(wide)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        first_k: Tensor,
        first_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        visible: Visible,
    ) -> Tensor:
        groups = (q * q.shape[-1] ** -0.5).unflatten(0, (first_k.shape[0], -1))  # [n,g,R,d]
        out = torch.empty_like(groups)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(groups.shape[:3], dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for b in visible.blocks:
                rows, keys = slice(b.row, b.row_end), slice(b.key, b.key_end)
                first, own = _scores(groups[:, :, rows], first_k[:, keys], own_k[:, rows])
                visible.hide(first, b)
                top = first.amax(-1, keepdim=True)
                if own.shape[-1]:
                    top = torch.maximum(top, own.amax(-1, keepdim=True))
                first, own = first.sub_(top).exp_(), own.sub(top).exp_()
                total = first.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
                mixed = first.to(q.dtype).flatten(1, 2) @ first_v[:, keys]
                mixed = mixed.view_as(out[:, :, rows])
                mixed += (own.to(q.dtype).transpose(1, 2) @ own_v[:, rows]).transpose(1, 2)
                out[:, :, rows] = mixed / total
                lse[:, :, rows] = (top + total.log()).squeeze(-1)
        ctx.save_for_backward(groups, first_k, first_v, own_k, own_v, out, lse)
        ctx.visible = visible
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, first_k, first_v, own_k, own_v, out, lse = ctx.saved_tensors
        visible: Visible = ctx.visible
        grad = grads[0].view_as(out)
        delta = (grad * out).sum(-1, keepdim=True).to(lse.dtype)
        d_q, d_own_k, d_own_v = (torch.empty_like(t) for t in (groups, own_k, own_v))
        d_first_k, d_first_v = torch.zeros_like(first_k), torch.zeros_like(first_v)
        for b in visible.blocks:
            rows, keys = slice(b.row, b.row_end), slice(b.key, b.key_end)
            q, g = groups[:, :, rows], grad[:, :, rows]
            norm, center = lse[:, :, rows].unsqueeze(-1), delta[:, :, rows]
            first, own = _scores(q, first_k[:, keys], own_k[:, rows])
            visible.hide(first, b)
            flat_q, flat_g = q.flatten(1, 2), g.flatten(1, 2)
            weights = first.sub_(norm).exp_()
            d_scores = (flat_g @ first_v[:, keys].transpose(1, 2)).view_as(weights)
            d_scores = d_scores.to(lse.dtype).sub_(center).mul_(weights).to(q.dtype).flatten(1, 2)
            d_first_v[:, keys] += weights.to(g.dtype).flatten(1, 2).transpose(1, 2) @ flat_g
            d_first_k[:, keys] += d_scores.transpose(1, 2) @ flat_q
            d_q[:, :, rows] = (d_scores @ first_k[:, keys]).view_as(q)

            by_row_q, by_row_g = q.transpose(1, 2), g.transpose(1, 2)  # [n,r,g,d]
            weights = own.sub(norm).exp_().transpose(1, 2)  # [n,r,g,k]
            d_scores = by_row_g @ own_v[:, rows].transpose(2, 3)
            d_scores = ((d_scores - center.transpose(1, 2)) * weights).to(q.dtype)
            d_own_v[:, rows] = weights.to(g.dtype).transpose(2, 3) @ by_row_g
            d_own_k[:, rows] = d_scores.transpose(2, 3) @ by_row_q
            d_q[:, :, rows] += (d_scores @ own_k[:, rows]).transpose(1, 2)
        d_q = d_q.mul_(groups.shape[-1] ** -0.5).flatten(0, 1)
        return d_q, d_first_k, d_first_v, d_own_k, d_own_v, None
