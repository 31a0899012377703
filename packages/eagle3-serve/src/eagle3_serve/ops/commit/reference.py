"""Torch reference of commit."""

import torch
from torch import Tensor

from eagle3_serve.ops.commit import Committed
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.verify import Verified


def commit(
    verified: Verified,
    aux: Tensor,
    root_ids: Tensor,
    segments: Segments,
    keys: Tensor,
    values: Tensor,
) -> Committed:
    """Keep the accepted rows of a pass, and move on to the next round's root.

    Row i of the accepted path goes to place `past + i`, where it lies already as long as the path
    is a prefix of the rows. The bonus is the next root; its keys are not there yet.

    Args:
        verified: `verify`'s result for trees of up to K+1 levels.
        aux: [B,N,W] states of all rows that were verified; rows may be strided.
        root_ids: [B] int64, gets the bonus tokens.
        segments: of the pass. `past` [B] int32 gets the number of keys that are held now; `pages`
            and `page_size` say where they lie.
        keys: [layers,nkv,slots,d] of the target, written in place.
        values: [layers,nkv,slots,d], likewise.
    """
    path = verified.path
    rows = torch.arange(path.shape[1], device=path.device)
    kept = path >= 0
    past, from_row = segments.past.clone(), path.clamp(min=0)
    places = past.unsqueeze(1) + rows
    source, goal = segments.slots(past.unsqueeze(1) + from_row), segments.slots(places)
    moved = kept & (path != rows) & (source >= 0)
    for held in (keys, values):
        held[:, :, goal[moved]] = held[:, :, source[moved]]  # read whole before it is written

    own = torch.arange(len(path), device=path.device)
    num_rows = kept.sum(1)
    root_ids.copy_(verified.token_ids[own, num_rows - 1])
    segments.past.copy_(past + num_rows)
    return Committed(
        aux[own.unsqueeze(1), from_row].masked_fill(~kept.unsqueeze(-1), 0.0),
        verified.token_ids.clamp(min=0),
        places.where(kept, 0).int(),
        goal.where(kept, -1),
        num_rows.int(),
        own * path.shape[1] + num_rows - 1,
        past,
    )
