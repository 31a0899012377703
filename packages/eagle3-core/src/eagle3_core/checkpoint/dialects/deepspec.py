"""DeepSpec (deepseek-ai/eagle3_*): a copy of the target's Qwen3 config; every layer sees e."""

from eagle3_core.checkpoint.dialects.base import Dialect

DIALECT = Dialect(
    name="deepspec",
    recognises=lambda c: c.arch == "Qwen3Eagle3Model",
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    forced=lambda _: {"qk_norm": (True, "DeepSpec's Qwen3 layers norm q and k")},
    borrows=frozenset(),
    has_default_ids=False,
)
