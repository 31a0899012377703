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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core import Eagle3Draft, UserError, load_draft, save_draft

_STATE = "state.json"
_OPTIMIZER = "optimizer.safetensors"
_PREFIX = "step-"
_BEST = "best.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training
    tokens: int = 0
    best_step: int | None = None  # of the highest held-out accept length
    best_accept_length: float | None = None


def save_checkpoint(
    folder: Path,
    progress: Progress,
    draft: Eagle3Draft,
    moments: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-<n>`, point `folder/best.json` at the best one, and then drop the rest.

    The newest `keep` complete ones and the best stay. Whatever happens meanwhile, there is a
    complete checkpoint whenever there was one before: everything is on the disk before it gets its
    name, and loses its name before it is removed.

    Raises:
        UserError: it cannot be written, such as on a full disk; nothing of it is left behind.
    """
    final = folder / f"{_PREFIX}{progress.step}"
    work = folder / f".{final.name}.tmp"
    _remove_leftovers(folder)
    try:
        work.mkdir(parents=True)
        save_draft(draft, work / "draft", identity_map=True)
        save_file(dict(moments), work / _OPTIMIZER)
        _finish(work, {**vars(progress), "identity": identity})
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(work, ignore_errors=True)
        complete = _complete(folder)
        last = f"{complete[0]} is intact" if complete else "there is no earlier one"
        raise UserError(
            f"{final}: the checkpoint cannot be written: {_reason(error)}; {last}; make room and "
            "give the same command again"
        ) from None
    _remove(final)
    os.replace(work, final)
    sync(folder)
    point_to_best(folder, progress)
    complete = _complete(folder)
    kept = {*complete[:keep], folder / f"{_PREFIX}{progress.best_step}"}
    for old in _steps(folder):
        if old not in kept:
            _remove(old)
    return final


def point_to_best(folder: Path, progress: Progress) -> None:
    """Write which checkpoint has the highest held-out accept length, if one has been measured."""
    if progress.best_step is None:
        return
    best = {"step": progress.best_step, "accept_length": progress.best_accept_length}
    write_json(folder / _BEST, {"path": f"{_PREFIX}{progress.best_step}", **best})


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
    progress = Progress(**{field.name: state[field.name] for field in fields(Progress)})
    point_to_best(folder, progress)  # as it was then: a later best may have been lost
    return Checkpoint(newest, progress)


def discard_run(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove the checkpoints of the run of `identity`, which has ended, to make room for another.

    Those of any other run stay.
    """
    for path in _complete(folder):
        if _state(path)["identity"] == identity:
            _remove(path)
            (folder / _BEST).unlink(missing_ok=True)


def incomplete(folder: Path) -> list[Path]:
    """Step folders that are cut short, so that resuming can say why it passed them over."""
    return [path for path in _steps(folder) if not _is_complete(path)]


def refuse_other_run(where: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a UserError that names the first setting in which two identities differ."""
    old, new = _flatten(found), _flatten(comparable(found, json.loads(json.dumps(wanted))))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{where}: written with {key} = {old.get(key)!r}, this run has {new.get(key)!r}; "
                "restore the old value to continue, or give this run another output folder"
            )


def comparable(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`wanted` without the files of a target where `found`, of an earlier version, lacks them."""
    kept = {k: v for k, v in wanted.items() if k != "target_files" or k in found or not found}
    for key, value in kept.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            kept[key] = comparable(found[key], value)
    return kept


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
    sync(path.parent)


def _finish(work: Path, state: Mapping[str, Any]) -> None:
    """Write the list of files, with everything it names on the disk first."""
    paths = sorted(work.rglob("*"))
    for path in paths:
        sync(path)
    files = {str(p.relative_to(work)): p.stat().st_size for p in paths if p.is_file()}
    write_json(work / _STATE, {**state, "files": files})


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Under another name first, so that a kill halfway leaves no torn checkpoint."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.old")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _remove_leftovers(folder: Path) -> None:
    """Of writes and removals that were killed."""
    for path in (*folder.glob(f".{_PREFIX}*.tmp"), *folder.glob(f".{_PREFIX}*.old")):
        shutil.rmtree(path)


def _reason(error: Exception) -> str:
    """safetensors reports the system's message inside its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rpartition("I/O error: ")[2]


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
