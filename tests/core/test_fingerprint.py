"""A target that changed under its old name is noticed; a copy of it elsewhere is the same."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eagle3_core.fingerprint import fingerprint, tokenizer_fingerprint
from eagle3_core.target import Target


@pytest.fixture(scope="module")
def target_folder(
    make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder, target = tmp_path_factory.mktemp("target"), make_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(target_folder, tmp_path / "target")


def test_a_copy_is_the_same_whatever_its_dates(folder: Path, target_folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert fingerprint(str(folder)) == fingerprint(str(target_folder))


def test_every_tensor_and_every_json_file_counts(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    seen = {fingerprint(str(folder))}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 1.01}, weights, metadata={"format": "pt"})
        seen.add(fingerprint(str(folder)))
    save_file(tensors, weights, metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text + " ")
        seen.add(fingerprint(str(folder)))
        (folder / name).write_text(text)
    assert len(seen) == 1 + len(tensors) + 2


def test_weights_without_named_tensors_are_sampled(folder: Path) -> None:
    path = folder / "more.bin"
    path.write_bytes(bytes(1 << 22))
    before = fingerprint(str(folder))
    path.write_bytes(bytes(1 << 21) + b"\1" * (1 << 21))
    assert fingerprint(str(folder)) != before


def test_of_the_tokenizer_only_its_vocabulary_counts(folder: Path) -> None:
    before = tokenizer_fingerprint(str(folder))
    assert before is not None
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_fingerprint(str(folder)) == before
    rules = folder / "tokenizer.json"
    rules.write_text(rules.read_text().replace("im_end", "IM_END"))
    assert tokenizer_fingerprint(str(folder)) not in (before, None)
    rules.unlink()
    assert tokenizer_fingerprint(str(folder)) is None


def test_damaged_and_missing_targets_are_left_to_the_loader(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert fingerprint(str(folder)) is not None
    assert fingerprint("no-such-owner/no-such-model") is None
