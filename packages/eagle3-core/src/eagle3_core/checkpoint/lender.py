"""What a draft may take from its target: embeddings, lm_head, and facts to check it against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_core.checkpoint.files import CheckpointFiles
from eagle3_core.errors import UserError

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


@dataclass(frozen=True)
class Lender:
    """A target as the reader sees it; the tensors [V,T] are read only when asked for."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embeddings: Callable[[], Tensor]
    head: Callable[[], Tensor]


def find_lender(target: object | None) -> Lender | None:
    """From a `Target`, a transformers model, or a model's folder or name.

    Raises:
        UserError: not one of these, or its config or weights cannot be read.
    """
    if target is None:
        return None
    if isinstance(target, str | Path):
        folder = Path(target)
        if folder.is_dir() and any(folder.glob("*.safetensors")):
            return _from_folder(folder)
        from eagle3_core.target import load_target  # noqa: PLC0415 - imports transformers

        return _from_model(load_target(target).model, str(target))
    model = getattr(target, "model", target) if hasattr(target, "tokenizer") else target
    if not hasattr(model, "get_input_embeddings"):
        raise UserError(
            f"target is a {type(target).__name__}, expected a Target, a transformers model, "
            "or a model's folder"
        )
    return _from_model(model, str(getattr(target, "name", type(model).__name__)))


def _from_model(model: Any, name: str) -> Lender:
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"target {name}: {type(model).__name__} has no lm_head")
    return Lender(
        name=name,
        model_type=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=len(head.weight),
        embeddings=lambda: model.get_input_embeddings().weight.detach().cpu(),
        head=lambda: head.weight.detach().cpu(),
    )


def _from_folder(folder: Path) -> Lender:
    files = CheckpointFiles.open(folder)
    where = folder / "config.json"
    config = files.config.get("text_config") or files.config
    embed = _find(files, "embed_tokens.weight")
    head = _find(files, "lm_head.weight")
    if embed is None:
        raise UserError(f"target {folder}: no embed_tokens.weight in its files")
    if head is None:
        if not config.get("tie_word_embeddings", files.config.get("tie_word_embeddings", True)):
            raise UserError(f"target {folder}: no lm_head.weight, and its embeddings are not tied")
        head = embed
    name = head
    return Lender(
        name=str(folder),
        model_type=str(config.get("model_type")),
        num_layers=_whole(config, "num_hidden_layers", where),
        hidden_size=_whole(config, "hidden_size", where),
        vocab_size=files.tensors[head].shape[0],
        embeddings=lambda: files.read(embed),
        head=lambda: files.read(name),
    )


def _find(files: CheckpointFiles, name: str) -> str | None:
    return next((p + name for p in _PREFIXES if p + name in files.tensors), None)


def _whole(config: Mapping[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}, expected a whole number")
    return value
