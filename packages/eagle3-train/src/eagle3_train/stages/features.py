"""Where the target's states of a split are kept, what they are made from, and reading them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3_core import UserError
from eagle3_core.fingerprint import fingerprint
from eagle3_core.target import Target, load_target
from eagle3_train.capture import Capturer, OnlineFeatures
from eagle3_train.config import TrainConfig
from eagle3_train.data import Example
from eagle3_train.placement import place_target
from eagle3_train.processes import Processes
from eagle3_train.provenance import changed_inputs, hash_files, recorded_inputs
from eagle3_train.rolling import check_rolling, in_order
from eagle3_train.stages.examples import (
    data_splits,
    load_template,
    prepare_split,
    template_arguments,
    template_files,
)
from eagle3_train.store import FeatureStore, RollingStore

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
}
Features = FeatureStore | OnlineFeatures | RollingStore


def open_features(config: TrainConfig, split: str) -> Features:
    """The samples of a split: captured before, or made on the fly."""
    if split not in data_splits(config):
        raise UserError(f"data.{split} is empty, expected files of conversations")
    if config.capture.mode == "online":
        target = place_reader(config, _online_processes(config))
        prepared = prepare_split(config, split, target, load_template(config, target))
        return OnlineFeatures(make_capturer(config, target), prepared.examples)
    folder, record = feature_paths(config, split)
    found = recorded_inputs(record)
    changed = changed_inputs(found or {}, feature_inputs(config, split))
    if changed:
        made = f" (made with other {', '.join(changed)})" if found else ""
        raise UserError(
            f"{folder}: no states of the data.{split} of this config{made}; "
            "run eagle3-train capture with it first"
        )
    if not is_rolling(config, split):
        return FeatureStore(folder)
    check_rolling(config, 1)
    target = load_target(config.target)
    prepared = prepare_split(config, split, target, load_template(config, target))
    return RollingStore(folder, in_order(prepared.examples, config.seed))


def _online_processes(config: TrainConfig) -> Processes:
    processes = Processes()
    if config.capture.placement == "tensor_parallel":
        # Each process trains on its own samples; the parts of a target have to read the same ones.
        raise UserError(
            "capture.placement is tensor_parallel with capture.mode online, expected offline: "
            "run eagle3-train capture, then fit"
        )
    return processes


def place_reader(config: TrainConfig, processes: Processes) -> Target:
    """The target, placed to read as `capture` says."""
    section = config.capture
    return place_target(config.target, DTYPES[section.dtype], section.placement, processes)


def make_capturer(config: TrainConfig, target: Target) -> Capturer:
    """What takes the states that `capture` names from the target."""
    section = config.capture
    return Capturer(target, section.aux_layer_ids, DTYPES[section.store_dtype])


def feature_paths(config: TrainConfig, split: str) -> tuple[Path, Path]:
    """The folder of a split's states, and the record of what it was made from."""
    folder = config.out / "features" / split
    return folder, folder.with_name(f"{split}.inputs.json")


def feature_inputs(config: TrainConfig, split: str) -> dict[str, Any]:
    """What the states of a split are made from."""
    return {
        "target": config.target,
        "target_files": fingerprint(config.target),
        "capture": config.capture.model_dump(
            exclude={"batch_tokens", "mode", "placement", "max_disk_gib"}
        ),
        "data": {
            **config.data.model_dump(include={"max_length", "chat_template"}),
            **template_arguments(config),
        },
        "files": hash_files([*data_splits(config)[split], *template_files(config)]),
        # In the order of training, and gone when read.
        **({"rolling": config.seed} if is_rolling(config, split) else {}),
    }


def is_rolling(config: TrainConfig, split: str) -> bool:
    """Whether the states of a split are gone once they are read."""
    return split == "train" and config.capture.max_disk_gib is not None


def sample_sources(config: TrainConfig, split: str, store: Features) -> list[str]:
    """[samples]: the file or data set of each; one name for all if the capture did not say."""
    if isinstance(store, OnlineFeatures):
        return origins(store.examples)
    found = recorded_inputs(sources_file(config, split)) or {}
    return found.get("sources") or [f"data.{split}"] * len(store)


def sources_file(config: TrainConfig, split: str) -> Path:
    """Which file each captured sample came from, in their order."""
    return config.out / "features" / f"{split}.sources.json"


def origins(examples: Sequence[Example]) -> list[str]:
    """[examples]: the file or data set of each."""
    return [example.where.rpartition(":")[0] for example in examples]
