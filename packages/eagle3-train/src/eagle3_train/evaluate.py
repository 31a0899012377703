"""The simulated accept length of a draft on held-out samples, without decoding."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_train.config import Dtype
from eagle3_train.metrics import StepCounts, count_steps
from eagle3_train.objective import SOFT_CE, Objective
from eagle3_train.ops.head_loss import HeadLoss, head_loss
from eagle3_train.order import pack
from eagle3_train.store import Sample
from eagle3_train.ttt import Batch, supervised_slots, unroll


class Samples(Protocol):
    """Captured samples, and their lengths without reading them."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def run_slots(
    draft: Eagle3Draft,
    batch: Batch,
    slots: Tensor,
    teacher_head: Tensor,
    step_weights: Tensor,
    dtype: Dtype = "float32",
    objective: Objective = SOFT_CE,
    gradient_checkpointing: bool = False,
) -> tuple[HeadLoss, StepCounts]:
    """Unroll, head, loss and counts of one batch.

    Args:
        draft: on the batch's device.
        batch: packed samples.
        slots: [K,S] bool, those whose loss counts.
        teacher_head: [D,T] the target's head rows of the draft vocabulary.
        step_weights: [K] of one slot of each step in the total loss.
        dtype: bfloat16 runs the matrix products under autocast.
        objective: what a slot's loss is.
        gradient_checkpointing: see `unroll`.
    """
    device = batch.aux.device
    half = dtype == "bfloat16"
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        hidden = unroll(draft, batch, slots, gradient_checkpointing)
        normed = draft.ops.rms_norm(hidden, draft.norm.weight, draft.config.rms_norm_eps)
    step, slot = slots.nonzero().unbind(1)
    result = head_loss(
        normed.to(torch.bfloat16) if half else normed,
        draft.lm_head.weight,
        batch.final,
        teacher_head,
        batch.logz.to(device),
        slot + 1 + step,
        step_weights[step].to(device),
        objective,
    )
    return result, count_steps(batch, slots, result, draft.to_target_ids(result.top1))


@torch.no_grad()
def evaluate(
    draft: Eagle3Draft,
    samples: Samples,
    indices: Sequence[int],
    teacher_head: Tensor,
    num_speculative_tokens: int,
    batch_tokens: int,
) -> StepCounts:
    """Counts of a chain of `num_speculative_tokens` over the samples `indices`, in float32."""
    total = StepCounts.zeros(num_speculative_tokens)
    t2d = draft.t2d if draft.config.is_pruned else None
    weights = torch.ones(num_speculative_tokens)
    for group in pack(indices, samples.lengths, batch_tokens):
        batch = Batch.pack([samples[i] for i in group]).to(teacher_head.device)
        slots = supervised_slots(batch, num_speculative_tokens, t2d, "strict")
        total += run_slots(draft, batch, slots, teacher_head, weights)[1]
    return total
