"""Torch reference of tree_build."""

import torch
from torch import Tensor

from eagle3_core.tree import TreeShape, ancestor_words, top
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.tree_build import Tree
from eagle3_serve.ops.tree_step import Scored, scored_before


def tree_build(root_ids: Tensor, scored: Scored, segments: Segments, shape: TreeShape) -> Tree:
    """The best N - 1 of all scored nodes under the root, N = `shape.num_nodes` up to 64.

    Nodes stand in the order they were scored in; of equal scores the first wins, and a child's is
    never above its parent's, so no node comes without its ancestors.

    Args:
        root_ids: [B] int64 target ids of the roots.
        scored: filled by `tree_step` for every depth.
        segments: of the requests, `past` being the keys before the root. Only `past`, `pages` and
            `page_size` count.
        shape: of the trees.
    """
    kept = top(scored.scores, shape.num_nodes - 1)[1].sort(1).values
    parents = torch.searchsorted(kept, scored.parents.gather(1, kept), right=True)
    parents = torch.cat([torch.full_like(parents[:, :1], -1), parents], 1)
    starts = [scored_before(d, shape.topk) for d in range(1, shape.num_speculative_tokens + 1)]
    depths = torch.searchsorted(torch.tensor(starts, device=kept.device), kept, right=True)
    past = segments.past.unsqueeze(1)
    rows = torch.arange(shape.num_nodes, device=kept.device)
    return Tree(
        torch.cat([root_ids.unsqueeze(1), scored.tokens.gather(1, kept)], 1),
        parents,
        ancestor_words(parents, shape.num_speculative_tokens)[..., 0],
        torch.cat([past, past + depths], 1).int(),
        segments.slots(past + rows),
    )
