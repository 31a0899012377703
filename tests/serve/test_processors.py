"""Logits under a request's parameters: transformers' own processors say what they should be."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle3_serve.processors import LogitsProcessor
from eagle3_serve.sampling import SamplingParams, processed_probs

V, EOS = 12, 11
tokens = st.lists(st.integers(0, V - 2), max_size=6)


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 3


def processor(params: SamplingParams, prompt: list[int]) -> LogitsProcessor:
    return LogitsProcessor(params, prompt, {EOS}, V, torch.device("cpu"))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    prompt=tokens.filter(bool),
    output=tokens,
    path=tokens,
    repetition=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    min_tokens=st.integers(0, 8),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, V]),
    top_p=st.sampled_from([0.3, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
def test_every_row_is_what_transformers_makes_of_its_own_context(
    seed: int,
    prompt: list[int],
    output: list[int],
    path: list[int],
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    logits = rows(seed, len(path) + 1)
    own = processor(params, prompt)
    own.advance(output)
    paths = [path[:i] for i in range(len(path) + 1)]
    before = own.process(logits, paths)
    probs = processed_probs(before, params)

    changes = LogitsProcessorList()
    if bias:
        changes.append(SequenceBiasLogitsProcessor({(i,): v for i, v in bias.items()}))
    changes.append(RepetitionPenaltyLogitsProcessor(repetition))
    changes.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, EOS, device="cpu"))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    for i, row in enumerate(logits):
        context = torch.tensor([[*prompt, *output, *paths[i]]])
        expected = changes(context, row[None])
        torch.testing.assert_close(before[i, None], expected, rtol=0, atol=0)
        law = warpers(context, expected.double()).softmax(-1)[0]
        assert torch.equal(law > 0, probs[i] > 0)
        torch.testing.assert_close(probs[i], law, rtol=1e-9, atol=1e-12)  # sums in another order


def test_openai_penalties_count_the_output_and_the_path_and_not_the_prompt() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    own = processor(params, [1, 1, 2])
    own.advance([3, 4])
    own.advance([3])
    logits = rows(0, 3)
    changed = own.process(logits, [[], [4], [5, 4]])
    # OpenAI: logit[j] - count[j] * frequency_penalty - (count[j] > 0) * presence_penalty
    for i, counts in enumerate([{3: 2, 4: 1}, {3: 2, 4: 2}, {3: 2, 4: 2, 5: 1}]):
        expected = logits[i].clone()
        for token, count in counts.items():
            expected[token] -= count * 0.25 + 0.5
        torch.testing.assert_close(changed[i], expected)


def test_rows_of_a_tree_see_their_own_path_alone() -> None:
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5, min_tokens=3)
    own = processor(params, [1])
    own.advance([2])
    paths = [[], [3], [4], [3, 4], [4, 3], [4, 4]]
    logits = rows(1, len(paths))
    together = own.process(logits, paths)
    for i, path in enumerate(paths):
        torch.testing.assert_close(together[i, None], own.process(logits[i, None], [path]))
    assert [bool(row[EOS].isneginf()) for row in together] == [True] * 3 + [False] * 3


def test_the_logits_handed_in_stay_as_they_are() -> None:
    params = SamplingParams(logit_bias=((1, 5.0),), frequency_penalty=1.0, min_tokens=9)
    logits = rows(2, 2)
    kept = logits.clone()
    processor(params, [1]).process(logits, [[], [1]])
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_any_type_become_fp32(dtype: torch.dtype) -> None:
    out = processor(SamplingParams(presence_penalty=1.0), [1]).process(rows(3, 1).to(dtype), [[]])
    assert out.dtype == torch.float32


def test_min_p_keeps_what_reaches_its_share_of_the_most_likely() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = [
        int((processed_probs(logits, SamplingParams(min_p=m)) > 0).sum()) for m in (0, 0.3, 0.6, 1)
    ]
    assert kept == [4, 3, 2, 1]
    assert all(a >= b for a, b in pairwise(kept))
