"""Triton kernel of swiglu."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.language import rounded, rounded_fp32

_BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, size, BLOCK: tl.constexpr):
    """One program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    silu = rounded_fp32(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out_ptr + row * size + columns, rounded(silu * up, dtype), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As the reference: one launch."""
    rows, size = gate.shape
    out = torch.empty((rows, size), dtype=gate.dtype, device=gate.device)
    if rows:
        swiglu_kernel[(rows, triton.cdiv(size, _BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=_BLOCK
        )
    return out
