"""With a draft the output is the target's own, token for token: greedy, and sampled with a seed."""

from typing import Any

import pytest

from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams

PROMPTS = [[7], [3, 9, 1, 4], [11, 2] * 6, [5, 5, 5], [20, 30, 40, 1, 2, 3, 4]]
LENGTHS = [24, 17, 1, 24, 13]
SAMPLED = [
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=12, seed=2, temperature=0.6),
    SamplingParams(max_tokens=12, seed=3, top_k=4),
    SamplingParams(max_tokens=12, seed=4, top_p=0.7),
    SamplingParams(max_tokens=12, seed=5, temperature=1.5, top_k=9, top_p=0.9),
]


@pytest.fixture(scope="module")
def target(pairs: Any) -> Any:
    return pairs.target()


@pytest.fixture(scope="module")
def drafts(pairs: Any, target: Any) -> dict[str, Any]:
    """One that is often right, one pruned and random, one of several layers."""
    fitted = pairs.draft(target)
    pairs.fit(target, fitted, PROMPTS[:3], 20)
    return {
        "fitted": fitted,
        "pruned": pairs.draft(target, draft_vocab_size=30),
        "layers": pairs.draft(
            target, num_hidden_layers=3, layer_input="every", feedback="post_norm"
        ),
    }


def _decode(
    target: Any,
    draft: Any,
    k: int,
    batch: int,
    prompts: list[list[int]],
    params: list[Any],
    **shape: int,
) -> tuple[list[list[int]], dict[str, Any]]:
    config = EngineConfig(num_speculative_tokens=k, max_batch_size=batch, **shape)
    outputs, figures = generate(Engine(target, draft, config), prompts, params)
    return [output.token_ids for output in outputs], figures


@pytest.fixture(scope="module")
def greedy(pairs: Any, target: Any) -> list[list[int]]:
    return [pairs.greedy(target, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


GREEDY = [SamplingParams(max_tokens=n, temperature=0) for n in LENGTHS]


@pytest.mark.parametrize("batch", [1, 3])
def test_plain_decoding_is_the_models_own(target: Any, greedy: list[list[int]], batch: int) -> None:
    assert _decode(target, None, 0, batch, PROMPTS, GREEDY)[0] == greedy


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["fitted", "pruned", "layers"])
def test_greedy_is_the_models_own(
    target: Any, drafts: dict[str, Any], greedy: list[list[int]], name: str, k: int
) -> None:
    for batch in range(1, 6) if name == "fitted" else (2, 5):
        outputs, figures = _decode(target, drafts[name], k, batch, PROMPTS, GREEDY)
        assert outputs == greedy, f"batch {batch}"
    if name == "fitted":  # else the test would say nothing about accepted drafts
        assert figures["accept_length"] > 1.3


TREES = [(1, 3, 4), (2, 2, 6), (3, 2, 7), (3, 4, 12), (5, 3, 9)]


@pytest.mark.parametrize(("k", "topk", "rows"), TREES)
@pytest.mark.parametrize("name", ["fitted", "pruned", "layers"])
def test_greedy_trees_are_the_models_own(
    target: Any,
    drafts: dict[str, Any],
    greedy: list[list[int]],
    name: str,
    k: int,
    topk: int,
    rows: int,
) -> None:
    for batch in (1, 4) if name == "fitted" else (3,):
        outputs, figures = _decode(
            target,
            drafts[name],
            k,
            batch,
            PROMPTS,
            GREEDY,
            topk=topk,
            num_verify_tokens=rows,
        )
        assert outputs == greedy, f"batch {batch}"
    if name == "fitted":
        assert figures["accept_length"] > 1.3
        assert len(figures["accepted_per_position"]) == k


@pytest.fixture(scope="module")
def plain_sampled(target: Any) -> list[list[int]]:
    return _decode(target, None, 0, 1, PROMPTS, SAMPLED)[0]


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("name", ["fitted", "pruned"])
def test_a_seeds_text_is_that_of_plain_decoding(
    target: Any, drafts: dict[str, Any], plain_sampled: list[list[int]], name: str, k: int
) -> None:
    accepted = 0
    for batch in (1, 2, 5):
        outputs, figures = _decode(target, drafts[name], k, batch, PROMPTS, SAMPLED)
        assert outputs == plain_sampled, f"batch {batch}"
        accepted += figures["num_accepted_tokens"]
    assert accepted > 0


@pytest.mark.parametrize("name", ["fitted", "pruned"])
def test_a_seeds_text_over_trees_is_that_of_plain_decoding(
    target: Any, drafts: dict[str, Any], plain_sampled: list[list[int]], name: str
) -> None:
    accepted = 0
    for (k, topk, rows), batch in zip(TREES, (5, 1, 2, 3, 4), strict=True):
        shape = {"topk": topk, "num_verify_tokens": rows}
        outputs, figures = _decode(target, drafts[name], k, batch, PROMPTS, SAMPLED, **shape)
        assert outputs == plain_sampled, f"batch {batch}"
        accepted += figures["num_accepted_tokens"]
    assert accepted > 0


def test_order_and_company_do_not_matter(target: Any, drafts: dict[str, Any]) -> None:
    prompts, params = PROMPTS * 2, [*SAMPLED, *GREEDY]
    expected = _decode(target, drafts["fitted"], 3, 10, prompts, params)[0]
    for order in ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]):
        shuffled = _decode(
            target,
            drafts["fitted"],
            3,
            4,
            [prompts[i] for i in order],
            [params[i] for i in order],
        )[0]
        assert shuffled == [expected[i] for i in order]


def test_joining_late_does_not_matter(
    target: Any, drafts: dict[str, Any], greedy: list[list[int]]
) -> None:
    engine = Engine(target, drafts["fitted"], EngineConfig(num_speculative_tokens=3))
    got: dict[str, list[int]] = {str(i): [] for i in range(5)}
    waiting = list(range(5))
    for _ in range(100):
        if waiting:
            i = waiting.pop()
            engine.add(PROMPTS[i], GREEDY[i], str(i))
        for output in engine.step():
            got[output.request_id] += output.token_ids
        if not waiting and not engine.has_work:
            break
    assert list(got.values()) == greedy
