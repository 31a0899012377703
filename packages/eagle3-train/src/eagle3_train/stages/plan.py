"""The stage that predicts what a run takes."""

from typing import Any

from eagle3_core.target import outline_target
from eagle3_train.config import StrategyName, TrainConfig
from eagle3_train.data import prepare
from eagle3_train.plan import Text, plan
from eagle3_train.stages.examples import data_splits, load_template

_ASSUMED_SUPERVISED = 0.5  # share of tokens, where the data is not there to be counted


def run_plan(
    config: TrainConfig,
    *,
    tokens: int | None,
    num_processes: int,
    strategy: StrategyName,
    device: str | None,
) -> dict[str, Any]:
    """Predict memory, disk and hours; writes nothing and loads no weights.

    Args:
        config: of the run.
        tokens: of the training data; None = read it.
        num_processes: that share a step.
        strategy: how they share weights and optimiser.
        device: one of `plan.DEVICES`; None = this machine.
    """
    target = outline_target(config.target)
    limit = min(config.data.max_length, target.max_position_embeddings)
    if tokens is None:
        sources = data_splits(config)["train"]
        prepared = prepare(sources, load_template(config, target), max_length=limit)
        mean = prepared.num_tokens / len(prepared.examples)
        text = Text(prepared.num_tokens, prepared.supervised_fraction, mean)
    else:
        text = Text(tokens, _ASSUMED_SUPERVISED, limit / 2)
    return plan(
        config,
        target,
        text,
        num_processes=num_processes,
        strategy=strategy,
        device=device,
    )
