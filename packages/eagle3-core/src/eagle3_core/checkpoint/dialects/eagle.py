"""SafeAILab/EAGLE (traineagle3 and the published yuhuili/EAGLE3-* heads)."""

from collections.abc import Iterable

from eagle3_core.checkpoint.dialects.base import Clues, Dialect


def _cautions(clues: Clues) -> Iterable[str]:
    if clues.config.get("rope_theta") not in (None, 10000, 10000.0):
        yield (
            "rope_theta: EAGLE's trainer ignores it and rotates with 10000, its inference code "
            "uses it; if acceptance is low, try rope_theta=10000"
        )


DIALECT = Dialect(
    name="eagle",
    # Its architectures entry is a plain LlamaForCausalLM, so the layer's name must tell.
    recognises=lambda c: c.arch in ("LlamaForCausalLM", "") and c.has(r"midlayer\."),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    cautions=_cautions,
)
