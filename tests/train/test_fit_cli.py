"""The commands from conversations to a trained draft, on a tiny target, as a user types them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_core import load_draft
from eagle3_train.cli import main

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 8-layer Llama over bytes, saved as a folder."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Path:
    """A config with 16 conversations to learn from and 4 held out."""
    for name, count in (("train", 16), ("eval", 4)):
        rows = [
            {"messages": [
                {"role": "user", "content": f"count {name} {i}"},
                {"role": "assistant", "content": "abcdefghij"[i % 5 :] * 2},
            ]}
            for i in range(count)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    values = {
        "output": str(tmp_path / "out"),
        "target": str(target),
        "data": {"train": [str(tmp_path / "train.jsonl")], "eval": [str(tmp_path / "eval.jsonl")]},
        "draft": {"vocab_size": 64, "init": "target"},
        "fit": {"ttt_length": 3, "batch_tokens": 160, "micro_batch_tokens": 96, "epochs": 2,
                "learning_rate": 1e-3},
        "eval": {"num_speculative_tokens": 3, "every": 4},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


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
