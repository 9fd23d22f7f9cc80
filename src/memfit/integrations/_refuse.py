"""Refuse before the first step what a checkpoint cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memfit.errors import UsageError

#: What a checkpoint cannot hold: its name, whether it is there, and what to do.
Cause = tuple[str, bool, str]


def refuse_any(causes: Iterable[Cause], allow: Collection[str], *, is_exact: bool = False) -> None:
    """Refuse the first cause that is there and was not allowed by its name."""
    how = "resumed to the same bytes" if is_exact else "stopped and resumed"
    for name, is_there, remedy in causes:
        if is_there and name not in allow:
            raise UsageError(
                f"This training cannot be {how} with {name}.",
                rule="what a checkpoint does not hold is refused before the first step.",
                remedy=remedy,
            )
