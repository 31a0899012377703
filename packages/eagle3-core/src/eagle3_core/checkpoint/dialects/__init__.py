"""The producers' layouts, one file each."""

from eagle3_core.checkpoint.dialects.canonical import Canonical
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.errors import UserError


def find_dialect(files: CheckpointFiles) -> Canonical:
    """The dialect that a checkpoint is written in.

    Raises:
        UserError: no dialect fits.
    """
    dialect = Canonical()
    if dialect.recognises(files):
        return dialect
    raise UserError(
        f"{files.folder / 'config.json'}: model_type is {files.config.get('model_type')!r}, "
        "expected 'eagle3_draft'"
    )
