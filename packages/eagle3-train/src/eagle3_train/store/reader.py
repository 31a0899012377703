"""Reading a finished store."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core import UserError
from eagle3_train.store.format import (
    HEAD,
    INDEX,
    MASS,
    open_file,
    open_shard,
    read_index,
    read_parts,
    read_sample,
)
from eagle3_train.store.sample import Sample


class FeatureStore:
    """A finished store, memory-mapped: `len()`, `lengths`, `[i]`.

    Every sample is checked as it is read: it is the one that the index names, and finite. The first
    time, its bytes are also compared with their checksum.

    Raises:
        UserError: not a store, not finished, or a shard is missing, cut or of another store.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = read_index(self.path)
        if index.order is None:
            stored = sum(part.num_samples for part in read_parts(self.path))
            raise UserError(
                f"{self.path}: capture has not finished ({stored} samples so far); run it again"
            )
        self.meta = index.meta
        self._files = [open_shard(self.path, shard) for shard in index.shards]
        # key -> file, first token, end, checksum (stores of earlier versions have none)
        places: dict[str, tuple[int, int, int, int | None]] = {}
        for number, shard in enumerate(index.shards):
            at = 0
            for sample in shard["samples"]:
                end = at + sample["length"]
                places[sample["key"]] = (number, at, end, sample.get("crc"))
                at = end
        self._order = index.order
        self._places = [places[key] for key in index.order]
        self._names = [shard["file"] for shard in index.shards]
        self._unread = set(range(len(self._order)))
        self.lengths: Sequence[int] = [end - start for _, start, end, _ in self._places]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        number, start, end, crc = self._places[index]
        where = f"{self.path / self._names[number]}: row {index}"
        expected = crc if index in self._unread else None
        place = (start, end, self._order[index], expected)
        sample = read_sample(self._files[number], place, self.meta, where)
        self._unread.discard(index)
        return sample

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [S] int64 and loss_mask [S] bool of a sample, without reading its states."""
        number, start, end, _ = self._places[index]
        ids, mask = (
            self._files[number].get_slice(name)[start:end] for name in ("input_ids", "loss_mask")
        )
        return ids, mask

    def head(self) -> Tensor:
        """[V,T] the target's lm_head weight, in the dtype of its arithmetic.

        Raises:
            UserError: missing, or not of this store's target.
        """
        path = self.path / HEAD
        expected = [self.meta.vocab_size, self.meta.hidden_size]
        with open_file(path) as file:
            head = file.get_tensor("head")
        if list(head.shape) != expected:
            raise UserError(f"{path}: head is {list(head.shape)}, {INDEX} says {expected}")
        return head

    def target_mass(self) -> Tensor:
        """[V] float64: the target's next-token probabilities, summed over the answers' tokens."""
        mass = torch.zeros(self.meta.vocab_size, dtype=torch.float64)
        for file in self._files:
            mass += file.get_tensor(MASS)
        return mass
