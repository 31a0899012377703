"""The rows that the target verifies: of all nodes that the draft has scored, the best ones."""

from typing import NamedTuple

from torch import Tensor


class Tree(NamedTuple):
    """N rows of each of B requests, the root first, parents before their children."""

    tokens: Tensor  # [B,N] int64 TARGET ids; siblings are distinct
    parents: Tensor  # [B,N] int64, -1 for the root
    words: Tensor  # [B,N] int64, bit j = the row sees row j of its request
    positions: Tensor  # [B,N] int32
    slots: Tensor  # [B,N] int64, where the row's keys and values go; -1 = nowhere
