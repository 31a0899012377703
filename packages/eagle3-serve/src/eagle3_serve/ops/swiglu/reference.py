"""Torch reference of swiglu."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: [R,I], rows may be strided (the left half of a fused projection).
        up: [R,I], likewise.

    Returns:
        [R,I], rounded to the inputs' dtype after silu and after the product.
    """
    return F.silu(gate) * up
