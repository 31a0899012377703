"""The draft's head, its loss and their gradients, a chunk of rows at a time.

Rows are supervised (slot, step) pairs, positions the teacher states they learn from. Gradients are
made in the forward pass, so nothing of width D or V outlives a chunk, and a position's teacher
distribution is computed once for all steps that learn from it.

With p, m, q and a as in `objective`, every objective's gradient with respect to a row's logits is

    c (q - p) + d q (s - 1[q < m p])        s = sum of q over the ids where q < m p

with two numbers a row: c for the divergence, d for the acceptance.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.objective import Objective

CHUNK_ELEMENTS = 1 << 23  # rows x D of one chunk: 32 MiB in float32


@dataclass(frozen=True)
class HeadLoss:
    """What one call of `head_loss` gives; only `total` carries a gradient."""

    total: Tensor  # [] sum over rows of weight x objective
    cross_entropy: Tensor  # [N]
    entropy: Tensor  # [N] of the teacher; KL = cross_entropy - entropy
    top1: Tensor  # [N] int64 draft id of the largest logit
    acceptance: Tensor | None  # [N] a; None while training on an objective that needs none


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    logz: Tensor,
    position: Tensor,
    weight: Tensor,
    objective: Objective,
) -> HeadLoss:
    """Loss of softmax(hidden @ head.T) against the target's law. Backward runs once.

    Args:
        hidden: [N,H] normed draft states; their dtype is that of the matrix products
            (logits and softmax are float32 at least).
        head: [D,H].
        teacher: [P,T] the target's states after its final norm.
        teacher_head: [D,T] the rows of the target's head that the draft can propose.
        logz: [P] log-sum-exp of the target's logits over its whole vocabulary.
        position: [N] int64 on the CPU, where chunks are planned: index into `teacher`.
        weight: [N] of each row in the total.
        objective: weights of the terms.
    """
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    total, ce, entropy, top1, acceptance = _HeadLoss.apply(
        hidden, head, teacher, teacher_head, logz, position, weight, objective, with_grad
    )
    known = objective.needs_acceptance or not with_grad
    return HeadLoss(total, ce, entropy, top1, acceptance if known else None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        logz: Tensor,
        position: Tensor,
        weight: Tensor,
        objective: Objective,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        device, dtype = hidden.device, hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        n = len(hidden)
        ce, entropy, acceptance, loss = (torch.zeros(n, dtype=wide, device=device) for _ in "1234")
        top1 = torch.zeros(n, dtype=torch.int64, device=device)
        d_hidden = torch.zeros_like(hidden, dtype=wide) if with_grad else None
        d_head = torch.zeros_like(head, dtype=wide) if with_grad and head.requires_grad else None
        chunks = plan_chunks(position, len(head))
        largest = max((len(c.rows) for c in chunks), default=0)
        with torch.autocast(device.type, enabled=False):
            matrix, teacher_matrix = head.to(dtype), teacher_head.to(dtype)
            products = Products(largest, len(head), dtype, wide, device)
            for chunk in chunks:
                rows, kept = chunk.rows.to(device), chunk.positions.to(device)
                law = Teacher.of(teacher[kept].to(dtype) @ teacher_matrix.T, logz[kept], wide)
                own = hidden[rows]
                logits = products.logits(own, matrix)
                for at, many in chunk.blocks():
                    block = rows[at : at + many]
                    score = Rows.of(
                        logits[at : at + many], law.first(many), objective, weight[block], with_grad
                    )
                    ce[block], entropy[block] = score.cross_entropy, law.entropy[:many]
                    acceptance[block], loss[block] = score.acceptance, score.loss
                    top1[block] = score.top1
                if d_hidden is None:
                    continue
                d_logits = products.gradient(logits)  # the rows have been turned into it
                d_hidden[rows] = (d_logits @ matrix).to(wide)
                if d_head is not None:
                    add_product(d_head, d_logits.T, own)
        # Not save_for_backward: these are results, which the backward pass may scale in place.
        ctx.grads = d_hidden, d_head
        ctx.dtypes = dtype, head.dtype
        ctx.mark_non_differentiable(ce, entropy, top1, acceptance)
        return loss.sum(), ce, entropy, top1, acceptance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.grads
        del ctx.grads  # the caller's from here on, so that no copy of [D,H] is made
        hidden_dtype, head_dtype = ctx.dtypes
        d_hidden = d_hidden.mul_(grads[0]).to(hidden_dtype)
        d_head = None if d_head is None else d_head.mul_(grads[0]).to(head_dtype)
        return d_hidden, d_head, *[None] * 7


@dataclass(frozen=True)
class Chunk:
    """Rows that are worked on together: all rows of some positions.

    Rows come in blocks: the j-th block holds the j-th row of every position that has so many.
    Positions are sorted by their number of rows, so block j's teachers are the first `sizes[j]`
    positions, and nothing of width D is gathered.
    """

    rows: Tensor  # [n] int64
    positions: Tensor  # [p] int64
    sizes: tuple[int, ...]

    def blocks(self) -> list[tuple[int, int]]:
        """Of each block: where it starts in `rows`, and its length."""
        starts = [sum(self.sizes[:j]) for j in range(len(self.sizes))]
        return list(zip(starts, self.sizes, strict=True))


def plan_chunks(position: Tensor, width: int) -> list[Chunk]:
    """Split rows into chunks of about CHUNK_ELEMENTS / width; a position's rows stay together."""
    ordered, order = position.sort(stable=True)
    kept, own, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0)
    turn = torch.arange(len(position)) - (ends - counts)[own]  # which of its position's rows
    limit = max(1, CHUNK_ELEMENTS // width)
    chunks, low, row = [], 0, 0
    while low < len(kept):
        high = max(low + 1, int(torch.searchsorted(ends, row + limit, right=True)))
        end = int(ends[high - 1])
        many = counts[low:high].argsort(descending=True, stable=True)
        rank = torch.empty_like(many)
        rank[many] = torch.arange(high - low)
        by_block = (turn[row:end] * (high - low) + rank[own[row:end] - low]).argsort()
        sizes = tuple(turn[row:end].bincount().tolist())
        chunks.append(Chunk(order[row:end][by_block], kept[low:high][many], sizes))
        low, row = high, end
    return chunks


@dataclass(frozen=True)
class Teacher:
    """The target's law of some positions."""

    p: Tensor  # [P,D] renormalised over the draft's ids
    mass: Tensor  # [P,1] that the whole law has on them
    entropy: Tensor  # [P] of p

    @classmethod
    def of(cls, logits: Tensor, logz: Tensor, wide: torch.dtype) -> "Teacher":
        """From logits [P,D] and the log-sum-exp over the whole vocabulary [P]."""
        logits = logits.to(wide)
        within = logits.logsumexp(-1)
        log_p = logits.sub_(within[:, None])
        mass = (within - logz.to(wide)).exp().clamp_(max=1)  # above 1 by rounding only
        p = log_p.exp()
        return cls(p, mass[:, None], -dot(p, log_p))

    def first(self, many: int) -> "Teacher":
        """Of the first positions."""
        return Teacher(self.p[:many], self.mass[:many], self.entropy[:many])


@dataclass(frozen=True)
class Rows:
    """Scores of a block of rows."""

    cross_entropy: Tensor
    acceptance: Tensor
    loss: Tensor  # weighted
    top1: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, law: Teacher, objective: Objective, weight: Tensor, with_grad: bool
    ) -> "Rows":
        """Score logits [n,D] and, `with_grad`, turn them into their gradient."""
        top1 = logits.argmax(-1)
        top = logits.gather(-1, top1[:, None])
        on_target = dot(logits, law.p)
        q = logits.sub_(top).exp_()
        sums = q.sum(-1, keepdim=True)
        ce = (top + sums.log()).squeeze(-1) - on_target
        weight = weight.to(q.dtype)
        acceptance, below = torch.zeros_like(ce), None
        if objective.needs_acceptance or not with_grad:
            q.div_(sums)
            sums = torch.ones_like(sums)
            reachable = law.p * law.mass
            acceptance = torch.minimum(q, reachable).sum(-1)
            below = reachable.gt_(q)  # 1 where q < m p
        value, c, d = objective.row(ce, ce - law.entropy, acceptance)
        if with_grad:
            c, d = (c * weight)[:, None], (d * weight)[:, None]
            if below is None:
                q.mul_(c / sums)
            else:
                below.mul_(q)
                q.mul_(c + d * below.sum(-1, keepdim=True)).addcmul_(below, d, value=-1)
            q.addcmul_(law.p, c, value=-1)
        return cls(ce, acceptance, value * weight, top1)


class Products:
    """Matrix products into buffers that all chunks share."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device
    ) -> None:
        self._wide = torch.empty(rows, width, dtype=wide, device=device)
        # A product is rounded to its inputs' dtype; the softmax wants more.
        self._narrow = None if dtype == wide else torch.empty_like(self._wide, dtype=dtype)

    def logits(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """rows [n,H] @ matrix [D,H].T -> [n,D], wide."""
        out = self._wide[: len(rows)]
        if self._narrow is None:
            return torch.mm(rows, matrix.T, out=out)
        return out.copy_(torch.mm(rows, matrix.T, out=self._narrow[: len(rows)]))

    def gradient(self, logits: Tensor) -> Tensor:
        """[n,D] -> the same in the products' dtype."""
        return logits if self._narrow is None else self._narrow[: len(logits)].copy_(logits)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b."""
    if out.dtype == b.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot product without a temporary of the inputs' size."""
    return (a.unsqueeze(1) @ b.unsqueeze(2)).flatten()
