"""What the engine counts. Draft position 0 is the first token of a round's chain or tree."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass
class RequestStats:
    """One request's share of speculation; a round is one verification of its drafts."""

    num_rounds: int = 0  # the pass over the prompt is not one
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the output: what a stop cut away does not count
    num_round_tokens: int = 0  # emitted by the rounds
    drafted_per_position: list[int] = field(default_factory=list)
    num_accepted_per_position: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Tokens emitted per round; 1.0 without a round."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 1.0

    def count(self, num_drafted: int, depth: int, num_accepted: int, num_emitted: int) -> None:
        """Add a round of drafts `depth` deep."""
        self.num_rounds += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_round_tokens += num_emitted
        self._count_positions([1] * depth, [1] * num_accepted)

    def add(self, other: "RequestStats") -> None:
        """Add another request's."""
        self.num_rounds += other.num_rounds
        self.num_drafted_tokens += other.num_drafted_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_round_tokens += other.num_round_tokens
        self._count_positions(other.drafted_per_position, other.num_accepted_per_position)

    def _count_positions(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for counts, more in (
            (self.drafted_per_position, drafted),
            (self.num_accepted_per_position, accepted),
        ):
            counts.extend([0] * (len(drafted) - len(counts)))
            for position, count in enumerate(more):
                counts[position] += count


@dataclass
class EngineStats(RequestStats):
    """The same over all requests, with tokens and seconds."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of them, found in the prefix cache
    num_output_tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"draft": 0.0, "verify": 0.0, "accept": 0.0, "extend": 0.0}
    )

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the drafts at each position, the share that was accepted (all before it included)."""
        pairs = zip(self.num_accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase of the round."""
        start = perf_counter()
        yield
        self.seconds[phase] += perf_counter() - start

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "num_rounds": self.num_rounds,
            "accept_length": self.accept_length,
            "accepted_per_position": self.accepted_per_position,
            "num_drafted_tokens": self.num_drafted_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seconds": dict(self.seconds),
        }
