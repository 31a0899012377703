"""vllm-project/speculators: the decoder's config is nested and holds only what differs."""

from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_core.checkpoint.dialects.base import Clues, Dialect

# Class defaults of the two bodies (transformers LlamaConfig, Qwen3Config).
_SHARED = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_BODIES = {
    "llama": {**_SHARED, "vocab_size": 32000, "intermediate_size": 11008}
    | {"max_position_embeddings": 2048},
    "qwen3": {**_SHARED, "vocab_size": 151936, "intermediate_size": 22016}
    | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
}


def _flatten(config: Mapping[str, Any]) -> Mapping[str, Any]:
    body = config.get("transformer_layer_config")
    body = body if isinstance(body, Mapping) else {}
    # The nested config of the decoder has its own keys of these names, which mean nothing here.
    own = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "dtype")}
    model_type = body.get("model_type", "qwen3")
    rope = any(body.get(k) for k in ("rope_theta", "rope_parameters", "rope_scaling"))
    defaults = {
        k: v for k, v in _BODIES.get(model_type, {}).items() if not (k == "rope_theta" and rope)
    }
    return {**defaults, **body, **own, "model_type": model_type}


def _cautions(clues: Clues) -> Iterable[str]:
    if "norm_before_residual" not in clues.config:
        yield (
            "norm_before_residual is absent: read as false, speculators' default; vLLM takes an "
            "absent key as true"
        )
    if clues.config.get("speculators_version") is None and clues.arch == "Eagle3Speculator":
        yield (
            "written by a speculators converter, which saved missing tensors as random values "
            "(speculators #1114): compare the acceptance with the original's"
        )


DIALECT = Dialect(
    name="speculators",
    recognises=lambda c: any(
        k in c.config
        for k in ("speculators_model_type", "speculators_config", "transformer_layer_config")
    ),
    flatten=_flatten,
    cautions=_cautions,
    borrows=frozenset(),
)
