"""What is drafted for one request in one round: a tree below its last token, or nothing.

Row 0 of a request's verify rows is its last certain token, row i its i-th drafted one. Rows are in
an order where parents come first and no row stands before a less deep one, so cutting a tree off
at some depth leaves a prefix. A chain is the tree in which every row is the parent of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle3_core.tree import ancestor_mask
from eagle3_serve.kv import Branches


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and the row of each one's parent.

    Block verification also needs to know what the tokens of a chain were drawn from.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    draft_ids: Sequence[int] = ()
    q: Tensor | None = None  # [K,D] fp64

    @staticmethod
    def chain(tokens: Sequence[int]) -> "Proposal":
        """One branch."""
        return Proposal(tokens, range(len(tokens)))

    @property
    def num_rows(self) -> int:
        """Rows to verify, the last certain token included."""
        return len(self.tokens) + 1

    @cached_property
    def paths(self) -> list[list[int]]:
        """Of each row: the drafted tokens from the root down to it."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path."""
        return len(self.paths[-1])

    def cut(self, depth: int) -> "Proposal":
        """The rows down to a depth."""
        count = sum(len(path) <= depth for path in self.paths) - 1
        return Proposal(self.tokens[:count], self.parents[:count])

    def walk(self, choices: Sequence[int]) -> list[int]:
        """The rows that hold, from the root on, if `choices` are the target's tokens behind each.

        The law of `eagle3_core.accept.greedy_tree`.
        """
        rows = {}
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            rows[parent, token] = row
        path = [0]
        while (path[-1], choices[path[-1]]) in rows:
            path.append(rows[path[-1], choices[path[-1]]])
        return path

    def branches(self, position: int, device: torch.device) -> Branches | None:
        """What the rows see of each other, the root at `position`; None for a chain."""
        if list(self.parents) == list(range(len(self.parents))):
            return None
        depths = torch.tensor([len(path) for path in self.paths], device=device)
        parents = torch.tensor([[-1, *self.parents]], device=device)
        return Branches(position + depths, ancestor_mask(parents, self.depth)[0])
