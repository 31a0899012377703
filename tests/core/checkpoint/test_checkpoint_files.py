"""Folders: which file counts, and broken files refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core import Eagle3Draft, UserError, load_draft, save_draft
from eagle3_core.checkpoint.files import CheckpointFiles

MakeDraft = Callable[..., Eagle3Draft]


@pytest.fixture
def saved(make_draft: MakeDraft, tmp_path: Path) -> Path:
    save_draft(make_draft(), tmp_path / "d")
    return tmp_path / "d"


@pytest.fixture
def sharded(saved: Path) -> Path:
    """Two shards and an index; the second shard holds a stale fc.weight as well."""
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    first = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    shards = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n in first},
        "model-00002-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in first},
    }
    weight_map = {n: shard for shard, held in shards.items() for n in held}
    shards["model-00002-of-00002.safetensors"]["fc.weight"] = torch.full_like(
        tensors["fc.weight"], 7.0
    )
    for shard, held in shards.items():
        save_file(held, saved / shard)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return saved


def test_index_beats_stray_files(sharded: Path, make_draft: MakeDraft) -> None:
    save_file({"fc.weight": torch.zeros(1)}, sharded / "model.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"stale")
    loaded = load_draft(sharded)
    for name, tensor in make_draft().state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[name], tensor)
    said = " | ".join(loaded.report.ignored)
    for part in ("fc.weight in model-00002", "model.safetensors:", "pytorch_model.bin:"):
        assert part in said


def test_missing_shard_names_file_and_tensors(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"00001.*no such file.*d2t, fc\.weight, lm_head\.weight"):
        load_draft(sharded)


def test_index_that_leaves_the_folder_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    with pytest.raises(UserError, match="in this folder"):
        load_draft(sharded)


def test_two_candidates_are_no_choice(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.safetensors, pytorch_model\.bin could each"):
        load_draft(saved)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_file_reads_the_same(saved: Path, make_draft: MakeDraft, zipped: bool) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    for name, tensor in load_draft(saved).draft.state_dict().items():
        assert torch.equal(tensor, make_draft().state_dict()[name])


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.75, 0.999])
def test_cut_files(saved: Path, fraction: float) -> None:
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(UserError, match=r"model\.safetensors: ") as caught:
        load_draft(saved)
    assert "\n" not in str(caught.value)


def _header(data: dict[str, Any], values: bytes) -> bytes:
    text = json.dumps(data).encode()
    return len(text).to_bytes(8, "little") + text + values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 40, "not a safetensors file"),
        (_header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"0000"), "F99"),
        (
            _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"),
            "needs 8",
        ),
        (
            _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"0" * 8),
            "starts",
        ),
        (
            _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"0" * 8),
            "too long",
        ),
        (_header({"a": {"dtype": "F32"}}, b""), "broken safetensors header"),
        (_header({"a": 3}, b""), "broken safetensors header"),
        ((4).to_bytes(8, "little") + b"{]:,", "broken safetensors header"),
    ],
)
def test_broken_headers(saved: Path, content: bytes, message: str) -> None:
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_draft(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        (None, "no such file"),
        ("\udcff", "cannot be read"),
    ],
)
def test_broken_configs(saved: Path, text: str | None, message: str) -> None:
    path = saved / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"config\.json: {message}"):
        load_draft(saved)


def test_no_folder_and_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        load_draft(saved)
    with pytest.raises(UserError, match="no such folder"):
        load_draft(saved / "nothing")


def test_chunks_are_the_whole_tensor_in_order(saved: Path) -> None:
    files = CheckpointFiles.open(saved)
    for name in files.tensors:
        pieces: list[Tensor] = list(files.chunks(name))
        assert torch.equal(torch.cat(pieces), files.read(name).flatten())
