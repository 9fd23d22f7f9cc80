"""The files of a backtest: they read back."""

import datetime
import json
import math

import numpy as np
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import (
    BacktestInput,
    BacktestSettings,
    Finding,
    judge,
    read_backtest,
    run_controls,
    write_backtest,
)

DATES = np.datetime64("2024-01-01") + np.arange(80)
FINDING = Finding(name="date_gap", severity="yellow", evidence="1 gap.", where=("2024-01-09",), count=1, remedy="fill")


@pytest.fixture(scope="module")
def market():
    rng = np.random.default_rng(0)
    returns_1 = rng.normal(0.001, 0.02, (80, 12))
    returns_1[40, 3] = math.nan
    return BacktestInput(DATES, tuple("ABCDEFGHIJKL"), rng.standard_normal((80, 12)), returns_1)


@pytest.fixture(scope="module")
def result(market):
    return market.run(BacktestSettings(horizon=4))


def test_everything_reads_back_with_null_for_what_is_undefined(tmp_path, market, result):
    controls = run_controls(market, result.settings, num_shuffles=2)
    verdict = judge(result, (FINDING,), controls=controls)
    facts = {"folds": (1, 2), "gains": [math.inf, 1.5], "end": datetime.date(2024, 3, 1), "to": tmp_path}
    (tmp_path / "new").mkdir()
    write_backtest(
        tmp_path / "new" / "backtest.json", result, verdict=verdict, findings=[FINDING], controls=controls, facts=facts
    )
    found = read_backtest(tmp_path / "new")
    assert found == read_backtest(tmp_path / "new" / "backtest.json")
    assert found["summary"] == vars(result.summary)
    assert found["settings"] == result.settings.model_dump()
    assert (found["verdict"]["colour"], len(found["verdict"]["reasons"])) == (verdict.colour, len(verdict.reasons))
    assert found["findings"] == [vars(FINDING) | {"where": ["2024-01-09"]}]
    assert found["controls"]["loss_t"] == controls.loss_t
    assert found["facts"] == {"folds": [1, 2], "gains": [None, 1.5], "end": "2024-03-01", "to": str(tmp_path)}
    nothing = BacktestInput(market.dates, market.codes, market.scores, np.full((80, 12), math.nan))
    write_backtest(tmp_path / "backtest.json", nothing.run(BacktestSettings()))
    assert read_backtest(tmp_path)["summary"]["sharpe"] is None
    assert "NaN" not in (tmp_path / "backtest.json").read_text()


@pytest.mark.proves("S0-36")
@pytest.mark.parametrize("change", [{"schema_version": 9}, {"schema_version": None}, {"kind": "other"}])
def test_another_kind_or_version_and_an_absent_file_are_refused(tmp_path, result, change):
    with pytest.raises(DataError, match="is not there"):
        read_backtest(tmp_path)
    *_, file = write_backtest(tmp_path / "backtest.json", result)
    file.write_text(json.dumps(read_backtest(tmp_path) | change))
    with pytest.raises(DataError, match="not a backtest of this version"):
        read_backtest(file)
