"""Counts behind every training and evaluation number; they add up over batches and processes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.loss import HeadLoss
from eagle3_train.ttt import Batch, chain_slots

_FIELDS = (
    "supervised",  # slots whose loss counts
    "cross_entropy",  # summed over them
    "entropy",  # of the teacher, summed over them
    "evaluated",  # slots a served chain could stand at
    "correct",  # of these: the draft's first choice is the target's, out-of-vocabulary is a miss
    "reached",  # chains whose earlier tokens the text can judge
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
        """JSON-ready means for each step, and the simulated accept length of a chain of K."""
        acceptance = _ratio(self["accepted"], self["reached"])
        return {
            "loss_per_step": _ratio(self["cross_entropy"], self["supervised"]).tolist(),
            "kl_per_step": _ratio(
                self["cross_entropy"] - self["entropy"], self["supervised"]
            ).tolist(),
            "accuracy_per_step": _ratio(self["correct"], self["evaluated"]).tolist(),
            "acceptance_per_step": acceptance.tolist(),
            "accept_length": 1 + float(acceptance.sum()),
            "slots": int(self["evaluated"][0]),
        }


def count_steps(batch: Batch, slots: Tensor, result: HeadLoss, target_ids: Tensor) -> StepCounts:
    """Count one batch.

    A chain goes on only over tokens it drafted right, so teacher forcing is exact as long as the
    text is the target's own first choice; where it is not, the chain's later steps are left out.

    Args:
        batch: on any device.
        slots: [K,S] bool, the rows of `result` in the order of `slots.nonzero()`.
        result: of `head_loss`.
        target_ids: [N] int64, `result.top1` as target ids.
    """
    steps = len(slots)
    chain = chain_slots(batch, steps)
    choice = torch.stack([batch.ahead(batch.argmax, 1 + k) for k in range(steps)])
    text = torch.stack([batch.ahead(batch.input_ids, 2 + k) for k in range(steps)])
    correct = torch.zeros_like(slots)
    correct[slots] = target_ids.cpu() == choice[slots]
    correct &= chain
    on_text = (choice == text).cummin(0).values
    judged = torch.cat([torch.ones_like(on_text[:1]), on_text[:-1]])
    reached = chain & judged
    rows = [
        slots,
        _scatter(slots, result.cross_entropy),
        _scatter(slots, result.entropy),
        chain,
        correct,
        reached,
        reached & correct.cummin(0).values,
    ]
    return StepCounts(torch.stack([row.double().sum(1) for row in rows]))


def _scatter(slots: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros(slots.shape, dtype=torch.float64)
    out[slots] = values.detach().cpu().double()
    return out


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return part / whole.clamp(min=1)
