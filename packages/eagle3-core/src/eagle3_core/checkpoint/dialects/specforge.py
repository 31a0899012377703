"""sgl-project/SpecForge, and its SGLang export, which leaves the embeddings out."""

from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_core.checkpoint.dialects.base import Clues, Dialect


def _cautions(clues: Clues) -> Iterable[str]:
    if clues.config.get("norm_output") is True:
        yield (
            "norm_output is true: read as post-norm feedback, as engines do; a draft trained by "
            "SpecForge before PR 879 fed back the pre-norm state whatever this says: then set "
            "feedback=pre_norm (SpecForge PR 568, PR 879)"
        )
    if clues.config.get("norm_output") is False:
        yield (
            "norm_output is false: read as pre-norm feedback, as engines do; in SpecForge before "
            "PR 879 it meant no norm before lm_head, which no engine serves (SpecForge PR 879)"
        )


def _forced(config: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    if config.get("attention_bias"):
        return {"attention_bias": (False, "SpecForge builds q, k, v without bias whatever it says")}
    return {}


DIALECT = Dialect(
    name="specforge",
    # Its trainer knows neither input_norm nor the older names of SGLang's aux norms.
    recognises=lambda c: (
        c.arch == "LlamaForCausalLMEagle3"
        and c.has(r"midlayer\.[a-z]")
        and not c.has(r"(aux_norm_|input_norm)")
    ),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    forced=_forced,
    cautions=_cautions,
)
