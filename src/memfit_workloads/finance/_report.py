"""A backtest as files: ``backtest.json``, ``days.csv``, ``trades.csv`` and ``backtest.png``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pydantic import ValidationError

from memfit.config import to_plain
from memfit.errors import DataError, MissingExtraError, UsageError
from memfit.rundir import read_json, write_atomic
from memfit_workloads.finance._backtest import BacktestResult, BacktestSummary, QuantileRow
from memfit_workloads.finance._controls import Controls
from memfit_workloads.finance._gate import Verdict
from memfit_workloads.finance._market import Finding, Record
from memfit_workloads.finance._report_plots import plot_backtest
from memfit_workloads.finance._sleeves import BacktestSettings

SCHEMA_VERSION = 1
REPORT_FILE = "backtest.json"


class BacktestReport(Record):
    """What ``backtest.json`` holds. A figure that is undefined is ``null`` there, and NaN here.

    Attributes:
        kind: What the file is.
        schema_version: The version of this format; any other one is refused.
        settings: How scores became positions, and what trading cost.
        summary: The backtest in numbers; see `BacktestSummary` for units.
        quantiles: Returns by fifth of the scores.
        verdict: What the gate said; None when it was not asked.
        findings: What the data checks found.
        controls: Shuffled and shifted scores; None when they were not tried.
        facts: What the caller adds: plain values.
        files: The files that lie beside this one.
    """

    kind: Literal["memfit.backtest"] = "memfit.backtest"
    schema_version: Literal[1] = 1
    settings: BacktestSettings
    summary: BacktestSummary
    quantiles: tuple[QuantileRow, ...]
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    controls: Controls | None = None
    facts: dict[str, Any]
    files: tuple[str, ...]


def write_backtest(
    path: Path,
    result: BacktestResult,
    *,
    facts: Mapping[str, Any],
    days: pa.Table | None,
    verdict: Verdict | None = None,
    findings: Sequence[Finding] = (),
    controls: Controls | None = None,
) -> tuple[Path, ...]:
    """Write a backtest as a JSON file with others beside it, each aside and then renamed; gives the files written.

    The JSON file comes last. Beside ``backtest.json`` lie ``days.csv``, ``trades.csv`` and ``backtest.png``; beside
    ``other.json`` they are named ``other_days.csv`` and so on. Without matplotlib there is no picture, and a line on
    standard error says so.

    Args:
        path: The JSON file, or a folder for ``backtest.json``; folders are made where there are none.
        result: The backtest.
        facts: What else to keep in ``backtest.json``: names and plain values, dates, paths or models.
        days: The day table of `memfit.evaluation.evaluate_days`, for the rank IC over time and for more columns of
            ``days.csv``; None without.
        verdict: Of `judge`.
        findings: Of `check_market`.
        controls: Of `run_controls`.

    Raises:
        DataError: If the day table has a date twice.
        UsageError: If the facts hold what JSON cannot.
        OSError: For example on a full disk.

    Example:
        >>> import tempfile
        >>> from memfit_workloads.finance._backtest import backtest
        >>> scores = np.random.default_rng(0).random((30, 8))
        >>> result = backtest(np.arange(30), tuple("ABCDEFGH"), scores, scores / 100, BacktestSettings())
        >>> folder = tempfile.TemporaryDirectory()
        >>> paths = write_backtest(Path(folder.name), result, facts={"fold": 1}, days=None)
        >>> paths[-1].name, read_backtest(paths[-1]).summary.num_dates
        ('backtest.json', 30)
        >>> folder.cleanup()
    """
    plain = _plain_facts(facts)
    file = path if path.suffix == ".json" else path / REPORT_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = [beside(file, "days.csv"), beside(file, "trades.csv")]
    write_atomic(paths[0], _csv(_joined(result.days, days)))
    write_atomic(paths[1], _csv(result.trades))
    if _drawn(file.with_suffix(".png"), result, days, verdict):
        paths.append(file.with_suffix(".png"))
    report = BacktestReport(
        settings=result.settings,
        summary=result.summary,
        quantiles=tuple(QuantileRow(**row) for row in result.quantiles.to_pylist()),
        verdict=verdict,
        findings=tuple(findings),
        controls=controls,
        facts=plain,
        files=tuple(path.name for path in paths),
    )
    paths.append(file)
    write_atomic(paths[-1], report.model_dump_json(indent=2) + "\n")
    return tuple(paths)


def beside(file: Path, name: str) -> Path:
    """The file of a name that lies beside a backtest's JSON file.

    >>> beside(Path("r/backtest.json"), "days.csv").name, beside(Path("r/five.json"), "days.csv").name
    ('days.csv', 'five_days.csv')
    """
    return file.with_name(name if file.name == REPORT_FILE else f"{file.stem}_{name}")


def _drawn(path: Path, result: BacktestResult, days: pa.Table | None, verdict: Verdict | None) -> bool:
    try:
        picture = plot_backtest(result, days=days, verdict=None if verdict is None else verdict.colour)
    except MissingExtraError as error:
        print(f"no {path.name}: {error.what} {error.remedy}", file=sys.stderr)
        path.unlink(missing_ok=True)  # one of an earlier backtest would not belong to these numbers
        return False
    write_atomic(path, picture)
    return True


def read_backtest(path: Path) -> BacktestReport:
    """The content of a ``backtest.json``, checked.

    Args:
        path: The file, or the folder that it lies in.

    Raises:
        DataError: If it is not there, of another version, or not what this version says.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    value = read_json(file)
    if value is None:
        raise DataError(f"{file} is not there.", rule="a backtest leaves this file.", remedy="run the backtest first")
    version = value.get("schema_version")
    if value.get("kind") != "memfit.backtest" or version != SCHEMA_VERSION or isinstance(version, bool):
        raise DataError(
            f"{file} is of kind {value.get('kind')!r}, version {version!r}.",
            rule=f"this memfit reads memfit.backtest of version {SCHEMA_VERSION}.",
            remedy="run the backtest again, or read the file with the memfit that wrote it",
        )
    try:
        return BacktestReport.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{file} does not follow its schema in {error.error_count()} places; the first is {place}: {first['msg']}.",
            rule=f"memfit.backtest, version {SCHEMA_VERSION}.",
            remedy="run the backtest again: the file was changed since it was written",
        ) from error


def _plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = _without_nan(to_plain(dict(facts)))
    except TypeError as error:
        raise UsageError(
            f"the facts of the backtest cannot be written as JSON: {error}.",
            rule="facts are named texts, numbers, dates, paths, models, and lists or mappings of these.",
            remedy="convert the value first, for example an array with .tolist()",
        ) from error
    return plain


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value


def _joined(days: pa.Table, evaluated: pa.Table | None) -> pa.Table:
    """The days of the backtest with the columns of the evaluation's day table beside them; null where it has no row."""
    if evaluated is None:
        return days
    theirs = evaluated["date"].to_numpy().astype("datetime64[D]")
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise DataError(
            f"the day table has {ordered[twice[0]]} more than once ({len(twice)} repetitions).",
            rule="each date of a backtest is scored by the model of one fold.",
            remedy="hand in the days of one model per date",
        )
    ours = days["date"].to_numpy().astype("datetime64[D]")
    place = np.searchsorted(ordered, ours)
    found = np.array([spot < len(ordered) and ordered[spot] == day for spot, day in zip(place, ours, strict=True)])
    rows = pa.array(order[np.minimum(place, max(len(order) - 1, 0))] if len(order) else place, mask=~found)
    for name in evaluated.column_names:
        if name not in days.column_names:
            days = days.append_column(name, evaluated[name].take(rows))
    return days


def _csv(table: pa.Table) -> bytes:
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table[field.name].cast(field.type.value_type))
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(quoting_style="needed"))
    content: bytes = sink.getvalue().to_pybytes()
    return content
