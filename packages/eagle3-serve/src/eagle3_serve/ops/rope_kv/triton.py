"""Triton kernel of rope_kv: one program a row and head; rotated keys never leave the chip twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.language import rounded, rounded_fp32


@triton.jit
def rope_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    q_stride,
    k_stride,
    v_stride,
    head_stride,
    slot_stride,
    num_q,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and head; the heads of the keys follow those of the queries."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    is_query = head < num_q
    # Queries go to rows of their own, whatever slot the row's keys go to.
    slot = tl.where(is_query, 0, tl.load(slots_ptr + row))
    kv_head = (head - num_q).to(tl.int64)
    if is_query:
        source = q_ptr + row * q_stride + head * size
        goal = out_ptr + (row * num_q + head) * size
    else:
        source = k_ptr + row * k_stride + kv_head * size
        goal = keys_ptr + kv_head * head_stride + slot * slot_stride
    write = tl.where(slot >= 0, columns, HALF) < HALF

    low = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + columns, mask=inside, other=0.0).to(tl.float32)
    angle = row * size + columns
    cos_low = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)
    new_low = rounded_fp32(low * cos_low, dtype) - rounded_fp32(high * sin_low, dtype)
    new_high = rounded_fp32(high * cos_high, dtype) + rounded_fp32(low * sin_high, dtype)
    tl.store(goal + columns, rounded(new_low, dtype), mask=write)
    tl.store(goal + HALF + columns, rounded(new_high, dtype), mask=write)
    if not is_query:
        value_source = v_ptr + row * v_stride + kv_head * size
        value_goal = values_ptr + kv_head * head_stride + slot * slot_stride
        value_low = tl.load(value_source + columns, mask=inside, other=0.0)
        value_high = tl.load(value_source + HALF + columns, mask=inside, other=0.0)
        tl.store(value_goal + columns, value_low, mask=write)
        tl.store(value_goal + HALF + columns, value_high, mask=write)


def rope_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """As the reference: one launch."""
    rows, num_q, size = q.shape
    assert keys.stride() == values.stride()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    out = torch.empty((rows, num_q, size), dtype=q.dtype, device=q.device)
    if rows:
        rope_kv_kernel[(rows, num_q + k.shape[1])](
            q,
            k,
            v,
            cos,
            sin,
            slots,
            out,
            keys,
            values,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            keys.stride(0),
            keys.stride(1),
            num_q,
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            num_warps=1,
        )
    return out
