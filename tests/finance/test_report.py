"""The files of a backtest: they read back, they are whole or not there, and the picture is one."""

from __future__ import annotations

import csv
import datetime
import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from memfit.errors import DataError, UsageError
from memfit.rundir import write_json
from memfit_workloads.finance import _report as module
from memfit_workloads.finance._backtest import BacktestResult
from memfit_workloads.finance._controls import BacktestInput, run_controls
from memfit_workloads.finance._gate import judge
from memfit_workloads.finance._market import Finding
from memfit_workloads.finance._report import BacktestReport, read_backtest, write_backtest
from memfit_workloads.finance._report_plots import plot_backtest
from memfit_workloads.finance._sleeves import BacktestSettings

DATES = np.datetime64("2024-01-01") + np.arange(80)
FINDING = Finding(name="date_gap", severity="yellow", evidence="1 gap.", where=("2024-01-09",), count=1, remedy="fill")


@pytest.fixture(autouse=True)
def _a_picture_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one takes a second: one test draws them."""
    monkeypatch.setattr(module, "plot_backtest", lambda *_, **__: b"a picture")


@pytest.fixture(scope="module")
def market() -> BacktestInput:
    rng = np.random.default_rng(0)
    returns_1 = rng.normal(0.001, 0.02, (80, 12))
    returns_1[40, 3] = math.nan
    return BacktestInput(DATES, tuple("ABCDEFGHIJKL"), rng.standard_normal((80, 12)), returns_1)


@pytest.fixture(scope="module")
def result(market: BacktestInput) -> BacktestResult:
    return market.run(BacktestSettings(horizon=4))


def day_table(dates: np.ndarray = DATES[10:]) -> pa.Table:
    """An evaluation's days; there are fewer of them than of the backtest."""
    ic = np.linspace(-0.2, 0.3, len(dates))
    ic[5] = math.nan
    return pa.table({"fold": np.full(len(dates), 2), "date": dates, "h4_rank_ic": ic, "num_assets": [12] * len(dates)})


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_everything_reads_back_from_json(tmp_path: Path, market: BacktestInput, result: BacktestResult) -> None:
    controls = run_controls(market, result.settings, num_shuffles=2)
    verdict = judge(result, (FINDING,), controls=controls)
    facts = {
        "folds": (1, 2),
        "ic": math.nan,
        "gains": [math.inf, 1.5],
        "end": datetime.date(2024, 3, 1),
        "to": tmp_path,
    }
    paths = write_backtest(
        tmp_path / "new", result, facts=facts, days=None, verdict=verdict, findings=[FINDING], controls=controls
    )
    report = read_backtest(tmp_path / "new")
    assert read_backtest(paths[-1]).model_dump_json() == report.model_dump_json()
    assert report.summary == result.summary
    assert report.settings == result.settings
    assert report.verdict == verdict
    assert report.findings == (FINDING,)
    assert report.controls == controls
    assert [row.mean_excess for row in report.quantiles] == result.quantiles["mean_excess"].to_pylist()
    assert report.facts["folds"] == [1, 2]
    assert report.facts["ic"] is None
    assert report.facts["gains"] == [None, 1.5]
    assert report.facts["end"] == "2024-03-01"
    assert report.files == ("days.csv", "trades.csv", "backtest.png")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted([*report.files, "backtest.json"])


def test_json_has_null_for_what_is_undefined_and_no_nan(tmp_path: Path, market: BacktestInput) -> None:
    nothing = BacktestInput(market.dates, market.codes, market.scores, np.full((80, 12), math.nan))
    write_backtest(tmp_path, nothing.run(BacktestSettings()), facts={}, days=None)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    value = json.loads((tmp_path / "backtest.json").read_text(), parse_constant=refuse)
    assert value["summary"]["sharpe"] is None
    assert value["schema_version"] == 1
    assert math.isnan(read_backtest(tmp_path).summary.sharpe)


def test_the_schema_names_every_part_and_lets_a_figure_be_null() -> None:
    schema = BacktestReport.model_json_schema()
    assert {"settings", "summary", "quantiles", "facts", "files"} <= set(schema["required"])
    assert schema["additionalProperties"] is False
    kinds = schema["$defs"]["BacktestSummary"]["properties"]["sharpe"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["number", "null"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "version 2"),
        ({"schema_version": True}, "version True"),
        ({"schema_version": None}, "version None"),
        ({"kind": "other"}, "kind 'other'"),
        ({"summary": {}}, "summary.start: Field required"),
        ({"surplus": 1}, "surplus: Extra inputs"),
    ],
)
def test_another_version_or_another_content_is_refused(
    tmp_path: Path, result: BacktestResult, change: dict[str, object], message: str
) -> None:
    write_backtest(tmp_path, result, facts={}, days=None)
    file = tmp_path / "backtest.json"
    write_json(file, json.loads(file.read_text()) | change)
    with pytest.raises(DataError, match=message):
        read_backtest(file)


def test_a_backtest_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        read_backtest(tmp_path)


def test_days_have_the_rank_ic_beside_the_returns_by_date(tmp_path: Path, result: BacktestResult) -> None:
    shuffled = day_table().take(np.random.default_rng(0).permutation(70))
    write_backtest(tmp_path, result, facts={}, days=shuffled)
    rows = read_csv(tmp_path / "days.csv")
    assert len(rows) == 80
    assert [row["date"] for row in rows] == [str(date) for date in DATES]
    assert [float(row["net"]) for row in rows] == result.days["net"].to_pylist()
    assert rows[9]["h4_rank_ic"] == rows[9]["fold"] == ""
    assert float(rows[10]["h4_rank_ic"]) == pytest.approx(-0.2)
    assert float(rows[79]["h4_rank_ic"]) == pytest.approx(0.3)
    assert rows[79]["fold"] == "2"


def test_trades_are_written_one_a_line(tmp_path: Path, result: BacktestResult) -> None:
    write_backtest(tmp_path, result, facts={}, days=None)
    rows = read_csv(tmp_path / "trades.csv")
    assert len(rows) == result.trades.num_rows
    assert rows[0] == {key: str(value) for key, value in result.trades.slice(0, 1).to_pylist()[0].items()}


def test_a_date_of_two_models_is_refused(tmp_path: Path, result: BacktestResult) -> None:
    twice = pa.concat_tables([day_table(), day_table(DATES[20:30])])
    with pytest.raises(DataError, match="2024-01-21 more than once"):
        write_backtest(tmp_path, result, facts={}, days=twice)


def test_facts_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path: Path, result) -> None:
    with pytest.raises(UsageError, match=r"\.tolist"):
        write_backtest(tmp_path / "new", result, facts={"scores": np.zeros(3)}, days=None)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_pictures_are_png_and_leave_no_state(tmp_path: Path, market: BacktestInput) -> None:
    """Of a long book with and of a long-short one without rank ICs, and of one that is shorter than its holding period."""
    np.savez(tmp_path / "given.npz", scores=market.scores, returns_1=market.returns_1)
    pa.feather.write_feather(day_table(), str(tmp_path / "days.feather"))
    code = """
import sys
from pathlib import Path
import matplotlib, numpy as np, pyarrow.feather
from memfit_workloads.finance._backtest import backtest
from memfit_workloads.finance._sleeves import BacktestSettings
from memfit_workloads.finance._report_plots import plot_backtest
folder = Path(sys.argv[1])
given, days = np.load(folder / "given.npz"), pyarrow.feather.read_table(folder / "days.feather")
dates = np.datetime64("2024-01-01") + np.arange(80)
before = matplotlib.rcParams.copy()
cases = [({"horizon": 4}, days), ({"side": "long_short"}, None), ({"horizon": 100}, None)]
for number, (settings, table) in enumerate(cases):
    result = backtest(dates, tuple("ABCDEFGHIJKL"), given["scores"], given["returns_1"], BacktestSettings(**settings))
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


def test_without_matplotlib_there_is_no_picture_and_a_line_says_so(
    tmp_path: Path, result: BacktestResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "plot_backtest", plot_backtest)
    (tmp_path / "backtest.png").write_bytes(b"of an earlier backtest")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paths = write_backtest(tmp_path, result, facts={}, days=None)
    assert [path.name for path in paths] == ["days.csv", "trades.csv", "backtest.json"]
    assert not (tmp_path / "backtest.png").exists()
    said = capsys.readouterr().err
    assert "no backtest.png: matplotlib is not installed" in said
    assert said.count("\n") == 1


def test_a_failure_midway_leaves_the_old_report(
    tmp_path: Path, result: BacktestResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_backtest(tmp_path, result, facts={"run": 1}, days=None)
    real = module.write_atomic

    def full(path: Path, content: bytes | str) -> None:
        if path.name == "backtest.json":
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        write_backtest(tmp_path, result, facts={"run": 2}, days=None)
    assert read_backtest(tmp_path).facts == {"run": 1}
    assert not list(tmp_path.glob(".*"))
