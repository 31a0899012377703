"""Inside a SLURM step of several tasks, each task is a process of the run."""

import os
import re
from collections.abc import Mapping, MutableMapping


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `srun` started this process beside others.

    Only `srun` sets SLURM_STEP_NUM_TASKS: the batch script itself has SLURM_PROCID and
    SLURM_NTASKS too, and would wait for tasks that nobody starts.
    """
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def adopt_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Name this process as torchrun would, from what `srun` says, inside a step of tasks."""
    if not in_step(environment) or "RANK" in environment:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    # Below the ephemeral ports; two jobs that share a host differ in their number.
    job = int(environment.get("SLURM_JOB_ID", "0"))
    environment.setdefault("MASTER_PORT", str(15000 + job % 15000))


def first_host(nodes: str) -> str:
    """The first name of a list such as `gpu[07-09,12],login1`."""
    found = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None, nodes
    prefix, number, suffix = found.groups()
    return prefix + (number or "") + suffix
