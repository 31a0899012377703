"""Tencent/AngelSlim: its rope ignores the declared theta, and its tie flag is not true."""

from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_core.checkpoint.dialects.base import Clues, Dialect

_FAITHFUL = {"llama3", "yarn", "mrope"}


def _forced(config: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if kind in _FAITHFUL or "mrope_section" in scaling:
        return {}
    return {"rope_theta": (10000.0, "AngelSlim trains plain rope with 10000 whatever it declares")}


def _cautions(clues: Clues) -> Iterable[str]:
    forced = _forced(clues.config)
    inner = clues.config.get("rope_parameters")
    declared = clues.config.get("rope_theta") or (inner or {}).get("rope_theta")
    if forced and declared not in (None, 10000, 10000.0):
        yield (
            f"rope_theta: {declared} is declared, 10000 was trained and is used "
            f"(wejoncy/sfllm #32); set rope_theta={declared} to overrule"
        )


DIALECT = Dialect(
    name="angelslim",
    recognises=lambda c: (
        (c.arch.endswith("Eagle3LlamaForCausalLM") or "aux_hidden_states_layer_ids" in c.config)
        and c.has(r"midlayer\.")
    ),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    forced=_forced,
    cautions=_cautions,
)
