"""What a reader decided, from which source, and what it wants to warn about."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Source = Literal[
    "config key", "tensor shape", "tensor values", "producer default", "target", "caller"
]


class Decision(NamedTuple):
    """One value of the draft and where it came from; `why` names the key, tensor or rule."""

    name: str
    value: Any
    source: Source
    why: str


@dataclass
class Report:
    """The reader's account of one checkpoint."""

    dialect: str
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def decide(self, name: str, value: Any, source: Source, why: str) -> Any:
        """Record a decision and hand its value on."""
        self.decisions.append(Decision(name, value, source, why))
        return value

    def warn(self, sentence: str) -> None:
        """Record a warning."""
        self.warnings.append(sentence)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "dialect": self.dialect,
            "decisions": [d._asdict() for d in self.decisions],
            "warnings": list(self.warnings),
            "ignored": list(self.ignored),
        }
