"""Rotary tables, from transformers, so that every rope type means what it means for the target."""

import torch
from torch import nn
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
