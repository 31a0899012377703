"""The standard decoder on the Triton kernels: ten launches a layer.

What `fused` is on a CPU. q, k and v are one product, gate and up another; each residual is added
where the norm behind it reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle3_core.rope import RopeTable
from eagle3_core.target import decoder_parts
from eagle3_serve.attention import Attention, RowContext
from eagle3_serve.fused import QKV, Norm, norm_of, window_of
from eagle3_serve.joined import join, joined
from eagle3_serve.ops.add_rms_norm.triton import add_rms_norm
from eagle3_serve.ops.swiglu.triton import swiglu
from eagle3_serve.paged import PagedContext


@dataclass(frozen=True)
class _Linears:
    """One product for linears that read the same input."""

    parts: Sequence[nn.Module]

    def __post_init__(self) -> None:
        join(self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias, _ = joined(self.parts)
        return F.linear(x, weight, bias)


class _Layer:
    """One decoder layer over rows [R,T]."""

    def __init__(self, layer: nn.Module, index: int, head_dim: int, window: int | None) -> None:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self.index, self.head_dim = index, head_dim
        self.how = Attention(head_dim**-0.5, window)
        self.norm = norm_of(layer, "input_layernorm")
        self.mlp_norm = norm_of(layer, "post_attention_layernorm")
        has_norms = hasattr(attention, "q_norm")
        self.head_norms = [norm_of(attention, n) for n in ("q_norm", "k_norm")] if has_norms else []
        parts = [attention.get_submodule(name) for name in QKV]
        self.heads = [cast(nn.Linear, part).out_features // head_dim for part in parts]
        self.qkv = _Linears(parts)
        self.out = attention.get_submodule("o_proj")
        self.gate_up = _Linears([mlp.get_submodule(f"{name}_proj") for name in ("gate", "up")])
        self.down = mlp.get_submodule("down_proj")

    def __call__(
        self, x: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and its norm [R,T] -> the stream, and what the layer adds to it."""
        heads = self.qkv(normed).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split(self.heads, 1)
        if self.head_norms:
            q, k = (_normed(part, norm) for part, norm in zip((q, k), self.head_norms, strict=True))
        mixed = context.attend_unrotated(self.index, q, k, v, cos, sin, self.how)
        x, normed = _add(x, self.out(mixed.flatten(1)), self.mlp_norm)
        return x, self.down(swiglu(*self.gate_up(normed).chunk(2, -1)))


class TritonDecoder:
    """Runs a standard model whose linears are plain ones."""

    def __init__(self, model: PreTrainedModel, num_positions: int) -> None:
        """Moves weights together in place; `num_positions` bounds the positions of its rows."""
        parts = decoder_parts(model)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._embed = cast(nn.Embedding, model.get_input_embeddings())
        self._rotary = RopeTable(
            parts.base.get_submodule("rotary_emb"), num_positions, self._embed.weight
        )
        self._layers = [
            _Layer(layer, i, head_dim, window_of(model, layer))
            for i, layer in enumerate(parts.layers)
        ]
        self._norm = norm_of(parts.base, "norm")
        self._head = cast(nn.Module, model.get_output_embeddings())

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        context: RowContext,
        logit_rows: Tensor | None,
        boundary_ids: Sequence[int],
        *,
        final_norm: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """See `backend.Decoder`; without `logit_rows` the logits of all rows."""
        assert isinstance(context, PagedContext)
        x = self._embed(token_ids)
        cos, sin = self._rotary(x, positions)
        states = []
        delta = None
        for layer in self._layers:
            x, normed = _add(x, delta, layer.norm)
            if layer.index in boundary_ids:
                states.append(x)
            x, delta = layer(x, normed, cos, sin, context)
        x, normed = _add(x, delta, self._norm)
        if len(self._layers) in boundary_ids:
            states.append(x)
        if final_norm:
            states.append(normed)
        return self._head(normed if logit_rows is None else normed[logit_rows]), states


def _add(x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    if delta is None:
        return add_rms_norm(None, x, norm.weight, norm.eps)
    return add_rms_norm(x, delta, norm.weight, norm.eps)


def _normed(heads: Tensor, norm: Norm) -> Tensor:
    """[R,n,d] -> the same, each head normed."""
    return add_rms_norm(None, heads.flatten(0, 1), norm.weight, norm.eps)[1].view(heads.shape)
