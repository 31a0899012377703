"""Rotary tables, from transformers, so that every rope type means what it means for the target."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_core.config import DraftConfig


def rotary_embedding(config: DraftConfig) -> nn.Module:
    """Module (x, position_ids [B,S]) -> cos, sin [B,S,head_dim] in x's dtype; fp32 tables."""
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(_rope_config(config))


def _rope_config(config: DraftConfig) -> LlamaConfig:
    """The part of a Llama config that transformers' rope tables read."""
    return LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )


class RopeTable(nn.Module):
    """The same for positions below a limit, read from tables that were made once.

    Only for rotary modules whose tables do not depend on how long the sequence is.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: nn.Module, num_positions: int, like: Tensor) -> None:
        """Run `rotary` over all positions, in the dtype and on the device of `like`."""
        super().__init__()
        every = torch.arange(num_positions, device=like.device)[None]
        cos, sin = rotary.to(like.device)(like, every)
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids of any shape -> cos and sin [..., head_dim]."""
        return self.cos[position_ids], self.sin[position_ids]


def is_static(rope_parameters: Mapping[str, Any]) -> bool:
    """Whether a rope type's tables do not depend on how long the sequence is."""
    return rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
