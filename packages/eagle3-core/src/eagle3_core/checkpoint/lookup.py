"""One value at a time: who says it, and do the others agree.

Order of authority: the caller, what the producer's code does whatever its config says, the config
key, the tensors, the producer's default. A key and a tensor in contradiction are an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_core.checkpoint.dialects.base import Dialect
from eagle3_core.checkpoint.files import CheckpointFiles, TensorInfo
from eagle3_core.checkpoint.lender import Lender
from eagle3_core.checkpoint.names import canonical_names
from eagle3_core.checkpoint.report import Report, Source
from eagle3_core.errors import UserError


@dataclass
class Lookup:
    """One folder read in one dialect. `keys` is its flattened config, `names` its tensors."""

    files: CheckpointFiles
    dialect: Dialect
    overrides: Mapping[str, Any]
    lender: Lender | None
    report: Report

    def __post_init__(self) -> None:
        """Flatten the config and name the tensors."""
        self.where = str(self.files.folder / "config.json")
        self.keys = self.dialect.flatten(self.files.config)
        self.forced = self.dialect.forced(self.keys)
        self.names = canonical_names(self.files, self.dialect.renames, self.report)

    def key(self, dotted: str) -> Any:
        """A config key, `a.b` for nested ones; None when absent or null."""
        found: Any = self.keys
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def info(self, name: str) -> TensorInfo | None:
        """Header of a tensor, by canonical name."""
        return self.files.tensors[self.names[name]] if name in self.names else None

    def told(self, name: str) -> bool:
        """Whether the caller said it."""
        return name in self.overrides

    def decide(self, name: str, value: Any, source: Source, why: str) -> Any:
        """Record a value, or what the caller said in its place."""
        if name in self.overrides:
            return self.report.decide(name, self.overrides[name], "caller", name)
        return self.report.decide(name, value, source, why)

    def size(self, name: str, *tensors: tuple[str, int], default: int | None = None) -> int:
        """A size: config key, and dimension of the first of these tensors that is there."""
        for tensor, dim in tensors:
            info = self.info(tensor)
            if info and len(info.shape) > dim:
                return self.settle(name, info.shape[dim], info, default)
        return self.settle(name, None, None, default)

    def settle(
        self, name: str, fits: int | None, info: TensorInfo | None, default: int | None = None
    ) -> int:
        """Bring the key `name` and the value that a tensor fits together.

        Raises:
            UserError: they contradict, or nothing says the value.
        """
        if self.told(name):
            return self.decide(name, None, "caller", name)
        claimed = self.key(name)
        if claimed is None:
            if info and fits:
                return self.decide(name, fits, "tensor shape", f"{info.name} {list(info.shape)}")
            return self.pick(name, default)
        if type(claimed) is not int or claimed < 1:
            raise UserError(f"{self.where}: {name} is {claimed!r}, expected a whole number >= 1")
        if info and claimed != fits:
            fit = f"fits {name} {fits}" if fits else f"fits no {name}"
            raise UserError(
                f"{self.where}: {name} is {claimed}, but {info.name} in {info.file.name} has "
                f"shape {list(info.shape)}, which {fit}"
            )
        return self.decide(name, claimed, "config key", name)

    def pick(self, name: str, default: Any = None) -> Any:
        """A value that no tensor shows.

        Raises:
            UserError: nothing says it.
        """
        if self.told(name):
            return self.decide(name, None, "caller", name)
        if name in self.forced:
            value, why = self.forced[name]
            return self.decide(name, value, "producer default", why)
        value = self.key(name)
        if value is not None:
            return self.decide(name, value, "config key", name)
        default = self.dialect.defaults.get(name, default)
        if default is None:
            raise UserError(f"{self.where}: {name} is missing, and nothing else says it")
        return self.decide(name, default, "producer default", f"{name} is absent or null")

    def flag(self, name: str, keys: Iterable[str], *, when_true: str, when_false: str) -> str:
        """A choice that producers write as a boolean under one of `keys`; absent means false.

        Raises:
            UserError: the keys disagree, or hold something else.
        """
        found = {key: self.key(key) for key in keys if self.key(key) is not None}
        if found and not self.told(name):
            for key, value in found.items():
                if not isinstance(value, bool):
                    raise UserError(f"{self.where}: {key} is {value!r}, expected true or false")
            if len(set(found.values())) > 1:
                said = " and ".join(f"{key} is {value}" for key, value in found.items())
                raise UserError(f"{self.where}: {said}; set {name}={when_true} or {when_false}")
            value = when_true if next(iter(found.values())) else when_false
            return self.decide(name, value, "config key", ", ".join(found))
        return self.decide(name, when_false, "producer default", f"no {' or '.join(keys)}")
