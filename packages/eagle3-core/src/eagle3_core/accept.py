"""Acceptance laws: which drafted tokens the target keeps, and the token it adds.

The trainer's simulated accept length and the engine's real one count with the same code, and every
law here emits exactly the target's own tokens (greedy) or its own distribution (sampling).

Shapes: B requests, K drafted tokens of a chain, N tree nodes (node 0 is the root, already emitted),
V target and D draft vocabulary. p rows are the target's probabilities after all sampling
parameters, q rows the law that the drafts were ACTUALLY drawn from, both normalised.

Randomness comes in as coins, fresh and uniform on [0, 1): the laws are deterministic functions of
them. Each draw costs one coin by inverse CDF. Sums run in fp64, so pass fp64 coins: an fp32 coin
has steps of 6e-8, wider than the share of a rare token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-300  # turns 0 / 0 into 0


class ChainAccept(NamedTuple):
    """What one verify pass of a chain emits: `num_accepted` drafted tokens, then `bonus`."""

    num_accepted: Tensor  # [B] int64, bonus excluded
    bonus: Tensor  # [B] int64 target id


class TreeAccept(NamedTuple):
    """What one verify pass of a tree emits: the tokens of `path[1:]`, then `bonus`."""

    num_accepted: Tensor  # [B] int64, root and bonus excluded
    bonus: Tensor  # [B] int64 target id
    path: Tensor  # [B, max_depth+1] int64 node indices from the root, -1 after the last


def inverse_cdf(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw an index with probability weights / sum(weights): the i with C_{i-1} <= coin * C < C_i.

    Whatever the coin and the rounding, an index of weight zero is never drawn from a row that
    has a positive weight.

    Args:
        weights: [..., V] non-negative, any scale.
        coins: [...] in [0, 1).

    Returns:
        [...] int64.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    level = coins.double() * cumulative[..., -1]
    # A parallel scan may be uneven in its last bit, so flat steps are excluded by the weight.
    hit = (cumulative > level.unsqueeze(-1)) & (weights > 0)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).byte().argmax(-1)
    return torch.where(hit.any(-1), hit.byte().argmax(-1), last)


def greedy_chain(
    draft_ids: Tensor, target_ids: Tensor, num_drafts: Tensor | None = None
) -> ChainAccept:
    """Keep drafts as long as they are the target's argmax.

    Args:
        draft_ids: [B,K] target ids.
        target_ids: [B,K+1] argmax of the verify rows; row i is the token after i drafts.
        num_drafts: [B] valid drafts of each row, K when left out.
    """
    num_accepted = _leading(draft_ids == target_ids[:, :-1], num_drafts)
    return ChainAccept(num_accepted, _at(target_ids, num_accepted))


def sampled_chain(
    draft_ids: Tensor,
    q: Tensor,
    p: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    d2t: Tensor | None = None,
    num_drafts: Tensor | None = None,
) -> ChainAccept:
    """Speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    A draft x stays with probability min(1, p(x)/q(x)); the first one that does not is replaced by a
    draw from (p - q)+. After the last kept draft the bonus is drawn from p. With a pruned
    vocabulary q is zero outside its D ids, so it is never spread to V: D entries of one p row
    change.

    Args:
        draft_ids: [B,K] DRAFT ids, each drawn from its q row; K >= 1.
        q: [B,K,D].
        p: [B,K+1,V].
        coins: [B,K] one a draft.
        final_coins: [B].
        d2t: [D] offsets to target ids, when the draft's vocabulary is pruned.
        num_drafts: [B] valid drafts of each row, K when left out.
    """
    image, p_drafts, q_drafts = _drafted(draft_ids, q, p, d2t)
    num_accepted = _leading(coins.double() * q_drafts < p_drafts, num_drafts)

    row = _at(p, num_accepted)
    refused_at, refused = _refused(num_accepted, q.shape[1], num_drafts)
    proposed = torch.where(refused.unsqueeze(1), _at(q, refused_at), 0.0)
    residual = row.index_copy(1, image, (row[:, image] - proposed).clamp(min=0))
    return ChainAccept(num_accepted, _draw_residual(residual, row, final_coins))


def block_chain(
    draft_ids: Tensor,
    q: Tensor,
    p: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    d2t: Tensor | None = None,
    num_drafts: Tensor | None = None,
) -> ChainAccept:
    """Block verification (Sun et al. 2403.10444): never keeps less than `sampled_chain` on average.

    With r_0 = 1, r_i = min(1, r_{i-1} p(x_i)/q(x_i)) and R_i the mass of (r_i p - q)+ in the row
    behind draft i, coin i passes with probability R_i / (R_i + 1 - r_i), the last one with r_K.
    Everything up to the LAST coin that passes stays, and the bonus is drawn from (r_i p - q)+
    there, or from p behind the last draft. As in `sampled_chain`, q is never spread to V.

    Args:
        draft_ids: [B,K] DRAFT ids, each drawn from its q row; K >= 1.
        q: [B,K,D].
        p: [B,K+1,V].
        coins: [B,K] one a draft.
        final_coins: [B].
        d2t: [D] offsets to target ids, when the draft's vocabulary is pruned.
        num_drafts: [B] valid drafts of each row, K when left out.
    """
    batch, width, _ = q.shape
    image, p_drafts, q_drafts = _drafted(draft_ids, q, p, d2t)
    ratios = p_drafts / q_drafts
    if num_drafts is None:
        num_drafts = torch.full((batch,), width, device=q.device)
    ratio = torch.ones(batch, dtype=torch.float64, device=p.device)
    num_accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
    residual = p[:, 0]
    # Nothing before the first draft can be refused: its coin always passes, unless p is q there.
    coins = torch.cat([torch.zeros_like(coins[:, :1]), coins], 1)
    for i in range(width + 1):
        is_last = num_drafts == i
        left = ratio.unsqueeze(1) * p[:, i]
        mass = ratio
        if i < width:
            proposed = torch.where(is_last.unsqueeze(1), 0.0, q[:, i])
            left = left.index_copy(1, image, (left[:, image] - proposed).clamp(min=0))
            mass = left.sum(1)
        passes = torch.where(is_last, ratio, mass / (mass + 1 - ratio).clamp(min=TINY))
        kept = (i <= num_drafts) & (coins[:, i] < passes)
        num_accepted = torch.where(kept, i, num_accepted)
        residual = torch.where(kept.unsqueeze(1), left, residual)
        if i < width:
            ratio = (ratio * ratios[:, i]).clamp(max=1)
    return ChainAccept(num_accepted, _draw_residual(residual, _at(p, num_accepted), final_coins))


def deterministic_chain(
    draft_ids: Tensor,
    p: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    num_drafts: Tensor | None = None,
) -> ChainAccept:
    """The law of `deterministic_tree` where every node has one child.

    Args:
        draft_ids: [B,K] TARGET ids, chosen without randomness (an argmax); K >= 1.
        p: [B,K+1,V].
        coins: [B,K] one a draft.
        final_coins: [B].
        num_drafts: [B] valid drafts of each row, K when left out.
    """
    p_drafts = p[:, :-1].gather(2, draft_ids.unsqueeze(2)).squeeze(2)
    num_accepted = _leading(coins < p_drafts, num_drafts)

    row = _at(p, num_accepted)
    refused_at, refused = _refused(num_accepted, draft_ids.shape[1], num_drafts)
    token = _at(draft_ids, refused_at).unsqueeze(1)
    kept = torch.where(refused.unsqueeze(1), 0.0, row.gather(1, token))
    residual = row.scatter(1, token, kept)
    return ChainAccept(num_accepted, _draw_residual(residual, row, final_coins))


def greedy_tree(
    tokens: Tensor, parents: Tensor, target_ids: Tensor, max_depth: int | None = None
) -> TreeAccept:
    """Walk from the root to the child that is the target's argmax, until there is none.

    Args:
        tokens: [B,N] target ids; node 0 is the root.
        parents: [B,N] index of each node's parent, always a lower one; -1 for the root and for
            padding.
        target_ids: [B,N] argmax of each node's verify row.
        max_depth: steps of the walk, N-1 when left out; it never asks the device how far it got.
    """

    def hits(node: Tensor, child: Tensor) -> Tensor:
        return child & (tokens == _at(target_ids, node).unsqueeze(1))

    node, _, path = _walk(hits, parents, max_depth)
    return TreeAccept((path >= 0).sum(1) - 1, _at(target_ids, node), path)


def deterministic_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int | None = None,
) -> TreeAccept:
    """Sampling over a tree whose topology owes nothing to the coins (a top-k tree).

    At a node with children c_1..c_m, child j is taken iff P_{j-1} <= coin < P_j, where P_j is the
    target's probability of the first j children. If none is, the bonus is drawn from p without
    the children. The same law as the sequential sibling test of the EAGLE reference.

    Args:
        tokens: [B,N] TARGET ids; node 0 is the root. Siblings must be distinct.
        parents: [B,N] index of each node's parent, always a lower one; -1 for the root and for
            padding.
        p: [B,N,V] of each node's verify row.
        coins: [B,N] one a node, spent when the walk leaves it.
        final_coins: [B].
        max_depth: steps of the walk, N-1 when left out; it never asks the device how far it got.
    """
    rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)

    def hits(node: Tensor, child: Tensor) -> Tensor:
        share = torch.where(child, p[rows, node.unsqueeze(1), tokens], 0.0)
        cumulative = share.cumsum(1, dtype=torch.float64)
        return (share > 0) & (cumulative > _at(coins, node).unsqueeze(1))

    node, tested, path = _walk(hits, parents, max_depth)
    row = _at(p, node)
    refused = (parents == node.unsqueeze(1)) & tested.unsqueeze(1)
    cap = torch.where(refused, 0.0, torch.inf).to(row.dtype)
    residual = row.scatter_reduce(1, tokens, cap, "amin")
    bonus = _draw_residual(residual, row, final_coins)
    return TreeAccept((path >= 0).sum(1) - 1, bonus, path)


@dataclass(frozen=True)
class AcceptCounts:
    """Acceptance added up over verify rounds, simulated or real; add counts, never averages."""

    num_rounds: int
    # [k]: rounds whose drafts 0..k were all accepted; a fraction where coins were averaged over
    accepted: tuple[float, ...]

    def __add__(self, other: "AcceptCounts") -> "AcceptCounts":
        """Both together; raises ValueError unless both count the same number of positions."""
        pairs = zip(self.accepted, other.accepted, strict=True)
        return AcceptCounts(self.num_rounds + other.num_rounds, tuple(a + b for a, b in pairs))

    @property
    def per_position(self) -> tuple[float, ...] | None:
        """[k]: share of rounds that accepted drafts 0..k, all of them; None before any round."""
        return tuple(a / self.num_rounds for a in self.accepted) if self.num_rounds else None

    @property
    def accept_length(self) -> float | None:
        """Mean tokens emitted a round, the bonus included; None before any round."""
        return 1 + sum(self.accepted) / self.num_rounds if self.num_rounds else None


def count_accepted(num_accepted: Tensor, num_speculative_tokens: int) -> AcceptCounts:
    """Counts of real rounds: num_accepted [rounds], each in 0..num_speculative_tokens."""
    slots = torch.arange(num_speculative_tokens, device=num_accepted.device)
    accepted = (num_accepted.unsqueeze(1) > slots).sum(0)
    return AcceptCounts(len(num_accepted), tuple(accepted.tolist()))


def simulated_accept_length(correct: Tensor, counted: Tensor) -> AcceptCounts:
    """What greedy rounds started at every slot would accept.

    A slot is a round if all its steps are counted, so that every position is a share of the SAME
    rounds; products of per-step accuracies, or steps averaged over different slots, are not accept
    lengths. Where the target's token lies outside the draft vocabulary the step is counted and
    not correct.

    Args:
        correct: [K, ...] bool, the draft's argmax at step k is the target's.
        counted: [K, ...] bool, the slot has a supervised target at step k.
    """
    rounds = counted.all(0)
    joint = correct.long().cumprod(0).bool() & rounds
    return AcceptCounts(int(rounds.sum()), tuple(joint.flatten(1).sum(1).tolist()))


def expected_accept_length(offered: Tensor, recorded: Tensor) -> AcceptCounts:
    """What sampled rounds started in text that the target has drawn accept, averaged over coins.

    However a round is drafted, it emits the target's own law, so a recorded token may stand for
    what the target draws. A round goes on while the recorded token is a draft that stays; of its
    last step only the probability that any draft stays is needed, which averages over the coin.

    Drafts chosen without randomness: `offered` is p(children), `recorded` is 1 where the recorded
    token is a child. A draft drawn from q: `offered` is sum(min(p, q)), and a recorded token x was
    the draft with probability min(1, q(x) / p(x)).

    Args:
        offered: [K,R] probability that a draft stays at step k, behind the recorded tokens.
        recorded: [K,R] probability that step k's recorded token is a draft that stays.
    """
    reached = torch.cat([torch.ones_like(recorded[:1]), recorded[:-1]]).double().cumprod(0)
    accepted = (reached * offered).sum(1)
    return AcceptCounts(offered.shape[1], tuple(accepted.tolist()))


def _drafted(
    draft_ids: Tensor, q: Tensor, p: Tensor, d2t: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[D] target id of every draft id, and what p and q [B,K] say of the drafted tokens."""
    image = torch.arange(q.shape[2], device=q.device)
    if d2t is not None:
        image = image + d2t
    p_drafts = p[:, :-1].gather(2, image[draft_ids].unsqueeze(2)).squeeze(2)
    return image, p_drafts, q.gather(2, draft_ids.unsqueeze(2)).squeeze(2)


def _leading(keeps: Tensor, num_drafts: Tensor | None) -> Tensor:
    """[B,K] -> [B]: how many of a row's first valid entries hold without a gap."""
    if num_drafts is not None:
        keeps = keeps & (torch.arange(keeps.shape[1], device=keeps.device) < num_drafts[:, None])
    return keeps.long().cumprod(1).sum(1)


def _refused(num_accepted: Tensor, width: int, num_drafts: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B] index of the refused draft (any index where none was), [B] whether there is one."""
    refused = num_accepted < (width if num_drafts is None else num_drafts)
    return num_accepted.clamp(max=width - 1), refused


def _walk(
    hits: Callable[[Tensor, Tensor], Tensor], parents: Tensor, max_depth: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root to the first hit among the children, and on.

    Args:
        hits: (node [B], child mask [B,N]) -> mask [B,N] of children that may be entered.

    Returns:
        [B] last node, [B] whether its children were all refused, [B, steps+1] path padded with -1.
    """
    batch, size = parents.shape
    node = torch.zeros(batch, dtype=torch.int64, device=parents.device)
    walking = torch.ones_like(node, dtype=torch.bool)
    path = [node]
    for _ in range(size - 1 if max_depth is None else max_depth):
        entered = hits(node, parents == node.unsqueeze(1)) & walking.unsqueeze(1)
        walking = entered.any(1)
        node = torch.where(walking, entered.byte().argmax(1), node)
        path.append(torch.where(walking, node, -1))
    return node, ~walking, torch.stack(path, 1)


def _draw_residual(residual: Tensor, row: Tensor, coins: Tensor) -> Tensor:
    """Draw from the residual [B,V]; from p itself where rounding left no residual at all."""
    empty = residual.amax(1, keepdim=True) <= 0
    return inverse_cdf(torch.where(empty, row, residual), coins)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """[B,S,...] and [B] -> [B,...]."""
    return values[torch.arange(len(values), device=values.device), index]
