"""Writing a checkpoint folder whole or not at all, and the canonical layout."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.checkpoint.dialects import canonical
from eagle3_core.config import DraftConfig
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError
from eagle3_core.vocab import check_vocab_map

WEIGHTS = "model.safetensors"


def save_draft(
    draft: Eagle3Draft,
    path: str | Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    identity_map: bool = False,
) -> None:
    """Write the canonical checkpoint: config.json and model.safetensors, dtypes as they are.

    An earlier checkpoint at `path` is replaced once the new one is complete on disk.

    Args:
        draft: what to save.
        path: the folder.
        metadata: JSON-ready facts about the run, kept under `metadata` in config.json.
        identity_map: the caller knows that the vocabulary map was set, so zero offsets are meant.

    Raises:
        UserError: a weight is NaN or inf, the vocabulary map is unset or wrong, or `path` holds
            something that is not a checkpoint.
    """
    tensors = {n: t.detach().contiguous().cpu() for n, t in draft.state_dict().items()}
    check_tensors(draft.config, tensors, str(path), identity_map=identity_map)
    identity = is_identity(draft.config, tensors)
    write_folder(path, canonical.to_json(draft.config, metadata, identity_map=identity), tensors)


def is_identity(config: DraftConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a pruned draft keeps exactly the first ids of the target."""
    return config.is_pruned and not tensors["d2t"].any()


def check_tensors(
    config: DraftConfig, tensors: Mapping[str, Tensor], where: str, *, identity_map: bool = False
) -> None:
    """Refuse NaN, inf and a broken vocabulary map; `identity_map` vouches that it was set.

    Raises:
        UserError: names the tensor and the first bad position.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            refuse_non_finite(tensor, name, where)
    if config.is_pruned:
        check_vocab_map(
            tensors["d2t"],
            tensors["t2d"],
            config.vocab_size,
            f"{where}: d2t",
            identity_map=identity_map,
        )


def refuse_non_finite(tensor: Tensor, name: str, where: str, offset: int = 0) -> None:
    """Raise on the first NaN or inf; `offset` is the flat position of the tensor's start."""
    bad = ~torch.isfinite(tensor)
    if bad.any():
        first = int(bad.flatten().nonzero()[0])
        raise UserError(
            f"{where}: {name} holds {tensor.flatten()[first].item()} at flat position "
            f"{offset + first}, expected finite weights; the training run diverged or the "
            "file is damaged"
        )


def write_folder(
    path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write config.json and model.safetensors beside `path`, then rename into place.

    Raises:
        UserError: `path` exists and is not a checkpoint folder, or cannot be written.
    """
    path = Path(path)
    check_destination(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
    try:
        fresh.chmod(0o755)
        save_file(dict(tensors), fresh / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, allow_nan=False)
        (fresh / "config.json").write_text(text + "\n", encoding="utf-8")
        for item in (fresh / WEIGHTS, fresh / "config.json", fresh):
            _fsync(item)
        _swap(fresh, path)
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise UserError(f"{path}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_destination(path: Path) -> None:
    """Refuse a path that holds something else than a checkpoint.

    Raises:
        UserError: names what is in the way.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path}: is a file, expected a folder to write the checkpoint to")
    extra = sorted(p.name for p in path.iterdir() if p.name not in ("config.json", WEIGHTS))
    if extra:
        raise UserError(
            f"{path}: holds {extra[0]}, so it is not a checkpoint to replace; "
            "choose another folder or empty this one"
        )


def _swap(fresh: Path, path: Path) -> None:
    if path.exists():
        # A folder cannot be renamed onto a full one, so the old one steps aside first.
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
        os.replace(path, old)
        try:
            os.replace(fresh, path)
        except OSError:
            os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(fresh, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
