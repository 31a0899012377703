"""Trees of drafts as the engine holds them, beside the core's laws and masks."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.accept import greedy_tree
from eagle3_core.tree import ancestor_mask
from eagle3_serve.proposal import Proposal


def random_proposal(rng: random.Random, nodes: int, size: int) -> Proposal:
    """Distinct siblings, less deep rows first."""
    depths, parents, tokens = [0], [], []
    for _ in range(nodes):
        free = [
            i
            for i, depth in enumerate(depths)
            if depth + 1 >= depths[-1] and sum(p == i for p in parents) < size
        ]
        parents.append(rng.choice(free))
        depths.append(depths[parents[-1]] + 1)
        taken = {t for t, p in zip(tokens, parents, strict=False) if p == parents[-1]}
        tokens.append(rng.choice([t for t in range(size) if t not in taken]))
    return Proposal(tokens, parents)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(2, 4))
def test_the_walk_is_the_cores(seed: int, nodes: int, size: int) -> None:
    rng = random.Random(seed)
    proposal = random_proposal(rng, nodes, size)
    choices = [rng.randrange(size) for _ in range(nodes + 1)]
    got = greedy_tree(
        torch.tensor([[-1, *proposal.tokens]]),
        torch.tensor([[-1, *proposal.parents]]),
        torch.tensor([choices]),
    )
    path = proposal.walk(choices)
    assert path == [node for node in got.path[0].tolist() if node >= 0]
    assert choices[path[-1]] == int(got.bonus)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 5))
def test_paths_depths_cuts_and_masks(seed: int, nodes: int, depth: int) -> None:
    proposal = random_proposal(random.Random(seed), nodes, 3)
    assert proposal.num_rows == nodes + 1
    assert proposal.depth == max(len(path) for path in proposal.paths)
    for row, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), 1):
        assert proposal.paths[row] == [*proposal.paths[parent], token]
    cut = proposal.cut(depth)
    assert cut.paths == [path for path in proposal.paths if len(path) <= depth]
    branches = proposal.branches(7, torch.device("cpu"))
    if list(proposal.parents) == list(range(nodes)):
        assert branches is None
    else:
        assert branches.positions.tolist() == [7 + len(path) for path in proposal.paths]
        parents = torch.tensor([[-1, *proposal.parents]])
        assert torch.equal(branches.visible, ancestor_mask(parents)[0])


def test_chains_walk_to_the_first_difference() -> None:
    chain = Proposal.chain([5, 6, 7])
    assert chain.depth == 3
    for choices, path in (
        ([5, 6, 7, 8], [0, 1, 2, 3]),
        ([5, 9, 7, 8], [0, 1]),
        ([1, 6, 7, 8], [0]),
    ):
        assert chain.walk(choices) == path
    assert Proposal().walk([3]) == [0]
    assert (Proposal().depth, Proposal().num_rows) == (0, 1)
