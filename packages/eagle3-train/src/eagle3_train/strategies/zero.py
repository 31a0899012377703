"""DeepSpeed's ZeRO: stage 2 shards gradients and moments, stage 3 the weights too.

DeepSpeed reduces a gradient as soon as a backward pass completes it, in the order in which that
happens, and stage 3 gathers a module's weights whenever it is called. Here processes differ in the
number of passes and of calls, so DeepSpeed holds the bare list of parameters and sees one backward
pass a step: gradients are computed aside and delivered in one go, in the same order everywhere.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig
from eagle3_train.distill import Distillation
from eagle3_train.metrics import StepCounts
from eagle3_train.optimizer import DraftOptimizer, trainable
from eagle3_train.processes import Processes
from eagle3_train.recipes import recipe
from eagle3_train.strategies.base import Strategy, Work, run_passes

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.utils import (
    logger,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

_KINDS = ("exp_avg", "exp_avg_sq")


class Zero(Strategy):
    """AdamW over float32 pieces; with fit.dtype=bfloat16 the passes run under autocast."""

    def __init__(
        self,
        name: Literal["zero2", "zero3"],
        module: Distillation,
        fit: FitConfig,
        processes: Processes,
    ) -> None:
        self._processes, self._stage = processes, 2 if name == "zero2" else 3
        self._module, self._draft = module.to(processes.device), module.draft
        self._parameters = trainable(self._draft, fit)
        self._names = {p: n for n, p in self._draft.named_parameters()}
        self._shapes = {n: p.shape for n, p in self._draft.named_parameters()}
        self._gradients: list[Tensor] = []
        _prepare_library()
        self._engine, *_ = deepspeed.initialize(
            model=_Parameters(self._parameters),
            optimizer=DraftOptimizer(self._draft, fit).adamw,
            config=recipe(name) | {"gradient_clipping": fit.clip_norm},
        )
        self._optimizer: Any = self._engine.optimizer  # its interface is not declared
        self._seed()

    def backward(self, work: Work, step_weights: Tensor) -> tuple[Tensor, StepCounts]:
        """See `Strategy`."""
        self._gradients = []

        def collect(loss: Tensor) -> None:
            found = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
            if self._gradients:
                for total, part in zip(self._gradients, found, strict=True):
                    total.add_(part)
            else:
                self._gradients = list(found)

        with self._gathered():
            result = run_passes(self._module, work, step_weights, self._processes.device, collect)
            self._gradients = self._gradients or [torch.zeros_like(p) for p in self._parameters]
        return result

    def update(self, rate: float, apply: bool) -> float:
        """See `Strategy`."""
        gradients, self._gradients = self._gradients, []
        if not apply:
            return 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages over processes; the loss is a sum over them.
        for gradient in gradients:
            gradient.mul_(self._processes.count)
        with self._gathered():
            self._engine.backward(_Deliver.apply(gradients, *self._parameters))
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        assert norm is not None
        return float(norm)

    @contextmanager
    def whole(self) -> Iterator[Eagle3Draft]:
        """See `Strategy`."""
        with self._gathered():
            yield self._draft

    def moments(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        found: dict[str, Tensor] = {}
        step = self._steps()[0]
        for parameter in self._parameters if step > 0 else ():
            name = self._names[parameter]
            for kind in _KINDS:
                value = safe_get_full_optimizer_state(parameter, kind)
                assert value is not None
                found[f"{kind}/{name}"] = value.cpu().view(self._shapes[name])
            found[f"step/{name}"] = step.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """See `Strategy`."""
        for name, value in weights.items():
            if name not in self._shapes or not self._draft.get_parameter(name).requires_grad:
                self._draft.state_dict()[name].copy_(value)
        for parameter in self._parameters:
            name = self._names[parameter]
            self._set(parameter, weights[name], None)
            for kind in _KINDS if moments else ():
                self._set(parameter, moments[f"{kind}/{name}"], kind)
        for step in self._steps() if moments else ():
            step.copy_(moments[f"step/{self._names[self._parameters[0]]}"])

    def _set(self, parameter: nn.Parameter, value: Tensor, kind: str | None) -> None:
        """Set a weight (None) or a moment from its whole value."""
        value = value.to(self._processes.device, torch.float32).contiguous()
        if self._stage == 2:
            if kind is not None:
                safe_set_full_optimizer_state(parameter, value, kind)
            else:
                parameter.copy_(value)
                safe_set_full_fp32_param(parameter, value)
            return
        # Pieces are of one size, so the last of them may reach beyond the end of the matrix.
        held: Tensor = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
        size, rank = held.numel(), self._processes.rank
        padded = nn.functional.pad(
            value.flatten(), (0, size * self._processes.count - value.numel())
        )
        piece = padded[size * rank : size * (rank + 1)]
        if kind is not None:
            safe_set_local_optimizer_state(parameter, piece, kind)
        else:
            held.copy_(piece)
            safe_set_local_fp32_param(parameter, piece)

    def _flat(self) -> list[Tensor]:
        """What the optimiser really moves: this process's piece of each group."""
        if self._stage == 2:
            return self._optimizer.single_partition_of_fp32_groups
        return self._optimizer.fp32_partitioned_groups_flat

    def _steps(self) -> list[Tensor]:
        return [self._optimizer.optimizer.state[flat]["step"] for flat in self._flat()]

    def _seed(self) -> None:
        """Empty moments, which AdamW would make at its first step, too late to restore any."""
        for flat in self._flat():
            self._optimizer.optimizer.state[flat] = {
                "step": torch.zeros((), device=flat.device),
                **{kind: torch.zeros_like(flat) for kind in _KINDS},
            }
        if self._stage == 2:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _gathered(self) -> AbstractContextManager[None]:
        if self._stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(self._parameters)


class _Parameters(nn.Module):
    """The parameters without the modules that use them, so that no hook of DeepSpeed fires."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


class _Deliver(torch.autograd.Function):
    """A loss of 0 whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0] for gradient in ctx.gradients)


def _prepare_library() -> None:
    """Messages to stderr, and on a CPU no operators: none is used, and each takes 30 s to build."""
    os.environ.setdefault("LOCAL_RANK", "0")  # which it asks for even where a process is alone
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    logger.setLevel(logging.ERROR)
    if not torch.accelerator.is_available():
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
