"""One check of a place or of a command: its verdict, what was found, why it matters, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Verdict = Literal["ok", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        check: Its name, such as ``fork`` or ``open files``.
        verdict: ``ok``; ``warning`` for what may go wrong or costs; ``problem`` for what will, with this command.
        finding: What was found, with numbers and, in code, ``file:line``.
        reason: Why it matters.
        remedy: A command or a setting; empty when there is nothing to do.
        source: Where the finding comes from: a file, a variable, a line of the script.

    Example:
        >>> Check("swap", "ok", "no swap", "why", source="/proc/meminfo").to_dict()["verdict"]
        'ok'
    """

    check: str
    verdict: Verdict
    finding: str
    reason: str
    remedy: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def worst_first(checks: list[Check]) -> list[Check]:
    """Problems, then warnings, then what is well, each in its order.

    >>> [one.check for one in worst_first([Check("a", "ok", "", ""), Check("b", "problem", "", "")])]
    ['b', 'a']
    """
    return sorted(checks, key=lambda one: -VERDICTS.index(one.verdict))
