"""Torch reference of add_rms_norm."""

from torch import Tensor

from eagle3_core import TorchOps


def add_rms_norm(
    residual: Tensor | None, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm after it.

    Args:
        residual: [R,H], or None for a norm alone.
        delta: [R,H], rows may be strided.
        weight: [H].
        eps: of the norm.

    Returns:
        residual + delta [R,H] (delta itself without a residual) and the norm of that sum [R,H].
    """
    total = delta if residual is None else residual + delta
    return total, TorchOps().rms_norm(total, weight, eps)
