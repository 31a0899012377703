"""SafeAILab/EAGLE (eagle/model/cnets.py): one midlayer, three default states, plain rope."""

from collections.abc import Iterable
from typing import Any

from eagle3_core.checkpoint.consumers.base import Consumer, Rule, llama_json, midlayer_name
from eagle3_core.config import DraftConfig, default_aux_layer_ids


def _limits(config: DraftConfig) -> Iterable[Rule]:
    wide = config.num_attention_heads * config.head_dim != config.hidden_size
    biased = config.attention_bias or config.attention_output_bias or config.mlp_bias
    rope = config.rope_parameters["rope_type"]
    return (
        (config.num_hidden_layers > 1, "it builds one layer"),
        (config.num_aux_hidden_states != 3, "it reads three states"),
        (_other_ids(config), "it reads boundaries 2, n//2, n-3 whatever the config says"),
        (config.aux_norm != "none", "it has no norm before fc"),
        (config.residual == "normed", "it has no normed residual"),
        (config.feedback == "post_norm", "it feeds the state before the norm back"),
        (not config.has_fc or config.fc_bias, "its fc is there and has no bias"),
        (biased, "its layer has no biases"),
        (config.qk_norm, "it has no q_norm and k_norm"),
        (config.sliding_window is not None, "it has no sliding window"),
        (wide, "its head size is hidden_size / heads"),
        (rope not in ("default", "linear", "dynamic"), f"it has no {rope} rope"),
    )


def _other_ids(config: DraftConfig) -> bool:
    ids, depth = config.aux_layer_ids, config.num_target_layers
    return ids is not None and (depth is None or ids != default_aux_layer_ids(depth))


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    out = llama_json(config, dtype)
    # Its config class passes every key on; these two would meet transformers' own of that name.
    del out["rope_parameters"], out["eagle_config"]
    return {**out, "architectures": ["LlamaForCausalLM"]}


CONSUMER = Consumer(
    name="eagle",
    serves=True,
    limits=_limits,
    to_json=_to_json,
    rename=midlayer_name,
    full_map=True,
)
