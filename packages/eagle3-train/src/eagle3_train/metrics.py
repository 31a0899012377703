"""Counts behind every training and evaluation number; they add up over batches and processes."""

import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.accept import AcceptCounts, simulated_accept_length
from eagle3_train.ops.head_loss import HeadLoss
from eagle3_train.ttt import Batch, chain_slots

# What the clock and the machine decide: different in two runs that are otherwise the same.
MEASURED = frozenset({
    "elapsed", "tokens_per_s", "data_wait_s", "compute_s", "rss_bytes", "peak_bytes",
})  # fmt: skip

_FIELDS = (
    "supervised",  # slots whose loss counts
    "cross_entropy",  # summed over them
    "entropy",  # of the teacher, summed over them
    "evaluated",  # slots a served chain could stand at
    "correct",  # of these: the draft's first choice is the target's, out-of-vocabulary is a miss
    "rounds",  # slots where a whole chain fits, the same number for every step
    "accepted",  # of these: correct at this and at all earlier steps
)


@dataclass(frozen=True)
class StepCounts:
    """Sums for each step of the unroll: [fields,K] float64."""

    values: Tensor

    @classmethod
    def zeros(cls, steps: int) -> "StepCounts":
        """Nothing counted yet."""
        return cls(torch.zeros(len(_FIELDS), steps, dtype=torch.float64))

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(self.values + other.values)

    def __getitem__(self, field: str) -> Tensor:
        return self.values[_FIELDS.index(field)]

    def summary(self) -> dict[str, Any]:
        """JSON-ready means for each step, and the simulated accept length of a chain of K.

        The accept length is None where no whole chain fits.
        """
        accept = AcceptCounts(int(self["rounds"][0]), tuple(self["accepted"].int().tolist()))
        divergence = self["cross_entropy"] - self["entropy"]
        return {
            "loss_per_step": _ratio(self["cross_entropy"], self["supervised"]),
            "kl_per_step": _ratio(divergence, self["supervised"]),
            "accuracy_per_step": _ratio(self["correct"], self["evaluated"]),
            "acceptance_per_position": accept.per_position,
            "accept_length": accept.accept_length,
            "num_rounds": accept.num_rounds,
        }


def count_steps(batch: Batch, slots: Tensor, result: HeadLoss, target_ids: Tensor) -> StepCounts:
    """Count one batch.

    A chain goes on only over tokens it drafted right, so for text that the target wrote greedily
    teacher forcing changes nothing about the accept length.

    Args:
        batch: on any device.
        slots: [K,S] bool, the rows of `result` in the order of `slots.nonzero()`.
        result: of `head_loss`.
        target_ids: [N] int64, `result.top1` as target ids.
    """
    steps = len(slots)
    chain = chain_slots(batch, steps)
    choice = torch.stack([batch.ahead(batch.argmax, 1 + k) for k in range(steps)])
    correct = torch.zeros_like(slots)
    correct[slots] = target_ids.cpu() == choice[slots]
    correct &= chain
    rounds = simulated_accept_length(correct, chain)
    rows = [
        slots.sum(1),
        _scatter(slots, result.cross_entropy).sum(1),
        _scatter(slots, result.entropy).sum(1),
        chain.sum(1),
        correct.sum(1),
        torch.full((steps,), rounds.num_rounds),
        torch.tensor(rounds.accepted),
    ]
    return StepCounts(torch.stack([row.double() for row in rows]))


def memory(device: torch.device) -> dict[str, int | None]:
    """Memory of this process, in bytes.

    rss_bytes: resident now; None where the system does not say. peak_bytes: the most so far, on a
    GPU of what torch allocated there, on a CPU of resident memory.
    """
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) if statm.exists() else None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "rss_bytes": None if resident is None else resident * resource.getpagesize(),
        "peak_bytes": peak,
    }


def reset_peak_memory(device: torch.device) -> None:
    """`peak_bytes` counts from now on, where the system lets it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark, proc(5)


def _scatter(slots: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros(slots.shape, dtype=torch.float64)
    out[slots] = values.detach().cpu().double()
    return out


def _ratio(part: Tensor, whole: Tensor) -> list[float]:
    return (part / whole.clamp(min=1)).tolist()
