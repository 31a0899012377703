"""A draft that starts from another one is that draft, whatever wrote it and however many layers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core import DraftConfig, Eagle3Draft, UnrollContext, UserError, load_draft, save_draft
from eagle3_core.checkpoint.export import export_draft
from eagle3_core.target import Target
from eagle3_core.vocab import vocab_map
from eagle3_train.capture import Capturer, OnlineFeatures
from eagle3_train.cli import main
from eagle3_train.config import DraftSection
from eagle3_train.data import Example
from eagle3_train.evaluate import evaluate
from eagle3_train.inherit import draft_digest, find_draft, inherit_draft

AUX = (1, 2, 4)
V, D, T = 272, 64, 32


def new_draft(**changes: Any) -> Eagle3Draft:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": V,
        "draft_vocab_size": D,
        "target_hidden_size": T,
        "num_target_layers": 4,
        "num_aux_hidden_states": 3,
        "aux_layer_ids": AUX,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    draft = Eagle3Draft(DraftConfig(**{**values, **changes}))
    generator = torch.Generator().manual_seed(1)
    draft.init_weights(generator, std=0.3)
    if draft.config.is_pruned:
        kept = torch.randperm(V, generator=generator)[:D].sort().values
        draft.d2t, draft.t2d = vocab_map(kept, V)
    return draft


def save(draft: Eagle3Draft, folder: Path) -> Path:
    save_draft(draft, folder)
    return folder


@torch.no_grad()
def chain_logits(draft: Eagle3Draft) -> list[torch.Tensor]:
    """Of three steps over twelve slots, each fed by the one before."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (1, 15), generator=g)
    x = draft.project(torch.randn(1, 12, 3 * T, generator=g))
    context, logits = UnrollContext(), []
    for k in range(3):
        h = draft(draft.embed(ids[:, k : k + 12]), x, torch.arange(12)[None] + k, context)
        logits.append(draft.logits(h))
        x = draft.feedback(h)
    return logits


def accepted(draft: Eagle3Draft, target: Target) -> torch.Tensor:
    """[K] chains that got as far, on random text."""
    g = torch.Generator().manual_seed(5)
    mask = torch.arange(40) >= 4
    examples = [Example(f"{i}", torch.randint(256, (40,), generator=g), mask) for i in range(3)]
    samples = OnlineFeatures(Capturer(target, AUX, torch.float32), examples)
    kept = draft.to_target_ids(torch.arange(draft.config.draft_vocab_size))
    head = samples.head()[kept].float()
    return evaluate(draft, samples, range(3), head, 3, 200)["accepted"]


@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("residual", ["raw", "normed"])
@pytest.mark.parametrize("layer_input", ["first", "every"])
def test_grown_layers_change_nothing(
    target: Target, tmp_path: Path, layer_input: str, residual: str, feedback: str
) -> None:
    choices = {"residual": residual, "feedback": feedback, "aux_norm": "per_layer"}
    one = new_draft(**choices, attention_output_bias=True, mlp_bias=True)
    section = DraftSection(num_hidden_layers=3, layer_input=layer_input)  # pyright: ignore
    grown = inherit_draft(save(one, tmp_path / "one"), section, target, AUX, seed=0)
    assert grown.config.num_hidden_layers == 3
    assert grown.config.layer_input == layer_input
    for before, after in zip(chain_logits(one), chain_logits(grown), strict=True):
        if layer_input == "every" and residual == "normed":
            # A norm of a normed state divides by sqrt(1 - eps): a part in 10^5, and rounding.
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(after, before)
    assert torch.equal(accepted(one, target), accepted(grown, target))
    new = [p for n, p in grown.named_parameters() if n.startswith(("layers.1.", "layers.2."))]
    assert any(bool(p.any()) for p in new)


def test_a_grown_draft_grows_again(target: Target, tmp_path: Path) -> None:
    two = new_draft(num_hidden_layers=2, layer_input="every")
    folder = save(two, tmp_path / "two")
    three = inherit_draft(folder, DraftSection(num_hidden_layers=3), target, AUX, seed=0)
    assert three.config.layer_input == "every"
    assert torch.equal(chain_logits(three)[2], chain_logits(two)[2])


def test_another_dialect_without_embeddings(target: Target, tmp_path: Path) -> None:
    draft = new_draft(num_target_layers=4)
    export_draft(draft, tmp_path / "theirs", "specforge")
    weights = tmp_path / "theirs/model.safetensors"
    tensors = load_file(weights)
    del tensors["embed_tokens.weight"]
    save_file(tensors, weights)
    ours = inherit_draft(tmp_path / "theirs", DraftSection(), target, AUX, seed=0)
    embeddings = target.model.get_input_embeddings().weight
    for name, value in ours.state_dict().items():
        expected = embeddings if name == "embed_tokens.weight" else draft.state_dict()[name]
        assert torch.equal(value, expected), name
    ours.embed_tokens.weight.data.zero_()
    assert embeddings.any()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_hidden_layers": 1}, "draft.num_hidden_layers is 1, but the draft in .* has 2"),
        ({"layer_input": "every"}, "draft.layer_input is every, .* has layer_input first"),
        ({"vocab_size": 65}, "draft.vocab_size is 65, .* has draft_vocab_size 64"),
        ({"hidden_size": 16}, "draft.hidden_size is 16, .* has hidden_size 32"),
        ({"aux_norm": "concat"}, "draft.aux_norm is concat, .* has aux_norm none"),
        ({"feedback": "post_norm"}, "draft.feedback is post_norm, .* has feedback pre_norm"),
        ({"sliding_window": 8}, "draft.sliding_window is 8, .* has sliding_window None"),
    ],
)
def test_contradictions_name_both(
    target: Target, tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    folder = save(new_draft(num_hidden_layers=2), tmp_path / "two")
    with pytest.raises(UserError, match=message):
        inherit_draft(folder, DraftSection(**section), target, AUX, seed=0)


def test_what_is_said_of_it_and_true_is_no_contradiction(target: Target, tmp_path: Path) -> None:
    folder = save(new_draft(aux_norm="concat"), tmp_path / "one")
    section = DraftSection(aux_norm="concat", vocab_size=D, num_hidden_layers=1)
    assert inherit_draft(folder, section, target, AUX, seed=0).config.aux_norm == "concat"


def test_another_targets_draft_and_other_states_are_refused(
    target: Target, make_target: Callable[..., Target], tmp_path: Path
) -> None:
    folder = save(new_draft(), tmp_path / "one")
    other = make_target(num_hidden_layers=6)
    with pytest.raises(UserError, match="num_target_layers is 4, but target random has 6"):
        inherit_draft(folder, DraftSection(), other, AUX, seed=0)
    with pytest.raises(UserError, match=r"states are of \[1, 2, 3\], .* reads .*\[1, 2, 4\]"):
        inherit_draft(folder, DraftSection(), target, (1, 2, 3), seed=0)


def test_names_that_are_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'lest_squares' is no folder, expected random, least"):
        find_draft("lest_squares")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="'nobody/nothing' is no folder, and as a hub id"):
        find_draft("nobody/nothing")


def test_the_digest_is_of_config_and_weights(tmp_path: Path) -> None:
    folder = save(new_draft(), tmp_path / "one")
    first = draft_digest(folder)
    (folder / "README.md").write_text("notes")
    os.utime(folder / "model.safetensors", (0, 0))
    assert draft_digest(folder) == first
    changed = new_draft()
    with torch.no_grad():
        changed.norm.weight[0] += 1
    assert draft_digest(save(changed, tmp_path / "two")) != first


def test_fit_continues_from_a_draft_and_notices_another(
    write_run: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(*settings: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["fit", str(path), "capture.mode=online", "eval.every=null", *settings])
        return code, capsys.readouterr().err

    path = write_run(tmp_path)
    values = json.loads(path.read_text())
    values["draft"] = {}
    values["capture"]["aux_layer_ids"] = list(AUX)
    path.write_text(json.dumps(values))
    code, error = fit("fit.train_head=false")
    assert code == 2
    assert "with draft.init random the head is random" in error
    folder = save(new_draft(), tmp_path / "one")
    settings = [f"draft.init={folder}", "draft.num_hidden_layers=2", "fit.max_steps=1"]
    assert fit(*settings)[0] == 0
    trained = load_draft(tmp_path / "out/draft").draft
    assert trained.config.num_hidden_layers == 2
    assert torch.equal(trained.t2d, new_draft().t2d)
    assert "is complete" in fit(*settings)[1]

    code, error = fit(f"draft.init={tmp_path / 'out/draft'}", "fit.max_steps=1")
    assert code == 2
    assert "give the run another output folder" in error

    with torch.no_grad():
        other = new_draft()
        other.norm.weight[0] += 1
    save(other, folder)
    code, error = fit(*settings)
    assert code == 0
    assert "made with other init; made again" in error
