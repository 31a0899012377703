"""Captured samples on disk: safetensors shards, an index, and the target's head.

    STORE/index.json              what each shard holds, and the order of the samples
    STORE/shard-00000.safetensors the tensors of many samples, laid end to end
    STORE/head.safetensors        the target's lm_head weight [V,T]

Shards and index are renamed into place when whole, the index last, so whatever it names exists.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core import UserError

_FORMAT = 1
_SHARD_BYTES = 256 * 2**20
_INDEX, _HEAD = "index.json", "head.safetensors"


@dataclass(frozen=True)
class Sample:
    """One conversation with the target's states. A aux states of width T, S tokens."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: a token the target writes; not shifted
    aux: Tensor  # [S,A·T] ascending boundaries
    final: Tensor  # [S,T] after the final norm: what the lm_head reads
    argmax: Tensor  # [S] int32: the target's choice for the next token; -1 where nobody asks
    logz: Tensor  # [S] float32: log-sum-exp of the target's logits; 0 where nobody asks


_TENSORS = tuple(field.name for field in fields(Sample))


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
    dtype: str  # of the stored states

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `asdict`, after JSON made lists of tuples."""
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})


def sample_key(input_ids: Tensor, loss_mask: Tensor) -> str:
    """Identity of a sample: its tokens and mask, nothing else."""
    digest = hashlib.sha256(input_ids.to(torch.int64).contiguous().numpy().tobytes())
    digest.update(loss_mask.to(torch.bool).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def head_digest(head: Tensor) -> str:
    """A fingerprint of a target: rows from all over its [V,T] lm_head."""
    rows = head[:: max(1, len(head) // 64)].float().cpu().contiguous()
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


class StoreWriter:
    """Adds samples to a store; one that exists is continued.

    As a context manager it writes the last shard on leaving. When an error leaves it, the samples
    since the last whole shard are lost, and the store stays readable for the next writer.

    Args:
        path: the store's folder.
        meta: of the samples to come.
        head: [V,T] the target's lm_head weight.
        shard_bytes: a shard is closed once it holds this much.

    Raises:
        UserError: the store there holds states of another kind; names the field.
    """

    def __init__(
        self, path: str | Path, meta: StoreMeta, head: Tensor, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        self._path, self._meta, self._shard_bytes = Path(path), meta, shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._order: list[str] | None = None
        self._pending: list[tuple[str, Sample]] = []
        self._pending_bytes = 0
        self._pending_mass = torch.zeros(meta.vocab_size, dtype=torch.float64)
        if (self._path / _INDEX).exists():
            index = _read_index(self._path)
            _check_meta(self._path, index.meta, meta)
            self._shards = index.shards
        else:
            self._path.mkdir(parents=True, exist_ok=True)
            _save(self._path / _HEAD, {"head": head.contiguous()}, {})
        self._keys = {sample["key"] for shard in self._shards for sample in shard["samples"]}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._close_shard()

    def add(self, samples: Sequence[Sample], target_mass: Tensor) -> None:
        """Append samples; ones it already has are left out.

        Args:
            samples: of the store's meta.
            target_mass: [V] what they add to `FeatureStore.target_mass`.
        """
        self._pending_mass += target_mass
        for sample in samples:
            key = sample_key(sample.input_ids, sample.loss_mask)
            if key in self._keys:
                continue
            self._keys.add(key)
            self._pending.append((key, sample))
            self._pending_bytes += sum(getattr(sample, name).nbytes for name in _TENSORS)
        if self._pending_bytes >= self._shard_bytes:
            self._close_shard()

    def finish(self, keys: Sequence[str]) -> None:
        """Declare the store complete: readers see these samples in this order, and no others."""
        self._close_shard()
        assert self._keys.issuperset(keys), "finish names samples that were never added"
        self._order = list(keys)
        self._write_index()

    def _close_shard(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        samples = [{"key": key, "length": len(s.input_ids)} for key, s in self._pending]
        tensors = {
            tensor: torch.cat([getattr(sample, tensor) for _, sample in self._pending])
            for tensor in _TENSORS
        }
        tensors["target_mass"] = self._pending_mass
        _save(self._path / name, tensors, {"samples": _digest(samples)})
        size = (self._path / name).stat().st_size
        self._shards.append({"file": name, "bytes": size, "samples": samples})
        self._write_index()
        self._pending, self._pending_bytes = [], 0
        self._pending_mass = torch.zeros_like(self._pending_mass)

    def _write_index(self) -> None:
        index = {
            "format": _FORMAT,
            "meta": asdict(self._meta),
            "order": self._order,
            "shards": self._shards,
        }
        temporary = self._path / f".{_INDEX}.tmp"
        temporary.write_text(json.dumps(index), encoding="utf-8")
        os.replace(temporary, self._path / _INDEX)


class FeatureStore:
    """A finished store, memory-mapped: `len()`, `lengths`, `[i]`.

    Every sample is checked as it is read: it is the one that the index names, and finite.

    Raises:
        UserError: not a store, not finished, or a shard is missing, cut or of another store.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        if index.order is None:
            stored = sum(len(shard["samples"]) for shard in index.shards)
            raise UserError(
                f"{self.path}: capture has not finished ({stored} samples so far); run it again"
            )
        self.meta = index.meta
        self._files = [_open_shard(self.path, shard) for shard in index.shards]
        places: dict[str, tuple[int, int, int]] = {}  # key -> file, first token, end
        for number, shard in enumerate(index.shards):
            at = 0
            for sample in shard["samples"]:
                places[sample["key"]] = (number, at, at + sample["length"])
                at += sample["length"]
        self._order = index.order
        self._places = [places[key] for key in index.order]
        self._names = [shard["file"] for shard in index.shards]
        self.lengths: Sequence[int] = [end - start for _, start, end in self._places]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        number, start, end = self._places[index]
        file = self._files[number]
        sample = Sample(**{name: file.get_slice(name)[start:end] for name in _TENSORS})
        where = f"{self.path / self._names[number]}: row {index}"
        if sample_key(sample.input_ids, sample.loss_mask) != self._order[index]:
            raise UserError(
                f"{where}: holds the tokens of another sample than {_INDEX} says; capture again"
            )
        check_finite(sample, where)
        return sample

    def head(self) -> Tensor:
        """[V,T] the target's lm_head weight, in the dtype of its arithmetic.

        Raises:
            UserError: missing, or not of this store's target.
        """
        path = self.path / _HEAD
        expected = [self.meta.vocab_size, self.meta.hidden_size]
        with _opened(path) as file:
            head = file.get_tensor("head")
        if list(head.shape) != expected:
            raise UserError(f"{path}: head is {list(head.shape)}, {_INDEX} says {expected}")
        return head

    def target_mass(self) -> Tensor:
        """[V] float64: the target's next-token probabilities, summed over the answers' tokens."""
        mass = torch.zeros(self.meta.vocab_size, dtype=torch.float64)
        for file in self._files:
            mass += file.get_tensor("target_mass")
        return mass


def check_finite(sample: Sample, where: str) -> None:
    """Refuse NaN and inf by tensor and position; warn of states that are all zero.

    Raises:
        UserError: names the first bad index.
    """
    for name in ("aux", "final", "logz"):
        values = getattr(sample, name)
        bad = ~values.isfinite()
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise UserError(
                f"{where}: {name}{at} is {values[tuple(at)].item()}, expected a finite number; "
                "capture again, in float32 if the target overflows"
            )
    for name in ("aux", "final"):
        zero = (getattr(sample, name) == 0).all(-1)
        if zero.any():
            position = int(zero.nonzero()[0])
            warnings.warn(f"{where}: {name}[{position}] is all zero, suspicious", stacklevel=3)


@dataclass(frozen=True)
class _Index:
    meta: StoreMeta
    order: list[str] | None  # keys; none until the store is finished
    shards: list[dict[str, Any]]


def _read_index(path: Path) -> _Index:
    file = path / _INDEX
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise UserError(f"{file}: format is {values['format']!r}, expected {_FORMAT}")
        return _Index(StoreMeta.from_json(values["meta"]), values["order"], values["shards"])
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}; expected the folder of a feature store"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: is not the index of a feature store; capture again") from error


def _check_meta(path: Path, found: StoreMeta, expected: StoreMeta) -> None:
    for name, value in asdict(expected).items():
        there = asdict(found)[name]
        if there != value:
            raise UserError(
                f"{path / _INDEX}: {name} is {there!r}, this capture has {value!r}; "
                "name another folder, or delete this one"
            )


def _open_shard(path: Path, shard: Mapping[str, Any]) -> Any:
    file = path / shard["file"]
    size = file.stat().st_size if file.exists() else 0
    if size != shard["bytes"]:
        raise UserError(
            f"{file}: {'is missing' if not size else f'has {size} bytes'}, {_INDEX} says "
            f"{shard['bytes']} bytes; delete the store and capture again"
        )
    opened = _opened(file)
    if (opened.metadata() or {}).get("samples") != _digest(shard["samples"]):
        raise UserError(f"{file}: holds other samples than {_INDEX} says; it is of another store")
    return opened


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}; capture again") from error


def _digest(samples: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps([[sample["key"], sample["length"]] for sample in samples])
    return hashlib.sha256(text.encode()).hexdigest()


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)
