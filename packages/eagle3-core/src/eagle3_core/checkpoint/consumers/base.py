"""How a consumer's layout is described: what it cannot honour, its config keys, its names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eagle3_core.config import DraftConfig

Rule = tuple[bool, str]  # (this config has it, why the consumer cannot take it)


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """One consumer. `limits` lists what it cannot honour, `to_json` writes its config.json.

    `rename` gives every name that a canonical tensor is written under; `full_map` says whether
    the trivial map of an unpruned vocabulary is written too; `target_key` is where its config names
    the target; `notes` are for whoever serves it.
    """

    name: str
    serves: bool  # an inference engine, not only a trainer's format
    limits: Callable[[DraftConfig], Iterable[Rule]]
    to_json: Callable[[DraftConfig, str], dict[str, Any]]
    rename: Callable[[DraftConfig, str], tuple[str, ...]]
    full_map: bool = False
    target_key: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def refusals(self, config: DraftConfig) -> list[str]:
        """Why this consumer would compute something else than the draft; empty if it would not."""
        return [why for holds, why in self.limits(config) if holds]


def llama_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """Keys of a Llama-style config.json that all consumers read alike.

    The aux ids are written twice, because vLLM reads boundary ids at the top level and SGLang and
    TensorRT-LLM layer outputs in `eagle_config` (sglang #25454, vllm #43671). target_hidden_size is
    left out rather than null, and draft_vocab_size is always there (both break SGLang).
    """
    out: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key: getattr(config, key) for key in _SAME},
        **rope_json(config),
    }
    if config.target_hidden_size != config.hidden_size:
        out["target_hidden_size"] = config.target_hidden_size
    if config.num_target_layers is not None:
        out["num_target_layers"] = config.num_target_layers
    eagle: dict[str, Any] = {"use_aux_hidden_state": config.aux_source == "boundaries"}
    if config.aux_layer_ids is not None:
        out["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
        if config.aux_layer_ids[0] > 0:
            eagle["eagle_aux_hidden_state_layer_ids"] = [c - 1 for c in config.aux_layer_ids]
    return {**out, "eagle_config": eagle}


_SAME = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "num_hidden_layers",
    "num_aux_hidden_states",
    "attention_bias",
    "mlp_bias",
    "rms_norm_eps",
    "max_position_embeddings",
)


def rope_json(config: DraftConfig) -> dict[str, Any]:
    """The same rope under its old and its new spelling."""
    rope = dict(config.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    kind = scaling["rope_type"]
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else {"type": kind, **scaling},
        "rope_parameters": rope,
    }


def norms_json(config: DraftConfig) -> dict[str, bool]:
    """Flags of the norms around fc and of the feedback."""
    return {
        "fc_norm": config.aux_norm in ("per_layer", "concat_per_layer"),
        "norm_before_fc": config.aux_norm in ("concat", "concat_per_layer"),
        "norm_output": config.feedback == "post_norm",
    }


def same_name(config: DraftConfig, name: str) -> tuple[str, ...]:
    """Canonical names are this consumer's names."""
    del config
    return (name,)


def midlayer_name(config: DraftConfig, name: str) -> tuple[str, ...]:
    """The one layer is called midlayer."""
    del config
    return (name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.") else name,)


def both_norm_names(config: DraftConfig, name: str) -> tuple[str, ...]:
    """vLLM calls the norm of a plain later layer input_layernorm, SGLang hidden_norm: both."""
    twin = hidden_norm_name(config, name)
    return (name,) if twin == (name,) else (name, *twin)


def hidden_norm_name(config: DraftConfig, name: str) -> tuple[str, ...]:
    """SGLang's and TensorRT-LLM's name of the norm of a plain later layer."""
    parts = name.split(".")
    plain = parts[0] == "layers" and not config.sees_embedding(int(parts[1]))
    if plain and parts[2] == "input_layernorm":
        return (name.replace("input_layernorm", "hidden_norm"),)
    return (name,)


def every_layer(config: DraftConfig) -> bool:
    """Whether later layers see the embedding too."""
    return config.num_hidden_layers > 1 and config.layer_input == "every"


def skips_fc(config: DraftConfig) -> bool:
    """Whether a consumer that decides by width whether to apply fc would leave it out."""
    return config.has_fc and config.aux_width == config.hidden_size


def bare_aux(config: DraftConfig) -> bool:
    """Boundary states used without fc: only the final state has a spelling for that."""
    return not config.has_fc and config.aux_source == "boundaries"


def unnamed_aux(config: DraftConfig) -> bool:
    """States whose depth is not known, and which no default names."""
    unknown = config.aux_source == "boundaries" and config.aux_layer_ids is None
    return unknown and config.num_aux_hidden_states != 3
