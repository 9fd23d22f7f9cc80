"""Words that a text must hold before a regular expression can match it: they say cheaply where to look."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

#: How many spellings of a part are told apart.
_MOST = 64
_Words = frozenset[str]
_NOTHING: _Words = frozenset({""})


def words_of(regex: re.Pattern[str]) -> tuple[str, ...]:
    r"""Return words, in lower case and without white space, one of which is in each text that a pattern matches.

    >>> words_of(re.compile(r"(?:CUDA|HIP) error\d*: out of memory|No space left\b")), words_of(re.compile(r"\d+"))
    ((':outofmemory', 'nospaceleft'), ())
    """
    best = _best(_spell(_parser.parse(regex.pattern, regex.flags))[1])
    return tuple(sorted(word for word in best if not any(other in word for other in best if other != word)))


def _best(found: Iterable[_Words]) -> _Words:
    """The set whose shortest word is longest; of equals the smallest."""
    return max(
        (one for one in found if "" not in one), key=lambda one: (min(map(len, one)), -len(one)), default=frozenset()
    )


def _spell(items: Iterable[tuple[Any, Any]]) -> tuple[_Words | None, list[_Words]]:
    """All texts that a sequence matches, None if they are many; and sets of words of which each match has one."""
    run, is_whole = _NOTHING, True
    found: list[_Words] = []
    for op, value in items:
        texts, inner = _spell_one(op, value)
        found += inner
        if texts is None or len(run) * len(texts) > _MOST:
            found.append(run)
            run, is_whole = texts or _NOTHING, False
        else:
            run = frozenset(first + last for first in run for last in texts)
    return run if is_whole else None, [*found, run]


def _spell_one(op: Any, value: Any) -> tuple[_Words | None, list[_Words]]:
    if op is code.LITERAL:
        return frozenset({chr(value).lower().strip()}), []
    if op in (code.AT, code.ASSERT, code.ASSERT_NOT):
        return _NOTHING, []
    if op is code.SUBPATTERN:
        return _spell(value[-1])
    if op is code.IN and all(one is code.LITERAL for one, _ in value):
        return frozenset(chr(one).lower().strip() for _, one in value), []
    if op is code.BRANCH:
        parts = [_spell(part) for part in value[1]]
        whole = [texts for texts, _ in parts if texts is not None]
        bests = [_best(found) for _, found in parts]
        texts = frozenset[str]().union(*whole) if len(whole) == len(parts) else None
        return texts, [frozenset[str]().union(*bests)] if all(bests) else []
    if op in (code.MAX_REPEAT, code.MIN_REPEAT):
        least, most, part = value
        texts, inner = _spell(part)
        if least:
            return texts if most == 1 else None, inner
        return texts | _NOTHING if texts is not None and most == 1 else None, []
    return None, []
