"""tree_step and tree_build draw the tree that `eagle3_core.tree.grow_tree` draws, bit for bit."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from eagle3_core.tree import Frontier as PlainFrontier
from eagle3_core.tree import TreeShape, ancestor_words, grow_tree, top
from eagle3_serve.ops.draft_head import Proposals
from eagle3_serve.ops.tree_attention import Segments
from eagle3_serve.ops.tree_build import Tree
from eagle3_serve.ops.tree_build import reference as plain_build
from eagle3_serve.ops.tree_step import Frontier, Scored
from eagle3_serve.ops.tree_step import reference as plain_step

PAGE = 4
HIDDEN = 5


def segments_of(past: list[int], rows: int) -> Segments:
    """Pages in no order, the last request's last page missing."""
    batch, count = len(past), -(-(max([*past, 0]) + rows) // PAGE)
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(batch))
    pages = order.view(batch, count).int()
    if batch:
        pages[-1, -1] = -1
    empty = torch.empty(batch, dtype=torch.int32)
    own = torch.tensor(past, dtype=torch.int32)
    return Segments(empty, empty, own, pages, PAGE, rows, count * PAGE)


def slots_of(segments: Segments, b: int, places: list[int]) -> list[int]:
    pages = segments.pages[b].tolist()
    pages = [pages[i // PAGE] if i // PAGE < len(pages) else -1 for i in places]
    return [p * PAGE + i % PAGE if p >= 0 else -1 for p, i in zip(pages, places, strict=True)]


class Draft:
    """Logits that hang on a row's whole path, whole numbers so that ties are common."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.d2t = torch.arange(vocab) * 2
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randint(-2, 3, (7, vocab), generator=generator).float()
        self._turn = torch.randint(1, 50, (3 * vocab,), generator=generator)

    def states(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What a row feeds back, from what it took in: [R,H], [R] -> [R,H]."""
        return (states * 3 + self._turn[tokens, None]) % 101

    def logits(self, states: Tensor) -> Tensor:
        return self._pool[states[:, 0].long() % len(self._pool)]

    def proposals(self, states: Tensor, k: int) -> Proposals:
        logits = self.logits(states)
        values, ids = top(logits, k)
        return Proposals(ids + self.d2t[ids], ids, values - logits.logsumexp(-1, keepdim=True))


def grow(
    step: ModuleType, build: ModuleType, draft: Draft, past: list[int], shape: TreeShape
) -> tuple[Tree, list[Frontier], Scored, Segments]:
    """Drafts as the engine does it, from roots 0, 1, 2 ..."""
    batch, k = len(past), shape.topk
    segments = segments_of(past, shape.num_nodes)
    scored = Scored.empty(batch, shape, torch.device("cpu"))
    roots = torch.arange(batch)
    states = draft.states(torch.ones(batch, HIDDEN), roots)
    frontier, frontiers = None, []
    for _ in range(shape.num_speculative_tokens):
        frontier = step.tree_step(draft.proposals(states, k), states, frontier, scored, segments)
        frontiers.append(frontier)
        states = draft.states(frontier.states.flatten(0, 1), frontier.tokens.flatten())
    return build.tree_build(roots, scored, segments, shape), frontiers, scored, segments


SHAPES = [
    TreeShape(1, 1),
    TreeShape(4, 1),
    TreeShape(1, 5, 3),
    TreeShape(2, 2),
    TreeShape(5, 3, 16),
    TreeShape(4, 4, 12),
    TreeShape(3, 7, 64),
    TreeShape(7, 10, 60),
    TreeShape(3, 16, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("past", [[3, 0, 6], [9]], ids=len)
def test_the_tree_is_that_of_grow_tree(shape: TreeShape, past: list[int]):
    draft, k = Draft(max(12, shape.topk), seed=len(past)), shape.topk
    tree, frontiers, scored, segments = grow(plain_step, plain_build, draft, past, shape)
    expected: list[PlainFrontier] = []
    roots = torch.arange(len(past))
    states = draft.states(torch.ones(len(past), HIDDEN), roots)
    at = [states.unsqueeze(1)]

    def expand(frontier: PlainFrontier) -> Tensor:
        expected.append(frontier)
        rows = torch.arange(len(past)).unsqueeze(1)
        fed = at[-1][rows, frontier.parent_rows]
        at.append(draft.states(fed.flatten(0, 1), frontier.tokens.flatten()).view_as(fed))
        assert torch.equal(frontiers[frontier.depth - 1].states, fed)
        return draft.logits(at[-1].flatten(0, 1)).unflatten(0, (len(past), k))

    grown = grow_tree(roots, draft.logits(states), expand, shape, draft.d2t)
    assert torch.equal(tree.tokens, grown.tokens)
    assert torch.equal(tree.parents, grown.parents)
    assert torch.equal(tree.words, ancestor_words(grown.parents)[..., 0])
    assert torch.equal(tree.positions, segments.past[:, None] + grown.depths)
    assert tree.positions.dtype == torch.int32
    assert torch.equal(
        top(scored.scores, shape.num_nodes - 1)[0].sort(1)[0], grown.scores[:, 1:].sort(1)[0]
    )
    for frontier, own in zip(frontiers, expected, strict=False):
        d = frontier.depth
        assert torch.equal(frontier.tokens, own.tokens)
        assert torch.equal(frontier.scores, own.scores)
        assert torch.equal(scored.tokens.gather(1, frontier.nodes), own.tokens)
        numbers = torch.arange(d) * k + own.lineage
        assert torch.equal(frontier.words, (torch.ones_like(numbers) << numbers).sum(-1))
        assert torch.equal(frontier.positions, (segments.past[:, None] + d - 1).expand(-1, k))
        assert frontier.positions.dtype == torch.int32
        for b, held in enumerate(past):
            places = [held + (d - 1) * k + r for r in range(k)]
            assert frontier.slots[b].tolist() == slots_of(segments, b, places)
    for b, held in enumerate(past):
        places = [held + n for n in range(shape.num_nodes)]
        assert tree.slots[b].tolist() == slots_of(segments, b, places)


def test_no_request_at_all():
    shape = TreeShape(3, 2, 6)
    tree, frontiers, _, _ = grow(plain_step, plain_build, Draft(12, seed=0), [], shape)
    assert [x.shape for x in tree] == [(0, 6)] * 5
    assert [x.shape for x in frontiers[-1][1:]] == [(0, 2)] * 6 + [(0, 2, HIDDEN)]
