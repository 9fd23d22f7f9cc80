"""Refuse what a checkpoint cannot hold, such as a callback that steers a training by what it counts."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Set

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


def steers_by_count(
    kind: type, flags: Set[str], parts: Set[str], *, always: Set[str] = frozenset(), never: Set[str] = frozenset()
) -> bool:
    """Return whether the methods of a class set attributes of their own, and steer a training. ``flags`` steer when
    they are set (``should_stop``), ``parts`` wherever they are named (``optimizer``). ``always``: attributes that no
    checkpoint can hold, whoever sets them. ``never``: those of the framework that steer nothing.
    >>> class Patience:
    ...     def on_log(self, control):
    ...         self.seen += 1
    ...         control.should_stop = self.seen > 9
    >>> steers_by_count(Patience, {"should_stop"}, set()), steers_by_count(Patience, {"should_save"}, set())
    (True, False)
    """
    codes = [one.__code__ for name, one in vars(kind).items() if name != "__init__" and hasattr(one, "__code__")]
    stored = {part.argval for code in codes for part in dis.get_instructions(code) if part.opname == "STORE_ATTR"}
    named = {name for code in codes for name in (*code.co_varnames, *code.co_names, *code.co_consts) if name in parts}
    return bool(stored & always or (stored - flags - parts - never and (stored & flags or named)))
