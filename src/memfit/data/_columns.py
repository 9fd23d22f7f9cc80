"""Columns by name or pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from memfit.data._source import Source, SourceLike, is_number, value_type
from memfit.errors import DataError, nearest

_NUM_NAMED = 8


@dataclass(frozen=True)
class Columns:
    """The columns that names and patterns stand for.

    Attributes:
        names: In the order of the patterns; those of one pattern as the source has them; each once.
        left_out: What patterns also match, and why it is not meant: "'date' (the index)", "'sector' (string)".
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]


def match_columns(source: SourceLike, patterns: Sequence[str], *, taken: Sequence[str] = ()) -> Columns:
    """The columns of a source that names and shell patterns (``*``, ``?``, ``[abc]``) stand for.

    A name is taken as it is. A pattern finds the columns of numbers that match it and are not ``taken``.

    Args:
        source: As for `Panel.build`.
        patterns: Names and patterns.
        taken: Columns that a pattern does not mean, because they have another role.

    Raises:
        DataError: If a pattern finds no column, or the source cannot be read.

    Example:
        >>> import pyarrow as pa
        >>> rows = pa.table({"date": ["2024-01-02"], "code": ["A"], "f1": [1.0], "f2": [2.0], "r": [0.1]})
        >>> match_columns(rows, ["f*"], taken=["date", "code"]).names
        ('f1', 'f2')
    """
    _, schema = next(Source.of(source).schemas())
    names: dict[str, None] = {}
    left_out: dict[str, None] = {}
    for pattern in patterns:
        if pattern in schema.names or not set("*?[") & set(pattern):
            names[pattern] = None
            continue
        found = [field for field in schema if fnmatchcase(field.name, pattern)]
        numbers = [field.name for field in found if field.name not in taken and is_number(value_type(field.type))]
        if not numbers:
            known = ", ".join(schema.names[:_NUM_NAMED]) + (", ..." if len(schema.names) > _NUM_NAMED else "")
            raise DataError(
                f"the pattern '{pattern}' finds no column of numbers; there are {known}.",
                rule="a pattern finds the columns of numbers that match it and have no other role.",
                remedy=nearest(pattern.strip("*"), schema.names),
            )
        names.update(dict.fromkeys(numbers))
        for field in found:
            if field.name not in numbers:
                left_out[f"'{field.name}' ({'has another role' if field.name in taken else field.type})"] = None
    return Columns(tuple(names), tuple(left_out))
