"""What the training loop asks of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

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
