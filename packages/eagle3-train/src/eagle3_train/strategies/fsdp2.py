"""FSDP2: weights, gradients and moments in shards, one group a layer and one for the rest.

The unroll calls a layer once for each of its steps, and processes differ in how many calls and
micro-batches they have. So a step gathers the weights once, before its first pass, and reduces the
gradients once, after its last: the same collectives in the same order everywhere, and no weight
travels twice. Between steps every process holds its shards alone.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3_core import Eagle3Draft
from eagle3_train.config import FitConfig
from eagle3_train.distill import Distillation
from eagle3_train.metrics import StepCounts
from eagle3_train.optimizer import DraftOptimizer, trainable
from eagle3_train.processes import Processes
from eagle3_train.recipes import recipe
from eagle3_train.strategies.base import Strategy, Work, run_passes


class FullyShard(Strategy):
    """Float32 masters in shards; with fit.dtype=bfloat16 the gathered weights are bfloat16."""

    def __init__(self, module: Distillation, fit: FitConfig, processes: Processes) -> None:
        self._fit, self._device = fit, processes.device
        self._draft = module.draft
        trainable(self._draft, fit)
        module.to(processes.device)
        # Frozen weights stay whole: gathering them at each step would cost more than it saves.
        frozen = {p for p in module.parameters() if not p.requires_grad}
        mesh = init_device_mesh(processes.device.type, (processes.count,))
        dtypes = recipe("fsdp2") if fit.dtype == "bfloat16" else {}
        dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        for part in (*self._draft.layers, module):
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=False,
                mp_policy=policy,
                ignored_params=frozen,
            )
        self._module = module
        self._groups = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for group in self._groups:
            # The loss is a sum over processes. Gloo has no scaled sum.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        self._optimizer = DraftOptimizer(self._draft, fit)

    def backward(self, work: Work, step_weights: Tensor) -> tuple[Tensor, StepCounts]:
        """See `Strategy`."""
        for group in self._groups:
            group.unshard()
            group.set_requires_gradient_sync(False)
            group.set_reshard_after_backward(False)
        result = run_passes(self._module, work, step_weights, self._device, torch.Tensor.backward)
        for group in self._groups:
            group.set_requires_gradient_sync(True)
            group.set_reshard_after_backward(True)
        nothing = torch.zeros(len(step_weights), 0, dtype=torch.bool)
        self._module(None, nothing, step_weights)[0].backward()  # adds 0, and reduces
        return result

    def update(self, rate: float, apply: bool) -> float:
        """See `Strategy`."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained(), self._fit.clip_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if apply and math.isfinite(norm):
            self._optimizer.step(rate)
        self._optimizer.zero_grad()
        return norm

    @contextmanager
    def whole(self) -> Iterator[Eagle3Draft]:
        """See `Strategy`."""
        with torch.device("meta"):
            draft = Eagle3Draft(self._draft.config, self._draft.ops)
        gathered = {n: _whole(t) for n, t in self._draft.state_dict().items()}
        draft.load_state_dict(gathered, assign=True)
        yield draft.requires_grad_(False)

    def moments(self) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {key: _whole(v).cpu() for key, v in self._optimizer.moments().items()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """See `Strategy`."""
        for name, tensor in self._draft.state_dict().items():
            tensor.copy_(_like(weights[name], tensor))
        self._optimizer.restore(moments, _like)

    def _trained(self) -> list[Tensor]:
        return [p for p in self._draft.parameters() if p.requires_grad]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(value: Tensor, shards: Tensor) -> Tensor:
    """This process's part of a whole tensor, laid out as `shards`."""
    value = value.to(shards.device, shards.dtype)
    if not isinstance(shards, DTensor):
        return value
    return distribute_tensor(value, shards.device_mesh, shards.placements, src_data_rank=None)
