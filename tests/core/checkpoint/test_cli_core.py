"""eagle3-core inspect, convert and diff, as a user calls them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from eagle3_core import DraftConfig, Eagle3Draft, load_draft, save_draft
from eagle3_core.checkpoint.read import expected_shapes
from eagle3_core.cli import main

MakeDraft = Callable[..., Eagle3Draft]
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def saved(make_draft: MakeDraft, tmp_path: Path) -> Path:
    save_draft(make_draft(), tmp_path / "draft")
    return tmp_path / "draft"


def test_inspect_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "sp_norm_before_residual"), "--json", "--scan"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dialect"] == "speculators"
    assert said["scanned"] is True
    assert {"name": "d2t", "shape": [128], "dtype": "int64", "origin": "checked map"} in said[
        "parts"
    ]
    residual = next(d for d in said["decisions"] if d["name"] == "residual")
    assert residual["value"] == "normed"
    assert residual["source"] == "config key"
    assert said["engines"]["vllm"] == []
    assert any("normed residual" in reason for reason in said["engines"]["sglang"])


def test_inspect_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "malformed" / "layers_40_one_midlayer")]) == 0
    said = capsys.readouterr().out
    for part in ("midlayer.self_attn.q_proj.weight", "num_hidden_layers is 40", "sglang: yes"):
        assert part in said


def test_inspect_needs_no_target_for_what_is_borrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "ea_base"), "--json"]) == 0
    parts = {p["name"]: p["origin"] for p in json.loads(capsys.readouterr().out)["parts"]}
    assert parts["embed_tokens.weight"] == "borrowed from the target"


def test_scan_names_the_first_bad_value(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, saved / "model.safetensors")
    assert main(["inspect", str(saved)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(saved), "--scan", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "layers.0.mlp.up_proj.weight holds nan at flat position 53" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("to", ["canonical", "sglang", "vllm", "speculators", "trtllm"])
def test_convert_keeps_the_function(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = GOLDEN / "malformed" / "_valid_sp_two_layer"
    assert main(["convert", str(source), str(tmp_path / to), "--to", to, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["to"], said["dialect"]) == (to, "speculators")
    assert main(["diff", str(source), str(tmp_path / to)]) == 0
    assert capsys.readouterr().out == "the same function\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["convert", "{draft}", "{new}", "--to", "eagle", "--set", "aux_layer_ids=1,4,5"],
            "2, n//2",
        ),
        (["convert", "{draft}", "{draft}", "--to", "vllm"], "exists"),
        (["convert", "{none}", "{new}", "--to", "vllm"], "no such folder"),
        (["inspect", "{draft}", "--set", "feedbak=post_norm"], "did you mean 'feedback'"),
        (["inspect", "{draft}", "--set", "feedback"], "expected KEY=VALUE"),
        (["inspect", "{draft}", "--set", "feedback=post"], "feedback is 'post', expected one of"),
        (["diff", "{draft}", "{none}"], "no such folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"draft": saved, "new": tmp_path / "new", "none": tmp_path / "none"}
    assert main([argument.format(**places) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft"]


def test_set_takes_json_and_lists(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "aux_layer_ids=1,4,8",
        "feedback=post_norm",
        "rms_norm_eps=1e-3",
        "num_target_layers=null",
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    assert main(["inspect", str(saved), "--json", *flags]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["aux_layer_ids"] == [1, 4, 8]
    assert (config["feedback"], config["rms_norm_eps"]) == ("post_norm", 1e-3)
    assert config["num_target_layers"] is None


def test_an_identity_map_that_is_vouched_for_stays_vouched_for(
    make_draft: MakeDraft, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tensors["d2t"].zero_()
    del tensors["t2d"]
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    command = ["convert", str(tmp_path / "draft"), str(tmp_path / "new"), "--to", "canonical"]
    assert main(command) == 2
    assert "d2t=identity" in capsys.readouterr().err
    assert main([*command, "--set", "d2t=identity"]) == 0
    assert not load_draft(tmp_path / "new").draft.d2t.any()


def test_diff_names_fields_and_tensors(
    saved: Path, make_draft: MakeDraft, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_draft(feedback="post_norm")
    with torch.no_grad():
        other.fc.weight[2, 1] += 1
    save_draft(other, tmp_path / "other")
    assert main(["diff", str(saved), str(tmp_path / "other"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    names = [d["name"] for d in said["differences"]]
    assert said["same"] is False
    assert names[0] == "feedback"
    assert names[1].startswith("fc.weight [flat 97] of 1 that differ")
    assert len(names) == 2


def test_target_is_checked(
    saved: Path,
    make_target: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_target(vocab_size=48).save_pretrained(tmp_path / "target")
    assert main(["inspect", str(saved), "--target", str(tmp_path / "target")]) == 2
    assert "vocab_size is 40, but target" in capsys.readouterr().err


# Zeros that take no disk: 768 MB of weights, in a file with holes.
BIG = DraftConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128000,
    draft_vocab_size=32000,
    target_hidden_size=2048,
    num_aux_hidden_states=3,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
MEASURE = """
import resource, sys, torch, rich
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
from eagle3_core.cli import main
status = main(sys.argv[1:])
slow = bool({"transformers", "sympy"} & sys.modules.keys())
print(status, peak() - before, slow, file=sys.stderr)
"""


def _sparse_checkpoint(folder: Path) -> Path:
    save_draft(Eagle3Draft(DraftConfig(**{**vars(BIG), **SMALL})), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **BIG.to_dict()}))
    header, position = {}, 0
    for name, shape in expected_shapes(BIG).items():
        kind = {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")
        size = {"I64": 8, "BOOL": 1, "BF16": 2}[kind] * torch.Size(shape).numel()
        span = [position, position + size]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": span}
        position += size
    text = json.dumps(header).encode()
    d2t = torch.ones(BIG.draft_vocab_size, dtype=torch.int64)
    t2d = torch.zeros(BIG.vocab_size, dtype=torch.bool)
    t2d[1 : BIG.draft_vocab_size + 1] = True
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in (("d2t", d2t), ("t2d", t2d)):
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(text) + position)
    return folder


SMALL = {
    "hidden_size": 16,
    "target_hidden_size": 16,
    "vocab_size": 4,
    "draft_vocab_size": 4,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(("flags", "megabytes"), [([], 100), (["--scan"], 300)])
def test_inspect_reads_headers_and_scan_streams(
    flags: list[str], megabytes: int, tmp_path: Path
) -> None:
    path = _sparse_checkpoint(tmp_path / "big")
    held = (path / "model.safetensors").stat().st_size
    assert held > 700_000_000
    command = [sys.executable, "-c", MEASURE, "inspect", str(path), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    status, growth, slow_imports = done.stderr.split()[-3:]
    assert status == "0"
    assert json.loads(done.stdout)["config"]["vocab_size"] == 128000
    assert int(growth) < megabytes
    assert slow_imports == "False"  # each alone would take longer than inspect may
