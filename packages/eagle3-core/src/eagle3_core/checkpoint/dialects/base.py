"""How a producer's layout is described: what gives it away, and what its code assumes."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIDLAYER = ((r"^midlayer\.", "layers.0."),)


@dataclass(frozen=True)
class Clues:
    """What detection may look at: the raw config and the names, without a `model.` prefix."""

    config: Mapping[str, Any]
    names: frozenset[str]
    target_names: bool  # names are a plain language model's: model.layers.*, and no fc

    @property
    def arch(self) -> str:
        """First entry of `architectures`, or ''."""
        found = self.config.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else ""

    def has(self, pattern: str) -> bool:
        """Whether a name matches from its start."""
        return any(re.match(pattern, name) for name in self.names)

    def nested(self, key: str) -> Any:
        """A key of `eagle_config`, None without one."""
        inner = self.config.get("eagle_config")
        return inner.get(key) if isinstance(inner, Mapping) else None


def _unchanged(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def _nothing(_: Clues) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One producer's layout.

    `flatten` turns its config into Llama-style keys, `defaults` are the values its code assumes for
    absent keys, `forced` those it uses whatever the config says (value, why), `cautions` the known
    faults that apply, `borrows` the tensors it may leave to the target. A `refused` layout is
    recognised only to say what it is.
    """

    name: str
    recognises: Callable[[Clues], bool]
    refused: str | None = None
    renames: tuple[tuple[str, str], ...] = MIDLAYER
    flatten: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _unchanged
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forced: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, str]]] = lambda _: {}
    cautions: Callable[[Clues], Iterable[str]] = _nothing
    borrows: frozenset[str] = frozenset({"embed_tokens.weight"})
    has_default_ids: bool = True
