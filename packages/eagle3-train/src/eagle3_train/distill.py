"""One micro-batch through draft and loss, as a module that wrappers for many processes can hold."""

import torch
from torch import Tensor, nn

from eagle3_core import Eagle3Draft
from eagle3_train.config import Dtype, FitConfig, LossConvention
from eagle3_train.evaluate import run_slots
from eagle3_train.metrics import StepCounts
from eagle3_train.objective import Objective
from eagle3_train.ttt import Batch


class Distillation(nn.Module):
    """The draft with its loss."""

    teacher_head: Tensor

    def __init__(self, draft: Eagle3Draft, teacher_head: Tensor, fit: FitConfig) -> None:
        super().__init__()
        self.draft = draft
        self.dtype: Dtype = fit.dtype
        self.objective = Objective(**fit.loss)
        self.gradient_checkpointing = fit.gradient_checkpointing
        self.register_buffer("teacher_head", teacher_head, persistent=False)

    def forward(
        self, batch: Batch | None, slots: Tensor, step_weights: Tensor
    ) -> tuple[Tensor, StepCounts]:
        """One micro-batch -> (its part of the loss, counts); None = nothing, zero gradients."""
        if batch is None:
            zero = sum(p.sum() * 0 for p in self.draft.parameters() if p.requires_grad)
            assert isinstance(zero, Tensor)
            return zero, StepCounts.zeros(len(slots))
        result, counts = run_slots(
            self.draft,
            batch,
            slots,
            self.teacher_head,
            step_weights,
            self.dtype,
            self.objective,
            self.gradient_checkpointing,
        )
        return result.total, counts


def normaliser(convention: LossConvention, counted: Tensor, slots: int) -> Tensor:
    """[K]: what the summed loss of each step is divided by.

    strict: the supervised slots of the step. specforge, eagle: all slots. speculators: the
    supervised slots + 1e-5.
    """
    if convention in ("specforge", "eagle"):
        return torch.full_like(counted, float(slots))
    if convention == "speculators":
        return counted + 1e-5
    return counted.clamp(min=1)
