"""Triton kernel of aux_states: the states go straight from where they lie into fc's input.

The norm over all states needs the whole row before its first value: a first pass over the states
adds up the squares, and the second reads them again out of the cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_core import UserError
from eagle3_serve.ops.language import rms_normed, rounded, rounded_fp32

MAX_STATES = 5


@triton.jit
def _load(first, second, third, fourth, fifth, i: tl.constexpr, offset, inside):
    """The row's part of state i; pointers cannot be indexed."""
    pointer = first
    if i == 1:
        pointer = second
    if i == 2:
        pointer = third
    if i == 3:
        pointer = fourth
    if i == 4:
        pointer = fifth
    return tl.load(pointer + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def aux_states_kernel(
    first,
    second,
    third,
    fourth,
    fifth,
    concat_weight_ptr,
    layer_weights_ptr,
    out_ptr,
    state_stride,
    size,
    eps,
    NUM_STATES: tl.constexpr,
    HAS_CONCAT: tl.constexpr,
    HAS_LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    offset = row * state_stride + columns
    scale = 1.0
    if HAS_CONCAT:
        squares = 0.0
        for i in tl.static_range(NUM_STATES):
            x = _load(first, second, third, fourth, fifth, i, offset, inside)
            squares += tl.sum(x * x, axis=0)
        scale = tl.rsqrt(squares / (NUM_STATES * size) + eps)
    for i in tl.static_range(NUM_STATES):
        x = _load(first, second, third, fourth, fifth, i, offset, inside)
        if HAS_CONCAT:
            weight = tl.load(concat_weight_ptr + i * size + columns, mask=inside, other=0.0)
            x = rounded_fp32(rounded_fp32(x * scale, dtype) * weight.to(tl.float32), dtype)
        if HAS_LAYER:
            weight = tl.load(layer_weights_ptr + i * size + columns, mask=inside, other=0.0)
            x = rms_normed(x, weight, size, eps, dtype)
        out = out_ptr + (row * NUM_STATES + i) * size + columns
        tl.store(out, rounded(x, dtype), mask=inside)


def aux_states(
    states: Sequence[Tensor], concat_weight: Tensor | None, layer_weights: Tensor | None, eps: float
) -> Tensor:
    """As the reference: one launch, up to five states.

    Raises:
        UserError: more than five states.
    """
    if len(states) > MAX_STATES:
        raise UserError(
            f"aux_layer_ids: {len(states)} states, the Triton kernel takes up to {MAX_STATES}; "
            "use the reference implementation"
        )
    first = states[0]
    rows, size = first.shape
    if any(state.stride() != first.stride() for state in states):
        states = [state.contiguous() for state in states]
        first = states[0]
    out = torch.empty((rows, len(states) * size), dtype=first.dtype, device=first.device)
    if rows:
        pointers = [*states, *[first] * (MAX_STATES - len(states))]
        aux_states_kernel[(rows,)](
            *pointers,
            concat_weight,
            layer_weights,
            out,
            first.stride(0),
            size,
            eps,
            NUM_STATES=len(states),
            HAS_CONCAT=concat_weight is not None,
            HAS_LAYER=layer_weights is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )
    return out
