"""What the training loop asks of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_train.metrics import StepCounts
from eagle3_train.ttt import Batch

Work = Sequence[tuple[Batch, Tensor]]  # micro-batches, each with its slots [K,S]


class Strategy(ABC):
    """Weights and optimiser of a run. Every method is called by all processes together."""

    @abstractmethod
    def backward(self, work: Work, step_weights: Tensor) -> tuple[Tensor, StepCounts]:
        """Gradients of the step's loss, which is the sum over all micro-batches of all processes.

        Args:
            work: of this process; may be empty and differ in length between processes.
            step_weights: [K] of one slot of each step in the loss.

        Returns:
            This process's part of the loss, [] float64 on the CPU, and its counts.
        """

    @abstractmethod
    def update(self, rate: float, apply: bool) -> float:
        """Clip, move the weights at learning rate `rate`, forget the gradients.

        Args:
            rate: learning rate.
            apply: False leaves weights and moments as they are, where nothing was supervised.

        Returns:
            The gradient's norm before clipping.
        """

    @abstractmethod
    def whole(self) -> AbstractContextManager[Eagle3Draft]:
        """The draft with all its weights in float32, on every process's device."""

    @abstractmethod
    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state, whole, on the main process's CPU: "kind/parameter" -> values."""

    @abstractmethod
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Continue from whole weights (of the draft's state dict) and whole moments."""


def run_passes(
    module: Callable[..., tuple[Tensor, StepCounts]],
    work: Sequence[tuple[Batch | None, Tensor]],
    step_weights: Tensor,
    device: torch.device,
    backward: Callable[[Tensor], object],
) -> tuple[Tensor, StepCounts]:
    """Forward and `backward` of each micro-batch; returns the sums of losses and counts."""
    loss = torch.zeros((), dtype=torch.float64)
    counts = StepCounts.zeros(len(step_weights))
    for batch, slots in work:
        moved = None if batch is None else batch.to(device)
        part, counted = module(moved, slots, step_weights)
        backward(part)
        loss += part.detach().double().cpu()
        counts += counted
    return loss, counts
