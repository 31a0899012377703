"""Where a target that only reads goes: one device, several, or a slice in each process."""

import torch
from torch.distributed.tensor import DTensor

from eagle3_core import UserError
from eagle3_core.packed import is_packing_available, pack_linears
from eagle3_core.target import Target, load_target
from eagle3_train.config import Placement
from eagle3_train.processes import Processes


def place_target(
    name: str, dtype: torch.dtype, placement: Placement, processes: Processes
) -> Target:
    """Load a target that is too large for one device, or for one copy a process.

    Args:
        name: of the target.
        dtype: of its weights.
        placement: single = whole, on this process's device (on a CPU its linears are packed).
            device_map = its layers one after the other over all devices of this process, by
            accelerate. tensor_parallel = a slice of every layer in each process, by the plan that
            transformers has for the architecture.
        processes: of the run.

    Raises:
        UserError: the placement does not go with the number of processes, or the architecture has
            no plan.
    """
    if placement == "tensor_parallel":
        return _tensor_parallel(name, dtype, processes)
    if placement == "device_map":
        if processes.count > 1:
            raise UserError(
                f"capture.placement is device_map in {processes.count} processes, which would all "
                "take every device; use one process, or tensor_parallel"
            )
        return load_target(name, dtype, spread={"device_map": "auto"})
    target = load_target(name, dtype, processes.device)
    if processes.device.type == "cpu" and is_packing_available():
        pack_linears(target.model)
    return target


def _tensor_parallel(name: str, dtype: torch.dtype, processes: Processes) -> Target:
    if processes.count == 1:
        raise UserError(
            "capture.placement is tensor_parallel in one process; start one for each device with "
            "--num-processes or torchrun"
        )
    target = load_target(name, dtype, spread={"tp_plan": "auto"})
    if not is_sliced(target):
        raise UserError(
            f"target {name}: transformers has no tensor-parallel plan for "
            f"{target.config.model_type}; use capture.placement device_map"
        )
    return target


def is_sliced(target: Target) -> bool:
    """Whether this process holds slices only, so that all have to run the same batches."""
    return any(isinstance(weight, DTensor) for weight in target.model.parameters())
