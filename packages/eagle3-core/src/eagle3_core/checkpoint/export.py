"""Writing a draft in another project's layout, or refusing by name what it cannot hold."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_core.checkpoint.consumers.base import Consumer
from eagle3_core.checkpoint.dialects import canonical
from eagle3_core.checkpoint.write import check_tensors, is_identity, write_folder
from eagle3_core.config import DraftConfig
from eagle3_core.draft import Eagle3Draft
from eagle3_core.errors import UserError

DESTINATIONS = (canonical.NAME, *CONSUMERS)


def export_draft(
    draft: Eagle3Draft,
    path: str | Path,
    to: str,
    *,
    target_name: str | None = None,
    identity_map: bool = False,
) -> None:
    """Write `draft` as `to`'s checkpoint folder.

    Args:
        draft: what to write; its embeddings and lm_head are always part of the file.
        path: the folder.
        to: one of `DESTINATIONS`.
        target_name: name or folder of the target, for layouts that name it.
        identity_map: the caller knows that the vocabulary map was set, so zero offsets are meant.

    Raises:
        UserError: `to` would compute something else than the draft, or a bad weight or path.
    """
    tensors = {n: t.detach().contiguous().cpu() for n, t in draft.state_dict().items()}
    export_tensors(
        draft.config, tensors, path, to, target_name=target_name, identity_map=identity_map
    )


def export_tensors(
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    path: str | Path,
    to: str,
    *,
    target_name: str | None = None,
    identity_map: bool = False,
) -> None:
    """As `export_draft`, from a state dict.

    Raises:
        UserError: as `export_draft`.
    """
    if to not in DESTINATIONS:
        raise UserError(f"--to is {to!r}, expected one of {', '.join(DESTINATIONS)}")
    check_tensors(config, tensors, str(path), identity_map=identity_map)
    identity = is_identity(config, tensors)
    if to == canonical.NAME:
        write_folder(path, canonical.to_json(config, identity_map=identity), tensors)
        return
    consumer = CONSUMERS[to]
    refusals = consumer.refusals(config)
    if identity:
        refusals.append("an unset map cannot be told from the identity there")
    if refusals:
        raise UserError(f"{path}: {to} cannot hold this draft: {'; '.join(refusals)}")
    dtype = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    out = consumer.to_json(config, dtype)
    if consumer.target_key:
        *outer, key = consumer.target_key
        functools.reduce(dict.__getitem__, outer, out)[key] = target_name
    write_folder(path, out, _renamed(consumer, config, tensors))


def _renamed(
    consumer: Consumer, config: DraftConfig, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for i, new in enumerate(consumer.rename(config, name)):
            out[new] = tensor if i == 0 else tensor.clone()  # safetensors refuses shared storage
    if consumer.full_map and not config.is_pruned:
        out["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        out["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    return out
