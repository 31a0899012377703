"""A store that is read while it is written and stays below a limit: one pass, in order.

    STORE/plan.json      keys of all samples, in the order in which they are trained on
    STORE/consumed.json  how many of them no checkpoint needs any more

The writer waits while the limit is reached, and deletes shards of which all samples are consumed.
The reader waits for what is not there yet. Either may be killed and started again.
"""

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_core import UserError
from eagle3_train.data.mask import Example
from eagle3_train.store.format import (
    HEAD,
    StoreMeta,
    open_file,
    open_shard,
    read_index,
    read_parts,
    read_sample,
)
from eagle3_train.store.sample import Sample, sample_key
from eagle3_train.store.writer import StoreWriter

_PLAN, _CONSUMED = "plan.json", "consumed.json"
_POLL_SECONDS = 0.2
_SHARDS = 8  # within the limit; the writer waits for room in steps of one


class RollingWriter:
    """Adds the samples of a plan in its order, within a limit.

    Args:
        path: the store's folder.
        meta: of the samples to come.
        head: [V,T] the target's lm_head weight.
        keys: all samples, in order, none twice.
        max_bytes: of all shards together.
    """

    def __init__(
        self,
        path: Path,
        meta: StoreMeta,
        head: Tensor,
        keys: Sequence[str],
        max_bytes: int,
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._shard_bytes = max_bytes // _SHARDS
        self.writer = StoreWriter(path, meta, head, self._shard_bytes)
        self._number = {key: number for number, key in enumerate(keys)}
        _write(path / _PLAN, {"keys": list(keys)})

    def is_wanted(self, key: str) -> bool:
        """Whether a sample is neither there nor consumed."""
        return key not in self.writer and self._number[key] >= consumed(self._path)

    def wait_for_room(self) -> None:
        """Until another shard fits below the limit; what is pending becomes readable meanwhile."""
        while self.writer.num_bytes + self._shard_bytes > self._max_bytes:
            self.writer.close_shard()
            if not self.writer.drop_shards(partial(self._is_before, consumed(self._path))):
                time.sleep(_POLL_SECONDS)

    def _is_before(self, count: int, key: str) -> bool:
        return self._number[key] < count


class RollingStore:
    """What `FeatureStore` is, for a store that is still being written, in the order of its plan.

    Args:
        path: the store's folder.
        examples: those of the plan, in its order.
        patience: seconds to wait for a sample while the writer adds nothing.

    Raises:
        UserError: not a store, no plan, or the plan of other examples.
    """

    def __init__(self, path: Path, examples: Sequence[Example], patience: float = 600.0) -> None:
        self._path, self._examples, self._patience = path, examples, patience
        self.meta = read_index(path).meta
        plan = _read(path / _PLAN)
        if plan is None:
            raise UserError(f"{path / _PLAN}: cannot be read; start eagle3-train capture first")
        self._keys = [sample_key(e.input_ids, e.loss_mask) for e in examples]
        self.lengths: Sequence[int] = [len(example.input_ids) for example in examples]
        if plan["keys"] != self._keys:
            raise UserError(f"{path / _PLAN}: is of other samples; run eagle3-train capture again")
        self._places: dict[str, tuple[dict[str, Any], int, int, int]] = {}
        self._files: dict[tuple[str, str], Any] = {}  # by name and first sample: names come back

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        shard, start, end, crc = self._place(index)
        identity = _identity(shard)
        if identity not in self._files:
            self._files[identity] = open_shard(self._path, shard)
        place = (start, end, self._keys[index], crc)
        where = f"{self._path / shard['file']}: row {index}"
        return read_sample(self._files[identity], place, self.meta, where)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [S] int64 and loss_mask [S] bool of a sample, stored or not."""
        example = self._examples[index]
        return example.input_ids, example.loss_mask

    @property
    def is_begun(self) -> bool:
        """Whether samples have been consumed, so that the first ones may be gone."""
        return consumed(self._path) > 0

    def head(self) -> Tensor:
        """[V,T] the target's lm_head weight, in the dtype of its arithmetic."""
        with open_file(self._path / HEAD) as file:
            return file.get_tensor("head")

    def release(self, count: int) -> None:
        """Nobody will ask for the first `count` samples again."""
        if count > consumed(self._path):
            _write(self._path / _CONSUMED, {"samples": count})

    def _place(self, index: int) -> tuple[dict[str, Any], int, int, int]:
        key, waited = self._keys[index], 0.0
        while key not in self._places:
            if index < consumed(self._path):
                raise UserError(
                    f"{self._path}: sample {index} is consumed, the store holds one pass; delete "
                    "this folder and run eagle3-train capture again"
                )
            if self._reload():
                waited = 0.0
            elif waited > self._patience:
                raise UserError(
                    f"{self._path}: no new sample in {self._patience:.0f} s; is eagle3-train "
                    "capture running, and does capture.max_disk_gib hold what has to be there at "
                    "a time?"
                )
            else:
                time.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS
        return self._places[key]

    def _reload(self) -> bool:
        """Read the index again; whether there is anything new."""
        known = len(self._places)
        shards = [shard for part in read_parts(self._path) for shard in part.shards]
        present = {_identity(shard) for shard in shards}
        self._files = {key: file for key, file in self._files.items() if key in present}
        for shard in shards:
            at = 0
            for sample in shard["samples"]:
                end = at + sample["length"]
                self._places.setdefault(sample["key"], (shard, at, end, sample["crc"]))
                at = end
        return len(self._places) > known


def _identity(shard: dict[str, Any]) -> tuple[str, str]:
    return shard["file"], shard["samples"][0]["key"]


def consumed(path: Path) -> int:
    """How many samples of the plan no checkpoint needs any more."""
    found = _read(path / _CONSUMED)
    return 0 if found is None else int(found["samples"])


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(file: Path, values: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    os.replace(temporary, file)
