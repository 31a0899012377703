"""The pruned draft vocabulary: an ascending subset of the target's ids.

`d2t` [D] int64 holds offsets, target_id = draft_id + d2t[draft_id]; `t2d` [V] is a bool mask of the
target ids that the draft can propose. Every producer and engine agrees on this.
"""

import torch
from torch import Tensor

from eagle3_core.errors import UserError


def vocab_map(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Build (d2t, t2d) from the distinct target ids to keep, in any order.

    Args:
        target_ids: [D] int, distinct, in [0, vocab_size).
        vocab_size: V of the target.

    Raises:
        UserError: an id is out of range or stands twice.
    """
    kept = target_ids.to(torch.int64).sort().values
    d2t = kept - torch.arange(len(kept))
    if len(kept) and (kept[0] < 0 or kept[-1] >= vocab_size):
        raise UserError(
            f"draft vocabulary: ids {kept[0].item()}..{kept[-1].item()} leave 0..{vocab_size - 1}"
        )
    if (kept[1:] == kept[:-1]).any():
        raise UserError("draft vocabulary: an id stands twice")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return d2t, t2d


def most_frequent(counts: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The `size` target ids to keep: `always`, then by falling count, ties to the lower id.

    Args:
        counts: [V] occurrences of each target id.
        size: D; ids never seen fill up the rest, lowest first.
        always: ids kept whatever their count, such as end-of-turn.

    Raises:
        UserError: size is not in 1..V, or smaller than `always`; an `always` id is not in 0..V-1.
    """
    outside = [i for i in always if not 0 <= i < len(counts)]
    if outside:
        raise UserError(
            f"draft vocabulary: id {outside[0]} is to be kept always, expected 0..{len(counts) - 1}"
        )
    if not max(1, len(set(always))) <= size <= len(counts):
        raise UserError(
            f"draft_vocab_size is {size}, expected {max(1, len(set(always)))}..{len(counts)}"
        )
    ranked = counts.to(torch.float64).clone()
    ranked[list(always)] = torch.inf
    return torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values


def check_vocab_map(
    d2t: Tensor,
    t2d: Tensor | None,
    vocab_size: int,
    where: str = "d2t",
    *,
    identity_map: bool = False,
) -> None:
    """Check range, order and agreement of a map.

    Args:
        d2t: [D] offsets.
        t2d: [V] mask, where there is one.
        vocab_size: V of the target.
        where: begins the message.
        identity_map: the caller knows that the map was set, so zero offsets mean the first ids.

    Raises:
        UserError: names the broken rule and the first offending index.
    """
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise UserError(
            f"{where}: {d2t.dtype} of shape {tuple(d2t.shape)}, expected one row of whole numbers"
        )
    draft_size = len(d2t)
    target_ids = d2t.to(torch.int64) + torch.arange(draft_size)
    if draft_size < vocab_size and not identity_map and not d2t.any():
        raise UserError(
            f"{where}: all {draft_size} offsets are zero although the vocabulary has {vocab_size} "
            "ids: the map was never set; write the real one, or say d2t=identity if the first ids "
            "are meant"
        )
    bad = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise UserError(
            f"{where}[{i}]: {i} + {int(d2t[i])} = {int(target_ids[i])} is not in "
            f"0..{vocab_size - 1}; d2t holds offsets, not ids"
        )
    bad = (target_ids[1:] <= target_ids[:-1]).nonzero()
    if len(bad):
        i = int(bad[0]) + 1
        raise UserError(
            f"{where}[{i}]: target id {int(target_ids[i])} does not follow "
            f"{int(target_ids[i - 1])}; target ids must rise strictly"
        )
    if t2d is not None:
        _check_mask(target_ids, t2d, vocab_size)


def _check_mask(target_ids: Tensor, t2d: Tensor, vocab_size: int) -> None:
    if t2d.shape != (vocab_size,):
        raise UserError(f"t2d: shape {tuple(t2d.shape)}, expected ({vocab_size},)")
    expected = torch.zeros(vocab_size, dtype=torch.bool)
    expected[target_ids] = True
    differs = (t2d.bool() != expected).nonzero()
    if len(differs):
        i = int(differs[0])
        raise UserError(
            f"t2d[{i}]: {bool(t2d[i])}, but d2t {'maps' if expected[i] else 'never maps'} to "
            f"target id {i} (t2d marks {int(t2d.sum())} ids, d2t holds {len(target_ids)})"
        )


def target_to_draft(d2t: Tensor, vocab_size: int) -> Tensor:
    """[V] int64: the draft id of each target id, -1 where the draft cannot propose it."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=d2t.device)
    ids = torch.arange(len(d2t), device=d2t.device)
    inverse[ids + d2t] = ids
    return inverse
