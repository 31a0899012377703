"""One depth of a draft tree: from the frontier's children to the next frontier."""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_core.tree import TreeShape


class Scored(NamedTuple):
    """All nodes of a tree that have been scored, C = k + (K - 1)·k², in that order.

    Buffers that the steps fill, depth by depth; they can be used again for every round.
    """

    tokens: Tensor  # [B,C] int64 TARGET ids
    scores: Tensor  # [B,C] fp32 cumulative log-probability
    parents: Tensor  # [B,C] int64 index among the scored, -1 for the root

    @classmethod
    def empty(cls, batch: int, shape: TreeShape, device: torch.device) -> "Scored":
        """Room for trees of a shape."""
        size = batch, shape.limit - 1
        return cls(
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.int64, device=device),
        )


class Frontier(NamedTuple):
    """The k nodes of one depth that are expanded, best first: the draft's next rows, packed.

    Row r of depth d is row (d - 1)·k + r of the tree that the draft attends to.
    """

    depth: int  # 1 for the root's children
    tokens: Tensor  # [B,k] int64 TARGET ids
    scores: Tensor  # [B,k] fp32
    nodes: Tensor  # [B,k] int64 index among the scored
    words: Tensor  # [B,k] int64, bit j = the row sees row j of the tree; bits over 63 are lost
    positions: Tensor  # [B,k] int32
    slots: Tensor  # [B,k] int64, where the row's keys and values go; -1 = nowhere
    states: Tensor  # [B,k,H], what the draft feeds back to the row


def scored_before(depth: int, k: int) -> int:
    """How many nodes of lower depths have been scored."""
    return 0 if depth == 1 else k + (depth - 2) * k * k
