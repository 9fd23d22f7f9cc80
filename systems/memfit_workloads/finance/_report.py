"""A backtest as files: ``backtest.json`` and ``days.csv``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.csv
from pydantic_core import to_json

from memfit.errors import DataError
from memfit.files import read_json, replacing, write_atomic
from memfit_workloads.finance._backtest import BacktestResult

REPORT_FILE = "backtest.json"
_KIND = {"kind": "memfit.backtest", "schema_version": 4}


def write_backtest(file: Path, result: BacktestResult, **facts: Any) -> tuple[Path, Path]:
    """Write a backtest as a CSV file of its days and a JSON file, each aside and then renamed; gives their paths.

    The JSON file comes last; it holds settings, summary and facts, with null for what is undefined. Beside
    ``backtest.json`` lies ``days.csv``; beside ``other.json`` ``other_days.csv``.
    """
    beside_it = beside(file, "days.csv")
    with replacing(beside_it) as aside:
        pyarrow.csv.write_csv(result.days, str(aside))
    content = {"settings": result.settings, "summary": result.summary, **facts, "files": [beside_it.name]}
    write_atomic(file, json.dumps(plain(_KIND | content), indent=2, allow_nan=False) + "\n")
    return beside_it, file


def read_backtest(path: Path) -> dict[str, Any]:
    """Return the content of a ``backtest.json``, or of the one in a folder.

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
    return json.loads(to_json(value, inf_nan_mode="null"))


def beside(file: Path, name: str) -> Path:
    """Return the file beside a backtest's JSON file: ``days.csv``, or ``five_days.csv`` beside ``five.json``."""
    return file.with_name(name if file.name == REPORT_FILE else f"{file.stem}_{name}")
