"""Whether a stage can write its results, asked before it spends hours on them."""

import os
from pathlib import Path

from eagle3_core import UserError


def check_outputs(
    folder: Path, *, files: tuple[str, ...] = (), folders: tuple[str, ...] = ()
) -> None:
    """Refuse a folder that cannot be made or written, and names in it that are taken.

    Args:
        folder: what the stage writes to; need not exist.
        files: names in it that will be files.
        folders: names in it that will be folders.

    Raises:
        UserError: names what is in the way.
    """
    for path in (folder, *(folder / name for name in folders)):
        _check_folder(path)
    for path in (folder / name for name in files):
        if path.is_dir():
            raise UserError(f"{path}: is a folder, expected a file or nothing; remove it")


def _check_folder(path: Path) -> None:
    """The nearest ancestor that exists has to be a folder that can be written to."""
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise UserError(f"{path}: is not a folder, expected one to write to; change output")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path}: cannot be written to: permission denied; change output")
