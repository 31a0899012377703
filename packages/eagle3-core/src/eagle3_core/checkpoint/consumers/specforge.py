"""sgl-project/SpecForge (0.2.0), to train on: one midlayer, three states."""

from collections.abc import Iterable
from typing import Any

from eagle3_core.checkpoint.consumers.base import Consumer, Rule, llama_json, midlayer_name
from eagle3_core.config import DraftConfig


def _limits(config: DraftConfig) -> Iterable[Rule]:
    biased = config.attention_bias or config.attention_output_bias or config.mlp_bias
    ids = config.aux_layer_ids or (1,)
    return (
        (config.num_hidden_layers > 1, "it builds one layer"),
        (config.num_aux_hidden_states != 3, "it reads three states"),
        (ids[0] == 0, "it counts layer outputs, so boundary 0 (the embeddings) has no id"),
        (config.aux_norm not in ("none", "per_layer"), "it has no norm over all states"),
        (config.residual == "normed", "it has no normed residual"),
        (
            config.feedback == "post_norm",
            "before its PR 879 norm_output does not mean post-norm feedback",
        ),
        (not config.has_fc or config.fc_bias, "its fc is there and has no bias"),
        (biased, "its layer has no biases"),
        (config.qk_norm, "it has no q_norm and k_norm"),
        (config.sliding_window is not None, "it has no sliding window"),
    )


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    return {**llama_json(config, dtype), "fc_norm": config.aux_norm == "per_layer"}


CONSUMER = Consumer(
    name="specforge",
    serves=False,
    limits=_limits,
    to_json=_to_json,
    rename=midlayer_name,
    full_map=True,
)
