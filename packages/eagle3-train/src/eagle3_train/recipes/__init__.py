"""What each `--strategy` tells its library: one JSON file a strategy."""

import json
from importlib.resources import files
from typing import Any

from eagle3_train.config import StrategyName


def recipe(name: StrategyName) -> dict[str, Any]:
    """Content of the strategy's file.

    ddp: arguments of torch's DistributedDataParallel. fsdp2: dtypes of its mixed-precision policy,
    used with fit.dtype=bfloat16. zero2, zero3: a DeepSpeed configuration.
    """
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)
