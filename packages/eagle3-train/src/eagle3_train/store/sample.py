"""One captured conversation: its tensors, its identity, and what its numbers have to satisfy."""

import hashlib
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_core import UserError


@dataclass(frozen=True)
class Sample:
    """One conversation with the target's states. A aux states of width T, S tokens."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: a token the target writes; not shifted
    aux: Tensor  # [S,A·T] ascending boundaries
    final: Tensor  # [S,T] after the final norm: what the lm_head reads
    argmax: Tensor  # [S] int32: the target's choice for the next token; -1 where nobody asks
    logz: Tensor  # [S] float32: log-sum-exp of the target's logits; 0 where nobody asks


def sample_key(input_ids: Tensor, loss_mask: Tensor) -> str:
    """Identity of a sample: its tokens and mask, nothing else."""
    digest = hashlib.sha256(input_ids.to(torch.int64).contiguous().numpy().tobytes())
    digest.update(loss_mask.to(torch.bool).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def head_digest(head: Tensor) -> str:
    """A fingerprint of a target: rows from all over its [V,T] lm_head."""
    rows = head[:: max(1, len(head) // 64)].float().cpu().contiguous()
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


def check_finite(sample: Sample, where: str) -> None:
    """Refuse NaN and inf by tensor and position; warn of states that are all zero.

    Raises:
        UserError: names the first bad index.
    """
    for name in ("aux", "final", "logz"):
        values = getattr(sample, name)
        bad = ~values.isfinite()
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise UserError(
                f"{where}: {name}{at} is {values[tuple(at)].item()}, expected a finite number; "
                "capture again, in float32 if the target overflows"
            )
    for name in ("aux", "final"):
        zero = (getattr(sample, name) == 0).all(-1)
        if zero.any():
            position = int(zero.nonzero()[0])
            warnings.warn(f"{where}: {name}[{position}] is all zero, suspicious", stacklevel=3)
