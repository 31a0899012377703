"""eagle3's own layout: every semantic choice is a key, every tensor has its module's name.

Nothing is inferred, so nothing can be misread.
"""

from collections.abc import Mapping
from typing import Any

from eagle3_core.checkpoint.report import Report
from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError

NAME = "canonical"
MODEL_TYPE = "eagle3_draft"
FORMAT_VERSION = 1
AUX_CONVENTION = "boundary: id c is the residual stream entering layer c"
IDENTITY_MAP = "identity"

_HEAD = (
    "model_type",
    "architectures",
    "format_version",
    "aux_layer_id_convention",
    "vocab_map",
    "metadata",
)


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this layout."""
    return config.get("model_type") == MODEL_TYPE


def has_identity_map(config: Mapping[str, Any]) -> bool:
    """Whether whoever wrote it vouched for a map of zero offsets."""
    return config.get("vocab_map") == IDENTITY_MAP


def to_json(
    config: DraftConfig,
    metadata: Mapping[str, Any] | None = None,
    *,
    identity_map: bool = False,
) -> dict[str, Any]:
    """config.json: facts about the run go under `metadata`."""
    out = {
        "model_type": MODEL_TYPE,
        "architectures": ["Eagle3Draft"],
        "format_version": FORMAT_VERSION,
        "aux_layer_id_convention": AUX_CONVENTION,
        **config.to_dict(),
    }
    if identity_map:
        out["vocab_map"] = IDENTITY_MAP
    if metadata:
        out["metadata"] = dict(metadata)
    return out


def from_json(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str, report: Report
) -> DraftConfig:
    """Inverse of `to_json`.

    Raises:
        UserError: another format version or id convention, or a bad config.
    """
    if raw.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{where}: format_version is {raw.get('format_version')!r}, this reader knows "
            f"{FORMAT_VERSION}; upgrade eagle3-core"
        )
    if raw.get("aux_layer_id_convention") != AUX_CONVENTION:
        raise UserError(
            f"{where}: aux_layer_id_convention is {raw.get('aux_layer_id_convention')!r}, "
            f"expected {AUX_CONVENTION!r}"
        )
    values = {k: v for k, v in raw.items() if k not in _HEAD} | dict(overrides)
    try:
        config = DraftConfig.from_dict(values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    for name, value in config.to_dict().items():
        source = "caller" if name in overrides else "config key"
        report.decide(name, value, source, name)
    return config
