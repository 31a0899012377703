"""eagle3's own layout: every semantic choice is a key, every tensor has its module's name."""

from collections.abc import Mapping
from typing import Any

from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.checkpoint.report import Report
from eagle3_core.checkpoint.write import AUX_CONVENTION, FORMAT_VERSION, MODEL_TYPE
from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError

_HEAD = ("model_type", "architectures", "format_version", "aux_layer_id_convention", "metadata")


class Canonical:
    """Reads what `save_draft` writes; nothing is inferred, so nothing can be misread."""

    name = "canonical"

    def recognises(self, files: CheckpointFiles) -> bool:
        """Whether the config names this layout."""
        return files.config.get("model_type") == MODEL_TYPE

    def resolve(
        self, files: CheckpointFiles, report: Report, overrides: Mapping[str, Any]
    ) -> tuple[DraftConfig, dict[str, str]]:
        """-> (config, canonical name -> name in the file).

        Raises:
            UserError: another format version or convention, or a bad config.
        """
        where = files.folder / "config.json"
        version = files.config.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{where}: format_version is {version!r}, this reader knows {FORMAT_VERSION}; "
                "upgrade eagle3-core"
            )
        if files.config.get("aux_layer_id_convention") != AUX_CONVENTION:
            raise UserError(
                f"{where}: aux_layer_id_convention is "
                f"{files.config.get('aux_layer_id_convention')!r}, expected {AUX_CONVENTION!r}"
            )
        values = {k: v for k, v in files.config.items() if k not in _HEAD} | dict(overrides)
        try:
            config = DraftConfig.from_dict(values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        for name, value in config.to_dict().items():
            by_caller = name in overrides
            report.decide(name, value, "caller" if by_caller else "config key", name)
        return config, {name: name for name in files.tensors}
