"""The vocabulary map of a checkpoint: read, completed, checked."""

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.report import Report
from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError
from eagle3_core.vocab import check_vocab_map

_INTEGERS = (torch.int64, torch.int32)
_MASKS = (torch.bool, torch.uint8, torch.int8, *_INTEGERS)


def read_vocab_map(
    files: CheckpointFiles,
    config: DraftConfig,
    names: Mapping[str, str],
    report: Report,
    *,
    identity: bool,
) -> dict[str, Tensor]:
    """-> {"d2t" [D] int64, "t2d" [V] bool}, empty for a full vocabulary.

    Args:
        files: where the tensors are.
        config: sizes.
        names: canonical name -> name in the files.
        report: is told where the map came from.
        identity: the caller vouches that draft id i is target id i.

    Raises:
        UserError: no map for a pruned vocabulary, an unset or a wrong one.
    """
    size, vocab = config.draft_vocab_size, config.vocab_size
    d2t = _read(files, names, "d2t", size, _INTEGERS)
    t2d = _read(files, names, "t2d", vocab, _MASKS)
    where = f"{files.tensors[names['d2t']].file if 'd2t' in names else files.folder}: "
    if not config.is_pruned:
        if (d2t is not None and d2t.any()) or (t2d is not None and not t2d.all()):
            raise UserError(f"{where}d2t or t2d drops ids, but lm_head has a row for all {vocab}")
        if d2t is not None or t2d is not None:
            report.decide("d2t", "none", "tensor values", "full vocabulary, trivial map left out")
        return {}
    if identity:
        if d2t is not None and d2t.any():
            raise UserError(f"{where}d2t=identity was asked for, but the file has a real map")
        report.decide("d2t", "identity", "caller", f"draft id i is target id i for i < {size}")
        return {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.arange(vocab) < size}
    if d2t is None:
        raise UserError(
            f"{where}no d2t, but the draft has {size} of {vocab} ids: which ones is not known; "
            "find the map, or set d2t=identity if the first ids are meant"
        )
    check_vocab_map(d2t, t2d, vocab, f"{where}{names['d2t']}")
    report.decide("d2t", f"{size} of {vocab} ids", "tensor values", names["d2t"])
    if t2d is None:
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[d2t + torch.arange(size)] = True
        report.decide("t2d", f"{size} ids marked", "tensor values", "not in the file; from d2t")
    return {"d2t": d2t.to(torch.int64), "t2d": t2d.to(torch.bool)}


def _read(
    files: CheckpointFiles,
    names: Mapping[str, str],
    name: str,
    length: int,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor | None:
    if name not in names:
        return None
    info = files.tensors[names[name]]
    if info.shape != (length,) or info.dtype not in dtypes:
        raise UserError(
            f"{info.file}: {info.name} is {info.dtype} {list(info.shape)}, expected "
            f"{dtypes[0]} [{length}]"
        )
    return files.read(names[name])
