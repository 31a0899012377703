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
        words: [R] int64, bit j = the row sees row j of its request; None = rows 0..i (a chain or a
            prompt). At most 64 rows a request.
        positions: [R] int32 of all rows, for a window over a tree; None = past + i.
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
        rows, length = slice(first, first + count), past + count
        order = torch.arange(length, device=q.device)
        page = segments.pages[b].long()[order // segments.page_size]
        slots = page * segments.page_size + order % segments.page_size
        own = torch.arange(count, device=q.device)
        at = past + own if positions is None else positions[rows].long()
        causal = own[:, None] >= own
        sees = causal if words is None else (words[rows, None] >> own & 1).bool()
        sees = torch.cat([sees.new_ones(count, past), sees], 1)
        if window is not None:
            key_at = torch.cat([order[:past], at])
            sees = sees & (at[:, None] - key_at < window)
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
