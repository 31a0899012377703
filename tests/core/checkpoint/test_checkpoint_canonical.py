"""The canonical layout: written whole or not at all, read back bit for bit or refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core import CacheContext, Eagle3Draft, UserError, load_draft, save_draft
from eagle3_core.checkpoint import write
from eagle3_core.cli import main

MakeDraft = Callable[..., Eagle3Draft]


def _same(a: Eagle3Draft, b: Eagle3Draft) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(t, right[n]) and t.dtype == right[n].dtype for n, t in left.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 3, "layer_input": "every", "qk_norm": True},
        {"aux_norm": "concat_per_layer", "fc_bias": True, "target_hidden_size": 24},
        {"draft_vocab_size": 40, "residual": "normed", "feedback": "post_norm"},
        {"attention_bias": True, "mlp_bias": True, "sliding_window": 4, "aux_layer_ids": None},
    ],
)
def test_round_trip_bit_for_bit(
    make_draft: MakeDraft, tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    draft = make_draft(**changes).to(dtype)
    save_draft(draft, tmp_path / "d", metadata={"step": 3})
    loaded = load_draft(tmp_path / "d")
    assert loaded.config == draft.config
    assert _same(loaded.draft, draft)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


@torch.no_grad()
def test_same_logits(make_draft: MakeDraft, tmp_path: Path) -> None:
    draft = make_draft(num_hidden_layers=2)
    save_draft(draft, tmp_path / "d")
    again = load_draft(tmp_path / "d").draft
    ids, aux = torch.arange(5)[None], torch.rand(1, 5, 48)
    out = [d.logits(d(d.embed(ids), d.project(aux), ids, CacheContext())) for d in (draft, again)]
    assert torch.equal(*out)


def test_dtype_on_request(make_draft: MakeDraft, tmp_path: Path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "d")
    loaded = load_draft(tmp_path / "d", dtype=torch.bfloat16).draft
    assert _same(loaded, draft.to(torch.bfloat16))
    assert loaded.d2t.dtype == torch.int64


def test_config_states_every_choice_and_the_id_convention(
    make_draft: MakeDraft, tmp_path: Path
) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config.items() >= draft.config.to_dict().items()
    assert config["aux_layer_id_convention"].startswith("boundary: ")
    with (tmp_path / "d" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "pt"}


def test_earlier_checkpoint_is_replaced_whole(make_draft: MakeDraft, tmp_path: Path) -> None:
    save_draft(make_draft(seed=1), tmp_path / "d")
    save_draft(make_draft(seed=2), tmp_path / "d")
    assert _same(load_draft(tmp_path / "d").draft, make_draft(seed=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize("failing", ["save_file", "_fsync", "_swap"])
def test_a_write_that_fails_leaves_the_earlier_one(
    make_draft: MakeDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save_draft(make_draft(seed=1), tmp_path / "d")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(write, failing, full)
    with pytest.raises(UserError, match="No space left"):
        save_draft(make_draft(seed=2), tmp_path / "d")
    assert _same(load_draft(tmp_path / "d").draft, make_draft(seed=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_a_folder_with_other_things_is_not_replaced(make_draft: MakeDraft, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt"):
        save_draft(make_draft(), tmp_path / "d")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        save_draft(make_draft(), tmp_path / "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_is_refused_both_ways(
    make_draft: MakeDraft, tmp_path: Path, value: float
) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][1, 2] = value
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model\.safetensors: fc\.weight holds .* position 50"):
        load_draft(tmp_path / "d")
    with torch.no_grad():
        draft.norm.weight[3] = value
    with pytest.raises(UserError, match=r"norm\.weight holds .* position 3"):
        save_draft(draft, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_unset_map_is_refused(make_draft: MakeDraft, tmp_path: Path) -> None:
    draft = Eagle3Draft(make_draft().config)
    draft.init_weights()
    with pytest.raises(UserError, match="never set"):
        save_draft(draft, tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_inputs": "first"}, r"unknown key 'layer_inputs'; did you mean 'layer_input'"),
        ({"format_version": 2}, "format_version is 2"),
        ({"aux_layer_id_convention": "output"}, "aux_layer_id_convention is 'output'"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"num_hidden_layers": 2}, r"unfilled: layers\.1\.input_layernorm\.weight, "),
        ({"qk_norm": True}, r"unused: none; unfilled: .*k_norm\.weight"),
        ({"fc_bias": True}, r"unfilled: fc\.bias"),
        ({"draft_vocab_size": 13}, r"lm_head\.weight has shape \[12, 16\], expected \[13, 16\]"),
    ],
)
def test_config_and_tensors_must_fit(
    make_draft: MakeDraft, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save_draft(make_draft(), tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as caught:
        load_draft(tmp_path / "d")
    assert "\n" not in str(caught.value)


def test_left_over_and_missing_tensors_are_listed(make_draft: MakeDraft, tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    tensors["extra"] = torch.zeros(1)
    tensors["fc2.weight"] = tensors.pop("fc.weight")
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"unused: extra, fc2\.weight; unfilled: fc\.weight"):
        load_draft(tmp_path / "d")


def test_overrides_are_checked(make_draft: MakeDraft, tmp_path: Path) -> None:
    save_draft(make_draft(), tmp_path / "d")
    loaded = load_draft(tmp_path / "d", overrides={"feedback": "post_norm"})
    assert loaded.config.feedback == "post_norm"
    assert ("feedback", "post_norm", "caller", "feedback") in loaded.report.decisions
    with pytest.raises(UserError, match="did you mean 'feedback'"):
        load_draft(tmp_path / "d", overrides={"feedbak": "post_norm"})


def test_a_map_of_the_first_ids_is_saved_by_who_knows_that_it_was_set(
    make_draft: MakeDraft, tmp_path: Path
) -> None:
    draft = make_draft()
    draft.d2t.zero_()
    draft.t2d.copy_(torch.arange(draft.config.vocab_size) < draft.config.draft_vocab_size)
    with pytest.raises(UserError, match="never set"):
        save_draft(draft, tmp_path / "d")
    save_draft(draft, tmp_path / "d", identity_map=True)
    assert _same(load_draft(tmp_path / "d").draft, draft)
    command = ["convert", str(tmp_path / "d"), str(tmp_path / "new"), "--to", "canonical"]
    assert main(command) == 0
    assert _same(load_draft(tmp_path / "new").draft, draft)

    draft.t2d.logical_not_()
    with pytest.raises(UserError, match="t2d"):
        save_draft(draft, tmp_path / "d", identity_map=True)
    save_draft(make_draft(), tmp_path / "d", identity_map=True)
    assert "vocab_map" not in json.loads((tmp_path / "d/config.json").read_text())
