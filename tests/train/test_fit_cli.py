"""The commands from conversations to a trained draft, on a tiny target, as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3_core import load_draft
from eagle3_train.cli import main


@pytest.fixture
def config(tmp_path: Path, write_run: Callable[[Path], Path]) -> Path:
    return write_run(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_capture_fit_eval(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, _, error = run(capsys, "fit", str(config))
    assert code == 2
    assert "run eagle3-train capture" in error
    assert not out.exists()

    assert run(capsys, "prepare", str(config))[0] == 0
    assert run(capsys, "capture", str(config))[0] == 0
    code, stdout, _ = run(capsys, "fit", str(config), "--json")
    assert code == 0
    result = json.loads(stdout)
    steps = metrics(out)
    assert result["num_steps"] == len(steps) == steps[-1]["step"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "eval" in steps[-1]
    assert json.loads((out / "run.json").read_text())["argv"][:2] == ["eagle3-train", "fit"]
    assert load_draft(out / "draft").config.draft_vocab_size == 64

    code, stdout, _ = run(capsys, "eval", str(config), "--json")
    assert code == 0
    held_out = json.loads(stdout)
    assert held_out["accept_length"] == steps[-1]["eval"]["accept_length"]
    assert 1 <= held_out["accept_length"] <= 4

    before = (out / "draft/model.safetensors").stat().st_mtime_ns
    code, _, error = run(capsys, "fit", str(config))
    assert code == 0
    assert "draft is complete" in error
    assert (out / "draft/model.safetensors").stat().st_mtime_ns == before
    code, _, error = run(capsys, "fit", str(config), "fit.learning_rate=1e-4")
    assert code == 2
    assert "fit.learning_rate = 0.001, this run has 0.0001" in error
    code, _, error = run(capsys, "fit", str(config), "data.max_length=20")
    assert code == 2
    assert "run eagle3-train capture" in error


def test_online_equals_offline(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["capture.store_dtype=float32", "fit.max_steps=2", "eval.every=null"]
    offline = [f"output={tmp_path / 'offline'}", *settings]
    assert run(capsys, "capture", str(config), *offline)[0] == 0
    assert run(capsys, "fit", str(config), *offline)[0] == 0
    online = [f"output={tmp_path / 'online'}", "capture.mode=online", "draft.vocab_size=64"]
    assert run(capsys, "fit", str(config), *online, *settings)[0] == 0
    a, b = (metrics(tmp_path / mode) for mode in ("offline", "online"))
    # Padding changes the order of the target's float32 sums, and the pruned vocabulary may differ
    # by the target's mass, which only a store keeps; the data and its order are the same.
    assert [m["tokens"] for m in a] == [m["tokens"] for m in b]
    assert a[0]["loss"] == pytest.approx(b[0]["loss"], rel=0.2)


@pytest.mark.parametrize("arguments", [["--what"], ["--num-processes", "0"]])
def test_unknown_options_are_refused(config: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", str(config), *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit.epoch=3"], "override fit.epoch: unknown key; did you mean 'epochs'"),
        (["target=./nowhere"], "target ./nowhere: no such directory"),
        (["data.train=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["data.train=[]"], "data.train is empty"),
    ],
)
def test_mistakes_end_with_one_line_and_nothing_written(
    config: Path,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, error = run(capsys, "capture", str(config), *arguments)
    assert code == 2
    assert out == ""
    assert expected in error
    assert error.startswith("eagle3-train capture: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
