"""The attention contexts of a training-time-test unroll over packed documents.

Slot t at step k sees the step-0 keys j <= t of its document and its own keys of steps 1..k, as far
as its sliding window reaches from position t + k. Only the slots that still run are queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_train.ops.ttt_attention import Visible, ttt_attention

KeysValues = tuple[Tensor, Tensor]  # [1,nkv,R,d] each


class PackedUnroll:
    """Keys of one packed row [1,S] of documents, from step to step."""

    def __init__(self, lengths: Sequence[int], sliding_window: int | None = None) -> None:
        """`lengths`: slots of each document, in order."""
        self.sliding_window = sliding_window
        ends = torch.tensor(list(lengths)).cumsum(0)
        starts = ends - torch.tensor(list(lengths))
        self._starts = starts.repeat_interleave(torch.tensor(list(lengths)))  # [S]
        self._count = 0
        self._last: PackedStep | None = None

    def step(self, slots: Tensor, kept: Tensor | None, device: torch.device) -> "PackedStep":
        """The context of the next step.

        Args:
            slots: [R] int64 on the CPU, those that run, ascending.
            kept: [R of the step before] bool on the CPU: which of them remain; None at step 0.
            device: of the draft.
        """
        high = slots + 1
        low = self._starts[slots]
        if self.sliding_window is not None:
            low = low.maximum(high + self._count - self.sliding_window)
        visible = Visible.plan(low, high, device)
        own: dict[int, list[KeysValues]] = {}
        first: dict[int, KeysValues] = {}
        if self._last is not None and kept is not None:
            remain = kept.to(device)
            own = {
                layer: [(k[:, :, remain], v[:, :, remain]) for k, v in pairs]
                for layer, pairs in self._last.all_own().items()
            }
            first = self._last.first
        self._last = PackedStep(self._count == 0, first, own, visible, self.sliding_window)
        self._count += 1
        return self._last


class PackedStep:
    """One step: a layer may attend again with the same values, as recomputation does."""

    def __init__(
        self,
        is_first: bool,
        first: dict[int, KeysValues],
        own: dict[int, list[KeysValues]],
        visible: Visible,
        sliding_window: int | None,
    ) -> None:
        self.sliding_window = sliding_window
        self.first = first  # of step 0, by layer
        self._is_first = is_first
        self._earlier = own
        self._new: dict[int, KeysValues] = {}
        self._visible = visible

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1,nq,R,d], k and v [1,nkv,R,d] -> [1,nq,R,d]."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        if self._is_first:
            self.first.setdefault(layer, (k, v))
            none = k[0].new_empty(k.shape[1], k.shape[2], 0, k.shape[3])
            return ttt_attention(q[0], k[0], v[0], none, none, self._visible)[None]
        self._new.setdefault(layer, (k, v))
        own = [*self._earlier.get(layer, []), (k, v)]
        seen = own if self.sliding_window is None else own[-self.sliding_window :]
        own_k = torch.stack([pair[0][0] for pair in seen], dim=2)  # [nkv,R,steps seen,d]
        own_v = torch.stack([pair[1][0] for pair in seen], dim=2)
        first_k, first_v = self.first[layer]
        return ttt_attention(q[0], first_k[0], first_v[0], own_k, own_v, self._visible)[None]

    def all_own(self) -> dict[int, list[KeysValues]]:
        """Of each layer the keys and values of steps 1 to this."""
        return {layer: [*self._earlier.get(layer, []), new] for layer, new in self._new.items()}
