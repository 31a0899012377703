"""A draft that starts from an existing one: its weights and vocabulary, and layers that are new."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.hub import snapshot_download  # pyright: ignore[reportPrivateImportUsage]

from eagle3_core import DraftConfig, Eagle3Draft, UserError, load_draft
from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.draft import DraftLayer
from eagle3_core.errors import as_user_error
from eagle3_core.target import Target
from eagle3_train.config import COMPUTED_STARTS, DraftSection

# What the section may say about an existing draft, and the field of the draft it must equal.
_SAME = {
    "vocab_size": "draft_vocab_size",
    **{
        name: name
        for name in DraftSection.model_fields
        if name not in ("vocab_size", "num_hidden_layers", "layer_input", "init")
    },
}


def find_draft(init: str) -> Path:
    """The folder of the draft that `draft.init` names; a hub id is fetched into the hub's cache.

    Raises:
        UserError: neither a folder nor a hub id that can be fetched.
    """
    folder = Path(init).expanduser()
    if folder.is_dir():
        return folder
    if init.startswith((".", "/", "~")) or init.count("/") != 1:
        raise UserError(
            f"draft.init: {init!r} is no folder, expected {', '.join(COMPUTED_STARTS)}, "
            "or the folder or hub id of a draft"
        )
    with as_user_error(f"draft.init: {init!r} is no folder, and as a hub id it cannot be fetched"):
        return Path(snapshot_download(init, allow_patterns=["*.json", "*.safetensors", "*.bin"]))


def draft_digest(folder: Path) -> str:
    """sha256 of a checkpoint's config and weights, so that a changed one is noticed.

    Raises:
        UserError: not a checkpoint folder.
    """
    files = CheckpointFiles.open(folder)
    paths = {folder / "config.json", *(info.file for info in files.tensors.values())}
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def inherit_draft(
    folder: Path,
    section: DraftSection,
    target: Target,
    aux_layer_ids: tuple[int, ...],
    seed: int,
) -> Eagle3Draft:
    """An existing draft of any dialect, ready to train: float32, every weight and the map kept.

    With more layers than it has, the new ones come last and change nothing yet.

    Args:
        folder: of the checkpoint.
        section: what it states must be the draft's; what it leaves out is taken from the draft.
        target: lends embeddings and head where the checkpoint leaves them to it.
        aux_layer_ids: boundary ids of the captured states.
        seed: of the new layers' weights.

    Raises:
        UserError: it belongs to another target, or names the first setting that contradicts it.
    """
    loaded = load_draft(folder, target=target, dtype=torch.float32)
    _check_states(folder, loaded.config, aux_layer_ids)
    _check_section(folder, loaded.config, section)
    layers, stated = loaded.config.num_hidden_layers, section.model_fields_set
    config = replace(
        loaded.config,
        num_hidden_layers=section.num_hidden_layers if "num_hidden_layers" in stated else layers,
        # Of one layer both designs are the same draft.
        layer_input=section.layer_input
        if layers == 1 and "layer_input" in stated
        else loaded.config.layer_input,
        num_target_layers=target.num_layers,
        aux_layer_ids=aux_layer_ids,
    )
    draft = Eagle3Draft(config)
    draft.init_weights(torch.Generator().manual_seed(seed))
    draft.load_state_dict(loaded.draft.state_dict(), strict=False)
    for layer in draft.layers[layers:]:
        assert isinstance(layer, DraftLayer)
        layer.init_identity()
    return draft


def _check_states(folder: Path, config: DraftConfig, captured: tuple[int, ...]) -> None:
    if config.aux_source != "boundaries":
        raise UserError(
            f"{folder}: aux_source is {config.aux_source}, expected boundaries; the state behind "
            "the final norm is not captured as an input"
        )
    ids = config.aux_layer_ids
    if (ids or captured) != captured or config.num_aux_hidden_states != len(captured):
        reads = f"aux_layer_ids {list(ids)}" if ids else f"{config.num_aux_hidden_states} states"
        raise UserError(
            f"capture.aux_layer_ids: the captured states are of {list(captured)}, but the draft "
            f"in {folder} reads {reads}; capture those"
        )


def _check_section(folder: Path, config: DraftConfig, section: DraftSection) -> None:
    """What the run's config states about the draft must hold of the checkpoint."""
    same = dict(_SAME)
    if config.num_hidden_layers > 1:
        same["layer_input"] = "layer_input"
    for key, field in same.items():
        wanted, found = getattr(section, key), getattr(config, field)
        if key in section.model_fields_set and wanted is not None and wanted != found:
            raise UserError(
                f"draft.{key} is {wanted}, but the draft in {folder} has {field} {found}; "
                f"leave draft.{key} out, or use another draft.init"
            )
    if "num_hidden_layers" in section.model_fields_set:
        wanted, found = section.num_hidden_layers, config.num_hidden_layers
        if wanted < found:
            raise UserError(
                f"draft.num_hidden_layers is {wanted}, but the draft in {folder} has {found}; "
                "layers can be added, not removed"
            )
