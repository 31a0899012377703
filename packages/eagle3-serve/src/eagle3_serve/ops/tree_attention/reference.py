"""Torch reference of tree_attention."""

import torch
from torch import Tensor

from eagle3_serve.ops.tree_attention import Segments


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
    """Every row over the keys that it sees: all before this pass, and of its own pass its path.

    Args:
        q: [R,nq,d], rotated; rows may be strided. Rows of no request come out as zeros.
        keys: [nkv,slots,d] of one layer.
        values: [nkv,slots,d].
        segments: of the packed rows.
        scale: of the scores.
        words: [R] int64, bit j = the row sees its request's j-th key behind the past ones, itself
            included; 0 = it sees all of them up to itself, as in a chain or a prompt, which None
            says of all rows. A request with other words has at most 64 such keys.
        positions: [B,M] int32 of the keys behind the past ones (M bounds grown + num_rows), for a
            window over a tree; None = in their order.
        window: positions that a row sees, its own included; None = all.
        sinks: [nq], a score of every head that takes weight and gives nothing (gpt-oss).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).

    Returns:
        [R,nq,d]; scores and sums in fp32 (fp64 for fp64 inputs).
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // len(keys)
    spans = zip(
        segments.first_row.tolist(), segments.num_rows.tolist(), segments.past.tolist(), strict=True
    )
    for b, (first, count, past) in enumerate(spans):
        rows, grown = slice(first, first + count), segments.grown + count
        length = past + grown
        order = torch.arange(length, device=q.device)
        page = segments.pages[b].long()[order // segments.page_size]
        slots = page * segments.page_size + order % segments.page_size
        own = torch.arange(grown, device=q.device)
        at = past + own if positions is None else positions[b, :grown].long()
        sees = own[segments.grown :, None] >= own
        if words is not None:
            word = words[rows, None]
            sees = torch.where(word == 0, sees, (word >> own.clamp(max=63) & 1).bool())
        sees = torch.cat([sees.new_ones(count, past), sees], 1)
        if window is not None:
            key_at = torch.cat([order[:past], at])
            sees = sees & (at[segments.grown :, None] - key_at < window)
        k = keys[:, slots].to(wide).repeat_interleave(groups, 0)
        v = values[:, slots].to(wide).repeat_interleave(groups, 0)
        scores = q[rows].transpose(0, 1).to(wide) @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~sees, -torch.inf)
        if sinks is not None:
            sink = sinks.to(wide)[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out
