"""Captured states are the target's own, whatever batch they were captured in."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from eagle3_core import UserError
from eagle3_core.target import Target, load_target
from eagle3_train.capture import Capturer, OnlineFeatures, asked_positions, batches, capture
from eagle3_train.data import Example
from eagle3_train.store import FeatureStore, Sample

AUX = (1, 2, 4)
LENGTHS = (9, 23, 3, 17, 9, 30, 2)


def _examples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Example]:
    """Random tokens; the second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Example(
            f"file:{i}",
            torch.randint(256, (length,), generator=generator),
            torch.arange(length) >= length // 2,
        )
        for i, length in enumerate(lengths)
    ]


EXAMPLES = _examples()


def _assert_close(left: Sample, right: Sample) -> None:
    """Equal but for the order of additions in matrix products of other shapes (fp32)."""
    assert left.input_ids.equal(right.input_ids)
    assert left.loss_mask.equal(right.loss_mask)
    assert left.argmax.equal(right.argmax)
    for name in ("aux", "final", "logz"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-4, atol=1e-4)


def test_states_are_those_of_a_plain_forward(target: Target) -> None:
    capturer = Capturer(target, (4, 0, 2), torch.float32)
    assert capturer.meta.aux_layer_ids == (0, 2, 4)
    kept: list[torch.Tensor] = []
    norm = target.model.get_decoder().norm
    handle = norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    for example in EXAMPLES:
        ((sample,), _) = capturer.run([example])
        out = target.model(example.input_ids[None], output_hidden_states=True)
        hidden = out.hidden_states  # the last one is after the final norm
        assert sample.aux.equal(torch.cat([hidden[0], hidden[2], kept[-1]], -1)[0])
        assert sample.final.equal(hidden[-1][0])
        asked = asked_positions(example.loss_mask)
        logits = out.logits[0].float()
        assert sample.argmax[asked].equal(logits[asked].argmax(-1).int())
        # log-sum-exp of the same logits; the product is over fewer rows.
        torch.testing.assert_close(
            sample.logz[asked], logits[asked].logsumexp(-1), rtol=0, atol=1e-4
        )
        assert (sample.argmax[~asked] == -1).all()
        assert (sample.logz[~asked] == 0).all()
    handle.remove()


@pytest.mark.parametrize("batch_tokens", [1, 40, 64, 1000])
def test_the_batch_changes_nothing(target: Target, tmp_path: Path, batch_tokens: int) -> None:
    capturer = Capturer(target, AUX, torch.float32)
    order = [3, 6, 0, 5, 1, 4, 2]
    examples = [EXAMPLES[i] for i in order]
    capture(capturer, examples, tmp_path, batch_tokens=batch_tokens, progress=False)
    store = FeatureStore(tmp_path)
    for i, example in enumerate(examples):
        _assert_close(store[i], capturer.run([example])[0][0])


def test_batches_hold_every_example_once_within_the_limit() -> None:
    made = list(batches(EXAMPLES, 40))
    assert sorted(e.where for batch in made for e in batch) == [e.where for e in EXAMPLES]
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(len(e.input_ids) for e in batch) <= 40


def test_online_and_stored_samples_are_the_same(target: Target, tmp_path: Path) -> None:
    capturer = Capturer(target, AUX, torch.bfloat16)
    online = OnlineFeatures(capturer, EXAMPLES)
    capture(
        capturer, EXAMPLES, tmp_path, batch_tokens=1, progress=False
    )  # one at a time, as online
    store = FeatureStore(tmp_path)
    assert (len(store), store.lengths, store.meta) == (len(online), online.lengths, online.meta)
    assert store.lengths == list(LENGTHS)
    assert store.head().equal(online.head())
    assert store.head().equal(target.lm_head)
    for i in range(len(online)):
        for name in ("input_ids", "loss_mask", "aux", "final", "argmax", "logz"):
            assert getattr(store[i], name).equal(getattr(online[i], name)), name
    assert store[0].aux.dtype == torch.bfloat16


def test_teacher_probabilities_from_rounded_states_sum_to_one(target: Target) -> None:
    samples, _ = Capturer(target, AUX, torch.bfloat16).run(EXAMPLES)
    for sample in samples:
        asked = asked_positions(sample.loss_mask)
        logits = sample.final[asked].float() @ target.lm_head.T
        total = (logits - sample.logz[asked, None]).exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-4)  # fp32 sums
        assert sample.argmax[asked].equal(logits.argmax(-1).int())


def test_target_mass_is_the_expected_count_of_each_token(target: Target, tmp_path: Path) -> None:
    capture(Capturer(target, AUX, torch.float32), EXAMPLES, tmp_path, progress=False)
    expected = torch.zeros(target.vocab_size, dtype=torch.float64)
    for example in EXAMPLES:
        logits = target.model(example.input_ids[None]).logits[0, :-1].double()
        expected += logits.softmax(-1)[example.loss_mask[1:]].sum(0)
    mass = FeatureStore(tmp_path).target_mass()
    torch.testing.assert_close(mass, expected, rtol=0, atol=1e-4)  # summed in fp32 per chunk


def test_a_second_run_reads_only_what_is_new(target: Target, tmp_path: Path) -> None:
    capturer = Capturer(target, AUX, torch.float32)
    first = capture(capturer, EXAMPLES[:4], tmp_path, progress=False)
    assert (first.num_samples, first.num_resumed, first.num_tokens) == (4, 0, sum(LENGTHS[:4]))
    wanted = [EXAMPLES[5], EXAMPLES[1], EXAMPLES[1], EXAMPLES[6]]
    second = capture(capturer, wanted, tmp_path, progress=False)
    assert (second.num_samples, second.num_resumed) == (4, 1)
    assert second.num_tokens == LENGTHS[5] + LENGTHS[6]
    store = FeatureStore(tmp_path)
    assert [store[i].input_ids.tolist() for i in range(4)] == [
        example.input_ids.tolist() for example in wanted
    ]


def test_a_store_of_another_kind_is_not_continued(target: Target, make_target, tmp_path) -> None:
    capture(Capturer(target, AUX, torch.float32), EXAMPLES[:1], tmp_path, progress=False)
    for other, field in (
        (Capturer(target, (1, 2), torch.float32), "aux_layer_ids"),
        (Capturer(target, AUX, torch.bfloat16), "dtype"),
        (Capturer(make_target(torch.bfloat16), AUX, torch.float32), "head_digest"),
    ):
        with pytest.raises(UserError, match=rf"index\.json: {field} is "):
            capture(other, EXAMPLES[1:2], tmp_path, progress=False)
    assert len(FeatureStore(tmp_path)) == 1


def test_a_state_that_is_not_finite_is_named(make_target) -> None:
    target = make_target()
    capturer = Capturer(target, (0,), torch.float32)
    target.model.get_decoder().embed_tokens.weight[77] = torch.inf
    good = Example("file:1", torch.tensor([1, 2, 3]), torch.tensor([False, True, True]))
    bad = Example("file:2", torch.tensor([1, 2, 77]), torch.tensor([False, True, True]))
    with pytest.raises(UserError, match=r"file:2: aux\[2, 0\] is inf"):
        capturer.run([good, bad])


def test_a_target_that_caps_its_logits_is_refused(target: Target) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    model = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    with pytest.raises(UserError, match="its logits are not its lm_head times its last state"):
        Capturer(Target("capped", model, target.tokenizer), AUX)


def test_bad_layer_ids_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="9 is out of range"):
        Capturer(target, (1, 9))
    with pytest.raises(UserError, match="aux_layer_ids is empty"):
        Capturer(target, ())


def test_asked_positions_reach_one_token_around_an_answer() -> None:
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1]).bool()
    assert asked_positions(mask).int().tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_target_spread_over_places_gives_the_states_of_a_whole_one(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    """Some layers in memory, some fetched from disk: accelerate's hooks, as between devices."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    spread = {"device_map": {**places, "lm_head": "cpu"}, "offload_folder": str(tmp_path)}
    capturer = Capturer(load_target(str(target_folder), spread=spread), AUX, torch.float32)
    whole = Capturer(target, AUX, torch.float32)
    for left, right in zip(capturer.run(EXAMPLES)[0], whole.run(EXAMPLES)[0], strict=True):
        _assert_close(left, right)
    spread = {"device_map": {**places, "lm_head": "disk"}, "offload_folder": str(tmp_path)}
    with pytest.raises(UserError, match="no room for its lm_head on a device"):
        Capturer(load_target(str(target_folder), spread=spread), AUX, torch.float32)
