"""SGLang (0.5.23: models/llama_eagle3.py). Loads by name, silent about what is left over."""

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
    skips_fc,
    unnamed_aux,
)
from eagle3_core.config import DraftConfig


def _limits(config: DraftConfig) -> Iterable[Rule]:
    ids = config.aux_layer_ids or (1,)
    return (
        (config.residual == "normed", "it has no normed residual (norm_before_residual)"),
        (every_layer(config), "its later layers take the hidden state alone"),
        (config.qk_norm, "it drops q_norm and k_norm"),
        (config.attention_bias, "it builds q, k, v without bias"),
        (config.attention_output_bias, "it has no bias of o_proj alone"),
        (config.mlp_bias, "its MLP has no bias"),
        (config.sliding_window is not None, "it takes a draft window from its command line only"),
        (ids[0] == 0, "it counts layer outputs, so boundary 0 (the embeddings) has no id"),
        (skips_fc(config), "it skips fc when the aux states are as wide as the draft"),
        (bare_aux(config), "it always has fc on boundary states"),
        (unnamed_aux(config), "aux_layer_ids are not known"),
    )


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    out = {**llama_json(config, dtype), **norms_json(config), "bias": config.fc_bias}
    # It prefers the nested key of this one.
    out["eagle_config"]["norm_before_fc"] = out["norm_before_fc"]
    return out


CONSUMER = Consumer(
    name="sglang",
    serves=True,
    limits=_limits,
    to_json=_to_json,
    rename=both_norm_names,
    notes=(
        "SGLang replaces the draft's embeddings by the target's when the widths are equal",
        "start it with --speculative-algorithm EAGLE3; EAGLE skips fc silently (sglang #21272)",
    ),
)
