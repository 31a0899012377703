"""The engine's drafts are those of the plain module run over the target's true states."""

from typing import Any

import pytest
import torch

from eagle3_core import CacheContext
from eagle3_core.attention import TreeContext
from eagle3_core.target import capture_boundaries
from eagle3_core.tree import TreeShape, draft_tree
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.proposal import Proposal
from eagle3_serve.sampling import SamplingParams

PROMPTS = [[3, 9, 1, 4], [7], [11, 2, 30] * 5]


def _reference(target: Any, draft: Any, tokens: list[int], shape: TreeShape) -> Proposal:
    """What is proposed after `tokens`, from one whole forward of the target without any cache."""
    ids = torch.tensor([tokens])
    with capture_boundaries(target.model, draft.config.aux_layer_ids) as capture:
        target.model(ids)
        aux = torch.cat(capture.states(), -1)[:, :-1]
    cache = CacheContext(draft.config.sliding_window)
    positions = torch.arange(len(tokens) - 1)[None]
    hidden = draft(draft.embed(ids[:, 1:]), draft.project(aux), positions, cache)[:, -1]
    tree = draft_tree(draft, ids[:, -1], hidden, positions[:, -1], TreeContext(cache), shape)
    return Proposal(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist())


@pytest.mark.parametrize("shape", [TreeShape(4), TreeShape(3, 3, 10)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"draft_vocab_size": 30, "residual": "normed", "feedback": "post_norm"},
        {"num_hidden_layers": 2, "aux_norm": "per_layer", "attention_bias": True},
        {"num_hidden_layers": 3, "layer_input": "every", "qk_norm": True},
        {"sliding_window": 5, "num_aux_hidden_states": 1, "aux_layer_ids": (4,)},
    ],
    ids=["plain", "pruned", "two layers", "every layer", "window"],
)
def test_drafts_equal_the_plain_modules(
    pairs: Any, choices: dict[str, Any], shape: TreeShape
) -> None:
    target = pairs.target()
    draft = pairs.draft(target, **choices)
    config = EngineConfig(
        num_speculative_tokens=shape.num_speculative_tokens,
        topk=shape.topk,
        num_verify_tokens=shape.num_nodes,
    )
    engine = Engine(target, draft, config)
    drafted: list[tuple[list[int], Proposal]] = []
    propose = engine._drafter.propose

    def record(requests: Any, depths: Any, shape: Any) -> list[Proposal]:
        proposals = propose(requests, depths, shape)
        pairs = zip(requests, proposals, depths, strict=True)
        drafted.extend(
            (list(r.tokens), p) for r, p, depth in pairs if depth == shape.num_speculative_tokens
        )
        return proposals

    engine._drafter.propose = record  # looks on, changes nothing
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(drafted) > 20
    for tokens, proposal in drafted:
        expected = _reference(target, draft, tokens, shape)
        assert list(proposal.tokens) == list(expected.tokens)
        assert list(proposal.parents) == list(expected.parents)


def test_beyond_the_drafts_own_positions_nothing_is_drafted(pairs: Any) -> None:
    """The last slot that a proposal reads is the draft's last position; the text is the same."""
    target = pairs.target()
    draft = pairs.draft(target, max_position_embeddings=12)
    for shape in ({}, {"topk": 2, "num_verify_tokens": 6}):
        engine = Engine(target, draft, EngineConfig(num_speculative_tokens=3, **shape))
        deepest: dict[int, int] = {}
        propose = engine._drafter.propose

        def record(
            requests: Any, *rest: Any, propose: Any = propose, deepest: Any = deepest
        ) -> Any:
            proposals = propose(requests, *rest)
            deepest.update((len(requests[0].tokens), p.depth) for p in proposals)
            return proposals

        engine._drafter.propose = record
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        (output,), _ = generate(engine, [PROMPTS[0]], params)
        assert output.token_ids == pairs.greedy(target, PROMPTS[0], 24)[:24]
        for length, depth in list(deepest.items())[1:]:  # the first round ran the prompt
            # The drafts of depth d are read off slot length - 3 + d.
            deepest_possible = min(3, max(0, 11 - (length - 3)), 28 - length - 1)
            assert depth == deepest_possible if not shape else depth <= deepest_possible, length
        assert {0, 2} <= set(deepest.values())
