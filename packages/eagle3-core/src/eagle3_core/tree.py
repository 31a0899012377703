"""Draft trees: how one grows from a draft's logits, and what its nodes see.

The dynamic tree of EAGLE-2 (arXiv 2406.16858), node for node the one that SafeAILab/EAGLE draws:
the first `topk` tokens hang from the root; then, depth by depth, every node of the frontier gets
`topk` children, and the `topk` best of them all by cumulative log-probability are the next
frontier. Of everything scored on the way, the best `num_verify_tokens - 1` nodes make the tree.
A child never scores above its parent, so no node is kept without its ancestors.

Scores are fp32 whatever the draft's dtype. Among equal scores the node that was scored first wins,
and among equal logits the lower draft id, so that every implementation can draw the same tree.

Shapes: B trees, F frontier nodes, N nodes (0 is the root: the token that is certain already), D
draft vocabulary, K depth. Nodes are in the order they were scored in: parents before their
children, and no node before a less deep one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_core.attention import TreeContext
from eagle3_core.draft import Eagle3Draft

WORD_BITS = 64


@dataclass(frozen=True)
class TreeShape:
    """How large a draft tree is; with `topk` 1 it is a chain.

    Raises:
        ValueError: no tree has this shape.
    """

    num_speculative_tokens: int  # K, drafted tokens on the longest path
    topk: int = 1  # children of a node, and nodes that are expanded at every depth
    num_verify_tokens: int | None = None  # N, root included; None = all nodes that are scored

    def __post_init__(self) -> None:
        """Check every range."""
        for name in ("num_speculative_tokens", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.num_verify_tokens is not None and not 2 <= self.num_verify_tokens <= self.limit:
            raise ValueError(
                f"num_verify_tokens is {self.num_verify_tokens}, expected 2..{self.limit}: the "
                f"root, and what depth {self.num_speculative_tokens} with topk {self.topk} scores"
            )

    @property
    def limit(self) -> int:
        """Nodes with the root that are scored; less if the draft has less than `topk` tokens."""
        return 1 + self.topk + (self.num_speculative_tokens - 1) * self.topk**2

    def cut(self, depth: int) -> "TreeShape":
        """The same with a depth of at most `depth`."""
        depth = min(depth, self.num_speculative_tokens)
        nodes = min(self.num_nodes, TreeShape(depth, self.topk).limit)
        return TreeShape(depth, self.topk, nodes)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.limit if self.num_verify_tokens is None else self.num_verify_tokens


class DraftTree(NamedTuple):
    """What is verified in one pass."""

    tokens: Tensor  # [B,N] TARGET ids; siblings are distinct
    parents: Tensor  # [B,N] node index, -1 for the root
    depths: Tensor  # [N] or [B,N], 0 for the root
    scores: Tensor  # [B,N] fp32 cumulative log-probability, 0 for the root


class Frontier(NamedTuple):
    """The nodes of one depth that are expanded, best first."""

    depth: int  # 1 for the root's children
    tokens: Tensor  # [B,F] TARGET ids
    scores: Tensor  # [B,F] fp32
    lineage: Tensor  # [B,F,depth] rows of the frontiers from depth 1 to this one: ancestors, itself

    @property
    def parent_rows(self) -> Tensor:
        """[B,F] row in the frontier above; the root is the only row of its own."""
        return self.lineage[..., -2] if self.depth > 1 else torch.zeros_like(self.lineage[..., 0])


def grow_tree(
    root_ids: Tensor,
    logits: Tensor,
    expand: Callable[[Frontier], Tensor],
    shape: TreeShape,
    d2t: Tensor | None = None,
) -> DraftTree:
    """Grow the trees of a batch.

    Args:
        root_ids: [B] target ids of the roots.
        logits: [B,D], what the draft says about the tokens after the roots.
        expand: runs the draft over a frontier, gives its logits [B,F,D]; called for depths
            1..K-1 in turn.
        shape: of every tree. A draft with too few tokens for it gives as many nodes as there are.
        d2t: [D] offsets to target ids, when the draft's vocabulary is pruned.
    """
    frontier: Frontier | None = None
    nodes = torch.full_like(root_ids, -1).unsqueeze(1)  # frontier rows as indices of all scored
    tokens, scores, parents = [], [], []
    for depth in range(1, shape.num_speculative_tokens + 1):
        rows = logits.unsqueeze(1) if frontier is None else expand(frontier)
        first = sum(level.shape[1] for level in scores)
        values, ids = top(rows, shape.topk)
        values = values - rows.float().logsumexp(-1, keepdim=True)
        if frontier is not None:
            values = values + frontier.scores.unsqueeze(-1)
        tokens.append((ids if d2t is None else ids + d2t[ids]).flatten(1))
        scores.append(values.flatten(1))
        parents.append(nodes.unsqueeze(-1).expand_as(ids).flatten(1))
        best, index = top(scores[-1], shape.topk)
        lineage = index.unsqueeze(-1)  # at depth 1 all are kept, in their own order
        if frontier is not None:
            above = index.div(ids.shape[-1], rounding_mode="floor")
            rank = torch.arange(index.shape[1], device=index.device).expand_as(index)
            lineage = torch.cat([_rows(frontier.lineage, above), rank.unsqueeze(-1)], -1)
        frontier = Frontier(depth, tokens[-1].gather(1, index), best, lineage)
        nodes = first + index
    depths = torch.cat([torch.full_like(s[0], i + 1).long() for i, s in enumerate(scores)])
    return _select(
        root_ids, torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), depths, shape
    )


def _select(
    root_ids: Tensor,
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    depths: Tensor,
    shape: TreeShape,
) -> DraftTree:
    """The best of all scored nodes [B,C], under the root."""
    kept = top(scores, shape.num_nodes - 1)[1].sort(1).values
    above = parents.gather(1, kept)
    root = root_ids.unsqueeze(1)
    return DraftTree(
        torch.cat([root, tokens.gather(1, kept)], 1),
        torch.cat([torch.full_like(root, -1), torch.searchsorted(kept, above, right=True)], 1),
        torch.cat([torch.zeros_like(root), depths[kept]], 1),
        torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, kept)], 1),
    )


def draft_tree(
    draft: Eagle3Draft,
    root_ids: Tensor,
    h: Tensor,
    slots: Tensor,
    context: TreeContext,
    shape: TreeShape,
) -> DraftTree:
    """The trees that a draft proposes behind slots it has run over: the plain reference.

    Args:
        draft: any.
        root_ids: [B] target ids, of the token that the slot pairs with the state before it.
        h: [B,H] output of the draft at the slot, before the final norm.
        slots: [B] position of the slot.
        context: the keys of all slots up to this one.
        shape: of every tree.
    """
    states = draft.feedback(h).unsqueeze(1)

    def expand(frontier: Frontier) -> Tensor:
        nonlocal states
        context.lineage = frontier.lineage
        positions = (slots + frontier.depth).unsqueeze(1).expand_as(frontier.tokens)
        states = _rows(states, frontier.parent_rows)
        hidden = draft(draft.embed(frontier.tokens), states, positions, context)
        states = draft.feedback(hidden)
        return draft.logits(hidden)

    d2t = draft.d2t if draft.config.is_pruned else None
    return grow_tree(root_ids, draft.logits(h), expand, shape, d2t)


def ancestor_mask(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """[B,N] parents, -1 for roots and padding -> [B,N,N] bool: row i sees its ancestors and itself.

    Args:
        parents: always lower than the node's own index.
        max_depth: of the tree, N-1 when left out.
    """
    size = parents.shape[1]
    seen = torch.eye(size, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    ancestor = parents
    for _ in range(size - 1 if max_depth is None else max_depth):
        hit = ancestor.unsqueeze(-1) == torch.arange(size, device=parents.device)
        seen = seen | hit
        above = parents.gather(1, ancestor.clamp(min=0))
        ancestor = torch.where(ancestor < 0, ancestor, above)
    return seen


def ancestor_words(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """`ancestor_mask` in bits: [B,N,W] int64, W = ceil(N/64); node j is bit j%64 of word j//64."""
    mask = ancestor_mask(parents, max_depth)
    mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD_BITS))
    bits = torch.arange(WORD_BITS, device=mask.device)
    return (mask.unflatten(-1, (-1, WORD_BITS)).long() << bits).sum(-1)


def root_paths(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Every path from the root to a leaf, in the order of the leaves.

    Args:
        parents: [B,N], always lower than the node's own index; -1 for the root and for padding.
        max_depth: of the trees, N-1 when left out.

    Returns:
        [B,leaves,max_depth+1] node indices, -1 behind the leaf; a tree with fewer leaves than
        others of the batch has rows of -1 at the end.
    """
    size = parents.shape[1]
    index = torch.arange(size, device=parents.device)
    inner = (parents.unsqueeze(-1) == index).any(1)
    real = (parents >= 0) | (index == 0)
    leaf = real & ~inner
    count = int(leaf.sum(1).max())
    order = torch.where(leaf, index, size).sort(1).values[:, :count]
    # Ancestors of a leaf, ascending: from the root down to itself.
    seen = ancestor_mask(parents, max_depth)
    seen = torch.cat([seen, seen.new_zeros(len(seen), 1, size)], 1)
    paths = torch.where(_rows(seen, order), index, size).sort(-1).values
    width = size if max_depth is None else min(size, max_depth + 1)
    return torch.where(paths == size, -1, paths)[..., :width]


def top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of [...,n] as fp32, in descending order; of equal ones the first, always.

    `torch.topk` leaves open which of two equal values it takes, and equal logits are common in
    bf16. Value and index together make keys that are never equal.

    Returns:
        values [...,min(k,n)] fp32 and their indices.
    """
    values = values.float() + 0.0  # no -0.0
    bits = values.contiguous().view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    index = torch.arange(values.shape[-1], device=values.device)
    keys = (ascending.long() << 32) | (0xFFFFFFFF - index)
    best = 0xFFFFFFFF - (keys.topk(min(k, values.shape[-1])).values & 0xFFFFFFFF)
    return values.gather(-1, best), best


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """[B,S,...] and [B,R] -> [B,R,...]."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), index]
