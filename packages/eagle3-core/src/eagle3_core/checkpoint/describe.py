"""What can be said about a checkpoint from its headers, and whether two are the same function."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.checkpoint.consumers import CONSUMERS
from eagle3_core.checkpoint.read import Reading, expected_shapes, plan_reading, read_tensors
from eagle3_core.checkpoint.write import refuse_non_finite
from eagle3_core.config import DraftConfig
from eagle3_core.errors import UserError

# Fields that leave the function of the draft as it is.
_INERT = {"max_position_embeddings", "num_target_layers"}


@dataclass(frozen=True)
class Part:
    """One tensor of the draft: where it comes from and what its header says."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: str  # name in the file, "target", or "made"


def parts(reading: Reading) -> list[Part]:
    """Every tensor of the draft, in the module's order."""
    out = []
    for name, shape in expected_shapes(reading.config).items():
        if name in reading.made:
            dtype, origin = reading.made[name].dtype, "checked map"
        elif name in reading.borrowed:
            dtype, origin = None, "borrowed from the target"
        else:
            info = reading.files.tensors[reading.names[name]]
            dtype, origin = info.dtype, info.name
        out.append(Part(name, shape, str(dtype).removeprefix("torch."), origin))
    return out


def engines(config: DraftConfig) -> dict[str, list[str]]:
    """Engine -> why it cannot serve the draft; empty if it can."""
    return {"eagle3-serve": []} | {
        name: consumer.refusals(config) for name, consumer in CONSUMERS.items() if consumer.serves
    }


def scan(reading: Reading) -> Iterator[tuple[str, int]]:
    """Look for NaN and inf piece by piece; yields (tensor, bytes) after each.

    Raises:
        UserError: names file, tensor and first bad position.
    """
    for in_file in reading.names.values():
        info, offset = reading.files.tensors[in_file], 0
        for chunk in reading.files.chunks(in_file):
            refuse_non_finite(chunk, in_file, str(info.file), offset)
            offset += chunk.numel()
            yield in_file, chunk.numel() * info.dtype.itemsize


def to_json(reading: Reading) -> dict[str, Any]:
    """JSON-ready account of one checkpoint."""
    return {
        "path": str(reading.files.folder),
        **reading.report.to_dict(),
        "config": reading.config.to_dict(),
        "parts": [vars(part) | {"shape": list(part.shape)} for part in parts(reading)],
        "engines": engines(reading.config),
    }


@dataclass(frozen=True)
class Difference:
    """`name` is a config field or a tensor."""

    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.name}: {self.a} against {self.b}"


def diff(a: str | Path, b: str | Path, target: object | None = None) -> list[Difference]:
    """Where two checkpoints differ as functions; empty when they are the same one.

    Spelling, producer, rotary length and a full vocabulary's trivial map do not count. The design
    of later layers counts only where there are some. dtypes count by value: weights are compared
    in float64.

    Raises:
        UserError: as `load_draft`, for either.
    """
    left, right = plan_reading(a, target), plan_reading(b, target)
    out = [
        Difference(f.name, repr(getattr(left.config, f.name)), repr(getattr(right.config, f.name)))
        for f in fields(DraftConfig)
        if f.name not in _INERT and _differs(f.name, left.config, right.config)
    ]
    if expected_shapes(left.config) != expected_shapes(right.config):
        return out
    # What both leave to the target is the same for both.
    borrow = left.borrowed != right.borrowed
    mine, theirs = read_tensors(left, borrow=borrow), read_tensors(right, borrow=borrow)
    return out + [d for name in mine if (d := _compare(name, mine[name], theirs[name]))]


def _differs(name: str, a: DraftConfig, b: DraftConfig) -> bool:
    if name == "layer_input" and a.num_hidden_layers == b.num_hidden_layers == 1:
        return False
    return getattr(a, name) != getattr(b, name)


def _compare(name: str, a: Tensor, b: Tensor) -> Difference | None:
    wide = a.to(torch.float64), b.to(torch.float64)
    gap = (wide[0] - wide[1]).abs()
    if not gap.any():
        return None
    first = int(gap.flatten().nonzero()[0])
    values = [f"{t.flatten()[first].item():.6g}" for t in wide]
    at = f"[flat {first}] of {int((gap > 0).sum())} that differ, by up to {gap.max().item():.3g}"
    return Difference(f"{name} {at}", *values)


def check_target_tokens(reading: Reading, tokenizer_size: int) -> list[str]:
    """Warnings about ids that the target's tokenizer does not have.

    Raises:
        UserError: the tokenizer has more ids than the draft's vocabulary.
    """
    vocab = reading.config.vocab_size
    if tokenizer_size > vocab:
        raise UserError(
            f"{reading.files.folder}: vocab_size is {vocab}, but the target's tokenizer has "
            f"{tokenizer_size} ids"
        )
    if "t2d" not in reading.made:
        return []
    beyond = int(reading.made["t2d"][tokenizer_size:].sum())
    return [f"d2t maps to {beyond} ids that the tokenizer does not have"] if beyond else []
