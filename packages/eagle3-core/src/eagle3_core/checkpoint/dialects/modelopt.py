"""NVIDIA ModelOpt: the HF export (layers.i, no embeddings, no t2d) and Megatron's `Deep` names."""

from collections.abc import Iterable

from eagle3_core.checkpoint.dialects.base import MIDLAYER, Clues, Dialect

_OWN_KEYS = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "parallel_draft_step",
)


def _recognises(clues: Clues) -> bool:
    own = any(clues.nested(key) is not None for key in _OWN_KEYS)
    return clues.arch == "LlamaForCausalLMEagle3Deep" or clues.has(r"midlayer\.\d") or own


def _cautions(clues: Clues) -> Iterable[str]:
    if clues.has(r"layers\.0\."):
        yield (
            "trained through ModelOpt's HF path since its PR 689 (2025-12), layer 0 saw "
            "input_layernorm on the hidden state as well, which no engine computes: the real "
            "acceptance may be lower than in training"
        )
    scaling = clues.config.get("rope_scaling")
    if isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        yield (
            "rope: ModelOpt injects yarn at export (PR 1238), the draft was trained without it; "
            "to measure the trained rope set "
            'rope_parameters={"rope_type": "default", "rope_theta": 10000}'
        )
    if clues.nested("eagle_aux_hidden_state_layer_ids") is None:
        yield (
            "no aux layer ids in the config: engines fall back to their default, which is wrong "
            "for some published heads (vllm #50170)"
        )


DIALECT = Dialect(
    name="modelopt",
    recognises=_recognises,
    renames=((r"^midlayer\.(\d+)\.", r"layers.\1."), *MIDLAYER),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    cautions=_cautions,
    borrows=frozenset({"embed_tokens.weight", "lm_head.weight"}),
)
