"""The stage that shows what the data becomes."""

from typing import Any

from eagle3_core.target import load_target
from eagle3_train.config import TrainConfig
from eagle3_train.data import show
from eagle3_train.display import console
from eagle3_train.outputs import check_outputs
from eagle3_train.stages.examples import data_splits, load_template, prepare_split


def run_prepare(config: TrainConfig) -> dict[str, Any]:
    """Show what the data becomes; keeps it in OUT/prepared."""
    splits = data_splits(config)
    check_outputs(config.out / "prepared", files=tuple(f"{s}.safetensors" for s in splits))
    target = load_target(config.target)
    template = load_template(config, target)
    result = {}
    for split in splits:
        prepared = prepare_split(config, split, target, template)
        show(prepared, template, console)
        result[split] = {
            "examples": len(prepared.examples),
            "rows": prepared.num_rows,
            "tokens": prepared.num_tokens,
            "supervised_fraction": prepared.supervised_fraction,
            "dropped": prepared.drops.by_reason(),
            "sources": {name: vars(counts) for name, counts in prepared.sources.items()},
        }
    return result
