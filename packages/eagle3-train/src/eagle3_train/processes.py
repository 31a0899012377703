"""The processes of a run: which one this is, and how they add up numbers and wait for each other.

The environment names them as torchrun does; a process without that is a run of its own.
"""

import os
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from eagle3_train.recipes import recipe

_LONG = timedelta(days=30)


class Processes:
    """All processes of this run, joined.

    Raises:
        RuntimeError: this process would train alone, beside others that do the same.
    """

    def __init__(self) -> None:
        # Without a device accelerate takes each process for a run of its own, unless told the CPU.
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            kwargs_handlers=[DistributedDataParallelKwargs(**recipe("ddp"))],
        )
        self.count = self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self.is_main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count != expected:
            raise RuntimeError(f"{self.count} processes joined, WORLD_SIZE is {expected}")

    def form_group(self) -> None:
        """Make sure that there is a process group, also of one process alone."""
        if not distributed.is_initialized():
            backend = distributed.get_default_backend_for_device(self.device)
            distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes, on the CPU."""
        summed = self.accelerator.reduce(values.to(self.device), "sum")
        assert isinstance(summed, Tensor)
        return summed.cpu()

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()

    def main_first(self) -> AbstractContextManager[None]:
        """A block that the first process leaves before the others enter it."""
        return self.accelerator.main_process_first()

    def wait_long(self) -> None:
        """Until every process is here after hours of unevenly spread work.

        `wait` gives up after the minutes that a backend grants a collective operation. A process
        that dies ends the others through whoever started them.
        """
        if self.count > 1:
            group = distributed.new_group(backend="gloo", timeout=_LONG)
            assert isinstance(group, distributed.ProcessGroup)  # every process is in it
            distributed.barrier(group)
            distributed.destroy_process_group(group)
