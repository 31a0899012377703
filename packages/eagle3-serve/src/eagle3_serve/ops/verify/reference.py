"""Torch reference of verify."""

import torch
from torch import Tensor

from eagle3_core.accept import inverse_cdf
from eagle3_core.tree import ancestor_mask
from eagle3_serve.ops.verify import Processing, Verified
from eagle3_serve.sampling import SamplingParams, processed_probs


def verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, coins: Tensor, how: Processing, max_depth: int
) -> Verified:
    """Walk from the root along the target's own choices, as far as the tree holds them.

    At a node the target's token is the most likely one, or the one that the node's coin picks by
    inverse CDF in order of id. The walk goes on to the child of that token, if there is one.

    Args:
        logits: [B,N,V], rows may be strided.
        tokens: [B,N] target ids; node 0 is the root, a token that is certain and counted already.
        parents: [B,N] index of each node's parent, always a lower one; -1 for the root and for
            padding.
        coins: [B,max_depth+1] fp32 in [0, 1), by depth; not used where greedy.
        how: sampling parameters.
        max_depth: of the tree.
    """
    batch = len(tokens)
    num_accepted = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    path = torch.full((batch, max_depth + 1), -1, device=logits.device)
    emitted = path.clone()
    log_probs = torch.zeros(batch, max_depth + 1, device=logits.device)
    for b in range(batch):
        rows = _processed(logits[b], tokens[b], parents[b], how, b)
        node = 0
        for depth in range(max_depth + 1):
            token, log_prob = _choose(rows[node], coins[b, depth], how, b)
            path[b, depth], emitted[b, depth] = node, token
            log_probs[b, depth], num_accepted[b] = log_prob, depth
            children = ((parents[b] == node) & (tokens[b] == token)).nonzero()
            if not len(children):
                break
            node = int(children[0])
    return Verified(num_accepted, path, emitted, log_probs)


def _processed(logits: Tensor, tokens: Tensor, parents: Tensor, how: Processing, b: int) -> Tensor:
    """[N,V] fp32, everything that comes before temperature."""
    z = logits.float()
    if how.bias is not None:
        z = z + how.bias[b]
    if how.penalties is not None and how.counts is not None and how.in_prompt is not None:
        repetition, presence, frequency = how.penalties[b]
        on_path = ancestor_mask(parents[None])[0].float()
        on_path[:, 0] = 0.0  # the root is certain, and counted
        used = torch.zeros_like(z).index_add_(1, tokens, on_path) + how.counts[b]
        lower = torch.where(z > 0, z / repetition, z * repetition)
        z = torch.where((used > 0) | how.in_prompt[b], lower, z)
        z = z - frequency * used
        z = z - presence * (used > 0)
    if how.mask is not None:
        bits = how.mask[b].unsqueeze(-1) >> torch.arange(32, device=z.device) & 1
        z = z.masked_fill(bits.flatten(1)[:, : z.shape[1]] == 0, -torch.inf)
    return z


def _choose(z: Tensor, coin: Tensor, how: Processing, b: int) -> tuple[int, Tensor]:
    params = SamplingParams(
        temperature=float(how.temperature[b]),
        top_k=int(how.top_k[b]),
        top_p=float(how.top_p[b]),
        min_p=float(how.min_p[b]),
    )
    if params.is_greedy:
        token = int(z.argmax())
        return token, z.log_softmax(-1)[token]
    probs = processed_probs(z, params)
    token = int(inverse_cdf(probs, coin))
    return token, probs[token].log()
