"""Whether a target is still the one it was: digests of its files that read little of them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from eagle3_core.packaged import is_packaged, packaged_target

_SAMPLE = 4096  # bytes read of each tensor, or of each part of a file without named tensors
_PARTS = 256
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def fingerprint(name: str) -> str | None:
    """Of a target that `load_target` takes: its commit on the hub, or a digest of its folder.

    The digest covers every json file, the tokenizer and template among them, names and sizes of
    the weight files, and the first bytes of every tensor: training any of them changes it.

    Returns:
        None where nothing can be read, which loading the target reports.
    """
    folder = _folder(name)
    if folder.is_dir():
        digest = hashlib.sha256()
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            if path.suffix in (".json", ".jinja"):
                digest.update(f"{path.name} ".encode() + path.read_bytes())
            elif path.suffix in _WEIGHTS:
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
                _add_samples(digest, path)
        return digest.hexdigest()
    snapshot = _snapshot(name)
    return None if snapshot is None else snapshot.name


def tokenizer_fingerprint(name: str) -> str | None:
    """Of the tokenizer that lies beside a model: a digest of the files that hold its vocabulary.

    Args:
        name: as for `fingerprint`, or the folder of a draft.

    Returns:
        None where there is none.
    """
    folder: Path | None = _folder(name)
    if folder is not None and not folder.is_dir():
        folder = _snapshot(name)
    held = [] if folder is None else [folder / file for file in _TOKENIZER]
    held = [path for path in held if path.is_file()]
    if not held:
        return None
    digest = hashlib.sha256()
    for path in held:
        digest.update(f"{path.name} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _folder(name: str) -> Path:
    return Path(packaged_target(name) if is_packaged(name) else os.path.expanduser(name))


def _snapshot(name: str) -> Path | None:
    """Where the hub's files of a model lie; the folder is called after their commit."""
    try:
        config = cached_file(name, "config.json")
    except (OSError, ValueError):
        return None
    return None if config is None else Path(config).parent


def _add_samples(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        for start in _starts(path):
            file.seek(start)
            digest.update(file.read(_SAMPLE))


def _starts(path: Path) -> list[int]:
    """Where the tensors of a file begin; evenly spread places where it does not say."""
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(length, size)))
                places = [entry["data_offsets"][0] for k, entry in header.items() if k[:2] != "__"]
                return [0, *(8 + length + place for place in sorted(places))]
            except (ValueError, KeyError, TypeError):
                pass  # damaged, which loading it reports
    return [size * part // _PARTS for part in range(_PARTS)]
