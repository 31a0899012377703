"""The standard decoder in fewer calls, for targets on a CPU.

A small model spends a third of a pass between its operators. Llama, Qwen2, Qwen3 and Mistral have
the same layer but for biases and norms of q and k; here it is nine linear and elementwise calls:
q, k and v come out of one linear, and SiLU, the product with the up projection and both residuals
ride on linears. Other models run through their own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from eagle3_core.packed import PackedLinear, PackedPart, pack_as_one
from eagle3_core.target import decoder_parts
from eagle3_serve.attention import Attention, RowContext

_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
QKV = ("q_proj", "k_proj", "v_proj")


def is_standard(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes what this model computes. A subclass may differ."""
    return type(model) in _KNOWN and model.config.hidden_act == "silu"


def pack_qkv(model: PreTrainedModel) -> None:
    """Pack q, k and v of every layer of a standard model as one; once is enough."""
    for layer in decoder_parts(model).layers:
        attention = layer.get_submodule("self_attn")
        if type(attention.get_submodule("q_proj")) is nn.Linear:
            pack_as_one(attention, QKV)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight and eps."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Layer:
    """One decoder layer over rows [R,T]."""

    def __init__(self, layer: nn.Module, index: int, head_dim: int, window: int | None) -> None:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self.index, self.head_dim = index, head_dim
        self.how = Attention(head_dim**-0.5, window)
        self.norm = norm_of(layer, "input_layernorm")
        self.mlp_norm = norm_of(layer, "post_attention_layernorm")
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = norm_of(attention, "q_norm") if has_norms else None
        self.k_norm = norm_of(attention, "k_norm") if has_norms else None
        parts = [attention.get_submodule(name) for name in QKV]
        self.num_heads, self.num_kv_heads, _ = (
            cast(PackedPart, part).out_features // head_dim for part in parts
        )
        self.qkv = cast(PackedPart, parts[0]).whole
        self.out = cast(PackedLinear, attention.get_submodule("o_proj"))
        self.gate, self.up, self.down = (
            cast(PackedLinear, mlp.get_submodule(f"{name}_proj")) for name in ("gate", "up", "down")
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: RowContext) -> Tensor:
        """cos and sin [R,1,d]; the first half of sin is negated."""
        heads = self.qkv(self.norm(x)).view(len(x), -1, self.head_dim)
        rotated = heads[:, : -self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.split([self.num_heads, self.num_kv_heads], 1)
            rotated = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        turned = rotated.roll(self.head_dim // 2, -1)
        # Not addcmul: its rounding is up to where in the tensor an element stands.
        rotated = rotated * cos + turned * sin
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        mixed = context.attend_rows(self.index, q, k, heads[:, -self.num_kv_heads :], self.how)
        x = self.out.plus(mixed.flatten(1), x)
        h = self.mlp_norm(x)
        return self.down.plus(self.up.times(h, self.gate.silu(h)), x)


class FusedDecoder:
    """Runs a standard model whose linears are packed, q, k and v as one."""

    def __init__(self, model: PreTrainedModel) -> None:
        parts = decoder_parts(model)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._embed = cast(nn.Module, model.get_input_embeddings())
        self._rotary = parts.base.get_submodule("rotary_emb")
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
        logit_rows: Tensor,
        boundary_ids: Sequence[int],
        *,
        final_norm: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """See `backend.Decoder`."""
        x = self._embed(token_ids)
        cos, sin = (table[0, :, None] for table in self._rotary(x, positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        states = []
        for layer in self._layers:
            if layer.index in boundary_ids:
                states.append(x)
            x = layer(x, cos, sin, context)
        if len(self._layers) in boundary_ids:
            states.append(x)
        if final_norm:
            states.append(self._norm(x))
        return self._head(self._norm(x[logit_rows])), states


def norm_of(parent: nn.Module, name: str) -> Norm:
    """The RMSNorm of that name in a standard model's part."""
    module = parent.get_submodule(name)
    return Norm(module.get_parameter("weight"), cast(float, module.variance_epsilon))


def window_of(model: PreTrainedModel, layer: nn.Module) -> int | None:
    """How far a standard model's layer sees, in positions; None is everything."""
    if isinstance(model, MistralForCausalLM):
        return model.config.sliding_window  # of all layers
    return getattr(layer.get_submodule("self_attn"), "sliding_window", None)
