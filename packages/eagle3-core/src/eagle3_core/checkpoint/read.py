"""Reading a checkpoint: from any known producer's folder to the canonical draft, or one error.

`plan_reading` decides everything from the config, the headers and the small tensors; `load_draft`
then reads the weights. Every tensor is used exactly once and every parameter is filled.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eagle3_core.checkpoint.dialects import canonical, clues_of, find_dialect
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.lender import Lender, find_lender
from eagle3_core.checkpoint.lookup import Lookup
from eagle3_core.checkpoint.report import Report
from eagle3_core.checkpoint.resolve import resolve
from eagle3_core.checkpoint.vocab_map import read_vocab_map
from eagle3_core.checkpoint.write import refuse_non_finite
from eagle3_core.config import DraftConfig
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError
from eagle3_core.pair import check_pair

OVERRIDES = (*(f.name for f in fields(DraftConfig)), "rope_theta", "aux_layer_id_convention", "d2t")
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LoadedDraft:
    """A draft, its config, and the reader's account of how it was read."""

    draft: Eagle3Draft
    config: DraftConfig
    report: Report


@dataclass(frozen=True)
class Reading:
    """What will be read: `names` maps canonical names to names in the files.

    `made` holds the vocabulary map, `borrowed` what the target must lend.
    """

    files: CheckpointFiles
    config: DraftConfig
    names: Mapping[str, str]
    made: Mapping[str, Tensor]
    borrowed: frozenset[str]
    lender: Lender | None
    report: Report


def load_draft(
    path: str | Path,
    target: object | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedDraft:
    """Read a checkpoint folder of any known producer.

    Args:
        path: the folder.
        target: a `Target`, a transformers model or a target's folder: it is checked against the
            draft, and lends embeddings and lm_head where the producer leaves them to the target.
        overrides: what the caller knows better than the file: `DraftConfig` fields, and
            `rope_theta`, `aux_layer_id_convention` ("boundary" or "output"), `d2t` ("identity").
        dtype: of the floating-point weights; None keeps the file's.

    Raises:
        UserError: one line naming file, tensor or key, and what is wrong with it.
    """
    return read_draft(plan_reading(path, target, overrides), dtype)


def read_draft(reading: Reading, dtype: torch.dtype | None = None) -> LoadedDraft:
    """The second half of `load_draft`: read the weights that were planned.

    Raises:
        UserError: NaN or inf, a quantised tensor, or nothing to borrow from.
    """
    tensors = read_tensors(reading)
    wanted = dtype or common_dtype(tensors, reading.report)
    draft = unfilled_draft(reading.config)
    draft.load_state_dict(
        {n: t.to(wanted) if t.is_floating_point() else t for n, t in tensors.items()},
        strict=True,
        assign=True,
    )
    return LoadedDraft(draft, reading.config, reading.report)


def plan_reading(
    path: str | Path,
    target: object | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Reading:
    """Everything `load_draft` decides, reading headers and vocabulary maps only.

    Raises:
        UserError: as `load_draft`.
    """
    overrides = _check_overrides(overrides or {})
    files = CheckpointFiles.open(path)
    dialect, lender = find_dialect(files), find_lender(target)
    report = Report(dialect.name if dialect else "canonical", ignored=list(files.ignored))
    fields_only = {k: v for k, v in overrides.items() if k != "d2t"}
    if dialect is None:
        where = str(files.folder / "config.json")
        config = canonical.from_json(files.config, fields_only, where, report)
        names = {name: name for name in files.tensors}
        identity = canonical.has_identity_map(files.config)
    else:
        for caution in dialect.cautions(clues_of(files)):
            report.warn(caution)
        config, names = resolve(Lookup(files, dialect, fields_only, lender, report))
        identity = False
    if lender is not None:
        check_pair(
            files.folder / "config.json",
            config,
            lender.name,
            vocab_size=lender.vocab_size,
            hidden_size=lender.hidden_size,
            num_layers=lender.num_layers,
        )
    names, borrowed = _account(files, config, names, dialect.borrows if dialect else frozenset())
    for name in sorted(borrowed):
        lent = f"not in the file; the target's{'' if lender else ' (to be given)'}"
        report.decide(name, "borrowed", "target", lent)
    identity = identity or "d2t" in overrides
    made = read_vocab_map(files, config, names, report, identity=identity)
    names = {n: f for n, f in names.items() if n not in ("d2t", "t2d")}
    return Reading(files, config, names, made, borrowed, lender, report)


def read_tensors(reading: Reading, *, borrow: bool = True) -> dict[str, Tensor]:
    """All tensors of the draft under canonical names, finite, in the file's dtypes.

    Args:
        reading: what to read.
        borrow: False leaves out what the target would lend.

    Raises:
        UserError: NaN or inf, a quantised tensor, or nothing to borrow from.
    """
    files = reading.files
    if borrow and reading.borrowed and reading.lender is None:
        raise UserError(
            f"{files.folder}: {', '.join(sorted(reading.borrowed))} not in the file, the producer "
            "leaves it to the target; give the target (--target)"
        )
    tensors = dict(reading.made)
    for name, in_file in reading.names.items():
        tensor = files.read(in_file)
        refuse_non_finite(tensor, in_file, str(files.tensors[in_file].file))
        tensors[name] = tensor
    if borrow and reading.lender is not None:
        lend = {_EMBED: reading.lender.embeddings, _HEAD: reading.lender.head}
        for name in reading.borrowed:
            # A copy: training the draft must not train the target.
            tensors[name] = lend[name]().clone()
    return tensors


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a draft."""
    return {n: tuple(t.shape) for n, t in unfilled_draft(config).state_dict().items()}


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init: on the meta device its first call imports a compiler, for seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def unfilled_draft(config: DraftConfig) -> Eagle3Draft:
    """A draft on the meta device, for `load_state_dict` to assign weights that exist already."""
    with torch.device("meta"), _NoInit():
        return Eagle3Draft(config)


def _check_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in overrides.items():
        if name not in OVERRIDES:
            near = difflib.get_close_matches(name, OVERRIDES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OVERRIDES)}"
            raise UserError(f"override {name!r} is not known; {hint}")
        if name == "d2t" and value != canonical.IDENTITY_MAP:
            raise UserError(f"override d2t is {value!r}, expected {canonical.IDENTITY_MAP!r}")
        if name == "aux_layer_id_convention" and value not in ("boundary", "output"):
            raise UserError(
                f"override aux_layer_id_convention is {value!r}, expected 'boundary' or 'output'"
            )
        if name == "aux_layer_ids" and not isinstance(value, list | tuple):
            raise UserError(f"override aux_layer_ids is {value!r}, expected a list of boundary ids")
    return {k: tuple(v) if k == "aux_layer_ids" else v for k, v in overrides.items()}


def _account(
    files: CheckpointFiles,
    config: DraftConfig,
    names: Mapping[str, str],
    borrows: frozenset[str],
) -> tuple[dict[str, str], frozenset[str]]:
    """Match names and shapes with the module's; the map's two tensors are checked elsewhere."""
    expected = {n: s for n, s in expected_shapes(config).items() if n not in ("d2t", "t2d")}
    held = {n: f for n, f in names.items() if n not in ("d2t", "t2d")}
    absent = expected.keys() - held.keys()
    lendable = frozenset(n for n in borrows & absent if _fits_target(n, config))
    unused = sorted(held[n] for n in held.keys() - expected.keys())
    unfilled = sorted(_as_in_file(n, held.values()) for n in absent - lendable)
    if unused or unfilled:
        raise UserError(
            f"{files.where}: tensors and config do not match: unused: "
            f"{', '.join(unused) or 'none'}; unfilled: {', '.join(unfilled) or 'none'}"
        )
    for name, in_file in held.items():
        info = files.tensors[in_file]
        if info.shape != expected[name]:
            raise UserError(
                f"{info.file}: {info.name} has shape {list(info.shape)}, expected "
                f"{list(expected[name])}"
            )
        if info.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UserError(
                f"{info.file}: {info.name} has dtype {info.dtype}, expected a floating-point type "
                "of 16 bits or more; quantised drafts are not supported"
            )
    return dict(names), lendable


def _as_in_file(name: str, in_file: Iterable[str]) -> str:
    """A canonical name in the spelling of the file, for messages."""
    single = any("midlayer." in other for other in in_file)
    return name.replace("layers.0.", "midlayer.", 1) if single else name


def _fits_target(name: str, config: DraftConfig) -> bool:
    """Whether the target's tensor has the draft's shape."""
    same_width = config.hidden_size == config.target_hidden_size
    return same_width and not (name == _HEAD and config.is_pruned)


def common_dtype(tensors: Mapping[str, Tensor], report: Report) -> torch.dtype:
    """The one floating-point dtype that holds all weights exactly; a mixture is reported."""
    found = sorted({t.dtype for t in tensors.values() if t.is_floating_point()}, key=str)
    wide = found[0]
    for dtype in found[1:]:
        wide = torch.promote_types(wide, dtype)
    if len(found) > 1:
        report.warn(f"weights are {' and '.join(map(str, found))}: all are held as {wide}")
    return wide
