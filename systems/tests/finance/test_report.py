"""The files of a backtest: they read back, they are whole or not there, and the picture is one."""

import csv
import datetime
import json
import math
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import (
    BacktestInput,
    BacktestSettings,
    Finding,
    judge,
    plot_backtest,
    read_backtest,
    run_controls,
    write_backtest,
)

DATES = np.datetime64("2024-01-01") + np.arange(80)
FINDING = Finding(name="date_gap", severity="yellow", evidence="1 gap.", where=("2024-01-09",), count=1, remedy="fill")


@pytest.fixture
def no_picture(monkeypatch):
    """Without matplotlib, which takes a second."""
    monkeypatch.setattr("memfit_workloads.finance._report.plot_backtest", plot_backtest)  # others may patch it
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture(scope="module")
def market():
    rng = np.random.default_rng(0)
    returns_1 = rng.normal(0.001, 0.02, (80, 12))
    returns_1[40, 3] = math.nan
    return BacktestInput(DATES, tuple("ABCDEFGHIJKL"), rng.standard_normal((80, 12)), returns_1)


@pytest.fixture(scope="module")
def result(market):
    return market.run(BacktestSettings(horizon=4))


def day_table(dates=DATES[10:]):
    """An evaluation's days; there are fewer of them than of the backtest."""
    ic = np.linspace(-0.2, 0.3, len(dates))
    ic[5] = math.nan
    return pa.table({"fold": np.full(len(dates), 2), "date": dates, "h4_rank_ic": ic, "num_assets": [12] * len(dates)})


def test_everything_reads_back_with_null_for_what_is_undefined(tmp_path, market, result, no_picture):
    controls = run_controls(market, result.settings, num_shuffles=2)
    verdict = judge(result, (FINDING,), controls=controls)
    facts = {"folds": (1, 2), "gains": [math.inf, 1.5], "end": datetime.date(2024, 3, 1), "to": tmp_path}
    write_backtest(tmp_path / "new", result, verdict=verdict, findings=[FINDING], controls=controls, facts=facts)
    found = read_backtest(tmp_path / "new")
    assert found == read_backtest(tmp_path / "new" / "backtest.json")
    assert found["summary"] == vars(result.summary)
    assert found["settings"] == result.settings.model_dump()
    assert (found["verdict"]["colour"], len(found["verdict"]["reasons"])) == (verdict.colour, len(verdict.reasons))
    assert found["findings"] == [vars(FINDING) | {"where": ["2024-01-09"]}]
    assert found["controls"]["loss_t"] == controls.loss_t
    assert found["facts"] == {"folds": [1, 2], "gains": [None, 1.5], "end": "2024-03-01", "to": str(tmp_path)}
    nothing = BacktestInput(market.dates, market.codes, market.scores, np.full((80, 12), math.nan))
    write_backtest(tmp_path, nothing.run(BacktestSettings()))
    assert read_backtest(tmp_path)["summary"]["sharpe"] is None
    assert "NaN" not in (tmp_path / "backtest.json").read_text()


@pytest.mark.proves("S0-36")
@pytest.mark.parametrize("change", [{"schema_version": 9}, {"schema_version": None}, {"kind": "other"}])
def test_another_kind_or_version_and_an_absent_file_are_refused(tmp_path, result, no_picture, change):
    with pytest.raises(DataError, match="is not there"):
        read_backtest(tmp_path)
    *_, file = write_backtest(tmp_path, result)
    file.write_text(json.dumps(read_backtest(tmp_path) | change))
    with pytest.raises(DataError, match="not a backtest of this version"):
        read_backtest(file)


def test_days_have_the_rank_ic_beside_the_returns_by_date(tmp_path, result, no_picture):
    write_backtest(tmp_path, result, days=day_table().take(np.random.default_rng(0).permutation(70)))
    with open(tmp_path / "days.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["date"] for row in rows] == [str(date) for date in DATES]
    assert [float(row["net"]) for row in rows] == result.days["net"].to_pylist()
    assert rows[9]["h4_rank_ic"] == rows[9]["fold"] == ""
    assert (float(rows[10]["h4_rank_ic"]), float(rows[79]["h4_rank_ic"])) == (-0.2, 0.3)
    twice = pa.concat_tables([day_table(), day_table(DATES[20:30])])
    with pytest.raises(DataError, match="a date more than once"):
        write_backtest(tmp_path, result, days=twice)


@pytest.mark.slow
def test_the_pictures_are_png_and_leave_no_state(tmp_path):
    """With rank ICs and without, and of a book that is shorter than its holding period."""
    code = """
import sys
from pathlib import Path
import matplotlib, numpy as np, pyarrow as pa
from memfit_workloads.finance import BacktestInput, BacktestSettings, plot_backtest
folder, rng = Path(sys.argv[1]), np.random.default_rng(0)
dates = np.datetime64("2024-01-01") + np.arange(80)
given = BacktestInput(dates, tuple("ABCDEFGHIJKL"), rng.standard_normal((80, 12)), rng.normal(0.001, 0.02, (80, 12)))
days = pa.table({"date": dates, "h4_rank_ic": np.linspace(-0.2, 0.3, 80)})
before = matplotlib.rcParams.copy()
cases = [({"horizon": 4}, days), ({}, None), ({"horizon": 100}, None)]
for number, (settings, table) in enumerate(cases):
    result = given.run(BacktestSettings(**settings))
    (folder / f"{number}.png").write_bytes(plot_backtest(result, days=table, verdict="green"))
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True, timeout=200)
    sizes = []
    for number in range(3):
        content = (tmp_path / f"{number}.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(struct.unpack(">II", content[16:24]))
    assert sizes[0][0] == sizes[1][0] == 1320
    assert sizes[0][1] > sizes[1][1] == sizes[2][1]  # a row less without rank ICs


def test_without_matplotlib_there_is_no_picture_and_a_line_says_so(tmp_path, result, no_picture, capsys):
    (tmp_path / "backtest.png").write_bytes(b"of an earlier backtest")
    paths = write_backtest(tmp_path, result)
    assert [path.name for path in paths] == ["days.csv", "backtest.json"]
    assert not (tmp_path / "backtest.png").exists()
    said = capsys.readouterr().err
    assert "no backtest.png: matplotlib is not installed" in said
    assert said.count("\n") == 1
