"""Conversations, and a run over them with a small random target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3_core.target import Target
from eagle3_train.data import ChatTemplate

EOS, IM_END = 257, 259


@pytest.fixture(scope="session")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target()


@pytest.fixture(scope="session")
def chatml(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(), eos_token_ids=(EOS, IM_END))


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write JSON lines under a name; returns the path as text."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def chat() -> Callable[..., list[dict[str, str]]]:
    """chat("hi", "hello", "and?", ...): user and assistant in turn."""

    def build(*texts: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    return build


@pytest.fixture(scope="session")
def target_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` as a folder that commands can load."""
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_run(target_folder: Path) -> Callable[[Path], Path]:
    """Folder -> a config in it: 16 conversations to learn from, 4 held out, a few small steps."""

    def write(folder: Path) -> Path:
        for name, count in (("train", 16), ("eval", 4)):
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"{name} {i}" * (1 + i % 3)},
                        {"role": "assistant", "content": "abcdefghij"[i % 5 :] * 2},
                    ]
                }
                for i in range(count)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        values = {
            "output": str(folder / "out"),
            "target": str(target_folder),
            "data": {"train": [str(folder / "train.jsonl")], "eval": [str(folder / "eval.jsonl")]},
            "capture": {"aux_layer_ids": [1, 2, 3]},
            "draft": {"vocab_size": 64, "init": "least_squares"},
            "fit": {
                "ttt_length": 3,
                "batch_tokens": 200,
                "micro_batch_tokens": 120,
                "epochs": 2,
                "learning_rate": 1e-3,
            },
            "eval": {"num_speculative_tokens": 3, "every": 4},
        }
        path = folder / "run.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        return path

    return write
