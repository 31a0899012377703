"""Torch reference of tree_step."""

import torch
from torch import Tensor

from eagle3_core.tree import top
from eagle3_serve.ops.draft_head import Proposals
from eagle3_serve.ops.tree_attention import MAX_BRANCH_ROWS, Segments
from eagle3_serve.ops.tree_step import Frontier, Scored, scored_before


def tree_step(
    proposals: Proposals,
    states: Tensor,
    frontier: Frontier | None,
    scored: Scored,
    segments: Segments,
) -> Frontier:
    """Score the children of a frontier and take the best of them as the next one.

    The tree is that of `eagle3_core.tree.grow_tree`: a child's score is its parent's plus its own
    log-probability, in fp32; of equal scores the node that was scored first wins. The draft has at
    least k tokens.

    Args:
        proposals: [B·F,k] `draft_head`'s of the rows that have run: of the roots (F = 1), or of the
            frontier (F = k).
        states: [B·F,H] what the draft feeds back from these rows; rows may be strided.
        frontier: whose children they are; None for those of the roots.
        scored: gets the children.
        segments: of the requests, `past` being the keys before the tree: its rows take the places
            from there on, and depth d the position `past + d - 1`. Only `past`, `pages` and
            `page_size` count.
    """
    batch, k = len(scored.tokens), proposals.log_probs.shape[1]
    rows, device = 1 if frontier is None else k, states.device
    tokens, scores = (x.view(batch, rows, k) for x in (proposals.token_ids, proposals.log_probs))
    if frontier is None:
        depth = 1
        above = torch.full((batch, 1), -1, device=device)
        words = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    else:
        depth, above, words = frontier.depth + 1, frontier.nodes, frontier.words
        scores = scores + frontier.scores.unsqueeze(-1)
    first = scored_before(depth, k)
    own = slice(first, first + rows * k)
    scored.tokens[:, own] = tokens.flatten(1)
    scored.scores[:, own] = scores.flatten(1)
    scored.parents[:, own] = above.repeat_interleave(k, 1)

    best, index = top(scores.flatten(1), k)
    row = index // k
    number = (depth - 1) * k + torch.arange(k, device=device)
    bit = (number < MAX_BRANCH_ROWS).long() << number % MAX_BRANCH_ROWS
    past = segments.past.unsqueeze(1)
    of_request = torch.arange(batch, device=device).unsqueeze(1)
    return Frontier(
        depth,
        tokens.flatten(1).gather(1, index),
        best,
        first + index,
        words.gather(1, row) | bit,
        (past + (depth - 1)).int().repeat(1, k),
        segments.slots(past + number),
        states.view(batch, rows, states.shape[1])[of_request, row],
    )
