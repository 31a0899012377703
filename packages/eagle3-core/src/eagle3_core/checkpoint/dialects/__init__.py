"""The producers' layouts, one file each, in the order in which they are tried."""

from eagle3_core.checkpoint.dialects import (
    angelslim,
    canonical,
    deepspec,
    eagle,
    engines,
    modelopt,
    nemo,
    specforge,
    speculators,
    torchspec,
)
from eagle3_core.checkpoint.dialects.base import Clues, Dialect
from eagle3_core.checkpoint.dialects.foreign import REFUSED
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.names import strip_prefix
from eagle3_core.errors import UserError

_ORDER = (
    *REFUSED,
    speculators.DIALECT,
    deepspec.DIALECT,
    nemo.DIALECT,
    torchspec.DIALECT,
    angelslim.DIALECT,
    modelopt.DIALECT,
    specforge.DIALECT,
    eagle.DIALECT,
    engines.DIALECT,
)


def clues_of(files: CheckpointFiles) -> Clues:
    """What detection looks at."""
    names = frozenset(strip_prefix(name) for name in files.tensors)
    is_target = any(n.startswith("model.layers.") for n in files.tensors) and not any(
        n.startswith(("fc.", "layers.0.hidden_norm", "midlayer.", "input_norm")) for n in names
    )
    return Clues(files.config, names, is_target)


def find_dialect(files: CheckpointFiles) -> Dialect | None:
    """The dialect that a checkpoint is written in; None means the canonical one.

    Raises:
        UserError: it is no EAGLE-3 draft, or one of a kind that is not supported.
    """
    if canonical.recognises(files.config):
        return None
    clues = clues_of(files)
    dialect = next((d for d in _ORDER if d.recognises(clues)), None)
    if dialect is None:
        raise UserError(
            f"{files.folder}: no EAGLE-3 draft: architectures is {clues.arch!r} and no tensor is "
            f"named like a draft's; found {', '.join(sorted(files.tensors)[:5]) or 'none'}"
        )
    if dialect.refused:
        raise UserError(f"{files.folder}: this is {dialect.refused}; it is not supported")
    return dialect
