"""Heads written for SGLang, vLLM or TensorRT-LLM rather than by a trainer that can be told.

gpt-oss drafters (nested norm_before_fc, no-aux heads), Dogacel-era fc_norm heads with SGLang's
older names, and this package's own exports.
"""

from eagle3_core.checkpoint.dialects.base import MIDLAYER, Dialect

_LEGACY_NORMS = tuple(
    (rf"^aux_norm_{name}\.", f"fc_norm.{i}.") for i, name in enumerate(("low", "mid", "high"))
)

DIALECT = Dialect(
    name="engines",
    recognises=lambda c: c.has(r"(midlayer|layers\.0)\.hidden_norm\."),
    renames=((r"^midlayer\.(\d+)\.", r"layers.\1."), *MIDLAYER, *_LEGACY_NORMS),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    borrows=frozenset({"embed_tokens.weight", "lm_head.weight"}),
)
