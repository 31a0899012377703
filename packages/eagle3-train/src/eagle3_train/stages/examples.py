"""What the data of a run becomes: its splits, the chat template and the prepared examples."""

from typing import Any

from eagle3_core import UserError
from eagle3_core.target import Target
from eagle3_train.config import TrainConfig
from eagle3_train.data import ChatTemplate, Prepared, cached, prepare, prepared_from


def data_splits(config: TrainConfig) -> dict[str, list[str]]:
    """The sources of each split that has any."""
    if not config.data.train:
        raise UserError("data.train is empty, expected files of conversations")
    splits = {"train": config.data.train, "eval": config.data.eval}
    return {name: sources for name, sources in splits.items() if sources}


def prepare_split(
    config: TrainConfig, split: str, target: Target, template: ChatTemplate
) -> Prepared:
    """The examples of a split, kept in OUT/prepared."""
    # Beyond its own limit the target's states mean nothing.
    sources = data_splits(config)[split]
    limit = min(config.data.max_length, target.max_position_embeddings)
    strict = config.data.strict
    return cached(
        config.out / "prepared" / f"{split}.safetensors",
        prepared_from(sources, template, limit, strict),
        lambda: prepare(sources, template, max_length=limit, strict=strict),
    )


def load_template(config: TrainConfig, target: Target) -> ChatTemplate:
    """The target's chat template, or the one that the config names."""
    data = config.data
    return ChatTemplate(
        target.tokenizer, data.chat_template, target.eos_token_ids, data.template_arguments
    )


def template_files(config: TrainConfig) -> list[str]:
    """What is read beside the target to render a conversation."""
    return [config.data.chat_template] if config.data.chat_template else []


def template_arguments(config: TrainConfig) -> dict[str, Any]:
    """What a record says of the template's arguments, if there are any."""
    arguments = config.data.template_arguments
    return {"template_arguments": arguments} if arguments else {}
