"""The ranker's parameters, panels, splits, held-out dates, and the market to check."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memfit.errors import ConfigError, SplitError
from memfit_workloads.finance.panels import check_folds, fingerprint, hold_out, market, possible_dates
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER, splitter
from stages_here import StagesHere

MODEL = {"patch_size": 5, "width": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.1}
GENERATED = {
    "source": "generated", "num_dates": 120, "num_assets": 12, "num_features": 2, "information_coefficient": 0.4,
    "horizons": (2, 4), "main_horizon": 2, "lookback": 10,
}  # fmt: skip
PARQUET = {"source": "parquet", "path": "mine.parquet", "features": ["x"], "targets": {1: "a", 5: "b"},
           "horizons": (5,)}  # fmt: skip


def make_params(data=GENERATED, *, splits=(("n_splits", 3), ("embargo_size", 2)), **train):
    return RankerParams(data=data, splits=dict(splits), model=MODEL, train=train)


def prepare(tmp_path, params):
    """The facts that prepare gives, the panel, and the positions that each fold trains on and is tested on."""
    output = StagesHere(tmp_path, RANKER, params).run("prepare")
    splits = output.arrays("splits")
    folds = [(splits[f"train_{one['fold']}"], splits[f"test_{one['fold']}"]) for one in output.result["folds"]]
    return SimpleNamespace(panel=output.panel(), splits=folds, **output.result)


def test_folds_are_purged_by_the_longest_horizon_and_every_usable_date_is_tested_once(tmp_path):
    prepared = prepare(tmp_path, make_params())
    for train, test in prepared.splits:
        assert np.abs(train[:, None] - test[None, :]).min() > 4
    tested = np.concatenate([test for _, test in prepared.splits])
    # 120 dates: the first 9 have no whole window of 10, the last 4 no target at the longest horizon yet
    assert tested.tolist() == list(range(9, 116))
    assert (prepared.label_dates, prepared.embargo_size) == (4, 2)
    assert prepared.panel.target_names == ("target_h1", "target_h2", "target_h4", "close")


@given(st.integers(3, 200), st.floats(0, 0.9), st.integers(1, 30), st.integers(0, 5))
def test_held_out_dates_are_the_last_and_no_fitted_label_reaches_into_them(num, share, reach, gap):
    dates = np.concatenate([np.arange(num // 2), np.arange(num // 2 + gap, num + gap)])  # around a test block
    try:
        fit, valid = hold_out(dates, share, reach)
    except SplitError:
        assert dates[0] + reach >= dates[-max(1, round(share * num)) :][0]
        return
    if share == 0:
        assert (fit.tolist(), valid.tolist()) == (dates.tolist(), [])
        return
    assert valid.tolist() == dates[num - len(valid) :].tolist()
    assert abs(len(valid) - share * num) <= 1
    assert fit.max() + reach < valid.min()
    assert [date for date in dates.tolist() if date + reach < valid.min()] == fit.tolist()


@pytest.mark.parametrize("source", ["generated", "prices"])
def test_the_market_to_check_has_the_closes_that_the_returns_are_made_of(tmp_path, source):
    data = GENERATED if source == "generated" else {"source": "prices", "start": "2021-01-01", "end": "2021-12-31"}
    params = RankerParams(data=data)
    prepared = prepare(tmp_path, params)
    table = market(prepared.panel, params)
    assert table.column_names == ["date", "code", "close"]
    assert (table.schema.field("date").type, table.schema.field("close").type) == (pa.date32(), pa.float64())
    closes = np.full(prepared.panel.shape[:2], np.nan)
    date = np.searchsorted(prepared.panel.dates, table.column("date").to_numpy().astype("datetime64[D]"))
    asset = np.searchsorted(prepared.panel.assets, table.column("code").to_numpy(zero_copy_only=False).astype(str))
    closes[date, asset] = table.column("close").to_numpy()
    assert (np.isfinite(closes) == prepared.panel.present).all()
    both = np.isfinite(closes[1:]) & np.isfinite(closes[:-1])
    returns = (closes[1:] / closes[:-1] - 1)[both]
    assert len(returns) > 1000
    assert prepared.panel.target("target_h1")[:-1][both] == pytest.approx(returns, abs=1e-6)


def test_the_market_of_a_file_is_its_column_of_closes_and_without_one_is_refused(tmp_path):
    days = np.repeat(np.arange("2024-01-02", "2024-01-12", dtype="datetime64[D]"), 2)
    rows = {"date": days, "code": ["A", "B"] * 10, "x": np.arange(20.0), "a": np.ones(20), "b": np.ones(20)}
    pq.write_table(pa.table(rows | {"price": 5.0 + np.arange(20)}), tmp_path / "mine.parquet")
    data = PARQUET | {"path": tmp_path / "mine.parquet", "lookback": 1}
    splits = {"n_splits": 2, "embargo_size": 0}
    named = RankerParams(
        data=data | {"close": "price", "horizons": (1,), "main_horizon": 1}, splits=splits, model={"patch_size": 1}
    )
    table = market(prepare(tmp_path / "panels", named).panel, named)
    assert table.column("close").to_pylist() == [5.0 + number for number in range(20)]
    unnamed = RankerParams(data=data, model={"patch_size": 1})
    with pytest.raises(ConfigError, match="names no closing prices"):
        market(None, unnamed)


def test_a_generated_market_is_written_once_per_set_of_parameters(tmp_path):
    prepare(tmp_path, make_params())
    (path,) = (tmp_path / "panels" / "markets").iterdir()
    before = path.stat().st_mtime_ns
    prepare(tmp_path, make_params())
    assert path.stat().st_mtime_ns == before
    prepare(tmp_path, make_params(GENERATED | {"market_seed": 1}))
    prepare(tmp_path, make_params(GENERATED | {"horizons": (2, 3)}))
    assert len(list((tmp_path / "panels" / "markets").iterdir())) == 3


def test_the_fingerprint_follows_the_content_of_the_data(tmp_path):
    path = tmp_path / "mine.parquet"
    data = PARQUET | {"path": path, "lookback": 10}
    params = make_params(data)
    with pytest.raises(ConfigError, match=r"mine\.parquet is not there"):
        RANKER.check(params)
    pq.write_table(pa.table({"x": [1.0]}), path)
    first = fingerprint(params.data)
    assert fingerprint(params.data) == first
    pq.write_table(pa.table({"x": [2.0]}), path)
    assert fingerprint(params.data) != first
    folder = make_params(data | {"path": tmp_path})
    assert fingerprint(folder.data) == fingerprint(params.data)
    pq.write_table(pa.table({"x": [3.0]}), tmp_path / "more.parquet")
    assert fingerprint(folder.data) != fingerprint(params.data)
    seeds = {fingerprint(make_params(GENERATED | {"market_seed": seed}).data) for seed in (0, 1)}
    assert len(seeds) == 2


def own_file(path, date="date", asset="code", num_dates=120):
    days = np.arange(num_dates).astype("datetime64[D]")
    rows = {date: np.repeat(days, 3), asset: ["A", "B", "C"] * num_dates}
    rows |= {name: np.random.default_rng(0).normal(size=3 * num_dates) for name in ("x", "a", "b")}
    pq.write_table(pa.table(rows), path)


def test_a_file_whose_date_and_asset_have_other_names_makes_the_same_panel(tmp_path):
    data = PARQUET | {"lookback": 10, "main_horizon": 5}
    own_file(tmp_path / "usual.parquet")
    own_file(tmp_path / "own.parquet", "Date", "Code")
    usual = prepare(tmp_path / "usual", make_params(data | {"path": tmp_path / "usual.parquet"}))
    columns = {"date": "Date", "asset": "Code"}
    own = prepare(tmp_path / "own", make_params(data | {"path": tmp_path / "own.parquet", "columns": columns}))
    assert own.panel.assets == usual.panel.assets == ("A", "B", "C")
    np.testing.assert_array_equal(own.panel.values, usual.panel.values)
    assert [fold["first_test_date"] for fold in own.folds] == [fold["first_test_date"] for fold in usual.folds]


def in_shanghai(days):
    return pc.assume_timezone(days.cast(pa.timestamp("ms")), "Asia/Shanghai")


@pytest.mark.parametrize("write", [in_shanghai, lambda days: days.cast(pa.string()).dictionary_encode()])
def test_dates_of_a_file_are_split_as_its_panel_has_them(tmp_path, write):
    path, data = tmp_path / "own.parquet", PARQUET | {"lookback": 10, "main_horizon": 5}
    own_file(path)
    rows = pq.read_table(path)
    pq.write_table(rows.set_column(0, "date", write(rows["date"])), path)
    prepared = prepare(tmp_path, make_params(data | {"path": path}))
    dates, _ = possible_dates(make_params(data | {"path": path}).data)
    assert dates.tolist() == prepared.panel.dates[9:].tolist()


def test_what_a_config_cannot_run_with_is_refused_before_the_first_job_by_the_names_of_its_settings(tmp_path):
    own_file(tmp_path / "own.parquet", "Date", "Code")
    data = PARQUET | {"path": tmp_path / "own.parquet", "lookback": 10, "main_horizon": 5}
    named = data | {"columns": {"date": "Date", "asset": "Code"}}
    stages_of = {stage.name: stage for stage in RANKER.stages}

    def refused(check, why, data=GENERATED, splits=(("n_splits", 3), ("embargo_size", 2)), train=(), **params):
        params = RankerParams(data=data, splits=dict(splits), model=MODEL, train=dict(train), **params)
        with pytest.raises(ConfigError, match=why) as caught:
            check(params)
        return caught.value.remedy

    assert "--set params.data.columns.date" in refused(RANKER.check, "0 columns named 'date'", data)
    assert "'x'?" in refused(RANKER.check, "0 columns named 'xx'", named | {"features": ["xx"]})
    assert "--set params.data.targets.5=" in refused(RANKER.check, "named 'z'", named | {"targets": {1: "a", 5: "z"}})
    assert "--set params.data.close=" in refused(RANKER.check, "named 'z'", named | {"close": "z"})
    assert "--set params.splits.n_splits=" in refused(
        RANKER.check, "12[0-9]* distinct|cut into", splits=[("n_splits", 400)]
    )
    assert "params.data.start" in refused(
        RANKER.check, "0 dates with features", {"start": "2023-01-01", "end": "2023-02-01"}
    )
    for name in ("blend", "health", "backtest"):
        assert "params.data.close" in refused(stages_of[name].check, "names no closing prices", named)
    RANKER.check(make_params(named))
    stages_of["health"].check(make_params(named | {"close": "a"}))


@pytest.mark.parametrize("kind", ["purged", "walk_forward"])
@pytest.mark.parametrize("turnover", [0.0, 0.9])
def test_no_fold_fits_more_dates_than_the_check_of_its_config_says(tmp_path, kind, turnover):
    params = make_params(GENERATED | {"turnover": turnover}, splits=[("n_splits", 4), ("kind", kind)])
    prepared = prepare(tmp_path, params)
    fitted = [len(hold_out(train, params.train.valid_share, 4)[0]) for train, _ in prepared.splits]
    most = check_folds(params.data, splitter(params), params.train.valid_share)
    assert min(fitted) <= most <= 1.1 * min(fitted)
    dates, num_assets = possible_dates(params.data)
    assert set(prepared.panel.dates[np.concatenate([test for _, test in prepared.splits])]) <= set(dates)
    assert prepared.panel.present.sum(axis=1).max() <= num_assets


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": {"source": "generated", "start": "2015-01-01"}}, "start belongs to source: prices"),
        ({"data": {"num_assets": 7}}, "num_assets belongs to source: generated, and source is prices"),
        ({"data": {"source": "parquet"}}, "needs path and features"),
        ({"data": PARQUET | {"targets": {5: "b"}}}, r"needs a column in targets for the horizons \[1\]"),
        ({"data": PARQUET | {"horizons": (1, 5, 20)}}, r"in targets for the horizons \[20\]"),
        ({"data": {"main_horizon": 3}}, r"main_horizon 3 is none of the horizons \[1, 5, 10, 20\]"),
        ({"data": {"horizons": (5, 5)}}, r"horizons \[5, 5\] name one twice"),
        ({"data": {"horizons": ()}}, "horizons"),
        ({"data": {"horizons": (0, 5)}}, "greater than or equal to 1"),
        ({"data": {"horizon": 5}}, "horizon"),
        ({"data": {"lookback": 25}}, r"data.lookback \(25\) must be a multiple of model.patch_size \(10\)"),
        ({"model": {"num_heads": 5}}, r"model.width \(32\) must be a multiple of model.num_heads \(5\)"),
        ({"data": {"lokback": 20}}, "lokback"),
        ({"splits": {"warm_start": True}}, "warm_start needs kind: walk_forward, and kind is purged: .* leak"),
        ({"train": {"tau_days": 60, "dates_per_batch": 1}}, "tau_days needs dates_per_batch of 2 or more"),
        ({"train": {"valid_share": 0, "patience": 3}}, "needs a valid_share above 0"),
        ({"train": {"loss": {"listnet": 0, "ranknet": 0, "mse": 0}}}, "one of the losses needs a weight"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_together_are_refused(change, text):
    with pytest.raises(ValidationError, match=text):
        RankerParams.model_validate(change)


@pytest.mark.slow
def test_preparing_a_run_loads_no_torch():
    code = "import sys, memfit_workloads.ranker.stages; print({'torch', 'skfolio', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
