"""A process that runs steps of one system on request: `worker.py MODULE CONVENTION FOLDER`.

Reads `step` or `count` a line, answers with one JSON line: seconds, loss, growth of memory over
what was held before the first step, and, if asked to count, the FLOPs of the matrix products.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
from case import Case
from torch.utils.flop_counter import FlopCounterMode

# Accumulating products, which the counter does not know.
_IN_PLACE = {
    torch.ops.aten.addmm_: lambda out, a, b, *_, **__: 2 * a[0] * a[1] * b[1],
    torch.ops.aten.baddbmm_: lambda out, a, b, *_, **__: 2 * a[0] * a[1] * a[2] * b[2],
}


class Memory:
    """Peak of the process (CPU) or of the allocator (GPU) over what was held at the start."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._baseline = torch.cuda.memory_allocated()
            return
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
        self._baseline = self._status("VmRSS")

    def growth(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self._baseline
        return self._status("VmHWM") - self._baseline

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Build the system, say that it stands, then answer until the input ends."""
    module, convention, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    settings = json.loads((Path(folder) / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    step = import_module(module).build(Case.load(Path(folder), settings), convention)
    memory = Memory()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        counting = FlopCounterMode(display=False, custom_mapping=_IN_PLACE)
        began = time.perf_counter()
        with counting if line.strip() == "count" else nullcontext():
            loss = float(step())
        answer = {
            "seconds": time.perf_counter() - began,
            "loss": loss,
            "growth": memory.growth(),
            "flops": counting.get_total_flops(),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
