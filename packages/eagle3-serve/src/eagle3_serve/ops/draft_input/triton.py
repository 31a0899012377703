"""Triton kernel of draft_input: one program a row; no embedding row is written and read again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.language import rms_normed, rounded


@triton.jit
def draft_input_kernel(
    ids_ptr,
    tails_ptr,
    embedding_ptr,
    x_ptr,
    e_weight_ptr,
    x_weight_ptr,
    out_ptr,
    normed_ptr,
    embedding_stride,
    x_stride,
    rows,
    size,
    eps,
    HAS_TAILS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_TAILS:
        tail = tl.load(tails_ptr + row)
        # The last row has no next one, and a tail; its load must still be inside.
        following = tl.load(ids_ptr + tl.minimum(row + 1, rows - 1))
        token = tl.where(tail >= 0, tail, following).to(tl.int64)
    else:
        token = tl.load(ids_ptr + row).to(tl.int64)
    e = tl.load(embedding_ptr + token * embedding_stride + columns, mask=inside, other=0.0)
    weight = tl.load(e_weight_ptr + columns, mask=inside, other=0.0)
    normed = rms_normed(e.to(tl.float32), weight, size, eps, dtype)
    tl.store(out_ptr + row * 2 * size + columns, rounded(normed, dtype), mask=inside)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    weight = tl.load(x_weight_ptr + columns, mask=inside, other=0.0)
    normed = rounded(rms_normed(x.to(tl.float32), weight, size, eps, dtype), dtype)
    tl.store(out_ptr + row * 2 * size + size + columns, normed, mask=inside)
    tl.store(normed_ptr + row * size + columns, normed, mask=inside)


def draft_input(
    token_ids: Tensor,
    embedding: Tensor,
    x: Tensor,
    e_weight: Tensor,
    x_weight: Tensor,
    eps: float,
    tails: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference: one launch."""
    rows, size = x.shape
    out = torch.empty((rows, 2 * size), dtype=x.dtype, device=x.device)
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        draft_input_kernel[(rows,)](
            token_ids,
            tails,
            embedding,
            x,
            e_weight,
            x_weight,
            out,
            normed,
            embedding.stride(0),
            x.stride(0),
            rows,
            size,
            eps,
            HAS_TAILS=tails is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )
    return out, normed
