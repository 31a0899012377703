"""Triton kernels of draft_head: each tile of the head keeps its own k best, a second pass merges.

What leaves a tile is k pairs, a maximum and a sum per row, in place of a row of D logits. Three
launches: norm, tiles, merge.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.add_rms_norm.triton import add_rms_norm
from eagle3_serve.ops.draft_head import Proposals
from eagle3_serve.ops.language import operand


@triton.jit
def head_tiles_kernel(
    normed_ptr,
    head_ptr,
    scale_ptr,
    values_ptr,
    ids_ptr,
    max_ptr,
    sum_ptr,
    rows,
    hidden,
    vocab,
    head_stride,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program a tile of the head and block of rows."""
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    row = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    token = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    has_row, has_token = row < rows, token < vocab
    logits = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for first in range(0, hidden, BLOCK_H):
        column = first + tl.arange(0, BLOCK_H)
        has_column = column < hidden
        x = tl.load(
            normed_ptr + row[:, None] * hidden + column[None, :],
            mask=has_row[:, None] & has_column[None, :],
            other=0.0,
        )
        w = tl.load(
            head_ptr + token[:, None].to(tl.int64) * head_stride + column[None, :],
            mask=has_token[:, None] & has_column[None, :],
            other=0.0,
        )
        logits += tl.dot(operand(x), tl.trans(operand(w.to(x.dtype))), input_precision="ieee")
    if HAS_SCALE:
        logits *= tl.load(scale_ptr + token, mask=has_token, other=0.0)[None, :]
    logits = tl.where(has_token[None, :], logits, float("-inf"))

    largest = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    tl.store(max_ptr + row * tiles + tile, largest, mask=has_row)
    tl.store(sum_ptr + row * tiles + tile, total, mask=has_row)
    for i in tl.static_range(K):
        best, at = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
        out = (row * tiles + tile) * K + i
        tl.store(values_ptr + out, best, mask=has_row)
        tl.store(ids_ptr + out, tile * BLOCK_D + at, mask=has_row)
        logits = tl.where(tl.arange(0, BLOCK_D)[None, :] == at[:, None], float("-inf"), logits)


@triton.jit
def merge_kernel(
    values_ptr,
    ids_ptr,
    max_ptr,
    sum_ptr,
    d2t_ptr,
    token_ids_ptr,
    draft_ids_ptr,
    log_probs_ptr,
    tiles,
    K: tl.constexpr,
    HAS_D2T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_T)
    largest = tl.load(max_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    sums = tl.load(sum_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    top = tl.max(largest, axis=0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(largest - top), axis=0))

    # Candidates stand in order of tile and, in a tile, of rank: of equal ones the left has the
    # lower id.
    candidate = tl.arange(0, BLOCK_C)
    inside = candidate < tiles * K
    values = tl.load(values_ptr + row * tiles * K + candidate, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * tiles * K + candidate, mask=inside, other=0)
    for i in tl.static_range(K):
        best, at = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.sum(tl.where(candidate == at, ids, 0), axis=0).to(tl.int64)
        token = chosen
        if HAS_D2T:
            token += tl.load(d2t_ptr + chosen)
        tl.store(draft_ids_ptr + row * K + i, chosen)
        tl.store(token_ids_ptr + row * K + i, token)
        tl.store(log_probs_ptr + row * K + i, best - log_sum)
        values = tl.where(candidate == at, float("-inf"), values)


def draft_head(
    h: Tensor,
    norm_weight: Tensor,
    eps: float,
    head: Tensor,
    k: int,
    d2t: Tensor | None = None,
    head_scale: Tensor | None = None,
) -> Proposals:
    """As the reference; logits are summed in fp32 and never rounded to the dtype of `h`."""
    rows, hidden = h.shape
    vocab, device = len(head), h.device
    # A large vocabulary in wide tiles, so that one program can merge what they leave.
    block_d = 64 if vocab <= 2**16 else 128
    tiles = triton.cdiv(vocab, block_d)
    token_ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    draft_ids = torch.empty_like(token_ids)
    log_probs = torch.empty((rows, k), dtype=torch.float32, device=device)
    if not rows:
        return Proposals(token_ids, draft_ids, log_probs)
    normed = add_rms_norm(None, h, norm_weight, eps)[1]
    values = torch.empty((rows, tiles, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, tiles, k), dtype=torch.int32, device=device)
    largest = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    # A tensor core takes at least 16 rows; rows that are not there are not read.
    block_r = min(64, max(16, triton.next_power_of_2(rows)))
    head_tiles_kernel[(tiles, triton.cdiv(rows, block_r))](
        normed,
        head,
        head_scale,
        values,
        ids,
        largest,
        sums,
        rows,
        hidden,
        vocab,
        head.stride(0),
        K=k,
        HAS_SCALE=head_scale is not None,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        BLOCK_H=128,
        num_warps=8,
        num_stages=4,
    )
    merge_kernel[(rows,)](
        values,
        ids,
        largest,
        sums,
        d2t,
        token_ids,
        draft_ids,
        log_probs,
        tiles,
        K=k,
        HAS_D2T=d2t is not None,
        BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK_C=triton.next_power_of_2(tiles * k),
        num_warps=4 if tiles * k <= 2048 else 16,
    )
    return Proposals(token_ids, draft_ids, log_probs)
