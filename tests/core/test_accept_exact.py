"""The sampling laws emit exactly the target's distribution: counted, not sampled.

Probabilities are quarters. Every breakpoint of every coin is then a multiple of 1/12 (a ratio
p/q of quarters, or a partial sum of a residual that sums to 1/4, 2/4, 3/4 or 1), so a law is
constant on the 12 cells of [0, 1) and evaluating it at their midpoints integrates it exactly:
sums of integers, compared for equality. `test_laws_are_constant_on_each_cell` checks that premise.
Block verification has breakpoints of its own, so its cells are cut where its formulas say.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eagle3_core.accept import (
    ChainAccept,
    TreeAccept,
    block_chain,
    deterministic_chain,
    deterministic_tree,
    expected_accept_length,
    inverse_cdf,
    sampled_chain,
)

CELLS = 12
Law = dict[tuple[int, ...], Fraction]
Context = tuple[int, ...]
SampledChain = Callable[..., ChainAccept]


@dataclass
class Table:
    """A language model over `size` tokens: a fixed random row of quarters for every context."""

    size: int
    seed: int
    parts: int = 4  # of which all probabilities are multiples
    copies: "Table | None" = None  # of a target: a row is taken from it half of the time

    def row(self, context: Context, width: int | None = None) -> list[Fraction]:
        rng = random.Random(f"{self.seed}{context}")
        if self.copies is not None and rng.random() < 0.5:
            return self.copies.row(context)
        cuts = sorted(rng.randint(0, self.parts) for _ in range(self.size - 1))
        edges = [0, *cuts, self.parts]
        row = [Fraction(b - a, self.parts) for a, b in itertools.pairwise(edges)]
        rng.shuffle(row)
        return row

    def law(self, length: int) -> Law:
        """Of the first `length` tokens."""
        law: Law = {(): Fraction(1)}
        for _ in range(length):
            law = {
                (*context, token): weight * share
                for context, weight in law.items()
                for token, share in enumerate(self.row(context))
                if share
            }
        return law


def coin_grid(columns: int, cells: int = CELLS) -> Tensor:
    """[cells^columns, columns]: every combination of midpoints, in fp64."""
    if not columns:
        return torch.zeros(1, 0, dtype=torch.float64)
    midpoints = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    return torch.cartesian_prod(*[midpoints] * columns).reshape(-1, columns)


def tensor(rows: list[list[Fraction]]) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def emitted(drafts: Context, accepted: ChainAccept) -> Iterator[tuple[Context, Fraction]]:
    """(tokens emitted, share of the coins) of one drafted chain."""
    codes, counts = torch.stack(accepted[:2], 1).unique(dim=0, return_counts=True)
    for (n, bonus), count in zip(codes.tolist(), counts.tolist(), strict=True):
        yield (*drafts[:n], bonus), Fraction(count, len(accepted.bonus))


def completed(target: Table, parts: Law, length: int) -> Law:
    """Emissions of different lengths, each continued by the target itself to `length` tokens."""
    law: Law = defaultdict(Fraction)
    for tokens, weight in parts.items():
        tails = {tokens: weight}
        while len(next(iter(tails))) < length:
            tails = {
                (*context, token): w * share
                for context, w in tails.items()
                for token, share in enumerate(target.row(context))
                if share
            }
        for context, w in tails.items():
            law[context] += w
    return dict(law)


def sampled_chain_law(
    target: Table,
    draft: Table,
    image: list[int],
    depth: int,
    chain: SampledChain,
    cells: int = CELLS,
) -> Law:
    """Law of the first depth+1 tokens when the draft's own samples are verified by `chain`."""
    d2t = torch.tensor(image) - torch.arange(len(image))
    coins = coin_grid(depth + 1, cells)
    parts: Law = defaultdict(Fraction)
    for ids in itertools.product(range(draft.size), repeat=depth):
        tokens = tuple(image[i] for i in ids)
        q = [draft.row(tokens[:k]) for k in range(depth)]
        weight = Fraction(1)
        for row, i in zip(q, ids, strict=True):
            weight *= row[i]
        if not weight:
            continue
        p = [target.row(tokens[:k]) for k in range(depth + 1)]
        batch = len(coins)
        accepted = chain(
            torch.tensor(ids).expand(batch, -1),
            tensor(q).expand(batch, -1, -1),
            tensor(p).expand(batch, -1, -1),
            coins[:, :-1],
            coins[:, -1],
            d2t=d2t,
        )
        for emission, share in emitted(tokens, accepted):
            parts[emission] += weight * share
    return completed(target, parts, depth + 1)


IMAGES = [(2, [0, 1]), (3, [0, 2]), (4, [1, 3]), (5, [0, 2, 3]), (6, [1, 2, 5]), (3, [0, 1, 2])]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "image"), IMAGES)
@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_chain_is_exact(depth: int, size: int, image: list[int], seed: int) -> None:
    """Zeros on both sides come up by themselves: q mass where p = 0, p mass outside the draft."""
    target = Table(size, seed)
    draft = Table(len(image), seed + 100, copies=target if len(image) == size else None)
    assert sampled_chain_law(target, draft, image, depth, sampled_chain) == target.law(depth + 1)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_chain_of_three_is_exact(seed: int) -> None:
    target, draft = Table(3, seed), Table(2, seed + 100)
    assert sampled_chain_law(target, draft, [0, 2], 3, sampled_chain) == target.law(4)


def test_finer_cells_change_nothing() -> None:
    target, draft = Table(4, 7), Table(2, 107)
    fine = sampled_chain_law(target, draft, [1, 3], 2, sampled_chain, cells=24)
    assert fine == target.law(3)


PARTS = 10  # block verification has breakpoints of its own anyway; fewer zeros than quarters have


def block_passes(
    target: Table, draft: Table, image: list[int], ids: Context
) -> tuple[list[Fraction], list[list[Fraction]]]:
    """Block verification by its formulas: where each coin stops passing, and each residual."""
    ratio, passes, residuals = Fraction(1), [], []
    for i in range(len(ids) + 1):
        tokens = tuple(image[j] for j in ids[:i])
        p, q = target.row(tokens), [Fraction(0)] * target.size
        for j, share in zip(image, draft.row(tokens), strict=True):
            q[j] = share if i < len(ids) else q[j]
        residuals.append([max(ratio * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])
        mass = sum(residuals[-1])
        passes.append(ratio if i == len(ids) else mass / (mass + 1 - ratio) if mass else mass)
        if i < len(ids):
            ratio = min(Fraction(1), ratio * p[image[ids[i]]] / draft.row(tokens)[ids[i]])
    return passes[1:], residuals


def cells(
    edges: list[list[Fraction]], inside: Fraction = Fraction(1, 2)
) -> tuple[Tensor, list[Fraction]]:
    """A point of every box between the edges of each coin, its midpoint, and the boxes' volumes."""
    sides = [list(itertools.pairwise(sorted({Fraction(0), Fraction(1), *own}))) for own in edges]
    boxes = list(itertools.product(*sides))
    volumes = [math.prod((b - a for a, b in box), start=Fraction(1)) for box in boxes]
    points = [[float(a + (b - a) * inside) for a, b in box] for box in boxes]
    return torch.tensor(points, dtype=torch.float64), volumes


def block_law(
    target: Table, draft: Table, image: list[int], depth: int, chain: SampledChain
) -> tuple[Law, Fraction]:
    """As `sampled_chain_law`, over the cells of block verification; and the drafts it keeps."""
    d2t = torch.tensor(image) - torch.arange(len(image))
    parts: Law = defaultdict(Fraction)
    kept = Fraction(0)
    for ids in itertools.product(range(draft.size), repeat=depth):
        tokens = tuple(image[i] for i in ids)
        q = [draft.row(tokens[:k]) for k in range(depth)]
        weight = math.prod((row[i] for row, i in zip(q, ids, strict=True)), start=Fraction(1))
        if not weight:
            continue
        passes, residuals = block_passes(target, draft, image, ids)
        final = [
            edge / total
            for residual in residuals
            if (total := sum(residual))
            for edge in itertools.accumulate(residual)
        ]
        coins, volumes = cells([*([edge] for edge in passes), final])
        p = tensor([target.row(tokens[:k]) for k in range(depth + 1)])
        accepted = chain(
            torch.tensor(ids).expand(len(coins), -1),
            tensor(q).expand(len(coins), -1, -1),
            p.expand(len(coins), -1, -1),
            coins[:, :-1],
            coins[:, -1],
            d2t=d2t,
        )
        rows = zip(accepted.num_accepted.tolist(), accepted.bonus.tolist(), volumes, strict=True)
        for n, bonus, volume in rows:
            parts[(*tokens[:n], bonus)] += weight * volume
            kept += weight * volume * n
    return completed(target, parts, depth + 1), kept


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "image"), IMAGES)
@pytest.mark.parametrize("depth", [1, 2])
def test_block_chain_is_exact(depth: int, size: int, image: list[int], seed: int) -> None:
    target = Table(size, seed, PARTS)
    draft = Table(len(image), seed + 100, PARTS, copies=target if len(image) == size else None)
    law, kept = block_law(target, draft, image, depth, block_chain)
    assert law == target.law(depth + 1)
    assert kept >= kept_token_by_token(target, draft, image, depth)


@pytest.mark.parametrize("seed", range(4))
def test_block_chain_of_three_is_exact_and_keeps_more(seed: int) -> None:
    target, draft = Table(4, seed, PARTS), Table(3, seed + 100, PARTS)
    law, kept = block_law(target, draft, [0, 1, 3], 3, block_chain)
    assert law == target.law(4)
    assert kept > kept_token_by_token(target, draft, [0, 1, 3], 3) > 0


def kept_token_by_token(target: Table, draft: Table, image: list[int], depth: int) -> Fraction:
    """Expected drafts that `sampled_chain` keeps: the product of min(1, p/q), summed up."""
    kept, alive = Fraction(0), {(): Fraction(1)}
    for _ in range(depth):
        alive = {
            (*tokens, image[j]): share * min(a, target.row(tokens)[image[j]])
            for tokens, share in alive.items()
            for j, a in enumerate(draft.row(tokens))
        }
        kept += sum(alive.values())
    return kept


@pytest.mark.parametrize("change", ["draft law", "vocabulary", "residual", "coin"])
def test_wrong_block_laws_are_caught(change: str) -> None:
    def wrong(
        ids: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor, d2t: Tensor
    ) -> ChainAccept:
        if change == "draft law":
            return block_chain(ids, torch.full_like(q, 1 / q.shape[2]), p, coins, final, d2t=d2t)
        if change == "vocabulary":
            return block_chain(ids, q, p, coins, final, d2t=torch.zeros_like(d2t))
        if change == "coin":
            return block_chain(ids, q, p, coins[:, :1].expand_as(coins), final, d2t=d2t)
        right = block_chain(ids, q, p, coins, final, d2t=d2t)
        row = p[torch.arange(len(p)), right.num_accepted]
        return right._replace(bonus=inverse_cdf(row, final))

    tables = [(Table(4, s, PARTS), Table(2, s + 100, PARTS)) for s in range(8)]
    caught = [block_law(t, d, [1, 3], 2, wrong)[0] != t.law(3) for t, d in tables]
    assert sum(caught) >= 4  # of 8


def test_block_law_is_constant_on_its_cells() -> None:
    """The formulas of the test know every breakpoint: just inside a cell's ends nothing changes."""
    tried = 0
    for seed in range(6):
        target, draft = Table(4, seed, PARTS), Table(3, seed + 100, PARTS)
        image = [0, 1, 3]
        for ids in itertools.product(range(3), repeat=2):
            tokens = tuple(image[i] for i in ids)
            q = [draft.row(tokens[:k]) for k in range(2)]
            if not all(row[i] for row, i in zip(q, ids, strict=True)):
                continue
            passes, residuals = block_passes(target, draft, image, ids)
            shares = [[x / sum(r) for x in r] for r in residuals if sum(r)]
            edges = [*([e] for e in passes), [e for r in shares for e in itertools.accumulate(r)]]
            p = tensor([target.row(tokens[:k]) for k in range(3)])
            ends = []
            for inside in (Fraction(1, 10**9), Fraction(1, 2), 1 - Fraction(1, 10**9)):
                coins, _ = cells(edges, inside)
                rows = [x.expand(len(coins), -1, -1) for x in (tensor(q), p)]
                drafts = torch.tensor(ids).expand(len(coins), -1)
                d2t = torch.tensor(image) - torch.arange(3)
                ends.append(block_chain(drafts, *rows, coins[:, :2], coins[:, 2], d2t=d2t))
            for end in ends[1:]:
                assert torch.equal(end.num_accepted, ends[0].num_accepted)
                assert torch.equal(end.bonus, ends[0].bonus)
            tried += len(ends[0].bonus)
    assert tried > 300


def wrong_no_subtraction(
    draft_ids: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor, d2t: Tensor
) -> ChainAccept:
    """A refused draft is replaced from p instead of (p - q)+."""
    num_accepted = sampled_chain(draft_ids, q, p, coins, final, d2t=d2t).num_accepted
    row = p[torch.arange(len(p)), num_accepted]
    return ChainAccept(num_accepted, inverse_cdf(row, final))


def wrong_draft_law(
    draft_ids: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor, d2t: Tensor
) -> ChainAccept:
    """The test knows another q than the drafts were drawn from."""
    other = torch.full_like(q, 1 / q.shape[-1])
    return sampled_chain(draft_ids, other, p, coins, final, d2t=d2t)


def wrong_vocabulary(
    draft_ids: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor, d2t: Tensor
) -> ChainAccept:
    """Draft ids taken for target ids."""
    return sampled_chain(draft_ids, q, p, coins, final, d2t=torch.zeros_like(d2t))


def wrong_shared_coin(
    draft_ids: Tensor, q: Tensor, p: Tensor, coins: Tensor, final: Tensor, d2t: Tensor
) -> ChainAccept:
    """The final draw reuses the coin of the first test."""
    return sampled_chain(draft_ids, q, p, coins, coins[:, 0], d2t=d2t)


WRONG = [wrong_no_subtraction, wrong_draft_law, wrong_vocabulary, wrong_shared_coin]


@pytest.mark.parametrize("law", WRONG)
def test_wrong_laws_are_caught(law: SampledChain) -> None:
    caught = [
        sampled_chain_law(Table(4, s), Table(2, s + 100), [1, 3], 2, law) != Table(4, s).law(3)
        for s in range(8)
    ]
    assert sum(caught) >= 4  # of 8: one-hot rows leave nothing to get wrong


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 4, 6])
def test_sampled_chain_of_the_target_itself_keeps_every_draft(size: int, seed: int) -> None:
    """p == q: no draft with q > 0 is ever refused."""
    target = Table(size, seed)
    row = tensor([target.row(())])
    for token in range(size):
        if row[0, token] > 0:
            coins = coin_grid(2)
            accepted = sampled_chain(
                torch.full((len(coins), 1), token),
                row.expand(len(coins), 1, -1),
                row.expand(len(coins), 2, -1),
                coins[:, :1],
                coins[:, 1],
            )
            assert accepted.num_accepted.tolist() == [1] * len(coins)


def trees(num_nodes: int) -> Iterator[tuple[int, ...]]:
    """Every parent array with parents before children."""
    return ((-1, *rest) for rest in itertools.product(*(range(i) for i in range(1, num_nodes))))


def label(parents: tuple[int, ...], size: int, rng: random.Random) -> list[int]:
    """Random tokens, distinct among siblings."""
    pools = [rng.sample(range(size), size) for _ in parents]
    return [0] + [pools[parent].pop() for parent in parents[1:]]


def contexts(parents: tuple[int, ...], tokens: list[int]) -> list[Context]:
    found: list[Context] = [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        found.append((*found[parent], token))
    return found


def tree_law(
    target: Table,
    parents: tuple[int, ...],
    tokens: list[int],
    walk: Callable[..., TreeAccept] = deterministic_tree,
) -> Law:
    """Coins of inner nodes have breakpoints at quarters only; the final one keeps its cells.

    A leaf's coin is never spent, so any will do.
    """
    inner = sorted(set(parents[1:]))
    node_coins = torch.full((4 ** len(inner), len(parents)), 0.5, dtype=torch.float64)
    node_coins[:, inner] = coin_grid(len(inner), 4)
    final = coin_grid(1)[:, 0]
    coins = node_coins.repeat_interleave(CELLS, 0)
    batch = len(coins)
    where = contexts(parents, tokens)
    p = tensor([target.row(context) for context in where])
    out = walk(
        torch.tensor(tokens).expand(batch, -1),
        torch.tensor(parents).expand(batch, -1),
        p.expand(batch, -1, -1),
        coins,
        final.repeat(len(node_coins)),
    )
    last = out.path.gather(1, out.num_accepted[:, None])[:, 0]
    codes, counts = torch.stack([last, out.bonus], 1).unique(dim=0, return_counts=True)
    parts: Law = defaultdict(Fraction)
    for (node, bonus), count in zip(codes.tolist(), counts.tolist(), strict=True):
        parts[(*where[node], bonus)] += Fraction(count, batch)
    return parts


def ways_out(target: Table, parents: tuple[int, ...], tokens: list[int]) -> Law:
    """What the target itself says about the texts that leave the tree: a path, then no child of it.

    No such text is the beginning of another, and every text has one of them as its beginning, so a
    law over them is the target's iff each has the target's own probability.
    """
    where = contexts(parents, tokens)
    law: Law = {}
    for context in where:
        share = math.prod(
            (target.row(context[:i])[t] for i, t in enumerate(context)), start=Fraction(1)
        )
        for token, own in enumerate(target.row(context)):
            if (*context, token) not in where and share * own:
                law[*context, token] = share * own
    assert sum(law.values()) == 1
    return law


@pytest.mark.parametrize("nodes", range(1, 7))
def test_trees_are_exact(nodes: int) -> None:
    """All 154 trees of up to 6 nodes, over every vocabulary of up to 6 that has enough siblings."""
    tried = 0
    for parents in trees(nodes):
        rng = random.Random(str(parents))
        siblings = max(parents.count(i) for i in range(nodes))
        for size in range(max(2, siblings), 7):
            target = Table(size, rng.randrange(100))
            tokens = label(parents, size, rng)
            law = tree_law(target, parents, tokens)
            assert law == ways_out(target, parents, tokens), (parents, tokens)
            tried += 1
    assert tried == {1: 5, 2: 5, 3: 10, 4: 29, 5: 111, 6: 528}[nodes]


def wrong_children_kept(
    tokens: Tensor, parents: Tensor, p: Tensor, coins: Tensor, final: Tensor
) -> TreeAccept:
    """The bonus may be a child that has just been refused."""
    right = deterministic_tree(tokens, parents, p, coins, final)
    last = right.path.gather(1, right.num_accepted[:, None])[:, 0]
    return right._replace(bonus=inverse_cdf(p[torch.arange(len(p)), last], final))


def wrong_shared_tree_coin(
    tokens: Tensor, parents: Tensor, p: Tensor, coins: Tensor, final: Tensor
) -> TreeAccept:
    """All nodes share the root's coin."""
    return deterministic_tree(tokens, parents, p, coins[:, :1].expand_as(coins), final)


@pytest.mark.parametrize("walk", [wrong_children_kept, wrong_shared_tree_coin])
def test_wrong_tree_laws_are_caught(walk: Callable[..., TreeAccept]) -> None:
    parents, tokens = (-1, 0, 0, 1, 1), [0, 1, 2, 0, 3]
    tables = [Table(4, s) for s in range(8)]
    caught = [
        tree_law(table, parents, tokens, walk) != ways_out(table, parents, tokens)
        for table in tables
    ]
    assert sum(caught) >= 4  # of 8: one-hot rows leave nothing to get wrong


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_deterministic_chain_is_the_tree_of_one_branch(depth: int, seed: int) -> None:
    """Equal coin by coin to the tree walk, and to sampled drafts with a one-hot q."""
    target, rng = Table(5, seed), random.Random(seed)
    tokens = [rng.randrange(5) for _ in range(depth)]
    p = tensor([target.row(tuple(tokens[:k])) for k in range(depth + 1)])
    coins = coin_grid(depth + 1)
    batch = len(coins)
    drafts, p = torch.tensor(tokens).expand(batch, -1), p.expand(batch, -1, -1)
    chain = deterministic_chain(drafts, p, coins[:, :-1], coins[:, -1])
    tree = deterministic_tree(
        torch.cat([torch.zeros(batch, 1, dtype=torch.int64), drafts], 1),
        torch.arange(-1, depth).expand(batch, -1),
        p,
        torch.cat([coins[:, :-1], torch.zeros(batch, 1)], 1),
        coins[:, -1],
    )
    one_hot = torch.nn.functional.one_hot(drafts, 5).double()
    sampled = sampled_chain(drafts, one_hot, p, coins[:, :-1], coins[:, -1])
    for other in (tree, sampled):
        assert torch.equal(chain.num_accepted, other.num_accepted)
        assert torch.equal(chain.bonus, other.bonus)


def test_laws_are_constant_on_each_cell() -> None:
    """Just inside both ends of every cell a law gives what it gives at the midpoint."""
    inside = 0.5 / CELLS - 1e-9
    coins = coin_grid(3)
    for seed in range(8):
        target, draft, image = Table(4, seed), Table(2, seed + 100), [1, 3]
        d2t = torch.tensor(image) - torch.arange(2)
        for ids in itertools.product(range(2), repeat=2):
            tokens = tuple(image[i] for i in ids)
            q = tensor([draft.row(tokens[:k]) for k in range(2)])
            p = tensor([target.row(tokens[:k]) for k in range(3)])
            batch = len(coins)
            results = [
                sampled_chain(
                    torch.tensor(ids).expand(batch, -1),
                    q.expand(batch, -1, -1),
                    p.expand(batch, -1, -1),
                    (coins + shift)[:, :-1],
                    (coins + shift)[:, -1],
                    d2t=d2t,
                )
                for shift in (-inside, 0.0, inside)
            ]
            for result in results[1:]:
                assert torch.equal(result.num_accepted, results[0].num_accepted)
                assert torch.equal(result.bonus, results[0].bonus)


@pytest.mark.parametrize("seed", range(6))
def test_recorded_text_gives_the_expected_accept_length(seed: int) -> None:
    """Over every text of K tokens, by its probability: exactly what the law accepts on average.

    Drawn drafts stay along x_1..x_k with probability prod(min(p, q)); a child of a fixed tree is
    entered with probability p.
    """
    steps, size = 3, 3
    target, drafter = Table(size, seed), Table(size, seed + 100, copies=Table(size, seed))
    children = {
        context: set(random.Random(f"{seed}{context}").sample(range(size), 2))
        for length in range(steps)
        for context in itertools.product(range(size), repeat=length)
    }
    drawn, in_tree = [Fraction(0)] * steps, [Fraction(0)] * steps
    for k in range(steps):
        for text in itertools.product(range(size), repeat=k + 1):
            pairs = [(text[:i], x) for i, x in enumerate(text)]
            drawn[k] += math.prod(min(target.row(c)[x], drafter.row(c)[x]) for c, x in pairs)
            if all(x in children[c] for c, x in pairs):
                in_tree[k] += math.prod(target.row(c)[x] for c, x in pairs)

    texts = target.law(steps)
    weights = torch.tensor([float(weight) for weight in texts.values()], dtype=torch.float64)
    for offered_by, expected in (("drawn", drawn), ("tree", in_tree)):
        offered, recorded = torch.zeros(2, steps, len(texts), dtype=torch.float64)
        for column, text in enumerate(texts):
            for k, x in enumerate(text):
                p, q = target.row(text[:k]), drafter.row(text[:k])
                if offered_by == "drawn":
                    offered[k, column] = float(sum(map(min, p, q)))
                    recorded[k, column] = float(min(Fraction(1), q[x] / p[x]))
                else:
                    offered[k, column] = float(sum(p[c] for c in children[text[:k]]))
                    recorded[k, column] = x in children[text[:k]]
        found = [
            sum(
                weight
                * expected_accept_length(offered[:, i : i + 1], recorded[:, i : i + 1]).accepted[k]
                for i, weight in enumerate(weights.tolist())
            )
            for k in range(steps)
        ]
        assert found == pytest.approx([float(share) for share in expected], abs=1e-12)
        together = expected_accept_length(offered, recorded)
        assert together.num_rounds == len(texts)
