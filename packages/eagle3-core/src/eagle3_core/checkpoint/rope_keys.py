"""Rope settings under all spellings -> one rope_parameters.

v4 writes rope_theta beside rope_scaling, v5 rope_parameters, ModelOpt puts rope_theta inside
rope_scaling; the type is `rope_type` or, older, `type`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle3_core.errors import UserError

_HOLDERS = ("rope_parameters", "rope_scaling")
_DEFAULT: Mapping[str, Any] = {"rope_type": "default"}
_MROPE = {"mrope_section", "mrope_interleaved"}


class ResolvedRope(NamedTuple):
    """`found` names the keys read, '' if there were none."""

    rope: dict[str, Any]
    found: str
    warnings: tuple[str, ...]


def resolve_rope(
    config: Mapping[str, Any], where: str, theta: float | None, default_theta: float
) -> ResolvedRope:
    """-> {"rope_type", "rope_theta", and the type's own keys}; `theta` goes over the config's.

    Raises:
        UserError: two keys disagree, or a partial rotary factor.
    """
    scalings = {h: _normal(config[h], h, where) for h in _HOLDERS if config.get(h)}
    thetas: dict[str, Any] = {}
    for holder, scaling in scalings.items():
        if "rope_theta" in scaling:
            thetas[f"{holder}.rope_theta"] = scaling.pop("rope_theta")
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    if theta is None:
        theta = _agreed(thetas, where)
    warnings = []
    if any(_is_mrope(scaling) for scaling in scalings.values()):
        warnings.append(
            "rope: mrope is read as plain rope, which it equals on text; positions of images "
            "are not reproduced"
        )
    scalings = {h: _plain(scaling, where) for h, scaling in scalings.items()}
    rope = {**(_agreed(scalings, where) or _DEFAULT), "rope_theta": theta or default_theta}
    return ResolvedRope(rope, ", ".join({**scalings, **thetas}), tuple(warnings))


def _is_mrope(scaling: Mapping[str, Any]) -> bool:
    return scaling["rope_type"] == "mrope" or bool(_MROPE & scaling.keys())


def _plain(scaling: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"{where}: partial_rotary_factor is not 1, and drafts rotate whole heads")
    if scaling["rope_type"] == "default" or _is_mrope(scaling):
        return _DEFAULT  # whatever else stands there is not read by that type
    return {k: v for k, v in scaling.items() if k != "partial_rotary_factor"}


def _normal(holder: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(holder, Mapping):
        raise UserError(f"{where}: {name} is {holder!r}, expected an object")
    if holder and all(isinstance(v, Mapping) for v in holder.values()):  # one per layer type
        inner = next(iter(holder.values()))
        if any(v != inner for v in holder.values()):
            raise UserError(
                f"{where}: {name} differs by layer type ({', '.join(holder)}), expected one rope"
            )
        holder = inner
    out = {k: v for k, v in holder.items() if v is not None and k != "type"}
    kind = holder.get("rope_type") or holder.get("type") or "default"
    return {"rope_type": kind, **{k: v for k, v in out.items() if k != "rope_type"}}


def _agreed(values: Mapping[str, Any], where: str) -> Any:
    items = list(values.items())
    for name, value in items[1:]:
        if value != items[0][1]:
            raise UserError(
                f"{where}: {items[0][0]} is {items[0][1]!r} and {name} is {value!r}; "
                "set the right one with rope_theta= or rope_parameters="
            )
    return items[0][1] if items else None
