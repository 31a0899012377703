"""Torch reference of rope_kv."""

from torch import Tensor

from eagle3_core import TorchOps


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
    """Rotate queries and keys; write keys and values of every row to its slot.

    Args:
        q: [R,nq,d], heads of one row adjacent, rows may be strided.
        k: [R,nkv,d], likewise.
        v: [R,nkv,d], likewise.
        cos: [R,d] of each row's position.
        sin: [R,d], likewise.
        slots: [R] int64, where a row's keys and values go; -1 = nowhere (padding).
        keys: [nkv,slots,d] of one layer, written in place.
        values: [nkv,slots,d], likewise.

    Returns:
        [R,nq,d] rotated queries. Halves rotate (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), each
        product and the sum rounded to the dtype.
    """
    heads_first = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    rotated_q, rotated_k = TorchOps().rope(*heads_first, cos[None], sin[None])
    kept = slots >= 0
    keys[:, slots[kept]] = rotated_k[0][:, kept]
    values[:, slots[kept]] = v.transpose(0, 1)[:, kept]
    return rotated_q[0].transpose(0, 1).contiguous()
