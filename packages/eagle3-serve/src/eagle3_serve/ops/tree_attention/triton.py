"""Triton kernels of tree_attention: keys in pieces of a fixed size, then one merge a row.

The size of a piece does not depend on the batch or the length, so a row's sum is always taken in
the same order, whoever shares the batch: what batch-invariant decoding needs. A program holds the
query heads that share a kv head, for up to 16 rows of one request.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_core import UserError
from eagle3_serve.ops.language import operand, rounded
from eagle3_serve.ops.tree_attention import Segments

_PIECE = 512  # keys of a program


@triton.jit
def attention_pieces_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    first_row_ptr,
    num_rows_ptr,
    past_ptr,
    pages_ptr,
    words_ptr,
    positions_ptr,
    mixed_ptr,
    largest_ptr,
    sum_ptr,
    q_stride,
    head_stride,
    slot_stride,
    pages_stride,
    positions_stride,
    total_rows,
    grown,
    scale,
    window,
    softcap,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program a request and block of its rows, a kv head, and a piece of the keys."""
    request = tl.program_id(0)
    block = tl.program_id(1)
    piece = tl.program_id(2) // KV_HEADS
    head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + request)
    past = tl.load(past_ptr + request)
    first_row = tl.load(first_row_ptr + request)
    length = past + grown + num_rows
    member = tl.arange(0, BLOCK_M)  # row of the request, and head of the group
    own = block * BLOCK_R + member // GROUPS
    place_own = grown + own  # among the keys behind the past ones
    is_row = (member < BLOCK_R * GROUPS) & (own < num_rows)
    row = (first_row + own).to(tl.int64)
    q_head = head * GROUPS + member % GROUPS
    dim = tl.arange(0, BLOCK_D)
    has_dim = dim < SIZE
    q = tl.load(
        q_ptr + row[:, None] * q_stride + q_head[:, None] * SIZE + dim[None, :],
        mask=is_row[:, None] & has_dim[None, :],
        other=0.0,
    )
    if HAS_WORDS:
        word = tl.load(words_ptr + row, mask=is_row, other=0)
    position = past + place_own
    if HAS_POSITIONS:
        positions_ptr += request.to(tl.int64) * positions_stride
        position = tl.load(positions_ptr + place_own, mask=is_row, other=0)

    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # A chain's rows see nothing behind the block's last one.
    end = length
    if not HAS_WORDS:
        end = tl.minimum(end, past + grown + (block + 1) * BLOCK_R)
    end = tl.minimum(end, (piece + 1) * PIECE)
    begin = piece * PIECE
    if HAS_WINDOW and not HAS_POSITIONS:
        reach = past + grown + block * BLOCK_R - window + 1
        begin = tl.maximum(begin, reach // BLOCK_N * BLOCK_N)
    # The merge reads no piece behind a request's last key.
    if (block * BLOCK_R < num_rows) & (piece * PIECE < length):
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            has_key = key < end
            page = tl.load(
                pages_ptr + request.to(tl.int64) * pages_stride + key // PAGE, mask=has_key, other=0
            )
            slot = page.to(tl.int64) * PAGE + key % PAGE
            place = head * head_stride + slot[:, None] * slot_stride + dim[None, :]
            inside = has_key[:, None] & has_dim[None, :]
            k = tl.load(keys_ptr + place, mask=inside, other=0.0)
            score = tl.dot(operand(q), tl.trans(operand(k)), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # tanh by exp, which saturates cleanly on both sides.
                score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap)))
            new = key - past  # which of the keys behind the past ones, if any
            sees = new[None, :] <= place_own[:, None]
            if HAS_WORDS:
                shift = tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
                bit = (word[:, None] >> shift[None, :]) & 1
                ancestor = (new[None, :] < 0) | (bit != 0)
                sees = tl.where(word[:, None] == 0, sees, ancestor)
            if HAS_WINDOW:
                key_position = key
                if HAS_POSITIONS:
                    branch = has_key & (new >= 0)
                    key_position = tl.where(
                        branch, tl.load(positions_ptr + new, mask=branch, other=0), key
                    )
                sees = sees & (position[:, None] - key_position[None, :] < window)
            score = tl.where(sees & has_key[None, :], score, float("-inf"))
            higher = tl.maximum(largest, tl.max(score, axis=1))
            # Rows that see nothing yet keep a maximum of -inf; 0 stands in for it.
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - safe[:, None])
            faded = tl.exp(largest - safe)
            total = total * faded + tl.sum(weight, axis=1)
            v = tl.load(values_ptr + place, mask=inside, other=0.0)
            weight = rounded(weight, v.dtype)
            mixed = mixed * faded[:, None] + tl.dot(
                operand(weight), operand(v), input_precision="ieee"
            )
            largest = higher
        out = (piece * total_rows + row) * (KV_HEADS * GROUPS) + q_head
        tl.store(largest_ptr + out, largest, mask=is_row)
        tl.store(sum_ptr + out, total, mask=is_row)
        tl.store(
            mixed_ptr + out[:, None] * SIZE + dim[None, :],
            mixed,
            mask=is_row[:, None] & has_dim[None, :],
        )


@triton.jit
def attention_merge_kernel(
    mixed_ptr,
    largest_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    first_row_ptr,
    num_rows_ptr,
    past_ptr,
    batch,
    total_rows,
    grown,
    heads,
    HAS_SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program a row and query head; pieces are added in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # A row of no request has no keys, and so no pieces.
    request = tl.arange(0, BLOCK_B)
    first = tl.load(first_row_ptr + request, mask=request < batch, other=0)
    count = tl.load(num_rows_ptr + request, mask=request < batch, other=0)
    past = tl.load(past_ptr + request, mask=request < batch, other=0)
    is_own = (row >= first) & (row < first + count)
    length = tl.sum(tl.where(is_own, past + grown + count, 0), axis=0)
    pieces = (length + PIECE - 1) // PIECE
    dim = tl.arange(0, BLOCK_D)
    has_dim = dim < SIZE
    top = float("-inf")
    for piece in range(pieces):
        top = tl.maximum(top, tl.load(largest_ptr + (piece * total_rows + row) * heads + head))
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    if HAS_SINKS:
        total = tl.exp(sink - safe)
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for piece in range(pieces):
        place = (piece * total_rows + row) * heads + head
        share = tl.exp(tl.load(largest_ptr + place) - safe)
        total += share * tl.load(sum_ptr + place)
        mixed += share * tl.load(mixed_ptr + place * SIZE + dim, mask=has_dim, other=0.0)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + (row * heads + head) * SIZE + dim
    tl.store(out, rounded(mixed, out_ptr.dtype.element_ty), mask=has_dim)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Segments,
    scale: float,
    *,
    words: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As the reference: two launches; weights are rounded to the values' dtype before the product.

    Raises:
        UserError: heads above 256.
    """
    rows, heads, size = q.shape
    kv_heads = len(keys)
    if size > 256:
        raise UserError(f"head_dim is {size}, the Triton attention takes up to 256")
    assert keys.stride() == values.stride()
    assert keys.stride(2) == 1
    groups = heads // kv_heads
    pieces = triton.cdiv(segments.max_length, _PIECE)
    largest = torch.empty(pieces, rows, heads, device=q.device)
    sums = torch.empty_like(largest)
    mixed = torch.empty(*largest.shape, size, device=q.device)
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    if not rows:
        return out
    block_r = min(16, triton.next_power_of_2(segments.max_rows))
    block_d = triton.next_power_of_2(size)
    batch = len(segments.past)
    grid = batch, triton.cdiv(segments.max_rows, block_r), pieces * kv_heads
    attention_pieces_kernel[grid](
        q,
        keys,
        values,
        segments.first_row,
        segments.num_rows,
        segments.past,
        segments.pages,
        words,
        positions,
        mixed,
        largest,
        sums,
        q.stride(0),
        keys.stride(0),
        keys.stride(1),
        segments.pages.stride(0),
        0 if positions is None else positions.stride(0),
        rows,
        segments.grown,
        float(scale),
        0 if window is None else window,
        0.0 if softcap is None else float(softcap),
        PAGE=segments.page_size,
        GROUPS=groups,
        KV_HEADS=kv_heads,
        HAS_WORDS=words is not None,
        HAS_POSITIONS=positions is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        SIZE=size,
        BLOCK_R=block_r,
        BLOCK_M=max(16, triton.next_power_of_2(block_r * groups)),
        BLOCK_N=64 if block_d <= 128 else 32,
        BLOCK_D=max(16, block_d),
        PIECE=_PIECE,
        num_warps=4,
        num_stages=2,
    )
    attention_merge_kernel[(rows, heads)](
        mixed,
        largest,
        sums,
        sinks,
        out,
        segments.first_row,
        segments.num_rows,
        segments.past,
        batch,
        rows,
        segments.grown,
        heads,
        HAS_SINKS=sinks is not None,
        SIZE=size,
        BLOCK_B=triton.next_power_of_2(batch),
        PIECE=_PIECE,
        BLOCK_D=max(16, block_d),
        num_warps=1 if size <= 128 else 2,
    )
    return out
