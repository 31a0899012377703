"""Every process holds everything; gradients are averaged while they are computed."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig
from eagle3_train.distill import Distillation
from eagle3_train.metrics import StepCounts
from eagle3_train.optimizer import make_optimizer
from eagle3_train.processes import Processes
from eagle3_train.strategies.base import Strategy, Work


class DataParallel(Strategy):
    """DistributedDataParallel, through accelerate."""

    def __init__(self, module: Distillation, fit: FitConfig, processes: Processes) -> None:
        self._fit, self._processes = fit, processes
        self._draft = module.draft
        self._optimizer = make_optimizer(self._draft, fit)
        self._module = processes.accelerator.prepare(module)

    def backward(self, work: Work, step_weights: Tensor) -> tuple[Tensor, StepCounts]:
        """See `Strategy`."""
        accelerator, world = self._processes.accelerator, self._processes.count
        loss = torch.zeros((), dtype=torch.float64)
        counts = StepCounts.zeros(len(step_weights))
        nothing = torch.zeros(len(step_weights), 0, dtype=torch.bool)
        passes = list(work) or [(None, nothing)]
        for i, (batch, slots) in enumerate(passes):
            last = i == len(passes) - 1
            with nullcontext() if last else accelerator.no_sync(self._module):
                moved = None if batch is None else batch.to(accelerator.device)
                part, counted = self._module(moved, slots, step_weights)
                # The wrapper averages over processes; the loss is a sum over them.
                accelerator.backward(part * world)
            loss += part.detach().double().cpu()
            counts += counted
        return loss, counts

    def update(self, rate: float, apply: bool) -> float:
        """See `Strategy`."""
        parameters = self._module.parameters()
        norm = self._processes.accelerator.clip_grad_norm_(parameters, self._fit.clip_norm)
        norm = float(norm) if norm is not None else 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if apply and math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def whole(self) -> Iterator[Eagle3Draft]:
        """See `Strategy`."""
        yield self._draft

    def moments(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._draft.named_parameters():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = value.detach().cpu().contiguous()
        return tensors

    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """See `Strategy`."""
        self._draft.load_state_dict(weights)
        parameters = dict(self._draft.named_parameters())
        for key, value in moments.items():
            kind, name = key.split("/", 1)
            parameter = parameters[name]
            # The step count stays where AdamW made it; moments live beside their parameter.
            device = value.device if kind == "step" else parameter.device
            self._optimizer.state[parameter][kind] = value.to(device)
