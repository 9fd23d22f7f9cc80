"""Decide whether A is better than B, corrected for all comparisons that were tried."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from filelock import FileLock

from memfit.errors import DataError, UsageError
from memfit.rundir import finite
from memfit_workloads.finance._days import by_date, description
from memfit_workloads.finance._inference import (
    DieboldMariano,
    diebold_mariano,
)

Verdict = Literal["A better", "B better", "no difference shown"]

#: The ends of metrics that are 0 on average for random scores.
_ZERO = ("_delta_p_at_k_pos", "_rank_ic", "_spread")
_DATA = b"memfit_data"
_HAVE_TO_AGREE = ("k_ratio", "num_codes", "universe")


@dataclass(frozen=True)
class Decision:
    """The result of a comparison of A with B. A higher metric is better.

    The verdict is ``A better`` or ``B better`` if the adjusted p-value (Holm's, for ``num_comparisons``) is below ``1 -
    level`` and the interval lies on that side of 0. ``no difference shown`` is not "equal". ``num_dropped`` dates one
    has alone, or either is undefined there.
    """

    verdict: Verdict
    metric: str
    horizon: int
    level: float
    test: DieboldMariano
    num_comparisons: int
    adjusted_p_value: float
    num_dropped: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, in one level; an undefined or infinite figure is None."""
        found = dataclasses.asdict(self)
        test = found.pop("test")
        return dict(finite(found | {"effect": test.pop("mean")} | test))

    def explain(self) -> dict[str, str]:
        """Return the evidence in words: a line for each title."""
        test = self.test
        tried = "this one alone" if self.num_comparisons == 1 else f"{self.num_comparisons} tried"
        return {
            "effect": f"{test.mean:+.5f} ± {test.standard_error:.5f} standard error",
            f"{self.level * 100:.4g} % interval": f"{test.lower:+.5f} to {test.upper:+.5f}",
            "test": f"t {test.statistic:+.2f}, {_p(test.p_value)}, labels over {self.horizon} dates",
            "comparisons": f"{tried}; {_p(self.adjusted_p_value)} after Holm, against {1 - self.level:.3g}",
            "dates": f"{test.num_dates} paired, {self.num_dropped} dropped",
        }


def _p(value: float) -> str:
    return f"p {value:.4f}" if value >= 1e-4 else "p < 0.0001"


def decide(
    days_a: pa.Table,
    days_b: pa.Table | Literal["random"],
    metric: str,
    horizon: int,
    *,
    level: float = 0.95,
    other_p_values: Sequence[float] = (),
) -> Decision:
    """Compare a metric of two day tables of `evaluate_days` on the dates that both have.

    B may be ``random``: scores without information. A verdict needs two things: the paired test's p-value, corrected
    for all comparisons, is below ``1 - level``, and the interval excludes 0. A date of several folds counts once, with
    their mean. ``horizon`` are the dates that the metric's labels span; ``other_p_values`` are those of all other
    comparisons that were tried. How far a training with another seed would differ is not in the figures.

    Raises:
        DataError: If a table lacks the metric, the tables say that they were evaluated on different shares or assets,
            or fewer than `minimum_dates` can be paired.
        UsageError: If the level is out of range, or random scores have no known expectation of the metric.
    """
    from statsmodels.stats.multitest import multipletests  # slow to load

    if isinstance(days_b, str) and not metric.endswith(_ZERO):
        raise UsageError(
            f"what random scores have for {metric} is not known beforehand.",
            rule=f"it is known of metrics that end in {', '.join(_ZERO)}.",
            remedy="compare with the day table of a baseline, for example of shuffled scores",
        )
    dates_a, all_a = by_date(days_a, metric, "A")
    if isinstance(days_b, str):
        dates_b, all_b = dates_a, np.zeros(len(dates_a))
    else:
        _refuse_unlike(description(days_a), description(days_b))
        dates_b, all_b = by_date(days_b, metric, "B")
    _, of_a, of_b = np.intersect1d(dates_a, dates_b, assume_unique=True, return_indices=True)
    test = diebold_mariano(all_a[of_a] - all_b[of_b], horizon, level)
    adjusted = float(multipletests([test.p_value, *other_p_values], method="holm")[1][0])
    sign = (test.lower > 0) - (test.upper < 0) if adjusted < 1 - level else 0
    verdicts: dict[int, Verdict] = {1: "A better", -1: "B better", 0: "no difference shown"}
    return Decision(
        verdict=verdicts[sign],
        metric=metric,
        horizon=horizon,
        level=level,
        test=test,
        num_comparisons=1 + len(other_p_values),
        adjusted_p_value=adjusted,
        num_dropped=len(np.union1d(dates_a, dates_b)) - test.num_dates,
    )


def _refuse_unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for name in _HAVE_TO_AGREE if a and b else ():
        if a.get(name) != b.get(name):
            raise DataError(
                f"A was evaluated with {name} {a.get(name)}, and B with {b.get(name)}.",
                rule="two day tables compare when they were evaluated with the same share of the same assets.",
                remedy="evaluate both with evaluate_folds, with the same of each",
            )


def record_of(days_a: pa.Table, days_b: pa.Table | Literal["random"], metric: str) -> Path:
    """Return the user's record of all comparisons on the data of B or A, the same from every folder.

    A table's metadata name its data: ``memfit_data``. Tables without it share a record by the dates of B, or of A.
    """
    tables = [one for one in (days_b, days_a) if not isinstance(one, str)]
    named = [one.schema.metadata[_DATA] for one in tables if _DATA in (one.schema.metadata or {})]
    data = named[0] if named else by_date(tables[0], metric, "the table")[0].tobytes()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "memfit", "comparisons", f"{hashlib.sha256(data).hexdigest()[:16]}.jsonl")


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
    """Decide as `decide` does, corrected for all comparisons in a record, and append this one to it.

    A comparison of the same values of the same metric counts once. Use one record for all variants that compete for one
    decision, such as `record_of`. Comparisons that are tried later make a verdict weaker: ask again. The record has one
    JSON object a line; it is made if absent, for its owner alone. ``names`` are what it calls the two.

    Raises:
        DataError: As `decide`; or if A and B are the same, or a line of the record cannot be read.
        OSError: If the record cannot be written.
    """
    ours, theirs = _digest(days_a, metric), _digest(days_b, metric)
    if ours == theirs:
        raise DataError(
            f"A and B have the same {metric} on the same dates.",
            rule="a table compared with itself shows nothing, and would count among the comparisons tried.",
            remedy="name another run or baseline",
        )
    key = hashlib.sha256("\n".join((*sorted((ours, theirs)), metric)).encode()).hexdigest()[:16]
    # Made before it is locked: where no file can be made, waiting for the lock would never end.
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    record.touch(mode=0o600)
    with open(record, "ab") as file, FileLock(record.with_name(f".{record.name}.lock")):
        written = record.read_bytes()
        written = written[: written.rfind(b"\n") + 1]  # a last line that a kill cut short goes
        others = [p_value for other, p_value in _p_values(record, written).items() if other != key]
        decision = decide(days_a, days_b, metric, horizon, level=level, other_p_values=others)
        entry = {"key": key, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        line = json.dumps(entry | {"a": names[0], "b": names[1]} | decision.to_dict()) + "\n"
        file.truncate(len(written))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    return decision


def _p_values(path: Path, content: bytes) -> dict[str, float]:
    """Return the p-value of each distinct comparison of a record by its key."""
    found: dict[str, float] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            found[str(entry["key"])] = float(entry["p_value"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: not a comparison ({error}).",
                rule="a record of comparisons has on each line an object with key and p_value, and counts them all.",
                remedy="mend or remove that line, or name another record",
            ) from error
    return found


def _digest(days: pa.Table | Literal["random"], metric: str) -> str:
    if isinstance(days, str):
        return days
    dates, values = by_date(days, metric, "the table")
    return hashlib.sha256(dates.astype(np.int64).tobytes() + values.tobytes()).hexdigest()[:16]
