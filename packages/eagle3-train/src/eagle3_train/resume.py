"""Checkpoints of a run: whole or absent, continued only by the run they belong to.

`step-<n>/` holds the draft in the canonical layout, the optimiser's moments and `state.json`, which
is written last and lists every other file with its size. A step is a function of the weights, the
moments, the step number and the seed (no dropout, no noise, data order by seed and epoch), so this
is all of it.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core import Eagle3Draft, UserError, load_draft, save_draft

_STATE = "state.json"
_OPTIMIZER = "optimizer.safetensors"
_PREFIX = "step-"


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training
    tokens: int = 0


def save_checkpoint(
    folder: Path,
    progress: Progress,
    draft: Eagle3Draft,
    moments: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-<n>` and then drop all but the newest `keep` complete ones."""
    final = folder / f"{_PREFIX}{progress.step}"
    work = folder / f".{final.name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    save_draft(draft, work / "draft", identity_map=True)
    save_file(dict(moments), work / _OPTIMIZER)
    files = {
        str(path.relative_to(work)): path.stat().st_size
        for path in sorted(work.rglob("*"))
        if path.is_file()
    }
    state = {**vars(progress), "identity": identity, "files": files}
    write_json(work / _STATE, state)
    if final.exists():
        shutil.rmtree(final)
    os.replace(work, final)
    for old in _complete(folder)[keep:]:
        shutil.rmtree(old)
    return final


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where the run stood, its weights and its optimiser's moments."""

    path: Path
    progress: Progress

    def weights(self) -> dict[str, Tensor]:
        """The draft's whole state dict."""
        return load_draft(self.path / "draft").draft.state_dict()

    def moments(self) -> dict[str, Tensor]:
        """What `save_checkpoint` was given."""
        return load_file(self.path / _OPTIMIZER)


def newest_checkpoint(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The newest complete checkpoint.

    Raises:
        UserError: it belongs to a run of another config or other data.
    """
    complete = _complete(folder)
    if not complete:
        return None
    newest = complete[0]
    state = _state(newest)
    refuse_other_run(newest, state["identity"], identity)
    return Checkpoint(newest, Progress(state["step"], state["elapsed"], state["tokens"]))


def discard_run(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove the checkpoints of the run of `identity`, which has ended, to make room for another.

    Those of any other run stay.
    """
    for path in _complete(folder):
        if _state(path)["identity"] == identity:
            shutil.rmtree(path)


def incomplete(folder: Path) -> list[Path]:
    """Step folders that are cut short, so that resuming can say why it passed them over."""
    return [path for path in _steps(folder) if not _is_complete(path)]


def refuse_other_run(where: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a UserError that names the first setting in which two identities differ."""
    old, new = _flatten(found), _flatten(json.loads(json.dumps(wanted)))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{where}: written with {key} = {old.get(key)!r}, this run has {new.get(key)!r}; "
                "restore the old value to continue, or give this run another output folder"
            )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that is either complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.tmp")
    with work.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)


def _steps(folder: Path) -> list[Path]:
    """Step folders, newest first."""
    found = [p for p in folder.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(_PREFIX)), reverse=True)


def _complete(folder: Path) -> list[Path]:
    return [path for path in _steps(folder) if _is_complete(path)]


def _state(path: Path) -> dict[str, Any]:
    return json.loads((path / _STATE).read_text(encoding="utf-8"))


def _is_complete(path: Path) -> bool:
    try:
        state = _state(path)
        return all((path / n).stat().st_size == size for n, size in state["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
