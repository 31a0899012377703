"""Triton kernels of verify: one pass over all rows, then only the rows that the walk visits.

The first launch reads every row's logits once and leaves, per piece of the vocabulary, the largest
processed logit, where it stands, and a sum of exponentials. That is all a greedy row needs, and it
tells a sampled row without filters in which piece its coin falls. The second launch walks: one
program a request. top_k and top_p look for their threshold sixteen ways at a time over the ordered
bits of the logits, and pass over pieces that lie below it; the search is exact and sums in a fixed
order, so the same coin always gives the same token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_serve.ops.verify import Processing, Verified

_PIECE = 1024  # of the vocabulary: a program of the first launch, a step of the second


@triton.jit
def _processed(
    row, column, HAS_BIAS: tl.constexpr, HAS_PENALTIES: tl.constexpr, HAS_MASK: tl.constexpr
):
    """Processed logits of some columns of one node's row, over temperature; -inf outside.

    row: (logits, tokens, parents, bias, penalties, counts, in_prompt, mask, node, vocab,
    temperature, max_depth), pointers at the data of this row or its request.
    """
    node, vocab, temperature, max_depth = row[8], row[9], row[10], row[11]
    inside = column < vocab
    z = tl.load(row[0] + column, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(row[3] + column, mask=inside, other=0.0)
    if HAS_PENALTIES:
        repetition = tl.load(row[4])
        presence = tl.load(row[4] + 1)
        frequency = tl.load(row[4] + 2)
        used = tl.load(row[5] + column, mask=inside, other=0).to(tl.float32)
        ancestor = node
        for _ in range(max_depth):
            # The root is certain, and counted already.
            token = tl.load(row[1] + ancestor, mask=ancestor > 0, other=-1)
            used += (column == token).to(tl.float32)
            ancestor = tl.load(row[2] + ancestor, mask=ancestor > 0, other=0).to(tl.int32)
        prompt = tl.load(row[6] + column, mask=inside, other=0).to(tl.int32)
        lower = tl.where(z > 0, z / repetition, z * repetition)
        z = tl.where((used > 0) | (prompt != 0), lower, z)
        z -= frequency * used
        z -= presence * (used > 0).to(tl.float32)
    if HAS_MASK:
        word = tl.load(row[7] + column // 32, mask=inside, other=0)
        z = tl.where(((word >> (column % 32)) & 1) != 0, z, float("-inf"))
    return z / temperature


@triton.jit
def _key(z):
    """fp32 -> uint32 in the same order; -0 as 0."""
    bits = (z + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _value(key):
    """The inverse of `_key`."""
    bits = tl.where((key >> 31) != 0, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _divisor(temperature, top_k):
    """(whether greedy, what to divide logits by)."""
    return (temperature == 0.0) | (top_k == 1), tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _above(row, maxima, threshold, top, flags: tl.constexpr, PIECE: tl.constexpr):
    """Of the logits above a key: how many, and their mass; and how many are at it."""
    count, mass, ties = 0.0, 0.0, 0.0
    for first in range(0, row[9], PIECE):
        if _key(tl.load(maxima + first // PIECE)) >= threshold:
            z = _processed(row, first + tl.arange(0, PIECE), flags[0], flags[1], flags[2])
            key = _key(z)
            count += tl.sum((key > threshold).to(tl.float32), axis=0)
            mass += tl.sum(tl.where(key > threshold, tl.exp(z - top), 0.0), axis=0)
            ties += tl.sum((key == threshold).to(tl.float32), axis=0)
    return count, mass, ties


@triton.jit
def _search(
    row, maxima, wanted, top, BY_MASS: tl.constexpr, flags: tl.constexpr, PIECE: tl.constexpr
):
    """The lowest key above which there are less than `wanted` logits, or less mass than that."""
    prefix = tl.zeros((), dtype=tl.uint32)
    for level in tl.static_range(8):
        shift = 28 - 4 * level
        ways = tl.arange(0, 16).to(tl.uint32)
        candidate = prefix + (ways << shift) + ((1 << shift) - 1)
        above = tl.zeros((16,), dtype=tl.float32)
        for first in range(0, row[9], PIECE):
            if _key(tl.load(maxima + first // PIECE)) > prefix:
                z = _processed(row, first + tl.arange(0, PIECE), flags[0], flags[1], flags[2])
                weight = tl.exp(z - top) if BY_MASS else tl.full((PIECE,), 1.0, tl.float32)
                over = _key(z)[:, None] > candidate[None, :]
                above += tl.sum(tl.where(over, weight[:, None], 0.0), axis=0)
        skipped = tl.sum((above >= wanted).to(tl.int32), axis=0).to(tl.uint32)
        prefix += skipped << shift
    return prefix


@triton.jit
def _scan(
    row, first, last, threshold, room, least, level, top, flags: tl.constexpr, PIECE: tl.constexpr
):
    """Add up the mass of what is kept, in order of id, until it exceeds `level`.

    Kept is what lies above the threshold, and of the logits at it the first `room`, if it weighs
    at least `least`. Returns the sum, the id at which it exceeds `level` or else the last one that
    weighs anything, and that one's weight.
    """
    total, ties = 0.0, 0.0
    found, weight_found, searching = tl.zeros((), tl.int32), 0.0, True
    for start in range(first, last, PIECE):
        if searching:
            column = start + tl.arange(0, PIECE)
            z = _processed(row, column, flags[0], flags[1], flags[2])
            key = _key(z)
            tie = (key == threshold).to(tl.float32)
            rank = ties + tl.cumsum(tie, axis=0)
            weight = tl.exp(z - top)
            kept = (key > threshold) | ((key == threshold) & (rank <= room))
            weight = tl.where(kept & (weight >= least), weight, 0.0)
            cumulative = total + tl.cumsum(weight, axis=0)
            hit = (cumulative > level) & (weight > 0)
            has_hit = tl.max(hit.to(tl.int32), axis=0) > 0
            heavy = tl.max(tl.where(weight > 0, column, -1), axis=0)
            at = tl.where(has_hit, tl.min(tl.where(hit, column, last + PIECE), axis=0), heavy)
            if at >= 0:
                found = at
                weight_found = tl.sum(tl.where(column == at, weight, 0.0), axis=0)
            total += tl.sum(weight, axis=0)
            ties += tl.sum(tie, axis=0)
            searching = has_hit == 0
    return total, found, weight_found


@triton.jit
def _sample(
    row, maxima, sums, top, top_k, top_p, min_p, coin, flags: tl.constexpr, PIECE: tl.constexpr
):
    """(id, log-probability) of what a coin picks in a row.

    sums: [pieces], the mass of each piece before any filter, over exp(top).
    """
    vocab = row[9]
    threshold = tl.zeros((), dtype=tl.uint32)
    room = vocab.to(tl.float32)
    total = tl.sum(sums, axis=0)
    if top_k > 0:
        threshold = _search(row, maxima, top_k.to(tl.float32), top, False, flags, PIECE)
        count, mass, ties = _above(row, maxima, threshold, top, flags, PIECE)
        room = top_k - count
        total = mass + tl.minimum(room, ties) * tl.exp(_value(threshold) - top)
    if top_p < 1.0:
        wanted = top_p * total
        lowest = _search(row, maxima, wanted, top, True, flags, PIECE)
        room = tl.where(lowest > threshold, vocab.to(tl.float32), room)
        threshold = tl.where(lowest > threshold, lowest, threshold)
        count, mass, ties = _above(row, maxima, threshold, top, flags, PIECE)
        fitting = tl.ceil((wanted - mass) / tl.exp(_value(threshold) - top))
        room = tl.minimum(room, tl.maximum(fitting, 1.0))
    first, last, level = 0, vocab, coin * total
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        total, _, _ = _scan(row, 0, vocab, threshold, room, min_p, float("inf"), top, flags, PIECE)
        level = coin * total
    else:
        # The coin falls into one piece, and only that one is read again.
        cumulative = tl.cumsum(sums, axis=0)
        index = tl.arange(0, sums.shape[0])
        hit = (cumulative > level) & (sums > 0)
        heavy = tl.max(tl.where(sums > 0, index, 0), axis=0)
        piece = tl.minimum(tl.min(tl.where(hit, index, sums.shape[0]), axis=0), heavy)
        level -= tl.sum(tl.where(index < piece, sums, 0.0), axis=0)
        first, last = piece * PIECE, (piece + 1) * PIECE
    _, token, weight = _scan(row, first, last, threshold, room, min_p, level, top, flags, PIECE)
    return token, tl.log(weight / total)


@triton.jit
def verify_rows_kernel(
    logits_ptr,
    tokens_ptr,
    parents_ptr,
    temperature_ptr,
    top_k_ptr,
    bias_ptr,
    penalties_ptr,
    counts_ptr,
    in_prompt_ptr,
    mask_ptr,
    max_ptr,
    argmax_ptr,
    sum_ptr,
    row_stride,
    nodes,
    vocab,
    max_depth,
    flags: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program a row and piece of the vocabulary."""
    number = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    request = number // nodes
    _, divisor = _divisor(tl.load(temperature_ptr + request), tl.load(top_k_ptr + request))
    row = (
        logits_ptr + number * row_stride,
        tokens_ptr + request * nodes,
        parents_ptr + request * nodes,
        bias_ptr + request * vocab,
        penalties_ptr + request * 3,
        counts_ptr + request * vocab,
        in_prompt_ptr + request * vocab,
        mask_ptr + number * ((vocab + 31) // 32),
        (number % nodes).to(tl.int32),
        vocab,
        divisor,
        max_depth,
    )
    z = _processed(row, piece * PIECE + tl.arange(0, PIECE), flags[0], flags[1], flags[2])
    largest, at = tl.max(z, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # Where nothing is allowed there is nothing to add up.
    total = tl.sum(tl.exp(z - tl.where(largest == float("-inf"), 0.0, largest)), axis=0)
    tl.store(max_ptr + number * pieces + piece, largest)
    tl.store(argmax_ptr + number * pieces + piece, (piece * PIECE + at).to(tl.int32))
    tl.store(sum_ptr + number * pieces + piece, total)


@triton.jit
def verify_walk_kernel(
    logits_ptr,
    tokens_ptr,
    parents_ptr,
    coins_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bias_ptr,
    penalties_ptr,
    counts_ptr,
    in_prompt_ptr,
    mask_ptr,
    max_ptr,
    argmax_ptr,
    sum_ptr,
    num_accepted_ptr,
    path_ptr,
    emitted_ptr,
    log_probs_ptr,
    row_stride,
    nodes,
    vocab,
    pieces,
    max_depth,
    flags: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    greedy, divisor = _divisor(tl.load(temperature_ptr + request), top_k)
    index = tl.arange(0, BLOCK_N)
    parents = tl.load(parents_ptr + request * nodes + index, mask=index < nodes, other=-1)
    tokens = tl.load(tokens_ptr + request * nodes + index, mask=index < nodes, other=-1)
    piece = tl.arange(0, BLOCK_P)
    node = tl.zeros((), dtype=tl.int32)
    accepted = tl.zeros((), dtype=tl.int64) - 1
    walking = True
    for depth in range(max_depth + 1):
        out = request * (max_depth + 1) + depth
        if walking:
            accepted += 1
            number = request * nodes + node
            maxima = max_ptr + number * pieces
            largest = tl.load(maxima + piece, mask=piece < pieces, other=float("-inf"))
            top, best = tl.max(
                largest, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            sums = tl.load(sum_ptr + number * pieces + piece, mask=piece < pieces, other=0.0)
            sums *= tl.exp(largest - top)
            token = tl.load(argmax_ptr + number * pieces + best)
            log_prob = -tl.log(tl.sum(sums, axis=0))
            if greedy == 0:
                row = (
                    logits_ptr + number * row_stride,
                    tokens_ptr + request * nodes,
                    parents_ptr + request * nodes,
                    bias_ptr + request * vocab,
                    penalties_ptr + request * 3,
                    counts_ptr + request * vocab,
                    in_prompt_ptr + request * vocab,
                    mask_ptr + number * ((vocab + 31) // 32),
                    node,
                    vocab,
                    divisor,
                    max_depth,
                )
                coin = tl.load(coins_ptr + out)
                token, log_prob = _sample(
                    row, maxima, sums, top, top_k, top_p, min_p, coin, flags, PIECE
                )
            tl.store(path_ptr + out, node.to(tl.int64))
            tl.store(emitted_ptr + out, token.to(tl.int64))
            tl.store(log_probs_ptr + out, log_prob)
            fits = (parents == node) & (tokens == token)
            child = tl.min(tl.where(fits, index, BLOCK_N), axis=0)
            walking = child < BLOCK_N
            node = tl.where(walking, child, node).to(tl.int32)
    tl.store(num_accepted_ptr + request, accepted)


def verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, coins: Tensor, how: Processing, max_depth: int
) -> Verified:
    """As the reference: two launches; logits are read once, visited rows again."""
    batch, nodes, vocab = logits.shape
    device = logits.device
    assert logits.stride(2) == 1
    assert logits.stride(0) == nodes * logits.stride(1)
    pieces = triton.cdiv(vocab, _PIECE)
    largest = torch.empty(batch, nodes, pieces, device=device)
    argmax = torch.empty(batch, nodes, pieces, dtype=torch.int32, device=device)
    sums = torch.empty_like(largest)
    out = Verified(
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.full((batch, max_depth + 1), -1, device=device),
        torch.full((batch, max_depth + 1), -1, device=device),
        torch.zeros(batch, max_depth + 1, device=device),
    )
    if not batch:
        return out
    # What is not there is not read: any pointer serves.
    absent = how.temperature
    shared = (
        absent if how.bias is None else how.bias,
        absent if how.penalties is None else how.penalties,
        absent if how.counts is None else how.counts,
        absent if how.in_prompt is None else how.in_prompt,
        absent if how.mask is None else how.mask,
        largest,
        argmax,
        sums,
    )
    flags = (how.bias is not None, how.penalties is not None, how.mask is not None)
    verify_rows_kernel[(batch * nodes, pieces)](
        logits,
        tokens,
        parents,
        how.temperature,
        how.top_k,
        *shared,
        logits.stride(1),
        nodes,
        vocab,
        max_depth,
        flags=flags,
        PIECE=_PIECE,
    )
    verify_walk_kernel[(batch,)](
        logits,
        tokens,
        parents,
        coins,
        how.temperature,
        how.top_k,
        how.top_p,
        how.min_p,
        *shared,
        *out,
        logits.stride(1),
        nodes,
        vocab,
        pieces,
        max_depth,
        flags=flags,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_P=triton.next_power_of_2(pieces),
        PIECE=_PIECE,
        num_warps=4,
    )
    return out
