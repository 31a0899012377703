"""A trained draft in the layout of an engine or of another trainer."""

from pathlib import Path
from typing import Any

from eagle3_core import UserError, load_draft
from eagle3_core.checkpoint import export_draft
from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_train.config import TrainConfig


def export(config: TrainConfig, to: str, draft: str | None, output: str | None) -> dict[str, Any]:
    """Write OUT/draft, or another, for `to`.

    Args:
        config: of the run.
        to: the consumer's name.
        draft: the folder of a draft in any layout that can be read; None = OUT/draft.
        output: the folder to write; None = OUT/export/<to>.

    Raises:
        UserError: no draft, the folder exists, or `to` would compute something else; says what.
    """
    source = Path(draft) if draft else config.out / "draft"
    folder = Path(output) if output else config.out / "export" / to
    if folder.exists():
        raise UserError(f"{folder}: exists; choose another folder with --output, or remove it")
    loaded = load_draft(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A map that was never set has been refused by the reader.
    export_draft(loaded.draft, folder, to, target_name=config.target, identity_map=True)
    return {
        "output": str(folder),
        "draft": str(source),
        "to": to,
        "notes": list(CONSUMERS[to].notes),
    }
