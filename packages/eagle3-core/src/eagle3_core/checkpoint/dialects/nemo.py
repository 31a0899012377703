"""NVIDIA NeMo Automodel: a `model.` prefix, no ids in the config."""

from collections.abc import Iterable

from eagle3_core.checkpoint.dialects.base import Clues, Dialect


def _cautions(clues: Clues) -> Iterable[str]:
    if "d2t" not in clues.names:
        yield "early NeMo checkpoints lack d2t for a pruned vocabulary (Automodel PR 2447)"


DIALECT = Dialect(
    name="nemo",
    recognises=lambda c: c.arch == "LlamaEagle3DraftModel",
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    cautions=_cautions,
)
