"""Attention contexts: who owns keys, masks and caches while the draft runs.

The draft calls `context.attend(layer, q, k, v)` with rotated q and k. What the query may see is the
context's business, so one module serves incremental decoding, training-time-test unrolls and paged
caches.
"""

from typing import Protocol

import torch
from torch import Tensor


class AttentionContext(Protocol):
    """Where keys live and what a query sees of them.

    `sliding_window` (tokens, own position included; None = all) must equal the draft config's.
    """

    sliding_window: int | None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B,nq,S,d], k and v [B,nkv,S,d] -> [B,nq,S,d]."""
        ...


class CacheContext:
    """Incremental decoding of equally long rows: a call appends its keys and attends causally."""

    def __init__(self, sliding_window: int | None = None) -> None:
        self.sliding_window = sliding_window
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        """Number of positions held."""
        return next(iter(self._keys.values())).shape[2] if self._keys else 0

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [B,nkv,length,d] each."""
        return self._keys[layer], self._values[layer]

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        for store in (self._keys, self._values):
            for layer, held in store.items():
                store[layer] = held[:, :, :length]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._keys:
            k = torch.cat([self._keys[layer], k], dim=2)
            v = torch.cat([self._values[layer], v], dim=2)
        self._keys[layer], self._values[layer] = k, v
        rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
        allowed = _causal(rows, torch.arange(k.shape[2], device=q.device), self.sliding_window)
        scores = _scores(q, k).masked_fill(~allowed, -torch.inf)
        return _mix(scores.softmax(-1), v)


class UnrollContext:
    """Training-time-test unroll (EAGLE-3 paper, section 3.2): step k is the k-th forward from 0.

    At step k slot t sees the step-0 keys j <= t of its own document and its own keys of steps 1..k,
    as far as its sliding window reaches from position t + k.
    The plain reference: it allocates [B,nq,S,S] scores at every step.
    """

    def __init__(
        self, document_ids: Tensor | None = None, sliding_window: int | None = None
    ) -> None:
        """`document_ids` [B,S] int: slots see only slots of the same id; None = one a row."""
        self.sliding_window = sliding_window
        self._documents = document_ids
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        step = len(keys) - 1
        scores = _scores(q, keys[0]).masked_fill(
            ~self._allowed(q.shape[2], step, q.device), -torch.inf
        )
        # The own key of step i stands at position t + i: a narrow window leaves the first behind.
        first = 1 if self.sliding_window is None else max(1, step + 1 - self.sliding_window)
        own = [
            (q * _per_query_head(key, q)).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
            for key in keys[first:]
        ]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = _mix(weights[..., : q.shape[2]], values[0])
        for i, value in enumerate(values[first:]):
            out = out + weights[..., q.shape[2] + i, None] * _per_query_head(value, q)
        return out

    def _allowed(self, slots: int, step: int, device: torch.device) -> Tensor:
        index = torch.arange(slots, device=device)
        # Slot t stands at position t + step: its window over step-0 keys narrows with each step.
        allowed = _causal(index, index, self.sliding_window, ahead=step)
        if self._documents is not None:
            same = self._documents[:, :, None] == self._documents[:, None, :]
            allowed = allowed & same[:, None]
        return allowed


class TreeContext:
    """Nodes of draft trees behind cached slots: a row sees the slots, its ancestors and itself.

    Set `lineage` before each forward: [B,F,depth], of every row the row of its ancestor in each
    forward from the first on, itself last. The plain reference.
    """

    def __init__(self, cache: CacheContext, lengths: Tensor | None = None) -> None:
        """`cache` is left as it is; its batch is B or 1. `lengths` [B] slots seen, None = all."""
        self.sliding_window = cache.sliding_window
        self.lineage = torch.empty(0)
        self._cache = cache
        self._lengths = lengths
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        cached_keys, cached_values = self._cache.held(layer)
        scores = torch.cat([_scores(q, key) for key in (cached_keys, *keys)], -1)
        allowed = torch.cat([self._sees_slots(), *self._sees_rows(keys)], -1)
        weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        shares = weights.split([cached_keys.shape[2], *(key.shape[2] for key in keys)], -1)
        parts = zip(shares, (cached_values, *values), strict=True)
        return sum((_mix(share, value) for share, value in parts), torch.zeros_like(q))

    def _sees_slots(self) -> Tensor:
        """[B,F,slots]"""
        batch, rows, depth = self.lineage.shape
        slots = torch.arange(self._cache.length, device=self.lineage.device)
        lengths = torch.full_like(self.lineage[:, 0, 0], self._cache.length)
        if self._lengths is not None:
            lengths = self._lengths
        allowed = slots < lengths[:, None]
        if self.sliding_window is not None:
            allowed = allowed & (lengths[:, None] - 1 + depth - slots < self.sliding_window)
        return allowed[:, None].expand(batch, rows, -1)

    def _sees_rows(self, keys: list[Tensor]) -> list[Tensor]:
        """[B,F,rows] for every depth so far."""
        depth = len(keys)
        return [
            (self.lineage[..., i, None] == torch.arange(key.shape[2], device=key.device))
            & (self.sliding_window is None or depth - 1 - i < self.sliding_window)
            for i, key in enumerate(keys)
        ]


def _causal(rows: Tensor, columns: Tensor, window: int | None, ahead: int = 0) -> Tensor:
    distance = rows[:, None] - columns[None, :]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance + ahead < window)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ _per_query_head(k, q).transpose(-1, -2) * q.shape[-1] ** -0.5


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ _per_query_head(v, weights)
