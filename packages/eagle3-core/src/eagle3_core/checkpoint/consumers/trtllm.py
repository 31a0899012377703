"""TensorRT-LLM (_torch/models/modeling_speculative.py at 00679c6)."""

from collections.abc import Iterable
from typing import Any

from eagle3_core.checkpoint.consumers.base import (
    Consumer,
    Rule,
    bare_aux,
    every_layer,
    hidden_norm_name,
    llama_json,
    norms_json,
    skips_fc,
    unnamed_aux,
)
from eagle3_core.config import DraftConfig


def _limits(config: DraftConfig) -> Iterable[Rule]:
    ids = config.aux_layer_ids or (1,)
    lone_bias = config.attention_bias != config.attention_output_bias
    return (
        (config.residual == "normed", "it has no normed residual"),
        (config.aux_norm == "concat_per_layer", "it applies fc_norm or input_norm, not both"),
        (config.qk_norm, "it has no q_norm and k_norm"),
        (lone_bias, "its attention has a bias on all of q, k, v, o or on none"),
        (config.sliding_window is not None, "its draft has no sliding window"),
        (config.aux_source == "final_norm", "it has no spelling for the final normed state"),
        (ids[0] == 0, "it counts layer outputs, so boundary 0 (the embeddings) has no id"),
        (skips_fc(config), "it skips fc when the aux states are as wide as the draft"),
        (bare_aux(config), "it always has fc on boundary states"),
        (unnamed_aux(config), "aux_layer_ids are not known"),
    )


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    out = {**llama_json(config, dtype), **norms_json(config), "bias": config.fc_bias}
    out["architectures"] = ["EAGLE3LlamaForCausalLM"]
    out["eagle_config"] |= {
        "norm_before_fc": out["norm_before_fc"],
        "return_hidden_post_norm": out["norm_output"],
        "next_layer_regular": not every_layer(config),
    }
    return out


CONSUMER = Consumer(
    name="trtllm",
    serves=True,
    limits=_limits,
    to_json=_to_json,
    rename=hidden_norm_name,
    notes=("give it the layers to capture in its own speculative config, as layer outputs",),
)
