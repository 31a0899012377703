"""How draft, gradients and optimiser are spread over the processes of a run."""

from eagle3_core import UserError
from eagle3_train.config import FitConfig, StrategyName
from eagle3_train.distill import Distillation
from eagle3_train.processes import Processes
from eagle3_train.strategies.base import Strategy

__all__ = ["Strategy", "check_strategy", "make_strategy"]


def check_strategy(name: StrategyName, fit: FitConfig) -> None:
    """Refuse what a strategy cannot do exactly.

    Raises:
        UserError: Muon under ZeRO, which cuts matrices into pieces that Muon needs whole.
    """
    if name in ("zero2", "zero3") and fit.optimizer == "muon":
        raise UserError(
            f"--strategy {name} with fit.optimizer=muon: ZeRO keeps flat pieces of matrices and "
            "Muon needs them whole; use --strategy ddp or fsdp2, or fit.optimizer=adamw"
        )


def make_strategy(
    name: StrategyName, module: Distillation, fit: FitConfig, processes: Processes
) -> Strategy:
    """The strategy of that name, holding `module`."""
    # Each with the library it needs; DeepSpeed alone takes seconds to import.
    if name == "ddp":
        from eagle3_train.strategies.ddp import DataParallel  # noqa: PLC0415

        return DataParallel(module, fit, processes)
    processes.form_group()
    if name == "fsdp2":
        from eagle3_train.strategies.fsdp2 import FullyShard  # noqa: PLC0415

        return FullyShard(module, fit, processes)
    from eagle3_train.strategies.zero import Zero  # noqa: PLC0415

    return Zero(name, module, fit, processes)
