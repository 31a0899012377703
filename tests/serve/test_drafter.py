"""The engine's drafts are those of the plain module run over the target's true states."""

from typing import Any

import pytest
import torch

from eagle3_core import CacheContext
from eagle3_core.target import capture_boundaries
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams

PROMPTS = [[3, 9, 1, 4], [7], [11, 2, 30] * 5]
K = 4


def _reference(target: Any, draft: Any, tokens: list[int]) -> list[int]:
    """A chain of K after `tokens`, from one whole forward of the target without any cache."""
    ids = torch.tensor([tokens])
    with capture_boundaries(target.model, draft.config.aux_layer_ids) as capture:
        target.model(ids)
        aux = torch.cat(capture.states(), -1)[:, :-1]
    context = CacheContext(draft.config.sliding_window)
    x, following, chain = draft.project(aux), ids[:, 1:], []
    start = 0
    for _ in range(K):
        positions = torch.arange(start, start + following.shape[1])[None]
        hidden = draft(draft.embed(following), x, positions, context)[:, -1:]
        following = draft.to_target_ids(draft.logits(hidden).argmax(-1))
        x, start = draft.feedback(hidden), positions[0, -1].item() + 1
        chain.append(int(following))
    return chain


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
def test_chains_equal_the_plain_modules(pairs: Any, choices: dict[str, Any]) -> None:
    target = pairs.target()
    draft = pairs.draft(target, **choices)
    engine = Engine(target, draft, EngineConfig(num_speculative_tokens=K))
    chains: list[tuple[list[int], list[int]]] = []
    propose = engine._drafter.propose

    def record(requests: Any, depths: Any) -> list[list[int]]:
        drafted = propose(requests, depths)
        chains.extend((list(r.tokens), c) for r, c in zip(requests, drafted, strict=True))
        return drafted

    engine._drafter.propose = record  # looks on, changes nothing
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    drafted = [(tokens, chain) for tokens, chain in chains if chain]
    assert len(drafted) > 20
    for tokens, chain in drafted:
        assert chain == _reference(target, draft, tokens)[: len(chain)]
