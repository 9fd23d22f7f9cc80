"""The record of comparisons that were tried: a line each, so that a verdict can be corrected for all of them."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from filelock import FileLock

from memfit.errors import DataError
from memfit.evaluation._decision import Decision, decide, digest


def decide_on_record(
    days_a: pa.Table,
    days_b: pa.Table | Literal["random"],
    metric: str,
    horizon: int,
    *,
    record: Path,
    level: float = 0.95,
    names: tuple[str, str] = ("A", "B"),
) -> Decision:
    """`decide`, corrected for all comparisons in a record, to which this one is appended.

    A comparison that was tried before, of the same values of the same metric, in whatever order and from whatever
    files, counts once. Use one record for all variants that compete for one decision. A verdict holds for the record
    as it was then: comparisons that are tried later make it weaker, and asking again gives the verdict of now.

    Args:
        days_a: As in `decide`, like the next four.
        days_b: A day table, or ``random``.
        metric: The column to compare.
        horizon: Dates that the metric's labels span.
        record: A file of one JSON object a line; made if absent, with its folder.
        level: At least 0.5, below 1.
        names: What to call the two in the record, for example their files.

    Raises:
        DataError: As `decide`; or if A and B are the same, or a line of the record cannot be read.
        UsageError: As `decide`.
        MissingExtraError: As `decide`.
        OSError: If the record cannot be written.
    """
    ours, theirs = digest(days_a, metric), digest(days_b, metric)
    if ours == theirs:
        raise DataError(
            f"A and B have the same {metric} on the same dates.",
            rule="a table compared with itself shows nothing, and would count among the comparisons tried.",
            remedy="name another run or baseline",
        )
    key = _key(ours, theirs, metric)
    record.parent.mkdir(parents=True, exist_ok=True)
    # Opened before it is locked: where no file can be made, waiting for the lock would never end.
    with open(record, "ab") as file, FileLock(record.with_name(f".{record.name}.lock")):
        others = [p_value for other, p_value in read_record(record).items() if other != key]
        decision = decide(days_a, days_b, metric, horizon, level=level, other_p_values=others)
        entry = {"key": key, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        line = json.dumps(entry | {"a": names[0], "b": names[1]} | decision.to_dict()) + "\n"
        file.truncate(_whole_bytes(record))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    return decision


def read_record(path: Path) -> dict[str, float]:
    """The p-value of each distinct comparison of a record, by its key; none where there is no record.

    A last line that a kill cut short is left out.

    Raises:
        DataError: If another line cannot be read: then it is not known how many comparisons were tried.

    Example:
        >>> read_record(Path("absent.jsonl"))
        {}
    """
    if not path.exists():
        return {}
    found: dict[str, float] = {}
    content = path.read_bytes()
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            found[str(entry["key"])] = float(entry["p_value"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: not a comparison ({error}).",
                rule="a record of comparisons has on each line an object with key and p_value, and counts them all.",
                remedy="mend or remove that line, or name another record with --record",
            ) from error
    return found


def _key(a: str, b: str, metric: str) -> str:
    return hashlib.sha256("\n".join((*sorted((a, b)), metric)).encode()).hexdigest()[:16]


def _whole_bytes(path: Path) -> int:
    """The bytes of a file's whole lines: a last line that a kill cut short is written over."""
    return path.read_bytes().rfind(b"\n") + 1
