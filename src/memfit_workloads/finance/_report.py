"""A backtest as files: ``backtest.json``, ``days.csv`` and ``backtest.png``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from memfit.config import to_plain
from memfit.errors import DataError, MissingExtraError
from memfit.files import read_json, write_atomic
from memfit_workloads.finance._backtest import BacktestResult
from memfit_workloads.finance._report_plots import plot_backtest

REPORT_FILE = "backtest.json"
_KIND = {"kind": "memfit.backtest", "schema_version": 2}


def write_backtest(
    path: Path, result: BacktestResult, *, days: pa.Table | None = None, **facts: Any
) -> tuple[Path, ...]:
    """Write a backtest as a JSON file with others beside it, each aside and then renamed; gives the files written.

    The JSON file comes last; it holds settings, summary and facts, with null for what is undefined. Beside
    ``backtest.json`` lie ``days.csv`` and ``backtest.png``; beside ``other.json`` they are named ``other_days.csv`` and
    ``other.png``. Without matplotlib there is no picture, and a line on standard error says so.

    Args:
        path: The JSON file, or a folder for ``backtest.json``; folders are made where there are none.
        result: The backtest.
        days: The day table of `evaluate_days`, for the rank IC over time and for more columns of ``days.csv``.
        facts: What else to keep in the JSON file, such as ``verdict``, ``findings`` and ``controls``.

    Raises:
        DataError: If the day table has a date twice.
        OSError: For example on a full disk.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from memfit_workloads.finance import BacktestInput, BacktestSettings
        >>> scores = np.random.default_rng(0).random((30, 8))
        >>> result = BacktestInput(np.arange(30), tuple("ABCDEFGH"), scores, scores / 100).run(BacktestSettings())
        >>> folder = tempfile.TemporaryDirectory()
        >>> paths = write_backtest(Path(folder.name), result, fold=1)
        >>> paths[-1].name, read_backtest(paths[-1])["summary"]["num_dates"]
        ('backtest.json', 30)
        >>> folder.cleanup()
    """
    file = path if path.suffix == ".json" else path / REPORT_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = [beside(file, "days.csv")]
    write_atomic(paths[0], _csv(_joined(result.days, days)))
    picture, verdict = file.with_suffix(".png"), facts.get("verdict")
    try:
        write_atomic(picture, plot_backtest(result, days=days, verdict=verdict.colour if verdict else None))
        paths.append(picture)
    except MissingExtraError as error:
        print(f"no {picture.name}: {error.what} {error.remedy}", file=sys.stderr)
        picture.unlink(missing_ok=True)  # one of an earlier backtest would not belong to these numbers
    content = {"settings": result.settings, "summary": result.summary, **facts, "files": [one.name for one in paths]}
    write_atomic(file, json.dumps(plain(_KIND | content), indent=2, allow_nan=False) + "\n")
    return (*paths, file)


def read_backtest(path: Path) -> dict[str, Any]:
    """Return the content of a ``backtest.json``.

    Args:
        path: The file, or the folder that it lies in.

    Raises:
        DataError: If it is not there, or of another kind or version.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    value = read_json(file) or {}
    if {name: value.get(name) for name in _KIND} != _KIND:
        raise DataError(
            f"{file} is not there, or is not a backtest of this version.",
            rule=f"this memfit reads {_KIND['kind']} of version {_KIND['schema_version']}.",
            remedy="run the backtest again, or read the file with the memfit that wrote it",
        )
    return value


def plain(value: Any) -> Any:
    """Return records, settings, dates and paths as plain values for JSON; a number that is not finite is None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else to_plain(value)


def beside(file: Path, name: str) -> Path:
    """Return the file of a name that lies beside a backtest's JSON file.

    >>> beside(Path("r/backtest.json"), "days.csv").name, beside(Path("r/five.json"), "days.csv").name
    ('days.csv', 'five_days.csv')
    """
    return file.with_name(name if file.name == REPORT_FILE else f"{file.stem}_{name}")


def _joined(days: pa.Table, evaluated: pa.Table | None) -> pa.Table:
    """Return the days of the backtest with the columns of the day table beside them; null where it has no row."""
    if evaluated is None:
        return days
    dates = evaluated["date"].cast(pa.date32())
    if len(dates.unique()) < len(dates):
        raise DataError(
            "the day table has a date more than once.",
            rule="each date of a backtest is scored by the model of one fold.",
            remedy="hand in the days of one model per date",
        )
    new = [name for name in evaluated.column_names if name not in days.column_names]
    theirs = evaluated.select(new).append_column("date", dates)
    ours = days.set_column(0, "date", days["date"].cast(pa.date32()))
    return ours.join(theirs, "date").sort_by("date")


def _csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(quoting_style="needed"))
    content: bytes = sink.getvalue().to_pybytes()
    return content
