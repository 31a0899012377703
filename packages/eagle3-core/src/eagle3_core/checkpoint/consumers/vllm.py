"""vLLM (0.32: models/{llama,qwen3}_eagle3.py). Strict on unexpected names, silent on missing."""

from collections.abc import Iterable
from typing import Any

from eagle3_core.checkpoint.consumers.base import (
    Consumer,
    Rule,
    bare_aux,
    both_norm_names,
    every_layer,
    llama_json,
    norms_json,
    unnamed_aux,
)
from eagle3_core.config import DraftConfig


def _limits(config: DraftConfig) -> Iterable[Rule]:
    llama_bias = config.attention_bias != config.attention_output_bias and not config.qk_norm
    return (
        (every_layer(config), "its later layers take the hidden state alone"),
        (config.fc_bias, "its fc has no bias"),
        (llama_bias, "its Llama layers have a bias on all of q, k, v, o or on none"),
        (config.qk_norm and config.attention_output_bias, "its Qwen3 o_proj has no bias"),
        (config.qk_norm and config.mlp_bias, "its Qwen3 MLP has no bias"),
        (
            config.sliding_window is not None and not config.qk_norm,
            "only its Qwen3 body has a sliding window",
        ),
        (bare_aux(config), "it always has fc on boundary states"),
        (unnamed_aux(config), "aux_layer_ids are not known"),
    )


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    out = {
        **llama_json(config, dtype),
        **norms_json(config),
        "norm_before_residual": config.residual == "normed",
    }
    if config.qk_norm:
        out |= qwen3_json(config)
        out["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    return out


def qwen3_json(config: DraftConfig) -> dict[str, Any]:
    """The body with q and k norms, which alone can window its attention."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return {
        "model_type": "qwen3",
        "layer_types": [kind] * config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }


CONSUMER = Consumer(
    name="vllm",
    serves=True,
    limits=_limits,
    to_json=_to_json,
    rename=both_norm_names,
    notes=('start it with --speculative-config \'{"method": "eagle3", ...}\'',),
)
