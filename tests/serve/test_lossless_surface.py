"""Whatever the parameters, a draft changes nothing: neither the tokens nor what is said of them."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams

V = 48
PROMPTS = [[7], [3, 9, 1, 4], [11, 2] * 6, [5, 5, 5]] * 4

parameters = st.builds(
    SamplingParams,
    max_tokens=st.integers(6, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 0, 1, 5, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, V - 1), st.sampled_from([-100.0, -2.0, 1.0, 3.0])),
        max_size=3,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.2, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, 2.0]),
    min_tokens=st.sampled_from([0, 0, 3, 6]),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 999),
)


@pytest.fixture(scope="module")
def engines(pairs: Any) -> tuple[Engine, list[Engine]]:
    """One that decodes plainly, and some with a draft that is often right or a random one."""
    target = pairs.target()
    fitted = pairs.draft(target)
    pairs.fit(target, fitted, PROMPTS[:2], 16)
    pruned = pairs.draft(target, draft_vocab_size=30)
    speculating = [
        Engine(target, draft, EngineConfig(**shape))
        for draft, shape in (
            (fitted, {"num_speculative_tokens": 4, "max_batch_size": 16}),
            (pruned, {"num_speculative_tokens": 3, "topk": 3, "max_batch_size": 7}),
        )
    ]
    plain = EngineConfig(num_speculative_tokens=0, max_batch_size=8)
    return Engine(target, None, plain), speculating


def test_every_combination_is_plain_decodings(engines: tuple[Engine, list[Engine]]) -> None:
    accepted = 0

    # No shrinking: each try decodes, and a failure is reproducible as it is.
    @settings(derandomize=True, deadline=None, max_examples=3, phases=[Phase.generate])
    @given(params=st.lists(parameters, min_size=16, max_size=16))
    def same(params: list[SamplingParams]) -> None:
        nonlocal accepted
        plain, speculating = engines
        expected = generate(plain, PROMPTS, params)[0]
        for engine in speculating:
            outputs, figures = generate(engine, PROMPTS, params)
            assert outputs == expected
            accepted += figures["num_accepted_tokens"]

    same()
    assert accepted > 20, accepted  # else speculation was hardly in play
