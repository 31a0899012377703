"""Greedy acceptance, draws from coins, and counting: small cases worked out by hand."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_core.accept import (
    AcceptCounts,
    count_accepted,
    deterministic_chain,
    deterministic_tree,
    greedy_chain,
    greedy_tree,
    inverse_cdf,
    sampled_chain,
    simulated_accept_length,
)

GOLDEN = Path(__file__).parent / "golden" / "ea_base"
ARGMAX = ".accept.target_argmax"
ALMOST_ONE = 1 - 2**-53  # the largest fp64 coin


def test_greedy_chain_against_a_loop() -> None:
    """Every pair of chains of 3 over 2 tokens, every number of valid drafts."""
    rows = list(itertools.product(*[range(2)] * 7, range(4)))
    table = torch.tensor(rows)
    drafts, targets, valid = table[:, :3], table[:, 3:7], table[:, 7]
    got = greedy_chain(drafts, targets, valid)
    for row, n, bonus in zip(rows, got.num_accepted.tolist(), got.bonus.tolist(), strict=True):
        expected = 0
        while expected < row[7] and row[expected] == row[3 + expected]:
            expected += 1
        assert (n, bonus) == (expected, row[3 + expected])
    full = greedy_chain(drafts, targets)
    assert torch.equal(
        full.num_accepted, greedy_chain(drafts, targets, torch.full_like(valid, 3))[0]
    )


def test_greedy_chain_without_drafts_is_plain_decoding() -> None:
    got = greedy_chain(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[5], [7]]))
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([0, 0], [5, 7])


def walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], int]:
    """The greedy walk in plain Python."""
    path = [0]
    while True:
        node = path[-1]
        hit = [
            i for i, parent in enumerate(parents) if parent == node and tokens[i] == targets[node]
        ]
        if not hit:
            return path, targets[node]
        path.append(hit[0])


def random_trees(count: int, nodes: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, parents, targets [count, nodes]; siblings distinct, last nodes sometimes padding."""
    rng = random.Random(0)
    all_tokens, all_parents, all_targets = [], [], []
    for _ in range(count):
        used = rng.randint(1, nodes)
        tokens, parents = [0], [-1]
        pools = [rng.sample(range(size), size)]
        for i in range(1, used):
            parents.append(rng.choice([j for j in range(i) if pools[j]]))
            tokens.append(pools[parents[i]].pop())
            pools.append(rng.sample(range(size), size))
        all_tokens.append(tokens + [rng.randrange(size) for _ in range(nodes - used)])
        all_parents.append(parents + [-1] * (nodes - used))
        all_targets.append([rng.randrange(size) for _ in range(nodes)])
    return torch.tensor(all_tokens), torch.tensor(all_parents), torch.tensor(all_targets)


def test_greedy_tree_against_a_walk() -> None:
    tokens, parents, targets = random_trees(400, nodes=9, size=3)
    got = greedy_tree(tokens, parents, targets)
    lengths = set()
    for b in range(len(tokens)):
        path, bonus = walk(tokens[b].tolist(), parents[b].tolist(), targets[b].tolist())
        assert got.path[b].tolist() == path + [-1] * (9 - len(path))
        assert (int(got.num_accepted[b]), int(got.bonus[b])) == (len(path) - 1, bonus)
        lengths.add(len(path))
    assert lengths >= {1, 2, 3, 4, 5}  # the sample reaches deep paths


def test_greedy_tree_against_the_reference_implementation() -> None:
    """Trees drawn and verified by SafeAILab/EAGLE: 4 trees, 12 sets of target answers each."""
    given = load_file(GOLDEN / "inputs.safetensors")
    expected = load_file(GOLDEN / "expected.safetensors")
    rounds = [key.removesuffix(ARGMAX) for key in given if key.endswith(ARGMAX)]
    assert len(rounds) == 4
    for key in rounds:
        mask = expected[f"{key}.tree_mask"].bool()
        depth = mask.sum(1)
        # a node's parent is its deepest ancestor
        above = (mask & ~torch.eye(len(mask), dtype=torch.bool)) * depth
        parents = torch.where(depth == 1, -1, above.argmax(1))
        targets = given[key + ARGMAX]
        batch = len(targets)
        tokens = expected[f"{key}.draft_tokens"].expand(batch, -1)
        nodes = expected[f"{key}.accept.nodes"]  # as wide as the tree is deep
        max_depth = nodes.shape[1] - 1
        got = greedy_tree(tokens, parents.expand(batch, -1), targets, max_depth)
        accepted = expected[f"{key}.accept.accept_length"]
        assert got.num_accepted.tolist() == accepted.tolist()
        assert got.bonus.tolist() == expected[f"{key}.accept.next_token"].tolist()
        on_path = torch.arange(nodes.shape[1]) <= accepted[:, None]
        assert torch.equal(got.path[on_path], nodes[on_path].long())


def test_greedy_tree_is_sampling_from_one_hot_rows() -> None:
    tokens, parents, targets = random_trees(200, nodes=9, size=3)
    p = torch.nn.functional.one_hot(targets, 3).double()
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(tokens.shape, dtype=torch.float64, generator=generator)
    greedy = greedy_tree(tokens, parents, targets)
    sampled = deterministic_tree(tokens, parents, p, coins, coins[:, 0])
    for a, b in zip(greedy, sampled, strict=True):
        assert torch.equal(a, b)


def test_a_shorter_walk_stays_exact() -> None:
    """max_depth below the tree's depth: children not tested are not excluded from the bonus."""
    tokens, parents = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]])
    p = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
    coins, final = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    got = deterministic_tree(tokens, parents, p, coins, final, max_depth=1)
    assert (got.num_accepted.tolist(), got.bonus.tolist(), got.path.tolist()) == (
        [1],
        [2],
        [[0, 1]],
    )
    got = deterministic_tree(tokens, parents, p, coins, final, max_depth=2)
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([2], [0])


def test_coin_on_a_breakpoint_belongs_to_the_cell_above() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).expand(5, -1)
    coins = torch.tensor([0.0, 0.25, 0.5, 0.75, ALMOST_ONE], dtype=torch.float64)
    assert inverse_cdf(weights, coins).tolist() == [1, 3, 3, 4, 4]
    # acceptance is half-open in the same way: probability 0.25 keeps coins 0 <= u < 0.25
    p = torch.tensor([0.25, 0.75]).expand(3, 2, 2)
    drafts, final = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
    coins = torch.tensor([[0.0], [0.25 - 2**-54], [0.25]], dtype=torch.float64)
    assert deterministic_chain(drafts, p, coins, final).num_accepted.tolist() == [1, 1, 0]
    q = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    assert sampled_chain(drafts, q, p, coins, final).num_accepted.tolist() == [1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_zero_weight_is_never_drawn(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 50, generator=generator).pow(8)
    weights = weights * (torch.rand(200, 50, generator=generator) < 0.3)
    weights[:, 0] = 0
    weights[:, 30:] = 0
    weights[:, 7] += 1e-3  # no row is all zero
    weights = (weights / weights.sum(1, keepdim=True)).to(dtype)
    cumulative = (
        weights.cumsum(1, dtype=torch.float64) / weights.sum(1, dtype=torch.float64)[:, None]
    )
    for coins in (*cumulative.unbind(1), torch.zeros(200), torch.full((200,), ALMOST_ONE)):
        drawn = inverse_cdf(weights, coins.double().clamp(max=ALMOST_ONE))
        assert (weights.gather(1, drawn[:, None]) > 0).all()
    # a coin of exactly 1, which a careless generator may give, is still safe
    assert (weights.gather(1, inverse_cdf(weights, torch.ones(200))[:, None]) > 0).all()


def test_no_residual_left_by_rounding_falls_back_to_the_target() -> None:
    """p <= q everywhere by rounding, and a draft refused all the same: p itself is drawn from."""
    p = torch.tensor([[[0.5 - 2**-20, 0.5 - 2**-20, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    coins, final = torch.tensor([[ALMOST_ONE]]).double(), torch.tensor([ALMOST_ONE]).double()
    got = sampled_chain(torch.tensor([[0]]), q, p, coins, final)
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([0], [1])
    one = torch.tensor([[[0.0, 1 - 2**-20, 0.0]] * 2])
    got = deterministic_chain(torch.tensor([[1]]), one, coins, final)
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([0], [1])


def test_rows_with_fewer_drafts_draw_the_bonus_from_p() -> None:
    """Row i has i valid drafts; what lies past them must not be excluded or subtracted."""
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).expand(3, 3, 2)
    q = torch.tensor([1.0, 0.0]).expand(3, 2, 2)
    drafts, valid = torch.zeros(3, 2, dtype=torch.int64), torch.arange(3)
    coins, final = torch.full((3, 2), 0.5).double(), torch.full((3,), 0.5).double()
    for got in (
        sampled_chain(drafts, q, p, coins, final, num_drafts=valid),
        deterministic_chain(drafts, p, coins, final, num_drafts=valid),
    ):
        assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([0, 1, 2], [0, 0, 0])


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(8, 4, 6, generator=generator).softmax(-1)
    q = torch.rand(8, 3, 3, generator=generator).softmax(-1)
    drafts = torch.randint(0, 3, (8, 3), generator=generator)
    coins = torch.rand(8, 3, generator=generator, dtype=torch.float64)
    final = torch.rand(8, generator=generator, dtype=torch.float64)
    d2t, valid = torch.tensor([1, 1, 3]), torch.tensor([3, 0, 1, 2, 3, 3, 3, 2])
    whole = sampled_chain(drafts, q, p, coins, final, d2t=d2t, num_drafts=valid)
    for b in range(8):
        one = [x[b : b + 1] for x in (drafts, q, p, coins, final)]
        single = sampled_chain(*one, d2t=d2t, num_drafts=valid[b : b + 1])
        assert single.num_accepted == whole.num_accepted[b]
        assert single.bonus == whole.bonus[b]
    assert len(set(whole.num_accepted.tolist())) > 1


def test_simulated_accept_length_by_hand() -> None:
    """Four slots, K = 3. The last slot lacks a target at step 2, so it is no round at all."""
    correct = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
    counted = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    got = simulated_accept_length(correct, counted)
    assert got == AcceptCounts(3, (2, 1, 1))
    assert got.per_position == (2 / 3, 1 / 3, 1 / 3)
    assert got.accept_length == 1 + 4 / 3
    # marginals are 2/3, 2/3, 1: their product would say 1 + 2/3 + 4/9 + 4/9
    assert got.accept_length != pytest.approx(1 + 2 / 3 + 4 / 9 + 4 / 9)


def test_simulated_and_served_counts_agree() -> None:
    """The mean of what greedy_chain accepts is the simulated accept length, slot by slot."""
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, 2, (5, 7, 3), generator=generator)
    targets = torch.randint(0, 2, (5, 7, 4), generator=generator)
    correct = (drafts == targets[..., :3]).movedim(-1, 0)
    simulated = simulated_accept_length(correct, torch.ones(3, 5, 7, dtype=torch.bool))
    served = greedy_chain(drafts.flatten(0, 1), targets.flatten(0, 1)).num_accepted
    assert simulated == count_accepted(served, 3)
    assert simulated.accept_length == 1 + served.double().mean()


def test_counts_add_up_before_they_are_divided() -> None:
    large, small = count_accepted(torch.tensor([2, 2, 2]), 2), count_accepted(torch.tensor([0]), 2)
    total = large + small
    assert total == AcceptCounts(4, (3, 3))
    assert total.accept_length == 2.5  # the average of the averages, 3 and 1, would be 2
    with pytest.raises(ValueError, match="zip"):
        _ = total + count_accepted(torch.tensor([0]), 3)


def test_no_rounds_have_no_accept_length() -> None:
    none = simulated_accept_length(
        torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    )
    assert none == AcceptCounts(0, (0, 0))
    assert none.accept_length is None
    assert none.per_position is None
