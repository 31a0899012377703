"""Soft cross-entropy against the target, fused with the draft's head.

Rows are supervised (slot, step) pairs, positions the teacher states they learn from. Gradients are
made chunk by chunk in the forward pass, so nothing of width D or V outlives a chunk, and the
teacher's distribution is computed once for all steps that share it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23  # rows x D of one chunk: 32 MiB in float32


@dataclass(frozen=True)
class HeadLoss:
    """What one call of `head_loss` gives; only `total` carries a gradient."""

    total: Tensor  # [] sum over rows of weight x cross-entropy
    cross_entropy: Tensor  # [N]
    entropy: Tensor  # [N] of the teacher; KL = cross_entropy - entropy
    top1: Tensor  # [N] int64 draft id of the largest logit


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    position: Tensor,
    weight: Tensor,
) -> HeadLoss:
    """Cross-entropy of softmax(hidden @ head.T) under the target's law over the draft's ids.

    The target's logits are restricted to D and renormalised: teacher_head holds those D rows.

    Args:
        hidden: [N,H] normed draft states; their dtype is that of the matrix products
            (logits and softmax are float32 at least).
        head: [D,H].
        teacher: [P,T] the target's states after its final norm.
        teacher_head: [D,T].
        position: [N] int64 index into `teacher`.
        weight: [N] of each row in the total.
    """
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    total, *rest = _HeadLoss.apply(hidden, head, teacher, teacher_head, position, weight, with_grad)
    return HeadLoss(total, *rest)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        position: Tensor,
        weight: Tensor,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        n = len(hidden)
        ce, entropy = (torch.empty(n, dtype=wide, device=hidden.device) for _ in range(2))
        top1 = torch.empty(n, dtype=torch.int64, device=hidden.device)
        d_hidden = torch.zeros_like(hidden, dtype=wide) if with_grad else None
        d_head = torch.zeros_like(head, dtype=wide) if with_grad and head.requires_grad else None
        weight = weight.to(wide)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = head.to(hidden.dtype)
            teacher, teacher_matrix = teacher.to(hidden.dtype), teacher_head.to(hidden.dtype)
            for rows, own, kept in _chunks(position, len(head)):
                log_p = (teacher[kept] @ teacher_matrix.T).to(wide).log_softmax(-1)
                p = log_p.exp()
                log_q = (hidden[rows] @ matrix.T).to(wide).log_softmax(-1)
                target = p[own]
                ce[rows] = -_dot(target, log_q)
                entropy[rows] = -_dot(p, log_p)[own]
                top1[rows] = log_q.argmax(-1)
                if d_hidden is None:
                    continue
                d_logits = log_q.exp_().sub_(target).to(hidden.dtype)
                d_hidden[rows] = (d_logits @ matrix).to(wide) * weight[rows, None]
                if d_head is not None:
                    scaled = (hidden[rows] * weight[rows, None]).to(hidden.dtype)
                    if d_head.dtype == scaled.dtype:
                        d_head.addmm_(d_logits.T, scaled)
                    else:
                        d_head += d_logits.T @ scaled
        ctx.save_for_backward(d_hidden, d_head)
        ctx.dtypes = hidden.dtype, head.dtype
        ctx.mark_non_differentiable(ce, entropy, top1)
        return (ce * weight).sum(), ce, entropy, top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        scale = grads[0]
        hidden_dtype, head_dtype = ctx.dtypes
        d_hidden = (d_hidden * scale).to(hidden_dtype)
        d_head = None if d_head is None else (d_head * scale).to(head_dtype)
        return d_hidden, d_head, None, None, None, None, None


def _chunks(position: Tensor, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Split rows into chunks of about CHUNK_ELEMENTS / width; a position's rows stay together.

    Returns:
        Of each chunk: rows [n], their index into the chunk's positions [n], the positions [p].
    """
    ordered, order = position.sort(stable=True)
    kept, own, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    limit = max(1, CHUNK_ELEMENTS // width)
    chunks, low, low_row, row = [], 0, 0, 0
    for high, count in enumerate(counts.tolist()):
        if row - low_row + count > limit and row > low_row:
            chunks.append((order[low_row:row], own[low_row:row] - low, kept[low:high]))
            low, low_row = high, row
        row += count
    if row > low_row:
        chunks.append((order[low_row:row], own[low_row:row] - low, kept[low:]))
    return chunks


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot product without a temporary of the inputs' size."""
    return (a.unsqueeze(1) @ b.unsqueeze(2)).flatten()
