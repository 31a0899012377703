"""The processes of a run: which one this is, and how they add up numbers and wait for each other.

The environment names them as torchrun does; a process without that is a run of its own.
"""

import os

import torch
from accelerate import Accelerator
from torch import Tensor


class Processes:
    """All processes of this run, joined.

    Raises:
        RuntimeError: this process would train alone, beside others that do the same.
    """

    def __init__(self) -> None:
        # Without a device accelerate takes each process for a run of its own, unless told the CPU.
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        self.count = self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self.is_main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count != expected:
            raise RuntimeError(f"{self.count} processes joined, WORLD_SIZE is {expected}")

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes, on the CPU."""
        summed = self.accelerator.reduce(values.to(self.device), "sum")
        assert isinstance(summed, Tensor)
        return summed.cpu()

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()
