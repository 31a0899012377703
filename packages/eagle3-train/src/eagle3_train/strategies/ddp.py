"""Every process holds everything; gradients are averaged while they are computed."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig
from eagle3_train.distill import Distillation
from eagle3_train.metrics import StepCounts
from eagle3_train.optimizer import DraftOptimizer, trainable
from eagle3_train.processes import Processes
from eagle3_train.strategies.base import Strategy, Work, run_passes


class DataParallel(Strategy):
    """DistributedDataParallel, through accelerate."""

    def __init__(self, module: Distillation, fit: FitConfig, processes: Processes) -> None:
        self._fit, self._processes = fit, processes
        self._draft = module.draft
        self._trained = trainable(self._draft, fit)
        with warnings.catch_warnings():
            # The recipe's broadcast_buffers: its successor is unknown to the older torch we allow.
            warnings.simplefilter("ignore", FutureWarning)
            self._module = processes.accelerator.prepare(module)
        self._optimizer = DraftOptimizer(self._draft, fit)

    def backward(self, work: Work, step_weights: Tensor) -> tuple[Tensor, StepCounts]:
        """See `Strategy`."""
        accelerator = self._processes.accelerator
        nothing = torch.zeros(len(step_weights), 0, dtype=torch.bool)
        passes = list(work) or [(None, nothing)]  # every process takes part in the average
        loss = torch.zeros((), dtype=torch.float64)
        counts = StepCounts.zeros(len(step_weights))
        for batches, quiet in ((passes[:-1], True), (passes[-1:], False)):
            with accelerator.no_sync(self._module) if quiet else nullcontext():
                part, counted = run_passes(
                    self._module, batches, step_weights, accelerator.device, self._differentiate
                )
            loss, counts = loss + part, counts + counted
        return loss, counts

    def update(self, rate: float, apply: bool) -> float:
        """See `Strategy`."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._fit.clip_norm))
        if apply and math.isfinite(norm):
            self._optimizer.step(rate)
        self._optimizer.zero_grad()
        return norm

    @contextmanager
    def whole(self) -> Iterator[Eagle3Draft]:
        """See `Strategy`."""
        yield self._draft

    def moments(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {k: v.detach().cpu().contiguous() for k, v in self._optimizer.moments().items()}

    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """See `Strategy`."""
        self._draft.load_state_dict(weights)
        self._optimizer.restore(moments, lambda value, parameter: value.to(parameter.device))

    def _differentiate(self, loss: Tensor) -> None:
        # The wrapper averages over processes; the loss is a sum over them.
        self._processes.accelerator.backward(loss * self._processes.count)
