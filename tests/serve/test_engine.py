"""Ends, limits, aborts, seeds and counters of the engine, on a pair whose output is known."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core import UserError, load_draft
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine
from eagle3_serve.generate import generate
from eagle3_serve.sampling import SamplingParams

KS = [0, 1, 2, 4, 8]


@pytest.fixture(scope="module")
def target(chain_pair: Any) -> Any:
    return load_target(chain_pair.target)


@pytest.fixture(scope="module")
def draft(chain_pair: Any) -> Any:
    return load_draft(chain_pair.draft).draft.eval().requires_grad_(False)


def _engine(target: Any, draft: Any, k: int, **limits: Any) -> Engine:
    return Engine(target, draft if k else None, EngineConfig(num_speculative_tokens=k, **limits))


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20} | values)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize(
    ("prompt", "params", "text", "last", "count", "reason"),
    [
        # The cases of serving: an end inside a block, a second end token, ends ignored, stop ids,
        # stop strings inside and across blocks (transformers #47912, vllm PR 47616).
        ("5", {}, "6789", 257, 5, "stop"),
        ("hi!", {"max_tokens": 5}, "", 259, 1, "stop"),
        ("2", {"max_tokens": 12, "ignore_eos": True}, "3456789ABCD", 68, 12, "length"),
        ("c", {"stop_token_ids": (101,)}, "d", 101, 2, "stop"),
        ("f", {"stop": ("ij",)}, "gh", 106, 4, "stop"),
        ("f", {"stop": ("ij", "h")}, "g", 104, 2, "stop"),
        ("f", {"stop": ("ghijklmnop",)}, "", 112, 10, "stop"),
        ("f", {"max_tokens": 1}, "g", 103, 1, "length"),
        ("P", {"max_tokens": 3}, "QRS", 83, 3, "length"),
        ("😀", {"max_tokens": 8}, "😀😀", 128, 8, "length"),
    ],
)
def test_ends(
    target: Any,
    draft: Any,
    k: int,
    prompt: str,
    params: dict[str, Any],
    text: str,
    last: int,
    count: int,
    reason: str,
) -> None:
    (output,), figures = generate(
        _engine(target, draft, k), [list(prompt.encode())], _params(**params)
    )
    assert (output.text, output.token_ids[-1], len(output.token_ids)) == (text, last, count)
    assert output.finish_reason == reason
    assert figures["num_output_tokens"] == count


@pytest.mark.parametrize("k", [0, 4])
def test_the_context_limit(target: Any, draft: Any, k: int) -> None:
    engine = _engine(target, draft, k, max_model_len=64)
    for length in (64, 65, 66):
        with pytest.raises(UserError, match=rf"{length} tokens .* 63.* 64"):
            engine.add([97] * length, _params())
    with pytest.raises(UserError, match="empty"):
        engine.add([], _params())
    assert not engine.has_work
    prompts = [[97] * length for length in (63, 62, 61, 60, 59, 3)]
    for limit in (None, 100, 3):
        outputs, _ = generate(engine, prompts, _params(max_tokens=limit, ignore_eos=True))
        room = [min(64 - len(p), limit or 64) for p in prompts]
        assert [len(o.token_ids) for o in outputs] == room
        assert {o.finish_reason for o in outputs} == {"length"}


def test_refuses_foreign_tokens_and_ids_in_use(target: Any, draft: Any) -> None:
    engine = _engine(target, draft, 2)
    with pytest.raises(UserError, match=r"token id 272 is not in 0\.\.271"):
        engine.add([97, 272], _params())
    engine.add([97], _params(), "a")
    with pytest.raises(UserError, match="'a' is in use"):
        engine.add([97], _params(), "a")


def test_memory_bounds_the_batch_and_comes_back(target: Any, draft: Any) -> None:
    # Room for two requests of 21 positions: four layers and one, two heads of 16, fp32, twice.
    engine = _engine(target, draft, 3, max_model_len=30, kv_cache_gib=45 * 1280 / 2**30)
    free = engine.num_free_slots
    assert free == 45
    ids = [engine.add([97 + i], _params(ignore_eos=True)) for i in range(5)]
    assert len(engine.step()) == 2
    engine.abort(ids[0])
    engine.abort(ids[4])
    engine.abort("never seen")
    seen = {output.request_id for _ in range(60) for output in engine.step()}
    assert seen == set(ids[1:4])
    assert not engine.has_work
    assert engine.num_free_slots == free


def test_refuses_a_context_that_does_not_fit(target: Any, draft: Any) -> None:
    with pytest.raises(UserError, match="kv_cache_gib is 1e-05, room for 8 tokens"):
        _engine(target, draft, 3, max_model_len=30, kv_cache_gib=1e-5)
    with pytest.raises(UserError, match=r"max_model_len is 257, but the target .* 256"):
        _engine(target, draft, 3, max_model_len=257)


def test_same_seed_same_text_and_no_seed_another(target: Any, draft: Any) -> None:
    prompts = [[99]] * 20
    sampled = _params(temperature=1.0, max_tokens=10)
    free, _ = generate(_engine(target, draft, 3), prompts, [sampled] * 20)
    assert len({tuple(o.token_ids) for o in free}) > 10
    seeded = [_params(temperature=1.0, max_tokens=10, seed=i % 4) for i in range(20)]
    first, _ = generate(_engine(target, draft, 3), prompts, seeded)
    again, _ = generate(_engine(target, draft, 1, max_batch_size=3), prompts, seeded)
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert len({tuple(o.token_ids) for o in first}) == 4


def test_counters(target: Any, draft: Any) -> None:
    # After 'c': d from the prompt; e f g h of which the draft misses f (it is wrong after 'e').
    engine = _engine(target, draft, 3)
    _, figures = generate(engine, [[ord("c")]], _params(max_tokens=11))
    # d | e f | g h i j | k l m n: drafts efg -> e, then all, then all.
    assert figures["num_rounds"] == 3
    assert figures["num_drafted_tokens"] == 9
    assert figures["num_accepted_tokens"] == 7
    assert figures["accepted_per_position"] == [1.0, 2 / 3, 2 / 3]
    assert figures["accept_length"] == 10 / 3
    assert figures["num_output_tokens"] == 11
    assert figures["num_prompt_tokens"] == 1


def test_a_stop_inside_a_block_counts_what_was_kept(target: Any, draft: Any) -> None:
    engine = _engine(target, draft, 4)
    engine.add([ord("f")], _params(stop=("ij",)))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [o.token_ids for o in outputs] == [[103], [104, 105, 106]]
    assert (outputs[-1].stats.num_accepted_tokens, outputs[-1].stats.accept_length) == (3, 3.0)
    assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (1, 4)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"vocab_size": 50, "draft_vocab_size": 50}, "vocab_size is 50, but target .* 48"),
        ({"target_hidden_size": 36}, "target_hidden_size is 36, but target .* 32"),
        ({"num_target_layers": 6}, "num_target_layers is 6, but target .* 4"),
        ({"num_target_layers": None, "aux_layer_ids": (1, 2, 5)}, "5 is out of range"),
        ({"aux_layer_ids": None}, "aux_layer_ids is not set"),
        (
            {"aux_layer_ids": None, "num_aux_hidden_states": 1, "aux_source": "final_norm"},
            "aux_source is final_norm, expected boundaries",
        ),
    ],
)
def test_refuses_a_draft_of_another_target(
    pairs: Any, choice: dict[str, Any], message: str
) -> None:
    target = pairs.target()
    other = pairs.target(vocab_size=choice.get("vocab_size", 48))
    draft = pairs.draft(other, **choice)
    with pytest.raises(UserError, match=message):
        _engine(target, draft, 2)


def test_refuses_mixed_dtypes(pairs: Any) -> None:
    target = pairs.target()
    draft = pairs.draft(target).to(torch.bfloat16)
    with pytest.raises(UserError, match=r"dtype is torch\.bfloat16, .* torch\.float32"):
        _engine(target, draft, 2)


def test_the_target_can_still_be_used_by_others(target: Any, draft: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[ord("c")]])
    engine = _engine(target, draft, 2)
    own = target.model.generate(ids, max_new_tokens=5, do_sample=False)[0, 1:].tolist()
    (output,), _ = generate(engine, [[ord("c")]], _params(max_tokens=5))
    assert output.token_ids == own == list(b"defgh")
