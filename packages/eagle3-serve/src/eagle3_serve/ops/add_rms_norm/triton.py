"""Triton kernel of add_rms_norm: one program a row, which is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.language import rms_normed, rounded, rounded_fp32


@triton.jit
def add_rms_norm_kernel(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    residual_stride,
    delta_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = delta_ptr.dtype.element_ty
    x = tl.load(delta_ptr + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        old = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = rounded_fp32(old.to(tl.float32) + x, dtype)
        tl.store(total_ptr + row * size + columns, rounded(x, dtype), mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = rms_normed(x, weight, size, eps, dtype)
    tl.store(normed_ptr + row * size + columns, rounded(normed, dtype), mask=inside)


def add_rms_norm(
    residual: Tensor | None, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference: one launch."""
    rows, size = delta.shape
    total = (
        delta
        if residual is None
        else torch.empty_like(delta, memory_format=torch.contiguous_format)
    )
    normed = torch.empty((rows, size), dtype=delta.dtype, device=delta.device)
    if rows:
        add_rms_norm_kernel[(rows,)](
            residual,
            delta,
            weight,
            total,
            normed,
            0 if residual is None else residual.stride(0),
            delta.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )
    return total, normed
