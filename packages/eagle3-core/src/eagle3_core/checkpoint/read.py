"""Reading a checkpoint: from any known producer's folder to the canonical draft, or one error.

`plan_reading` decides everything from the config, the headers and the small tensors; `load_draft`
then reads the weights. Every tensor is used exactly once and every parameter is filled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.checkpoint.dialects import find_dialect
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.report import Report
from eagle3_core.checkpoint.write import refuse_non_finite
from eagle3_core.config import DraftConfig
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError
from eagle3_core.vocab import check_vocab_map


@dataclass(frozen=True)
class LoadedDraft:
    """A draft, its config, and the reader's account of how it was read."""

    draft: Eagle3Draft
    config: DraftConfig
    report: Report


@dataclass(frozen=True)
class Reading:
    """What will be read: `names` maps canonical names to names in the files."""

    files: CheckpointFiles
    config: DraftConfig
    names: Mapping[str, str]
    report: Report


def load_draft(
    path: str | Path,
    target: object | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedDraft:
    """Read a checkpoint folder.

    Args:
        path: the folder.
        target: the target, a loaded transformers model, or a target's folder.
        overrides: what the caller knows better than the file, by `DraftConfig` field name.
        dtype: of the floating-point weights; None keeps the file's.

    Raises:
        UserError: one line naming file, tensor or key, and what is wrong with it.
    """
    reading = plan_reading(path, target, overrides)
    tensors = _read_tensors(reading, dtype)
    with torch.device("meta"):
        draft = Eagle3Draft(reading.config)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return LoadedDraft(draft, reading.config, reading.report)


def plan_reading(
    path: str | Path,
    target: object | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Reading:
    """Everything `load_draft` decides, without reading a weight.

    Raises:
        UserError: as `load_draft`.
    """
    files = CheckpointFiles.open(path)
    dialect = find_dialect(files)
    report = Report(dialect.name, ignored=list(files.ignored))
    config, names = dialect.resolve(files, report, overrides or {})
    _account(files, config, names)
    if config.is_pruned:
        d2t = files.read(names["d2t"])
        check_vocab_map(d2t, files.read(names["t2d"]), config.vocab_size, f"{files.folder}: d2t")
    return Reading(files, config, names, report)


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft."""
    with torch.device("meta"):
        draft = Eagle3Draft(config)
    return {name: tuple(t.shape) for name, t in draft.state_dict().items()}


def _account(files: CheckpointFiles, config: DraftConfig, names: Mapping[str, str]) -> None:
    expected = expected_shapes(config)
    unused = sorted(names[n] for n in names.keys() - expected.keys())
    unfilled = sorted(expected.keys() - names.keys())
    if unused or unfilled:
        raise UserError(
            f"{files.folder}: tensors and config do not match: "
            f"unused: {', '.join(unused) or 'none'}; unfilled: {', '.join(unfilled) or 'none'}"
        )
    for name, shape in expected.items():
        info = files.tensors[names[name]]
        if info.shape != shape:
            raise UserError(
                f"{info.file}: {info.name} has shape {list(info.shape)}, "
                f"expected {list(shape)} from the config"
            )


def _read_tensors(reading: Reading, dtype: torch.dtype | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, in_file in reading.names.items():
        tensor = reading.files.read(in_file)
        if tensor.is_floating_point():
            refuse_non_finite(tensor, in_file, str(reading.files.tensors[in_file].file))
            tensor = tensor.to(dtype or tensor.dtype)
        tensors[name] = tensor
    return tensors
