"""Which states of the target a draft reads: from the id lists that configs carry to boundary ids.

No producer writes down what its ids mean, so each key has its convention here, with its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from eagle3_core.checkpoint.report import Source
from eagle3_core.config import default_aux_layer_ids
from eagle3_core.errors import UserError

Convention = Literal["boundary", "output", "unknown"]


@dataclass(frozen=True)
class IdKey:
    """A config key that may hold ids: `boundary` c itself, `output` of layer k (c = k + 1)."""

    path: tuple[str, ...]
    convention: Convention
    source: str

    @property
    def name(self) -> str:
        """Dotted."""
        return ".".join(self.path)


KEYS = (
    IdKey(("eagle_aux_hidden_state_layer_ids",), "boundary", "vLLM and speculators"),
    IdKey(
        ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
        "output",
        "SGLang, ModelOpt and SpecForge (sglang #25454)",
    ),
    IdKey(("aux_hidden_states_layer_ids",), "output", "AngelSlim"),
    IdKey(("target_layer_ids",), "output", "DeepSpec"),
    IdKey(("eagle_config", "layer_ids"), "unknown", "read by vLLM's V2 runner alone"),
)

# Targets for which SGLang 0.5.23 takes a list that does not start with 1 as boundary ids.
_BOUNDARY_UNLESS_ONE = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}


def find_id_lists(config: Mapping[str, Any], where: str) -> list[tuple[IdKey, tuple[int, ...]]]:
    """Every list the config holds; null counts as absent.

    Raises:
        UserError: a list of something else than whole numbers, or not ascending.
    """
    found = []
    for key in KEYS:
        ids: Any = config
        for part in key.path:
            ids = ids.get(part) if isinstance(ids, Mapping) else None
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids) or not ids:
            raise UserError(f"{where}: {key.name} is {ids!r}, expected a list of layer ids")
        if ids != sorted(set(ids)):
            raise UserError(
                f"{where}: {key.name} is {ids}, not ascending, and no rule says in which order "
                "the states are concatenated; set aux_layer_ids to ascending boundary ids"
            )
        found.append((key, tuple(ids)))
    return found


def to_boundaries(
    key: IdKey,
    ids: tuple[int, ...],
    num_target_layers: int | None,
    target_type: str | None,
    convention: str | None,
    where: str,
) -> tuple[tuple[int, ...], str]:
    """-> (boundary ids, the rule used). `convention` is the caller's word, over any rule.

    Raises:
        UserError: nothing says what the ids mean.
    """
    if convention == "boundary" or (convention is None and key.convention == "boundary"):
        return ids, f"{key.name}: boundary ids, as {key.source} write them"
    shifted = tuple(i + 1 for i in ids)
    if convention == "output":
        return shifted, f"{key.name}: layer outputs, plus 1"
    if key.convention == "unknown":
        raise UserError(
            f"{where}: {key.name} {list(ids)} has no known meaning ({key.source}); "
            "set aux_layer_id_convention=boundary or =output"
        )
    if num_target_layers is not None and ids[-1] == num_target_layers:
        return ids, (
            f"{key.name}: holds the layer count {num_target_layers}, so boundary ids as they are "
            "(sglang #32334)"
        )
    if target_type in _BOUNDARY_UNLESS_ONE and ids[0] != 1:
        return ids, f"{key.name}: boundary ids, as SGLang reads them for {target_type} targets"
    return shifted, f"{key.name}: layer outputs as {key.source} write them, plus 1"


class ResolvedIds(NamedTuple):
    """`ids` are boundary ids, None when neither the config nor a default rule gives them."""

    ids: tuple[int, ...] | None
    source: Source
    why: str
    warnings: tuple[str, ...] = ()


def resolve_aux_layer_ids(
    config: Mapping[str, Any],
    where: str,
    *,
    num_aux: int,
    num_target_layers: int | None,
    target_type: str | None,
    convention: str | None,
    has_default: bool,
) -> ResolvedIds:
    """Find the ids, by their key's convention or the caller's.

    Raises:
        UserError: two keys disagree, or a list has no known meaning.
    """
    found = [
        (key, *to_boundaries(key, ids, num_target_layers, target_type, convention, where))
        for key, ids in find_id_lists(config, where)
    ]
    if not found:
        return _default_ids(num_aux, num_target_layers, has_default)
    first, first_ids, _ = found[0]
    for key, ids, _ in found[1:]:
        if ids != first_ids:
            raise UserError(
                f"{where}: {first.name} means boundary ids {list(first_ids)}, {key.name} means "
                f"{list(ids)}; set aux_layer_ids to the right ones"
            )
    warnings = ()
    if num_target_layers is None and first.convention == "output" and convention is None:
        warnings = (
            "aux_layer_ids: the target's layer count is unknown, so a list that holds it (then "
            "meant as boundary ids, sglang #32334) cannot be told; give the target",
        )
    rules = "; ".join(rule for *_, rule in found)
    return ResolvedIds(first_ids, "caller" if convention else "config key", rules, warnings)


def _default_ids(num_aux: int, num_target_layers: int | None, has_default: bool) -> ResolvedIds:
    if not has_default or num_aux != 3:
        why = f"no ids in the config, and no default for {num_aux} states"
        warning = f"aux_layer_ids: {why}; set aux_layer_ids to boundary ids"
        return ResolvedIds(None, "producer default", why, (warning,))
    rule = "no ids in the config; the producers' common default, boundaries 2, n//2, n-3"
    if num_target_layers is None:
        return ResolvedIds(None, "producer default", f"{rule}, of a target of unknown depth n")
    ids = default_aux_layer_ids(num_target_layers)
    return ResolvedIds(ids, "producer default", f"{rule}, of n = {num_target_layers}")
