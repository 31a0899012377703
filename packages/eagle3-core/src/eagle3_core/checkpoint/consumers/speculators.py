"""vllm-project/speculators (0.9.0): the decoder's config nested, ids as boundaries."""

from collections.abc import Iterable
from typing import Any

from eagle3_core.checkpoint.consumers.base import (
    Consumer,
    Rule,
    every_layer,
    llama_json,
    norms_json,
    same_name,
    unnamed_aux,
)
from eagle3_core.checkpoint.consumers.vllm import qwen3_json
from eagle3_core.config import DraftConfig

_OUTSIDE = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "num_target_layers",
    "torch_dtype",
    "eagle_config",
    "rope_theta",
    "rope_scaling",
)


def _limits(config: DraftConfig) -> Iterable[Rule]:
    lone_bias = config.attention_bias != config.attention_output_bias
    return (
        (every_layer(config), "its later layers take the hidden state alone"),
        (config.target_hidden_size != config.hidden_size, "it wants the target's width"),
        (config.aux_norm == "concat_per_layer", "it takes fc_norm or norm_before_fc, not both"),
        (config.aux_source == "final_norm", "it has no drafts on the final normed state"),
        (not config.has_fc or config.fc_bias, "its fc is there and has no bias"),
        (lone_bias, "its attention has a bias on all of q, k, v, o or on none"),
        (config.mlp_bias and config.qk_norm, "its Qwen3 MLP has no bias"),
        (
            config.sliding_window is not None and not config.qk_norm,
            "only its Qwen3 body has a sliding window",
        ),
        (unnamed_aux(config), "aux_layer_ids are not known"),
    )


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    flat = llama_json(config, dtype)
    body = {k: v for k, v in flat.items() if k not in ("architectures", *_OUTSIDE)}
    if config.qk_norm:
        body |= qwen3_json(config)
    ids = config.aux_layer_ids
    out = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "norm_before_residual": config.residual == "normed",
        **norms_json(config),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": body,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
    }
    if config.num_target_layers is not None:
        out["num_target_layers"] = config.num_target_layers
    return out


CONSUMER = Consumer(
    name="speculators",
    serves=False,
    limits=_limits,
    to_json=_to_json,
    rename=same_name,
    target_key=("speculators_config", "verifier", "name_or_path"),
    notes=("speculators itself loads it only when it was written with the target (--target)",),
)
