"""The target inside the engine: one pass over packed rows, with the engine's own keys and values.

transformers looks attention up by name, and hands extra keyword arguments of the model's forward to
it; so the round's context travels with the call and no cache object is involved.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from eagle3_core import UserError
from eagle3_core.target import Capture, Target, capture_boundaries, capture_final
from eagle3_serve.attention import Attention, RowContext
from eagle3_serve.backend import Backend
from eagle3_serve.fused import FusedDecoder
from eagle3_serve.kv import KVStore, Segment
from eagle3_serve.padding import pad_rows
from eagle3_serve.pages import PagePool, PageTable

_ATTENTION = "eagle3_packed"
# What transformers passes to attention functions and this one takes no notice of: switched off or
# about training and masks, which the context replaces.
_NEUTRAL = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "is_causal",
        "position_bias",
    }
)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed: RowContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1,nq,R,d], key and value [1,nkv,R,d] -> [1,R,nq,d]."""
    for name, argument in others.items():
        if argument is not None and name not in _NEUTRAL:
            raise UserError(
                f"target: its attention needs {name!r}, which this engine does not have"
            )
    layer = cast(int, module.layer_idx)
    how = Attention(scaling, sliding_window, softcap, s_aux)
    out = packed.attend_scaled(layer, query, key, value, how)
    return out.transpose(1, 2), None


def _no_mask(*args: object, **kwargs: object) -> None:
    """The packed context knows what each row sees."""


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _no_mask)


class TargetRunner:
    """Runs a target over packed rows and captures aux states. A aux states, T hidden, V vocab."""

    def __init__(
        self,
        target: Target,
        backend: Backend,
        num_positions: int,
        aux_layer_ids: Sequence[int] = (),
        *,
        final_norm: bool = False,
    ) -> None:
        """Lets the backend change the model's linears in place.

        Args:
            target: whose model runs.
            backend: what runs it.
            num_positions: bounds the positions of its rows.
            aux_layer_ids: boundary ids, ascending.
            final_norm: the one aux state is that behind the final norm; it has no id.

        Raises:
            UserError: an id is out of range or stands twice.
        """
        self.target = target
        self._model = target.model
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._final_norm = final_norm
        with self._capture():
            pass
        self._backend = backend
        self._decoder = backend.decoder(target.model, num_positions)

    def new_store(self, num_slots: int) -> KVStore:
        """Room for the keys and values of `num_slots` positions."""
        layers, heads, head_dim = kv_shape(self.target)
        return KVStore(layers, heads, head_dim, num_slots, self._model.dtype, self._model.device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: RowContext, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            token_ids: [R] packed.
            positions: [R], absolute.
            context: where the rows' keys and values go.
            logit_rows: [r] rows whose logits are wanted.

        Returns:
            logits [r,V] and aux states [R,A·T] (width 0 without aux ids).
        """
        num_rows, num_logits = len(token_ids), len(logit_rows)
        kept = pad_rows(logit_rows)
        if self._decoder is not None:
            logits, states = self._decoder(
                pad_rows(token_ids),
                pad_rows(positions),
                context,
                kept,
                self._aux_layer_ids,
                final_norm=self._final_norm,
            )
        else:
            logits, states = self._run(token_ids, positions, context, kept)
        # fp32 for whoever chooses from them: torch's argmax over bf16 takes four times as long.
        logits = logits[:num_logits].to(torch.promote_types(logits.dtype, torch.float32))
        if not states:
            return logits, logits.new_empty(num_rows, 0)
        return logits, torch.cat([state[:num_rows] for state in states], -1)

    def _run(
        self, token_ids: Tensor, positions: Tensor, context: RowContext, kept: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Through the model's own code."""
        with self._packed_attention(), self._capture() as capture:
            output = self._model(
                input_ids=pad_rows(token_ids)[None],
                position_ids=pad_rows(positions)[None],
                use_cache=False,
                logits_to_keep=kept,
                packed=context,
            )
            states = capture.states()
        if output.logits.shape[1] != len(kept):
            raise RuntimeError("its forward takes no notice of logits_to_keep")
        return output.logits[0], [state[0] for state in states]

    def _capture(self) -> AbstractContextManager[Capture]:
        if self._final_norm:
            return capture_final(self._model)
        return capture_boundaries(self._model, self._aux_layer_ids)

    def check(self, store: KVStore) -> None:
        """Run a few tokens, and refuse a target whose layers do not all work on the packed context.

        Raises:
            UserError: the architecture is not one for this engine.
        """
        device = self._model.device
        count = min(5, store.keys.shape[2])
        store.keys[:, :, :count] = torch.nan
        table = PageTable(PagePool(1, count, False))
        table.reserve(count)
        context = self._backend.context(store, [Segment(0, count, table, 0, device)])
        ids, last = torch.arange(count, device=device), torch.tensor([1], device=device)
        try:
            self.forward(ids, ids, context, last)
        except (RuntimeError, TypeError) as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{self._name}: its layers do not fit this engine: {line}") from error
        if store.keys[:, :, :count].isnan().any():
            raise UserError(
                f"{self._name}: has layers without keys and values of their own (recurrent or "
                "sharing ones); this engine decodes plain attention layers"
            )

    def check_exact(self) -> None:
        """Refuse a target whose rows may round differently in another company.

        Raises:
            UserError: not all its matrix products are packed linears, which do not.
        """
        if not isinstance(self._decoder, FusedDecoder):
            raise UserError(
                f"exact: {self._name} does not run on packed linears alone; that takes a Llama, "
                "Mistral, Qwen2 or Qwen3 on a CPU, in float32 or bfloat16"
            )

    @property
    def _name(self) -> str:
        return f"target {self.target.name} ({type(self._model).__name__})"

    @contextmanager
    def _packed_attention(self) -> Iterator[None]:
        """The model's own attention is back afterwards: others may use the same target."""
        config = self.target.config
        own = config._attn_implementation
        config._attn_implementation = _ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = own


def kv_shape(target: Target) -> tuple[int, int, int]:
    """(layers, kv heads, head_dim) of a target.

    Raises:
        UserError: it has no attention.
    """
    config = target.config
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise UserError(
            f"target {target.name}: {type(target.model).__name__} has no attention heads; "
            "this engine decodes plain attention layers"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return target.num_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim


def positions(target: Target) -> int:
    """Positions whose rotary tables do not depend on the length of the sequence.

    longrope takes other frequencies for ALL positions once a sequence passes its original window;
    keys that are held were turned by the old ones (dynamic rope does so beyond the whole window,
    which ends a sequence anyway).
    """
    longest = target.max_position_embeddings
    rope = getattr(target.config, "rope_parameters", None) or {}
    for own in (rope, *rope.values()):  # of all layers, or by type of layer
        if isinstance(own, dict) and own.get("rope_type") == "longrope":
            longest = min(longest, own.get("original_max_position_embeddings", longest))
    return longest
