"""Layouts that are recognised to be refused by name: they hold something else than this draft."""

from eagle3_core.checkpoint.dialects.base import Dialect


def _names(pattern: str):
    return lambda clues: clues.has(pattern)


REFUSED = (
    Dialect(
        name="p-eagle",
        recognises=lambda c: (
            c.has(r"mask_hidden")
            or c.arch == "PEagleDraftModel"
            or c.config.get("speculators_model_type") == "peagle"
            or bool(c.config.get("parallel_drafting"))
        ),
        refused="a P-EAGLE draft, which predicts all positions in one parallel pass from a learned "
        "mask state instead of feeding its state back",
    ),
    Dialect(
        name="mla",
        recognises=lambda c: (
            c.arch.startswith(("Eagle3DeepseekV", "Eagle3DeepSeekV"))
            or c.has(r"(midlayer|layers\.\d+)\.self_attn\.kv_(a_proj_with_mqa|b_proj)")
        ),
        refused="an EAGLE-3 draft with multi-head latent attention (Eagle3DeepseekV2), whose keys "
        "and values come through a low-rank latent",
    ),
    Dialect(
        name="gemma4-deepspec",
        recognises=_names(r"layers\.\d+\.(pre|post)_feedforward_layernorm"),
        refused="DeepSpec's Gemma4 draft, with sandwich norms, scaled embeddings and soft-capped "
        "logits",
    ),
    Dialect(
        name="eh-proj",
        recognises=_names(r"((midlayer|layers)(\.\d+)?\.)?(eh_proj|enorm)\."),
        refused="a TensorRT-LLM draft with eh_proj before attention",
    ),
    Dialect(
        name="gated",
        recognises=_names(r"(midlayer|layers\.\d+)\.self_attn\.g_proj"),
        refused="a NeMo KimiK3 draft, with gated attention without positions",
    ),
    Dialect(
        name="medusa",
        recognises=_names(r"(parallel_draft_heads|medusa)"),
        refused="a checkpoint with parallel Medusa heads",
    ),
    Dialect(
        name="target",
        recognises=lambda c: c.target_names,
        refused="a target model, not a draft",
    ),
    Dialect(
        name="eagle-1",
        recognises=lambda c: (
            c.has(r"fc\.weight")
            and c.has(r"layers\.0\.self_attn\.q_proj")
            and not c.has(r"(midlayer|layers\.0)\.hidden_norm|midlayer|norm\.weight")
        ),
        refused="an EAGLE-1 or EAGLE-2 head: its layer takes fc(embedding, hidden), not two norms",
    ),
)
