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


def check_one_given(
    given: Mapping[str, object], *, rule: str, remedy: str, none: str = "", error: type[UsageError] = UsageError
) -> None:
    """Refuse two of what excludes each other; with ``none``, which says what is missing, also no one of them.

    Raises:
        UsageError: Or another class of ``error``.

    >>> check_one_given({"--a": "1", "--b": None}, rule="", remedy="")
    >>> check_one_given({"--a": "1", "--b": 0}, rule="one counts.", remedy="leave one out")
    Traceback (most recent call last):
    memfit.errors.UsageError: --a and --b are both given.
      rule: one counts.
      do:   leave one out
    """
    found = [name for name, value in given.items() if value is not None and value is not False]
    if len(found) > 1 or (none and not found):
        raise error(f"{' and '.join(found[:2])} are both given." if found else f"{none}.", rule=rule, remedy=remedy)
