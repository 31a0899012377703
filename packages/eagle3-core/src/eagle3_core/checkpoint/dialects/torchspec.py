"""TorchSpec, MHA drafts: SpecForge's names, or layers.0 after its convert_to_hf."""

from collections.abc import Iterable

from eagle3_core.checkpoint.dialects.base import Clues, Dialect


def _cautions(clues: Clues) -> Iterable[str]:
    if "d2t" in clues.names:
        yield (
            "TorchSpec's convert_to_hf --prune-vocab takes offsets for row ids and so keeps wrong "
            "lm_head rows: if this file went through it, its head is wrong"
        )


DIALECT = Dialect(
    name="torchspec",
    recognises=lambda c: "_torchspec_version" in c.config,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    cautions=_cautions,
)
