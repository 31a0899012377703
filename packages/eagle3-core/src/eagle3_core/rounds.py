"""Rounds that a draft would make on recorded text: its real trees, and how far they are followed.

A round stands at a slot: the token after it is certain, more are drafted. The draft grows its real
tree there, off the recorded path too, since that takes no state of the target. What the target
would choose is known along the recorded text only, and that is enough: a walk that leaves the
recorded tokens has ended there.

Shapes: S tokens of a text, B rounds, K depth, N nodes, D draft vocabulary, A·T width of the
target's states.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle3_core.accept import TreeAccept, greedy_tree
from eagle3_core.attention import CacheContext, TreeContext
from eagle3_core.draft import Eagle3Draft
from eagle3_core.tree import DraftTree, TreeShape, draft_tree


class RecordedRounds:
    """A draft that has read a whole text, and can draft behind any of its slots 0..S-2."""

    def __init__(self, draft: Eagle3Draft, ids: Tensor, aux: Tensor) -> None:
        """ids [S] target ids, aux [S,A·T] the target's states at their positions."""
        self.draft, self.ids = draft, ids
        self._cache = CacheContext(draft.config.sliding_window)
        positions = torch.arange(len(ids) - 1, device=ids.device)
        x = draft.project(aux[None, :-1])
        self._h = draft(draft.embed(ids[None, 1:]), x, positions[None], self._cache)[0]

    def trees(self, slots: Tensor, shape: TreeShape) -> DraftTree:
        """The trees that are drafted behind the slots [B]."""
        context = TreeContext(self._cache, slots + 1)
        return draft_tree(self.draft, self.ids[slots + 1], self._h[slots], slots, context, shape)

    def along(self, tokens: Tensor, slots: Tensor) -> Iterator[Tensor]:
        """[B,D] logits at each of K steps of the chains that consist of `tokens` [B,K]."""
        context, h = TreeContext(self._cache, slots + 1), self._h[slots][:, None]
        yield self.draft.logits(h)[:, 0]
        for depth in range(1, tokens.shape[1]):
            context.lineage = torch.zeros(len(slots), 1, depth, dtype=torch.int64).to(slots)
            e = self.draft.embed(tokens[:, depth - 1, None])
            h = self.draft(e, self.draft.feedback(h), slots[:, None] + depth, context)
            yield self.draft.logits(h)[:, 0]


def follow(tree: DraftTree, tokens: Tensor) -> TreeAccept:
    """The path that `tokens` [B,K] take from the root, as long as they are in the tree."""
    depths = tree.depths.expand_as(tree.tokens)
    # Nodes of the last depth have no child, whatever would be asked for behind them.
    wanted = tokens.gather(1, depths.clamp(max=tokens.shape[1] - 1))
    return greedy_tree(tree.tokens, tree.parents, wanted, tokens.shape[1])
