"""Adding samples to a store, by one process or by many at once."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_train.display import console
from eagle3_train.store.format import (
    HEAD,
    INDEX,
    MASS,
    Index,
    StoreMeta,
    check_meta,
    check_shard,
    checksum,
    digest,
    open_shard,
    read_index,
    read_parts,
    save,
    to_tensors,
    write_index,
)
from eagle3_train.store.sample import Sample, sample_key

_SHARD_BYTES = 256 * 2**20


class StoreWriter:
    """Adds samples to a store; one that exists is continued.

    As a context manager it writes the last shard on leaving. When an error leaves it, the samples
    since the last whole shard are lost, and the store stays readable for the next writer.

    Args:
        path: the store's folder.
        meta: of the samples to come.
        head: [V,T] the target's lm_head weight.
        shard_bytes: a shard is closed once it holds this much.
        writer: a number that no other process has that writes to the store now.

    Raises:
        UserError: the store there holds states of another kind; names the field.
    """

    def __init__(
        self,
        path: str | Path,
        meta: StoreMeta,
        head: Tensor,
        shard_bytes: int = _SHARD_BYTES,
        writer: int = 0,
    ) -> None:
        self._path, self._meta, self._shard_bytes = Path(path), meta, shard_bytes
        self._name = f"part-{writer}.json"
        self._prefix = f"shard-{writer}"
        self._pending: list[tuple[str, int, dict[str, Tensor]]] = []
        self._pending_bytes = 0
        self._number = -1  # of the last shard
        self._pending_mass = torch.zeros(meta.vocab_size, dtype=torch.float64)
        if not (self._path / INDEX).exists():
            self._path.mkdir(parents=True, exist_ok=True)
            save(self._path / HEAD, {"head": head.contiguous()}, {})
            write_index(self._path, Index(meta, None, []))
        found = self._present(say=True)
        self._own = [s for s in found if re.match(rf"{self._prefix}-\d", s["file"])]
        self._keys = {sample["key"] for shard in found for sample in shard["samples"]}

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
            self.close_shard()

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
            tensors = to_tensors(sample, self._meta)
            self._pending.append((key, len(sample.input_ids), tensors))
            self._pending_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._pending_bytes >= self._shard_bytes:
            self.close_shard()

    def close_shard(self) -> None:
        """Write what has been added since the last shard."""
        if not self._pending:
            return
        names = self._meta.tensors
        samples = [
            {"key": key, "length": length, "crc": checksum(tensors, names)}
            for key, length, tensors in self._pending
        ]
        joined = {name: _joined([t[name] for _, _, t in self._pending]) for name in names}
        joined[MASS] = self._pending_mass
        file = f"{self._prefix}-{self._next_number():05d}.safetensors"
        save(self._path / file, joined, {"samples": digest(samples)})
        size = (self._path / file).stat().st_size
        self._own.append({"file": file, "bytes": size, "samples": samples})
        write_index(self._path, Index(self._meta, None, self._own), self._name)
        self._pending, self._pending_bytes = [], 0
        self._pending_mass = torch.zeros_like(self._pending_mass)

    @property
    def num_bytes(self) -> int:
        """Of this writer's shards, and of what will be its next."""
        return sum(shard["bytes"] for shard in self._own) + self._pending_bytes

    def drop_shards(self, done: Callable[[str], bool]) -> bool:
        """Delete this writer's shards of which all samples are done; whether there was one."""
        gone = [s for s in self._own if all(done(sample["key"]) for sample in s["samples"])]
        if not gone:
            return False
        self._own = [shard for shard in self._own if shard not in gone]
        write_index(self._path, Index(self._meta, None, self._own), self._name)
        for shard in gone:
            (self._path / shard["file"]).unlink()
        return True

    def finish(self, keys: Sequence[str]) -> None:
        """Declare the store complete: readers see these samples in this order, and no others.

        Of several writers one does it, after all have closed their last shard.

        Raises:
            UserError: a sample is in no shard.
        """
        self.close_shard()
        found = self._present(say=False)
        missing = set(keys).difference(s["key"] for shard in found for s in shard["samples"])
        if missing:
            raise UserError(
                f"{self._path}: {len(missing)} of {len(set(keys))} samples are in no shard; "
                "run eagle3-train capture again"
            )
        write_index(self._path, Index(self._meta, list(keys), found))
        for part in self._path.glob("part-*.json"):
            part.unlink()

    def _present(self, say: bool) -> list[dict[str, Any]]:
        """All whole shards of the store; the samples of others have to be captured again."""
        whole = []
        for shard in all_shards(self._path, self._meta):
            try:
                open_shard(self._path, shard)
            except UserError as error:
                if say:
                    console.print(f"{error}; its samples are captured again", markup=False)
            else:
                whole.append(shard)
        return whole

    def _next_number(self) -> int:
        taken = [int(shard["file"].split("-")[2].split(".")[0]) for shard in self._own]
        self._number = max([self._number, *taken]) + 1
        return self._number


def all_shards(path: Path, meta: StoreMeta | None = None) -> list[dict[str, Any]]:
    """What the index and the parts of all writers name.

    Raises:
        UserError: states of another kind than `meta`.
    """
    shards: dict[str, dict[str, Any]] = {}
    for index in read_parts(path):
        if meta is not None:
            check_meta(path, index.meta, meta)
        shards |= {shard["file"]: shard for shard in index.shards}
    return list(shards.values())


def remove_damaged(path: Path) -> list[str]:
    """Read a store, finished or not, and delete the shards that are not what was written.

    A writer that opens the store afterwards finds their samples missing.

    Returns:
        The first fault of each.
    """
    faults = []
    meta = read_index(path).meta
    for shard in all_shards(path):
        try:
            check_shard(path, shard, meta)
        except UserError as error:
            faults.append(str(error))
            (path / shard["file"]).unlink(missing_ok=True)
    return faults


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Laid end to end; torch concatenates no float8."""
    if parts[0].dtype.itemsize == 1 and parts[0].is_floating_point():
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))
