"""Tiny drafts with random weights, and folders written by hand in any layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core import DraftConfig, Eagle3Draft
from eagle3_core.vocab import vocab_map

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "draft_vocab_size": 12,
    "target_hidden_size": 16,
    "num_target_layers": 8,
    "num_aux_hidden_states": 3,
    "aux_layer_ids": (2, 4, 5),
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(scope="session")
def make_draft() -> Callable[..., Eagle3Draft]:
    """Config changes -> a draft with random weights and norms, and a real vocabulary map."""

    def build(seed: int = 0, **changes: Any) -> Eagle3Draft:
        config = DraftConfig(**{**SIZES, **changes})
        draft = Eagle3Draft(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
            if config.is_pruned:
                kept = torch.randperm(config.vocab_size, generator=generator)
                d2t, t2d = vocab_map(
                    kept[: config.draft_vocab_size].sort().values, config.vocab_size
                )
                if not d2t.any():  # the one map that cannot be told from an unset one
                    d2t, t2d = vocab_map(kept.sort().values[-config.draft_vocab_size :], len(kept))
                draft.d2t.copy_(d2t)
                draft.t2d.copy_(t2d)
        return draft

    return build


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """(config, tensors) -> a checkpoint folder with just these."""

    def write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = "ckpt") -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(dict(config)))
        copies = {n: t.detach().clone().contiguous() for n, t in tensors.items()}
        save_file(copies, path / "model.safetensors")
        return path

    return write


@pytest.fixture(scope="session")
def make_target() -> Callable[..., LlamaForCausalLM]:
    """A random Llama of 8 layers that fits `make_draft`'s drafts."""

    def build(**changes: Any) -> LlamaForCausalLM:
        torch.manual_seed(7)
        shape = {
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()

    return build


@pytest.fixture(scope="session")
def specforge_config() -> dict[str, Any]:
    """A config as SpecForge and its relatives write it, for `make_draft()`'s default draft."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


@pytest.fixture(scope="session")
def midlayer() -> Callable[[Eagle3Draft], dict[str, Tensor]]:
    """A one-layer draft's tensors under EAGLE's and SpecForge's names."""

    def rename(draft: Eagle3Draft) -> dict[str, Tensor]:
        return {n.replace("layers.0.", "midlayer."): t for n, t in draft.state_dict().items()}

    return rename
