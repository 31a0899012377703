"""Block verification in the engine: coin by coin what its formulas give on whole forwards.

That the law emits the target's distribution is proven with fractions in the core's tests; here the
engine hands it the right rows, the law the drafts were drawn from, and coins of no other round.
"""

from typing import Any

import pytest
import torch

from eagle3_core import CacheContext, UserError
from eagle3_core.accept import block_chain, inverse_cdf
from eagle3_core.target import capture_boundaries
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams, coin, processed_probs

PROMPTS = [[3, 9, 1, 4], [7], [11, 2, 9] * 3, [5, 5]]
COUNT = 10


def _coins(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _reference(target: Any, draft: Any, prompt: list[int], params: Any, k: int) -> list[int]:
    """The same rounds from whole forwards, without any cache."""
    tokens, seed = list(prompt), params.seed
    while (left := len(prompt) + COUNT - len(tokens)) > 0:
        start, depth = len(tokens), min(k, left - 1) if len(tokens) > len(prompt) else 0
        with capture_boundaries(target.model, draft.config.aux_layer_ids) as capture:
            logits = target.model(torch.tensor([tokens])).logits[0, -1]
            aux = torch.cat(capture.states(), -1)[:, :-1]
        if not depth:
            choice = inverse_cdf(processed_probs(logits, params), _coins([coin(seed, start)])[0])
            tokens.append(int(choice))
            continue
        cache, x, following = CacheContext(), draft.project(aux), torch.tensor([tokens[1:]])
        positions, ids, q = torch.arange(start - 1)[None], [], []
        for step in range(depth):
            hidden = draft(draft.embed(following), x, positions, cache)[:, -1:]
            q.append(processed_probs(draft.logits(hidden)[0, 0], params))
            ids.append(int(inverse_cdf(q[-1], _coins([coin(seed, start, f" draft {step}")])[0])))
            following, x = draft.to_target_ids(torch.tensor([[ids[-1]]])), draft.feedback(hidden)
            positions = positions[:, -1:] + 1
        drafts = draft.to_target_ids(torch.tensor(ids)).tolist()
        rows = target.model(torch.tensor([tokens + drafts])).logits[:, -depth - 1 :]
        accepted = block_chain(
            torch.tensor([ids]),
            torch.stack(q)[None],
            processed_probs(rows, params),
            _coins([coin(seed, start, f" accept {i}") for i in range(depth)]),
            _coins([coin(seed, start, " final")])[0],
            draft.d2t if draft.config.is_pruned else None,
        )
        tokens += [*drafts[: int(accepted.num_accepted)], int(accepted.bonus)]
    return tokens[len(prompt) :]


@pytest.mark.parametrize("draft_vocab_size", [48, 30])
def test_equals_its_formulas_in_every_batch(pairs: Any, draft_vocab_size: int) -> None:
    target = pairs.target(torch.float64)
    draft = pairs.draft(target, draft_vocab_size=draft_vocab_size)
    choices = ({}, {"temperature": 0.6}, {"top_k": 9, "temperature": 2.0}, {"top_p": 0.8})
    params = [
        SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=i, **choices[i % 4])
        for i in range(8)
    ]
    prompts = [PROMPTS[i // 2] for i in range(8)]
    for k in (1, 3):
        expected = [
            _reference(target, draft, prompt, own, k)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        for batch in (1, 5):
            config = EngineConfig(
                num_speculative_tokens=k, max_batch_size=batch, acceptance="block"
            )
            outputs, figures = generate(Engine(target, draft, config), prompts, params)
            assert [output.token_ids for output in outputs] == expected
            assert 0 < figures["num_accepted_tokens"] < figures["num_drafted_tokens"]


def test_greedy_requests_are_not_concerned(pairs: Any) -> None:
    target = pairs.target()
    draft = pairs.draft(target)
    config = EngineConfig(num_speculative_tokens=2, acceptance="block")
    params = SamplingParams(max_tokens=12, temperature=0)
    outputs, _ = generate(Engine(target, draft, config), PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == pairs.greedy(target, prompt, 12)


def test_trees_are_refused() -> None:
    with pytest.raises(UserError, match="'block' with topk 2"):
        EngineConfig(acceptance="block", topk=2)
    with pytest.raises(UserError, match="acceptance is 'typical'"):
        EngineConfig(acceptance="typical")
