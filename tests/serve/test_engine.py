"""Ends, limits, aborts, seeds and counters of the engine, on a pair whose output is known."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core import UserError, load_draft
from eagle3_core.target import load_target
from eagle3_serve.config import EngineConfig
from eagle3_serve.engine import Engine, QueueFullError
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


def test_memory_that_runs_out_delays_and_comes_back(
    chain_pair: Any, target: Any, draft: Any
) -> None:
    # Room for 45 positions: four layers and one, two heads of 16, fp32, twice.
    limits = {"max_model_len": 30, "kv_cache_gib": 45 * 1280 / 2**30, "page_size": 1}
    engine = _engine(target, draft, 3, **limits)
    free = engine.num_free_pages
    assert free == 45
    ids = [engine.add([97 + i], _params(ignore_eos=True)) for i in range(5)]
    assert len(engine.step()) == 5  # nobody waits for what may never be needed
    engine.abort(ids[0])
    engine.abort(ids[4])
    engine.abort("never seen")
    tokens = {i: [] for i in ids[1:4]}
    most = 0
    for _ in range(100):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        most = max(most, engine.num_waiting)
    assert most > 0, "three times 21 positions do not fit into 45: somebody had to give way"
    assert not engine.has_work
    assert engine.num_free_pages == free
    for i in range(1, 4):
        first, *rest = tokens[ids[i]]
        assert [first, *rest] == chain_pair.greedy(97 + i, 20)[-len(rest) - 1 :]


@pytest.mark.parametrize("k", [0, 3])
def test_a_known_beginning_is_not_run_again(
    chain_pair: Any, target: Any, draft: Any, k: int
) -> None:
    engine = _engine(target, draft, k, page_size=4)
    prompt = list(b"abcdefghij")
    cached = []
    for tokens in (prompt, prompt, [*prompt[:9], 120], prompt[:8], [*b"abcdefghijk"] * 2):
        engine.add(tokens, _params(max_tokens=6))
        outputs = [output for _ in range(8) for output in engine.step()]
        text = [token for output in outputs for token in output.token_ids]
        assert text == chain_pair.greedy(tokens[-1], 6)
        cached.append(outputs[-1].num_cached_tokens)
    # The fourth prompt ends with a page: its last token runs. The fifth meets "k" at 10, where the
    # answers to the first two went on, and shares with them all that both have.
    assert cached == [0, 8, 8, 7, 8]
    assert engine.stats.num_cached_tokens == sum(cached)
    answer = chain_pair.greedy(prompt[-1], 6)
    engine.add([*prompt, *answer, 65], _params(max_tokens=2))
    assert engine.step()[0].num_cached_tokens == 12, "answers are remembered too"


def test_a_long_prompt_lets_others_decode(chain_pair: Any, target: Any, draft: Any) -> None:
    engine = _engine(target, draft, 1, max_num_batched_tokens=10)
    engine.add([97], _params(max_tokens=30))
    engine.step()
    engine.add([*b"x" * 59, 65], _params(max_tokens=4), "long")
    # Two rows of the ten are the decoding request's; 60 tokens are eight pieces.
    rounds = [engine.step() for _ in range(8)]
    assert [len(outputs) for outputs in rounds] == [1] * 7 + [2]
    assert all(outputs[0].token_ids for outputs in rounds)
    assert rounds[-1][1].token_ids == chain_pair.greedy(65, 1)


def test_a_target_that_computes_nonsense_fails_one_request(pairs: Any) -> None:
    target = pairs.target()
    with torch.no_grad():
        target.model.get_input_embeddings().weight[5] = torch.nan
    engine = _engine(target, None, 0, page_size=2)
    for tokens, name in (([1, 2, 5, 3], "bad"), ([1, 2, 4], "good")):
        engine.add(tokens, _params(max_tokens=3), name)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert [o.error for o in outputs if o.request_id == "bad"] == [
        "the target's logits are not finite; its weights or dtype do not fit"
    ]
    good = [t for o in outputs if o.request_id == "good" for t in o.token_ids]
    assert good == pairs.greedy(target, [1, 2, 4], 3)
    assert not engine.has_work


def test_requests_time_out_and_queues_are_bounded(target: Any, draft: Any) -> None:
    engine = _engine(target, draft, 2, request_timeout_s=1e-9)
    engine.add([97], _params(), "late")
    (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("timeout", "took longer than 1e-09 s")
    assert not engine.has_work
    engine = _engine(target, draft, 2, max_batch_size=2, max_queue_size=3)
    for i in range(5):
        engine.add([97 + i], _params())
    with pytest.raises(QueueFullError, match="5 requests are waiting"):
        engine.add([97], _params())
    engine.step()
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        engine.add([97], _params())
    while engine.has_work:
        engine.step()


def test_a_leaked_page_is_noticed(target: Any, draft: Any) -> None:
    engine = _engine(target, draft, 2)
    engine._pool.take()
    engine.add([97], _params(max_tokens=1))
    with pytest.raises(RuntimeError, match="1 pages are held although there is no request"):
        engine.step()


def test_refuses_a_context_that_does_not_fit(target: Any, draft: Any) -> None:
    with pytest.raises(UserError, match="kv_cache_gib is 1e-05, room for 5 tokens"):
        _engine(target, draft, 3, max_model_len=30, kv_cache_gib=1e-5, page_size=1)
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
