"""Rows that were left out: every one is counted, named and explained."""

from collections import defaultdict

from eagle3_core import UserError

_NAMED = 3  # rows named per reason in a summary


class Unusable(Exception):
    """One row cannot be used; the message is the reason."""


class Drops:
    """Collects left-out rows.

    Args:
        strict: the first dropped row ends the run with a UserError instead.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self.rows: list[tuple[str, str]] = []  # (where, reason)

    def add(self, where: str, reason: str) -> None:
        """Leave out the row at `where` (file and line).

        Raises:
            UserError: strict.
        """
        if self._strict:
            raise UserError(f"{where}: {reason}; correct the row, or let go of strict to skip it")
        self.rows.append((where, reason))

    def __len__(self) -> int:
        return len(self.rows)

    def by_reason(self) -> dict[str, list[str]]:
        """Where rows were dropped, by reason, in order."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for where, reason in self.rows:
            reasons[reason].append(where)
        return dict(reasons)

    def summary(self) -> list[str]:
        """One line a reason: how many rows, why, and the first few by name."""
        return [
            f"{len(where)} dropped: {reason} ({', '.join(where[:_NAMED])}"
            + (f" and {len(where) - _NAMED} more)" if len(where) > _NAMED else ")")
            for reason, where in self.by_reason().items()
        ]
