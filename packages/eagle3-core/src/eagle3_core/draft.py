"""The EAGLE-3 draft, defined once: trained by eagle3_train, decoded by eagle3_serve.

Shapes: B batch, S slots, H draft hidden, T target hidden, A aux states, V and D target and draft
vocabulary. Slot t pairs the target's states at position t with the embedding of token t+1.
Parameter names are the names in the checkpoint. `DraftConfig` says what each choice means.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_core.attention import AttentionContext
from eagle3_core.config import DraftConfig
from eagle3_core.ops import DraftOps, TokenEmbeddings, TorchOps


class RMSNorm(nn.Module):
    """A norm's weight; the arithmetic is in the ops."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


@dataclass(frozen=True)
class SplitProjection:
    """q, k and v of a layer that sees embeddings, W [e; x] = W_e e + W_x x, with W_e e done.

    P = (nq + 2 nkv) d, the widths of q, k and v together.
    """

    embedding: Tensor  # [B,S,P] W_e e, and the biases
    hidden: Tensor  # [P,H] W_x


@dataclass(frozen=True)
class SplitEmbeddings:
    """What the embeddings give each layer: for whoever runs over the same tokens repeatedly."""

    layers: tuple[SplitProjection | None, ...]  # None: the layer sees no embedding

    def at(self, slots: Tensor) -> "SplitEmbeddings":
        """Those of the tokens `slots` [R] int64."""
        return SplitEmbeddings(
            tuple(
                None if layer is None else replace(layer, embedding=layer.embedding[:, slots])
                for layer in self.layers
            )
        )


class Attention(nn.Module):
    """Projections and rotary positions; what the queries see is the context's business."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.rms_norm_eps
        width = config.hidden_size * (2 if config.sees_embedding(layer) else 1)
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else None

    def split(self, e: Tensor) -> SplitProjection:
        """Normed embeddings [B,S,H] -> their part of the projections."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        # One product for all three.
        weights: list[Tensor] = [p.weight for p in projections]
        biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
        of_e, of_x = torch.cat(weights).split(e.shape[-1], dim=1)
        return SplitProjection(F.linear(e, of_e, torch.cat(biases) if biases else None), of_x)

    def forward(
        self,
        x: Tensor,
        split: SplitProjection | None,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        ops: DraftOps,
    ) -> Tensor:
        """x [B,S,H or 2H], or [B,S,H] beside a `split` -> [B,S,H]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if split is None:
            q, k, v = (self._heads(part) for part in ops.linears(x, projections))
        else:
            joint = F.linear(x, split.hidden) + split.embedding
            widths = [p.weight.shape[0] for p in projections]
            q, k, v = (self._heads(part) for part in joint.split(widths, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm.weight, self.eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.eps)
        out = ops.rope_attend(context, self.layer, q, k, v, cos, sin)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inter, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inter, bias=bias)
        self.up_proj = nn.Linear(hidden, inter, bias=bias)
        self.down_proj = nn.Linear(inter, hidden, bias=bias)

    def forward(self, x: Tensor, ops: DraftOps) -> Tensor:
        """[B,S,H] -> [B,S,H]."""
        return self.down_proj(ops.swiglu(*ops.linears(x, (self.gate_proj, self.up_proj))))


class DraftLayer(nn.Module):
    """One decoder layer, over cat[input_layernorm(e), hidden_norm(x)] if it sees embeddings."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.normed_residual = config.residual == "normed"
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size) if config.sees_embedding(layer) else None
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)

    def split(self, e: Tensor, ops: DraftOps) -> SplitProjection | None:
        """Embeddings [B,S,H] -> their part of the attention's projections, if they have one."""
        if self.hidden_norm is None:
            return None
        return self.self_attn.split(ops.rms_norm(e, self.input_layernorm.weight, self.eps))

    @torch.no_grad()
    def init_identity(self) -> None:
        """Zero what the layer writes, so that it hands on its residual until it is trained.

        That is x itself, bit for bit. Where the residual is `hidden_norm(x)` it is x at unit mean
        square while that norm's weight is one, which nothing that reads it can tell: the next
        layer, the final norm and, in such a draft, the next step all take the norm of it.
        """
        for linear in (self.self_attn.o_proj, self.mlp.down_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()

    def forward(
        self,
        e: Tensor | TokenEmbeddings | SplitProjection | None,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        ops: DraftOps,
    ) -> Tensor:
        """e (or what stands for it) and x [B,S,H] -> [B,S,H]; no residual is added twice."""
        residual, split = x, None
        if self.hidden_norm is None:
            attn_in = ops.rms_norm(x, self.input_layernorm.weight, self.eps)
        elif isinstance(e, Tensor | TokenEmbeddings):
            attn_in, normed = ops.norm_concat(
                e, self.input_layernorm.weight, x, self.hidden_norm.weight, self.eps
            )
            residual = normed if self.normed_residual else x
        else:
            split = e
            attn_in = ops.rms_norm(x, self.hidden_norm.weight, self.eps)
            residual = attn_in if self.normed_residual else x
        attn_out = self.self_attn(attn_in, split, cos, sin, context, ops)
        h, mlp_in = ops.add_rms_norm(
            residual, attn_out, self.post_attention_layernorm.weight, self.eps
        )
        return h + self.mlp(mlp_in, ops)


class Eagle3Draft(nn.Module):
    """The draft model.

    One step: `h = draft(e, x, position_ids, context)`, `draft.logits(h)`, and `draft.feedback(h)`
    is the next step's x. The first x of a position is `draft.project(aux)`.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, ops: DraftOps | None = None) -> None:
        super().__init__()
        self.config = config
        self.ops: DraftOps = TorchOps() if ops is None else ops
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.aux_norm in ("concat", "concat_per_layer"):
            self.input_norm = RMSNorm(config.aux_width)
        if config.aux_norm in ("per_layer", "concat_per_layer"):
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size) for _ in range(config.num_aux_hidden_states)
            )
        if config.has_fc:
            self.fc = nn.Linear(config.aux_width, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.is_pruned:
            # Identity until a real map is set; a checkpoint with this placeholder is refused.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.t2d[: config.draft_vocab_size].fill_(True)

    @cached_property
    def _rotary(self) -> tuple[nn.Module]:
        """transformers' rope tables, in a tuple so that Module.to(bfloat16) cannot round them.

        Made on first use: importing them takes seconds, which a reader of shapes need not pay,
        and a draft built on the meta device gets real ones.
        """
        from eagle3_core.rope import rotary_embedding  # noqa: PLC0415

        return (rotary_embedding(self.config),)

    def tabulate_rope(self, num_positions: int) -> None:
        """Look rotary tables up from now on, for positions below the limit.

        Raises:
            ValueError: this draft's tables depend on how long the sequence is.
        """
        from eagle3_core.rope import RopeTable, is_static, rotary_embedding  # noqa: PLC0415

        if not is_static(self.config.rope_parameters):
            raise ValueError(f"rope_parameters: {self.config.rope_parameters} make no fixed table")
        table = RopeTable(rotary_embedding(self.config), num_positions, self.norm.weight)
        self.__dict__["_rotary"] = (table,)

    def init_weights(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Normal(0, std) matrices, unit norms, zero biases."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def norm_aux(self, aux: Tensor) -> Tensor:
        """[...,A·T] -> [...,A·T]: the aux norm; the whole concatenation first, then each state."""
        if aux.shape[-1] != self.config.aux_width:
            raise ValueError(
                f"aux states are {aux.shape[-1]} wide, expected "
                f"{self.config.num_aux_hidden_states} x {self.config.target_hidden_size} "
                f"= {self.config.aux_width}"
            )
        eps = self.config.rms_norm_eps
        if self.config.aux_norm in ("concat", "concat_per_layer"):
            aux = self.ops.rms_norm(aux, self.input_norm.weight, eps)
        if self.config.aux_norm in ("per_layer", "concat_per_layer"):
            chunks = aux.unflatten(-1, (self.config.num_aux_hidden_states, -1)).unbind(-2)
            aux = torch.cat(
                [
                    self.ops.rms_norm(c, n.get_parameter("weight"), eps)
                    for c, n in zip(chunks, self.fc_norm, strict=True)
                ],
                -1,
            )
        return aux

    def project(self, aux: Tensor) -> Tensor:
        """[B,S,A·T] -> [B,S,H]: aux norm, then fc. For the target's states, never fed-back ones."""
        aux = self.norm_aux(aux)
        return self.fc(aux) if self.config.has_fc else aux

    def embed(self, ids: Tensor) -> Tensor:
        """[B,S] target ids -> [B,S,H]."""
        return self.embed_tokens(ids)

    def embed_lazily(self, ids: Tensor) -> TokenEmbeddings:
        """The same without reading the table: `forward` hands ids and table to its ops."""
        return TokenEmbeddings(ids, self.embed_tokens.weight)

    def split_embeddings(self, e: Tensor) -> SplitEmbeddings:
        """[B,S,H] -> what `forward` takes in place of e: equal up to the order of additions."""
        splits: list[SplitProjection | None] = []
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            splits.append(layer.split(e, self.ops))
        return SplitEmbeddings(tuple(splits))

    def forward(
        self,
        e: Tensor | TokenEmbeddings | SplitEmbeddings,
        x: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """e, x [B,S,H], position_ids [B,S] -> h [B,S,H], before the final norm."""
        if context.sliding_window != self.config.sliding_window:
            raise ValueError(
                f"context has sliding_window {context.sliding_window}, "
                f"the draft {self.config.sliding_window}"
            )
        cos, sin = self._rotary[0].to(x.device)(x, position_ids)
        inputs = e.layers if isinstance(e, SplitEmbeddings) else [e] * len(self.layers)
        for layer, own in zip(self.layers, inputs, strict=True):
            x = layer(own, x, cos, sin, context, self.ops)
        return x

    def logits(self, h: Tensor) -> Tensor:
        """[B,S,H] -> [B,S,D]."""
        return self.ops.draft_head(
            h, self.norm.weight, self.config.rms_norm_eps, self.lm_head.weight
        )

    def feedback(self, h: Tensor) -> Tensor:
        """[B,S,H] -> [B,S,H]: what the next step takes in place of the projected aux states."""
        if self.config.feedback == "pre_norm":
            return h
        return self.ops.rms_norm(h, self.norm.weight, self.config.rms_norm_eps)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids + self.d2t[draft_ids] if self.config.is_pruned else draft_ids
