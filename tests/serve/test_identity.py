"""The text of a seed is the same however the engine is set up and whoever else is there.

Every example is a whole serving history: requests with shared beginnings that come and go between
rounds, some dropped half-way, under a random batch size, piece size of prompts, page size, memory
(down to what one sequence needs, so that requests have to give way) and K. EAGLE3_IDENTITY_EXAMPLES
sets how many.
"""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.sampling import SamplingParams

VOCAB, LONGEST = 24, 40
STEM = [3, 9, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]

NUM_EXAMPLES = int(os.environ.get("EAGLE3_IDENTITY_EXAMPLES", "40"))


@dataclass(frozen=True)
class Job:
    """A request, the round it comes in and the round it is dropped in."""

    prompt: tuple[int, ...]
    seed: int | None  # None is greedy
    max_tokens: int
    comes: int
    dropped: int | None

    @property
    def params(self) -> SamplingParams:
        if self.seed is None:
            return SamplingParams(max_tokens=self.max_tokens, temperature=0)
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed, top_p=0.9)


_PROMPTS = st.builds(
    lambda stem, rest: (*STEM[:stem], *rest),
    st.integers(0, len(STEM)),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=3),
)
_JOBS = st.lists(
    st.builds(
        Job,
        _PROMPTS,
        st.sampled_from([None, 1, 2]),
        st.integers(1, 10),
        st.integers(0, 6),
        st.sampled_from([None, None, None, 0, 2, 5]),
    ),
    min_size=1,
    max_size=7,
)
_SETUPS = st.fixed_dictionaries(
    {
        "num_speculative_tokens": st.integers(0, 5),
        "max_batch_size": st.integers(1, 6),
        "page_size": st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]),
        "max_num_batched_tokens": st.sampled_from([1, 2, 3, 5, 7, 16, 64]),
    }
)


class Pair:
    """A target, a draft that is often right, and what plain decoding says to every job.

    In bf16, where rounding decides near ties, with `exact`.
    """

    def __init__(self, pairs: Any, dtype: torch.dtype) -> None:
        self.is_exact = dtype == torch.bfloat16
        self.target = pairs.target(dtype, vocab_size=VOCAB, num_hidden_layers=2, hidden_size=16)
        self.draft = pairs.draft(
            self.target, num_hidden_layers=2, aux_layer_ids=(0, 1, 2), hidden_size=16
        )
        if not self.is_exact:  # bf16 does not train; a random draft is right at times
            pairs.fit(self.target, self.draft, [STEM[:5], STEM[:9], STEM], 12)
        self._answers: dict[Any, list[int]] = {}

    def answer(self, job: Job) -> list[int]:
        """The first tokens of the answer, from decoding plainly, alone, nothing cached."""
        key = job.prompt, job.seed, job.max_tokens
        if key not in self._answers:
            engine = Engine(
                self.target,
                None,
                EngineConfig(max_batch_size=1, kv_cache_gib=1e-3, exact=self.is_exact),
            )
            engine.add(job.prompt, job.params)
            tokens: list[int] = []
            while engine.has_work:
                for output in engine.step():
                    tokens += output.token_ids
            self._answers[key] = tokens
        return self._answers[key]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "exact bf16"])
def pair(pairs: Any, request: pytest.FixtureRequest) -> Pair:
    return Pair(pairs, request.param)


# A token's keys and values in target and draft: two and two layers, 2 heads of 8 and 6.
_VALUES = {True: 2 * (2 * 2 * 8 + 2 * 2 * 6), False: 2 * 2 * 2 * 8}


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs=_JOBS, setup=_SETUPS, spare_pages=st.sampled_from([0, 1, 2, 5, 400]))
def test_text_does_not_depend_on_setup_and_company(
    pair: Pair, jobs: list[Job], setup: dict[str, int], spare_pages: int
) -> None:
    k, size = setup["num_speculative_tokens"], setup["page_size"]
    num_pages = -(-(LONGEST + k) // size) + spare_pages
    engine = Engine(
        pair.target,
        pair.draft if k else None,
        EngineConfig(
            **setup,
            max_model_len=LONGEST,
            exact=pair.is_exact,
            kv_cache_gib=num_pages
            * size
            * _VALUES[k > 0]
            * pair.target.model.dtype.itemsize
            / 2**30,
        ),
    )
    assert engine.num_free_pages == num_pages
    got: dict[str, list[int]] = {str(i): [] for i in range(len(jobs))}
    ended = set()
    for round_number in range(2000):
        for i, job in enumerate(jobs):
            if job.comes == round_number:
                engine.add(job.prompt, job.params, str(i))
            if job.dropped is not None and job.comes + job.dropped == round_number:
                engine.abort(str(i))
        for output in engine.step():
            got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if round_number > 12 and not engine.has_work:
            break
    assert not engine.has_work, "requests are stuck"
    assert engine.num_free_pages == num_pages, "pages have leaked"
    for i, job in enumerate(jobs):
        expected = pair.answer(job)
        if str(i) not in ended:
            assert job.dropped is not None
            expected = expected[: len(got[str(i)])]
        assert got[str(i)] == expected
