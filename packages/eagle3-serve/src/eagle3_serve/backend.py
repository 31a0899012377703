"""What runs the models' layers in a pass: plain torch, with linears packed on a CPU, or Triton."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle3_core import Eagle3Draft, TorchOps
from eagle3_core.packed import PackedLinear, can_pack, is_packing_available, pack_linears
from eagle3_core.tree import TreeShape
from eagle3_serve.attention import PackedContext, RowContext
from eagle3_serve.fused import FusedDecoder, is_standard, pack_qkv
from eagle3_serve.kv import KVStore, Segment
from eagle3_serve.ops.select import Implementation, resolve


class Decoder(Protocol):
    """A model's layers in fewer calls than its own code makes. T hidden, V vocabulary."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        context: Any,
        logit_rows: Tensor,
        boundary_ids: Sequence[int],
        *,
        final_norm: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """token_ids and positions [R], logit_rows [r] -> logits [r,V], each state [R,T].

        The states are those of `boundary_ids`, and with `final_norm` the one behind that norm.
        """
        ...


class Backend(Protocol):
    """See the module."""

    def context(
        self,
        store: KVStore,
        segments: Sequence[Segment],
        sliding_window: int | None = None,
        exact: bool = False,
    ) -> RowContext:
        """The attention of one pass; see `PackedContext` for `exact`."""
        ...

    def decoder(self, model: PreTrainedModel, num_positions: int) -> Decoder | None:
        """For a standard model; it can still be run by its own code. None: it has to be."""
        ...

    def check_shape(self, shape: TreeShape) -> None:
        """Check that trees of a shape can be drafted and verified.

        Raises:
            UserError: they are too large.
        """
        ...

    def prepare(self, draft: Eagle3Draft, num_positions: int) -> None:
        """Change a draft in place: it can be run afterwards, not trained or saved."""
        ...


def choose_backend(implementation: Implementation, device: torch.device) -> Backend:
    """A backend by name, or for a device.

    Raises:
        UserError: triton is asked for where its kernels cannot run.
    """
    if resolve(implementation, device) == "reference":
        return TorchBackend()
    return import_module("eagle3_serve.triton_backend").TritonBackend()


class TorchBackend:
    """Runs anywhere."""

    def context(
        self,
        store: KVStore,
        segments: Sequence[Segment],
        sliding_window: int | None = None,
        exact: bool = False,
    ) -> RowContext:
        return PackedContext(store, segments, sliding_window, exact)

    def decoder(self, model: PreTrainedModel, num_positions: int) -> Decoder | None:
        head = model.get_output_embeddings()
        if not is_packing_available() or head is None or not can_pack(head.weight):
            return None
        standard = is_standard(model)
        if standard:
            pack_qkv(model)
        pack_linears(model)
        return FusedDecoder(model) if standard else None

    def check_shape(self, shape: TreeShape) -> None:
        pass

    def prepare(self, draft: Eagle3Draft, num_positions: int) -> None:
        if is_packing_available() and can_pack(draft.lm_head.weight):
            # The head stays where it is: `logits` reads its weight, which a packed layer would copy
            draft.ops = _PackedOps(draft.lm_head)
            pack_linears(draft.layers)
            if draft.config.has_fc and isinstance(draft.fc, nn.Linear):
                draft.register_module("fc", PackedLinear(draft.fc.weight, draft.fc.bias))


class _PackedOps(TorchOps):
    """The reference ops with a head packed for a CPU."""

    def __init__(self, lm_head: nn.Linear) -> None:
        self._head = PackedLinear(lm_head.weight)

    def draft_head(self, h: Tensor, norm_weight: Tensor, eps: float, head: Tensor) -> Tensor:
        return self._head(self.rms_norm(h, norm_weight, eps))
