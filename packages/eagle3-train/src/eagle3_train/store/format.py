"""The files of a store: indexes, shards, and what one has to say about the other."""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core import UserError
from eagle3_train.store import fp8
from eagle3_train.store.sample import Sample, check_finite, sample_key

FORMAT = 1
INDEX, HEAD = "index.json", "head.safetensors"
FP8 = "float8_e4m3fn"
MASS = "target_mass"
_EXPONENT = "aux_exponent"  # of an eight-bit store
_REPAIR = "eagle3-train capture --verify finds and replaces such shards"
_FIELDS = tuple(field.name for field in fields(Sample))


@dataclass(frozen=True)
class StoreMeta:
    """What states are of whom. Two stores with equal meta can be mixed."""

    target: str
    num_target_layers: int
    hidden_size: int  # T
    vocab_size: int  # V
    head_digest: str  # tells other weights under the same name
    aux_layer_ids: tuple[int, ...]  # boundary ids
    compute_dtype: str  # of the target's arithmetic
    dtype: str  # of the stored states; with float8_e4m3fn `final` is bfloat16

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `asdict`, after JSON made lists of tuples."""
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})

    @property
    def token_bytes(self) -> int:
        """What one token takes in a shard."""
        count, width = len(self.aux_layer_ids), self.hidden_size
        beside = 8 + 1 + 4 + 4  # id, mask, argmax, logz
        if self.dtype == FP8:
            return count * (width + 1) + 2 * width + beside
        return (count + 1) * width * (4 if self.dtype == "float32" else 2) + beside

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a sample's tensors in a shard."""
        return (*_FIELDS, _EXPONENT) if self.dtype == FP8 else _FIELDS


@dataclass(frozen=True)
class Index:
    """An index file: `index.json`, or the part of one writer."""

    meta: StoreMeta
    order: list[str] | None  # keys; none until the store is finished
    shards: list[dict[str, Any]]  # file, bytes, samples: key, length, crc

    @property
    def num_samples(self) -> int:
        """Over all shards."""
        return sum(len(shard["samples"]) for shard in self.shards)


def to_tensors(sample: Sample, meta: StoreMeta) -> dict[str, Tensor]:
    """A sample as a shard holds it."""
    found = {name: getattr(sample, name) for name in _FIELDS}
    if meta.dtype == FP8:
        found["aux"], found[_EXPONENT] = fp8.encode(sample.aux, meta.hidden_size)
    return found


def from_tensors(found: Mapping[str, Tensor], meta: StoreMeta) -> Sample:
    """The inverse of `to_tensors`."""
    tensors = {name: found[name] for name in _FIELDS}
    if meta.dtype == FP8:
        tensors["aux"] = fp8.decode(found["aux"], found[_EXPONENT])
    return Sample(**tensors)


def checksum(tensors: Mapping[str, Tensor], names: Sequence[str]) -> int:
    """CRC-32 of the stored bytes of one sample."""
    crc = 0
    for name in names:
        stored: Any = tensors[name].contiguous().flatten().view(torch.uint8).numpy()
        crc = zlib.crc32(stored, crc)
    return crc


def read_index(path: Path, name: str = INDEX) -> Index:
    """An index file of the store in `path`.

    Raises:
        UserError: it cannot be read, or is not one.
    """
    file = path / name
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"{file}: format is {values['format']!r}, expected {FORMAT}")
        return Index(StoreMeta.from_json(values["meta"]), values["order"], values["shards"])
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}; expected the folder of a feature store"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: is not the index of a feature store; capture again") from error


def read_parts(path: Path) -> list[Index]:
    """What all writers have closed so far, the index itself first."""
    parts = sorted(file.name for file in path.glob("part-*.json"))
    return [read_index(path, name) for name in (INDEX, *parts)]


def write_index(path: Path, index: Index, name: str = INDEX) -> None:
    """Put an index file in place, whole."""
    values = {
        "format": FORMAT,
        "meta": asdict(index.meta),
        "order": index.order,
        "shards": index.shards,
    }
    temporary = path / f".{name}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(values), encoding="utf-8")
    os.replace(temporary, path / name)


def check_meta(path: Path, found: StoreMeta, expected: StoreMeta) -> None:
    """Refuse to continue a store of another kind.

    Raises:
        UserError: names the field.
    """
    for name, value in asdict(expected).items():
        there = asdict(found)[name]
        if there != value:
            raise UserError(
                f"{path / INDEX}: {name} is {there!r}, this capture has {value!r}; "
                "name another folder, or delete this one"
            )


def open_shard(path: Path, shard: Mapping[str, Any]) -> Any:
    """A shard, memory-mapped, once it is the one that the index names.

    Raises:
        UserError: it is missing, cut, or of another store.
    """
    file = path / shard["file"]
    size = file.stat().st_size if file.exists() else 0
    if size != shard["bytes"]:
        raise UserError(
            f"{file}: {'is missing' if not size else f'has {size} bytes'}, {INDEX} says "
            f"{shard['bytes']} bytes; run eagle3-train capture again"
        )
    opened = open_file(file)
    if (opened.metadata() or {}).get("samples") != digest(shard["samples"]):
        raise UserError(f"{file}: holds other samples than {INDEX} says; it is of another store")
    return opened


def open_file(file: Path) -> Any:
    """A safetensors file.

    Raises:
        UserError: it is none.
    """
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}; capture again") from error


def read_sample(
    file: Any, place: tuple[int, int, str, int | None], meta: StoreMeta, where: str
) -> Sample:
    """One sample of an opened shard.

    Args:
        file: of `open_shard`.
        place: first token, end, key, and the checksum to compare with (None = do not).
        meta: of the store.
        where: names it in errors.

    Raises:
        UserError: it is another sample, not finite, or not what was written.
    """
    start, end, key, crc = place
    tensors = {name: file.get_slice(name)[start:end] for name in meta.tensors}
    if sample_key(tensors["input_ids"], tensors["loss_mask"]) != key:
        raise UserError(f"{where}: holds the tokens of another sample than {INDEX} says; {_REPAIR}")
    sample = from_tensors(tensors, meta)
    check_finite(sample, where)
    if crc is not None and checksum(tensors, meta.tensors) != crc:
        raise UserError(f"{where}: its bytes are not those that were written; {_REPAIR}")
    return sample


def check_shard(path: Path, shard: Mapping[str, Any], meta: StoreMeta) -> None:
    """Read a whole shard.

    Raises:
        UserError: its first fault.
    """
    file, at = open_shard(path, shard), 0
    for number, sample in enumerate(shard["samples"]):
        end = at + sample["length"]
        place = (at, end, sample["key"], sample.get("crc"))
        read_sample(file, place, meta, f"{path / shard['file']}: sample {number}")
        at = end


def digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """Of which samples a shard holds, in which order."""
    text = json.dumps([[sample["key"], sample["length"]] for sample in samples])
    return hashlib.sha256(text.encode()).hexdigest()


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Put a safetensors file in place, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)
