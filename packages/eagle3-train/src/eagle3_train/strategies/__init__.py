"""How draft, gradients and optimiser are spread over the processes of a run."""

from eagle3_train.config import FitConfig
from eagle3_train.distill import Distillation
from eagle3_train.processes import Processes
from eagle3_train.strategies.base import Strategy, Work
from eagle3_train.strategies.ddp import DataParallel

STRATEGIES = ("ddp",)

__all__ = ["STRATEGIES", "Strategy", "Work", "make_strategy"]


def make_strategy(
    name: str, module: Distillation, fit: FitConfig, processes: Processes
) -> Strategy:
    """The strategy of that name, holding `module`."""
    assert name in STRATEGIES
    return DataParallel(module, fit, processes)
