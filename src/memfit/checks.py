"""One check of a place or of a command, with what to do about it; and a check that one of several things was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from memfit.errors import UsageError

Verdict = Literal["ok", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Check:
    """One check."""

    check: str  # such as ``fork`` or ``open files``
    verdict: Verdict
    finding: str  # with numbers and, in code, ``file:line``
    reason: str
    remedy: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_one_given(
    given: Mapping[str, object], *, rule: str, remedy: str, none: str = "", error: type[UsageError] = UsageError
) -> None:
    """Refuse two of what excludes each other; with ``none``, which says what is missing, also no one of them."""
    found = [name for name, value in given.items() if value is not None and value is not False]
    if len(found) > 1 or (none and not found):
        raise error(f"{' and '.join(found[:2])} are both given." if found else f"{none}.", rule=rule, remedy=remedy)
