"""Capture and fit at the same time, on less disk than the states of the whole data take.

Both read the same plan: every example once, in an order that the seed decides.
"""

from collections.abc import Sequence

import torch

from eagle3_core import UserError
from eagle3_train.config import TrainConfig
from eagle3_train.data.mask import Example
from eagle3_train.store import StoreMeta, sample_key

_GIB = 2**30
# Steps whose samples are there at a time: two checkpoints' worth, since the older of the two has to
# be able to take over, the step at hand and the two that are read ahead.
_CHECKPOINTS, _STEPS = 2, 3
_FREE = 0.25  # share of the limit for the shard that is being written and one half consumed


def check_rolling(config: TrainConfig, num_processes: int) -> None:
    """Refuse settings that need samples twice, or all of them.

    Raises:
        UserError: names the setting.
    """
    for field, found, expected, why in (
        ("capture.mode", config.capture.mode, "offline", "online stores nothing"),
        ("fit.epochs", config.fit.epochs, 1, "what is consumed is gone"),
        ("draft.init", config.draft.init, "random", "the fit reads its samples at every start"),
    ):
        if found != expected:
            raise UserError(
                f"{field} is {found} with capture.max_disk_gib, expected {expected}: {why}"
            )
    if config.fit.save_every is None:
        raise UserError(
            "fit.save_every is missing with capture.max_disk_gib: samples are deleted once a "
            "checkpoint stands behind them; give it a number of steps"
        )
    if num_processes > 1:
        raise UserError(
            f"capture.max_disk_gib with {num_processes} capturing processes, expected 1: samples "
            "have to come in order; use capture.placement device_map for more devices"
        )


def check_limit(config: TrainConfig, meta: StoreMeta) -> int:
    """The limit in bytes.

    Raises:
        UserError: less than has to be there at a time; says how much that is.
    """
    assert config.capture.max_disk_gib is not None
    assert config.fit.save_every is not None
    limit = int(config.capture.max_disk_gib * _GIB)
    steps = _CHECKPOINTS * config.fit.save_every + _STEPS
    tokens = steps * max(config.fit.batch_tokens, config.data.max_length)
    needed = tokens * meta.token_bytes / (1 - _FREE)
    if needed > limit:
        raise UserError(
            f"capture.max_disk_gib is {config.capture.max_disk_gib:g}, expected at least "
            f"{needed / _GIB:.3g} for {steps} steps of fit.batch_tokens; raise it or lower "
            "fit.save_every"
        )
    return limit


def in_order(examples: Sequence[Example], seed: int) -> list[Example]:
    """Every example once, shuffled."""
    unique = list({sample_key(e.input_ids, e.loss_mask): e for e in examples}.values())
    generator = torch.Generator().manual_seed(seed)
    return [unique[i] for i in torch.randperm(len(unique), generator=generator).tolist()]
