"""The draft under SpecForge's method names, called as its trainer calls them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle3_core import Eagle3Draft, UnrollContext, UserError, load_draft
from eagle3_core.specforge import SpecForgeDraft

MakeDraft = Callable[..., Eagle3Draft]
GOLDEN = Path(__file__).parents[1] / "golden"

SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 2, "layer_input": "every"},
    {"feedback": "post_norm", "sliding_window": 3},
)


def _run(model: SpecForgeDraft, ids: Tensor, aux: Tensor, mask: Tensor, steps: int) -> list[Tensor]:
    """OnlineEagle3Model's calls: ids move left by one each step, with a zero at the end."""
    x, cache, out = model.project_hidden_states(aux), [[], []], []
    held = model.prepare_decoder_attention_mask(
        attention_mask=mask,
        hidden_states=x,
        batch_size=len(ids),
        seq_length=ids.shape[1],
        past_key_values_length=0,
    )
    positions = torch.arange(ids.shape[1])[None]
    for _ in range(steps):
        x = model.backbone(
            input_embeds=model.embed_input_ids(ids),
            hidden_states=x,
            cache_hidden=cache,
            attention_mask=held,
            position_ids=positions,
            past_key_values=None,
            use_cache=True,
        )
        out.append(model.compute_logits(x))
        ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    return out


@pytest.mark.parametrize("changes", SHAPES)
def test_logits_and_gradients_are_the_drafts_own(
    changes: dict[str, Any], make_draft: MakeDraft
) -> None:
    draft, model = make_draft(**changes), SpecForgeDraft.of(make_draft(**changes))
    ids, aux = torch.randint(1, 40, (2, 6)), torch.rand(2, 6, 48)
    out = _run(model, ids, aux, torch.ones(2, 6, dtype=torch.bool), 3)
    x, context, expected = (
        draft.project(aux),
        UnrollContext(sliding_window=draft.config.sliding_window),
        [],
    )
    for step in range(3):
        h = draft(draft.embed(ids), x, torch.arange(6).expand(2, 6) + step, context)
        x = draft.feedback(h)
        expected.append(draft.logits(h))
        ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine, theirs)
    torch.stack(out).square().sum().backward()
    torch.stack(expected).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), draft.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None
        # One norm for logits and feedback here, two there: the same sum in another order.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_padding_on_either_side_changes_no_real_row(make_draft: MakeDraft) -> None:
    model = SpecForgeDraft.of(make_draft(num_hidden_layers=2))
    ids, aux = torch.randint(1, 40, (1, 5)), torch.rand(1, 5, 48)
    alone = _run(model, ids, aux, torch.ones(1, 5, dtype=torch.bool), 1)[0]
    noise = torch.rand(1, 3, 48)
    for left in (True, False):
        joined = [noise, aux] if left else [aux, noise]
        pad = (3, 0) if left else (0, 3)
        mask = torch.nn.functional.pad(torch.ones(1, 5, dtype=torch.bool), pad)
        padded = _run(model, torch.nn.functional.pad(ids, pad), torch.cat(joined, 1), mask, 1)[0]
        assert torch.isfinite(padded).all()
        # Rope is relative, so the shift by three positions rounds differently and no more.
        torch.testing.assert_close(padded[mask], alone[0], rtol=0, atol=1e-5)


def test_golden_unroll() -> None:
    path = GOLDEN / "sf_fc_norm"
    model = SpecForgeDraft.from_pretrained(path)
    inputs, expected = (
        load_file(path / "inputs.safetensors"),
        load_file(path / "expected.safetensors"),
    )
    cache, x = [[], []], model.project_hidden_states(inputs["aux_hidden"])
    for step, tokens in enumerate(expected["step_tokens"]):
        positions = expected["step_positions"][0][None]
        x = model.backbone(model.embed_input_ids(tokens), x, cache, None, positions)
        # The bound of the golden tests: 2e-5 recorded, as much again for this run's own rounding.
        torch.testing.assert_close(x, expected["hidden_steps"][step], rtol=0, atol=4e-5)
        logits = model.compute_logits(x)
        torch.testing.assert_close(logits, expected["logits_steps"][step], rtol=0, atol=4e-5)


def test_vocabulary_map_file(make_draft: MakeDraft, tmp_path: Path) -> None:
    draft = make_draft()
    torch.save({"d2t": draft.d2t, "t2d": draft.t2d}, tmp_path / "map.pt")
    model = SpecForgeDraft(draft.config)
    model.load_vocab_mapping(tmp_path / "map.pt")
    assert model.vocab_mapping_loaded
    assert torch.equal(model.d2t, draft.d2t)
    torch.save({"d2t": draft.d2t + torch.arange(12), "t2d": draft.t2d}, tmp_path / "ids.pt")
    with pytest.raises(UserError, match=r"ids\.pt: "):
        model.load_vocab_mapping(tmp_path / "ids.pt")
    with pytest.raises(UserError, match="no vocabulary map"):
        model.load_vocab_mapping(tmp_path / "none.pt")


def test_full_vocabulary_has_a_map_that_is_not_saved(make_draft: MakeDraft, tmp_path: Path) -> None:
    model = SpecForgeDraft.of(make_draft(draft_vocab_size=40))
    assert model.t2d.all()
    assert not model.d2t.any()
    model.save_pretrained(tmp_path / "out")
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")


def test_embeddings_from_a_target(
    make_draft: MakeDraft, make_target: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    model = SpecForgeDraft.of(make_draft())
    model.load_embedding(tmp_path / "target")
    model.freeze_embedding()
    assert torch.equal(model.embed_tokens.weight, target.get_input_embeddings().weight)
    assert not model.embed_tokens.weight.requires_grad
    with pytest.raises(UserError, match=r"no wte, expected shape \[40, 16\]"):
        model.load_embedding(tmp_path / "target", "wte")


@pytest.mark.parametrize("gathered", [True, False])
def test_saved_and_read_back(gathered: bool, make_draft: MakeDraft, tmp_path: Path) -> None:
    draft = make_draft(num_hidden_layers=2, layer_input="every")
    model = SpecForgeDraft.of(draft)
    state = {n: t.clone() for n, t in model.state_dict().items()} if gathered else None
    model.save_pretrained(tmp_path / "out", state_dict=state)
    again = load_draft(tmp_path / "out")
    assert again.config == draft.config
    for name, tensor in again.draft.state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name])


def test_other_backends_are_refused(make_draft: MakeDraft) -> None:
    model, states = SpecForgeDraft.of(make_draft()), torch.rand(1, 2, 16)
    positions = torch.arange(2)[None]
    with pytest.raises(ValueError, match="sdpa"):
        model.backbone(states, states, None, None, positions, past_key_values=object())
    with pytest.raises(ValueError, match="expected \\[B,S\\]"):
        model.backbone(states, states, None, None, positions[None])
