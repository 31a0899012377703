"""The commands from conversations to a trained draft, on a tiny target, as a user types them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eagle3_core import load_draft
from eagle3_core.fingerprint import fingerprint, tokenizer_fingerprint
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
    target = json.loads(config.read_text())["target"]
    assert json.loads((out / "draft/config.json").read_text())["metadata"] == {
        "target": target,
        "target_files": fingerprint(target),
        "tokenizer_files": tokenizer_fingerprint(target),
        "step": result["num_steps"],
    }

    code, stdout, _ = run(capsys, "eval", str(config), "--json")
    assert code == 0
    held_out = json.loads(stdout)
    assert held_out["accept_length"] == steps[-1]["eval"]["accept_length"]
    assert 1 <= held_out["accept_length"] <= 4
    other = ["capture.mode=online", "capture.aux_layer_ids=[1,2,4]"]
    code, _, error = run(capsys, "eval", str(config), *other)
    assert code == 2
    assert "aux_layer_ids is [1, 2, 3], but the captured states are of [1, 2, 4]" in error

    before = (out / "draft/model.safetensors").stat().st_mtime_ns
    code, _, error = run(capsys, "fit", str(config))
    assert code == 0
    assert "draft is complete" in error
    assert (out / "draft/model.safetensors").stat().st_mtime_ns == before
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
        (["fit.learning_rate=.inf"], "fit.learning_rate: found inf, expected a finite number"),
        (["fit=3"], "fit: found 3, expected a section with keys such as ttt_length"),
        (["output="], "output: found None, expected a valid string"),
        (["data.train=[questions.jsonl]"], "no assistant turn (questions.jsonl:1)"),
        (["capture.placement=tensor_parallel"], "tensor_parallel in one process"),
        (["data.max_length=1"], "nothing supervised within max_length, 1 tokens"),
    ],
)
def test_mistakes_end_with_one_line_and_nothing_written(
    config: Path,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    code, out, error = run(capsys, "capture", str(config), *arguments)
    assert code == 2
    assert out == ""
    assert expected in error
    assert error.startswith("eagle3-train capture: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("stage", "taken"),
    [
        ("regenerate", "out"),
        ("regenerate", "out/regenerated.jsonl/"),
        ("capture", "out"),
        ("capture", "out/features"),
        ("capture", "out/features/eval"),
        ("capture", "out/features/eval.inputs.json/"),
        ("fit", "out/draft"),
        ("fit", "out/draft/notes.txt"),
        ("fit", "out/checkpoints"),
        ("fit", "out/metrics.jsonl/"),
        ("fit", "out/run.json/"),
    ],
)
def test_outputs_in_the_way_are_named_before_any_work(
    config: Path, tmp_path: Path, stage: str, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / taken
    path.parent.mkdir(parents=True, exist_ok=True)
    if taken.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    before = snapshot(tmp_path)
    code, out, error = run(capsys, stage, str(config), f"regenerate.prompts=[{tmp_path}/x.jsonl]")
    assert (code, out) == (2, "")
    assert path.name in error
    assert error.count("\n") == 1
    assert "no such file" not in error
    assert snapshot(tmp_path) == before


def test_a_failing_disk_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "out/features")

    monkeypatch.setattr("eagle3_train.store.writer.save", full)
    code, _, error = run(capsys, "capture", str(config))
    assert code == 2
    assert error.endswith("eagle3-train capture: out/features: No space left on device\n")


def test_a_finished_run_makes_room_for_another_config_and_an_unfinished_one_does_not(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(capsys, "capture", str(config))[0] == 0
    assert run(capsys, "fit", str(config), "fit.max_steps=2")[0] == 0
    code, _, error = run(capsys, "fit", str(config), "fit.max_steps=1")
    assert code == 0
    assert f"{out / 'draft'}: made with other fit; made again" in error
    assert len(metrics(out)) == 1
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-1", "best.json"}

    (out / "draft.inputs.json").unlink()
    before = snapshot(out)
    code, _, error = run(capsys, "fit", str(config), "fit.learning_rate=1e-4")
    assert code == 2
    assert "this run has 0.0001" in error
    assert snapshot(out) == before


def test_other_states_replace_the_old_and_fit_names_what_is_other(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "capture", str(config))[0] == 0
    other = "capture.aux_layer_ids=[1,2]"
    code, _, error = run(capsys, "fit", str(config), other)
    assert code == 2
    assert "(made with other capture); run eagle3-train capture" in error
    assert error.count("\n") == 1
    before = snapshot(tmp_path / "out")
    assert run(capsys, "capture", str(config), "capture.aux_layer_ids=[99]")[0] == 2
    assert snapshot(tmp_path / "out") == before
    code, _, error = run(capsys, "capture", str(config), other)
    assert code == 0
    assert "train: made with other capture; made again" in error
    assert run(capsys, "fit", str(config), other, "fit.max_steps=1")[0] == 0


def test_a_changed_file_in_a_folder_and_a_changed_template_are_noticed(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, template = tmp_path / "texts", tmp_path / "chat.jinja"
    folder.mkdir()
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]}
    (folder / "a.jsonl").write_text(json.dumps(row) + "\n")
    template.write_text(
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' }}{%- endif -%}"
    )
    settings = [f"data.train=[{folder}]", "data.eval=[]", f"data.chat_template={template}"]
    assert run(capsys, "capture", str(config), *settings)[0] == 0
    assert "is complete" in run(capsys, "capture", str(config), *settings)[2]
    for file in (folder / "a.jsonl", template):
        file.write_text(file.read_text() + "\n")
        code, _, error = run(capsys, "capture", str(config), *settings)
        assert code == 0
        assert "made with other files; made again" in error


def test_a_draft_vocabulary_of_the_first_ids_is_trained_and_saved(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The data holds bytes and the template's marks: with the lowest of the rest, ids 0..259.
    online = ["capture.mode=online", "eval.every=null"]
    settings = [*online, "draft.vocab_size=260", "draft.init=random", "fit.max_steps=1"]
    assert run(capsys, "fit", str(config), *settings)[0] == 0
    draft = load_draft(tmp_path / "out/draft").draft
    assert draft.config.is_pruned
    assert not draft.d2t.any()
    assert run(capsys, "eval", str(config), *settings)[0] == 0


def test_nothing_to_learn_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only end-of-turn is supervised, and a slot needs a supervised token before the one it learns.
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    (tmp_path / "empty.jsonl").write_text(json.dumps(row) + "\n")
    settings = [f"data.train=[{tmp_path}/empty.jsonl]", "capture.mode=online", "draft.init=random"]
    code, _, error = run(capsys, "fit", str(config), *settings, "eval.every=null")
    assert code == 2
    assert "not one of 1 samples has a token to learn" in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prepared"]


def test_a_sequence_longer_than_the_target_allows_is_cut(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 999}]
    }
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    settings = [f"data.train=[{tmp_path}/long.jsonl]", "data.max_length=4096", "data.eval=[]"]
    code, out, error = run(capsys, "prepare", str(config), "--json", *settings)
    assert code == 0
    assert json.loads(out)["train"]["tokens"] == 256
    assert "1 examples cut to 256 tokens" in error


def test_other_settings_set_the_old_answers_aside_and_other_prompts_keep_them(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "out/regenerated.jsonl"
    ask = '{"prompt": "hi"}\n'
    prompts.write_text(ask)
    settings = [str(config), f"regenerate.prompts=[{prompts}]", "regenerate.max_tokens=4"]
    assert run(capsys, "regenerate", *settings)[0] == 0
    assert "is complete" in run(capsys, "regenerate", *settings)[2]
    first = answers.read_text()
    prompts.write_text(ask + '{"prompt": "ho"}\n')
    assert run(capsys, "regenerate", *settings)[0] == 0
    assert answers.read_text().startswith(first)
    both = answers.read_text()
    code, _, error = run(capsys, "regenerate", *settings, "regenerate.max_tokens=3")
    assert code == 0
    assert "made with other regenerate; made again" in error
    assert (tmp_path / "out/regenerated.previous.jsonl").read_text() == both
    assert len(answers.read_text().splitlines()) == 2


def test_prompts_that_all_fail_are_an_error(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    settings = [f"regenerate.prompts=[{tmp_path}/prompts.jsonl]", "regenerate.max_tokens=4"]
    code, _, error = run(capsys, "regenerate", str(config), *settings)
    assert code == 2
    assert "nothing to answer: 1 dropped: a prompt of" in error
    assert not (tmp_path / "out").exists()


def test_slices_of_a_target_cannot_read_different_samples(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["capture.placement=tensor_parallel", "capture.mode=online"]
    code, _, error = run(capsys, "fit", str(config), *settings)
    assert code == 2
    assert "tensor_parallel with capture.mode online, expected offline" in error


def test_other_target_weights_under_the_same_path_are_noticed(
    config: Path, tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(target_folder, tmp_path / "target")
    settings = [str(config), f"target={moved}", "fit.max_steps=1", "draft.init=random"]
    assert run(capsys, "capture", *settings)[0] == 0
    assert run(capsys, "fit", *settings)[0] == 0
    weights = moved / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, weights, metadata={"format": "pt"})
    code, _, error = run(capsys, "fit", *settings)
    assert code == 2
    assert "made with other target_files" in error
    code, _, error = run(capsys, "capture", *settings)
    assert code == 0
    assert "made with other target_files; made again" in error
    code, _, error = run(capsys, "fit", *settings)
    assert code == 0
    assert "draft: made with other features, target_files; made again" in error

    # A record of a version that did not look at them says nothing about them.
    record = tmp_path / "out/features/train.inputs.json"
    inputs = json.loads(record.read_text())
    del inputs["target_files"]
    record.write_text(json.dumps(inputs))
    assert "train is complete" in run(capsys, "capture", *settings)[2]
