"""The ranker: its loss, its model, its data, and whether it finds a signal that is there, and none that is not."""

import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pyarrow import feather
from pydantic import ValidationError

from memfit import config
from memfit.data import Panel
from memfit.errors import DataError, UsageError
from memfit.evaluation import rank_ic_by_date, summarize_ic
from memfit.pipeline import FoldContext, PrepareContext, RunConfig
from memfit.training import load_checkpoint
from memfit_workloads.ranker import job
from memfit_workloads.ranker.job import RANKER, RankerParams
from memfit_workloads.ranker.loss import listnet_loss
from memfit_workloads.ranker.market import Market, write_market
from memfit_workloads.ranker.model import PatchRanker

MODEL = {"patch_size": 5, "width": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.1}
GENERATED = {
    "source": "generated", "num_dates": 280, "num_assets": 50, "num_features": 3, "information_coefficient": 0.5,
    "horizon": 2, "lookback": 10,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in a fold; two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_params(data=GENERATED, *, num_epochs=2, **train):
    return RankerParams(
        data=data, splits={"n_splits": 3, "embargo_size": 2}, model=MODEL, train={"num_epochs": num_epochs, **train}
    )


def run_fold(tmp_path, params, fold=1):
    """One fold, as the pipeline runs it; its metrics, and the folder of its tables."""
    prepared = RANKER.prepare(PrepareContext(tmp_path / "panels"), params)
    train, test = prepared.splits[fold - 1]
    (tmp_path / "job").mkdir(exist_ok=True)
    context = FoldContext(fold, prepared.panel, train, test, tmp_path / "checkpoints", 3, tmp_path / "job")
    return RANKER.train_fold(context, params), context


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A fold of a market with a strong planted signal."""
    tmp_path = tmp_path_factory.mktemp("planted")
    params = make_params(num_epochs=3, learning_rate=3e-3)
    metrics, context = run_fold(tmp_path, params)
    return params, metrics, context, tmp_path


def test_a_planted_signal_is_found(planted):
    _, metrics, _, _ = planted
    print(metrics)
    assert metrics["num_dates"] > 80
    standard_error = metrics["rank_ic_sd"] / (metrics["num_dates"] / 2) ** 0.5  # labels of 2 dates overlap
    assert metrics["rank_ic"] > 0.25
    assert metrics["rank_ic"] > 5 * standard_error
    assert metrics["icir"] == pytest.approx(metrics["rank_ic"] / metrics["rank_ic_sd"])


def test_no_signal_is_found_when_the_targets_are_shuffled(tmp_path):
    market = Market(num_dates=280, num_assets=50, num_features=3, information_coefficient=0.5, horizon=2)
    write_market(tmp_path / "market.parquet", market)
    rows = pq.read_table(tmp_path / "market.parquet").drop_null()
    shuffled = rows.column("target").take(pa.array(np.random.default_rng(0).permutation(len(rows))))
    path = tmp_path / "mine.parquet"
    pq.write_table(rows.set_column(rows.column_names.index("target"), "future", shuffled), path)
    data = {"source": "parquet", "path": path, "features": ["f00", "f01", "f02"], "target": "future", "lookback": 10}
    metrics, _ = run_fold(tmp_path, make_params(data | {"horizon": 2}, num_epochs=1, learning_rate=3e-3))
    print(metrics)
    assert metrics["num_dates"] > 80
    assert abs(metrics["rank_ic"]) < 3 * metrics["rank_ic_sd"] / metrics["num_dates"] ** 0.5


def test_the_reported_figures_are_those_of_the_saved_scores_on_test_dates_alone(planted):
    _, metrics, context, tmp_path = planted
    scores = feather.read_table(tmp_path / "job" / "scores.feather")
    assert scores.column_names == ["date", "code", "score", "target"]
    dates, ic = rank_ic_by_date(*(scores.column(name).to_numpy() for name in ("date", "score", "target")))
    assert set(dates) == set(context.panel.dates[context.test_dates])
    assert metrics["rank_ic"] == pytest.approx(np.nanmean(ic))
    first = scores.slice(0, 1).to_pylist()[0]
    date = np.flatnonzero(context.panel.dates == np.datetime64(first["date"]))[0]
    asset = context.panel.assets.index(first["code"])
    assert context.panel.targets[date, asset, 0] == np.float32(first["target"])


def test_the_scores_are_those_of_the_last_epoch_and_not_of_the_best(tmp_path, monkeypatch):
    falling = iter([0.5, 0.9, 0.2, 0.2])  # the first is the preflight's
    monkeypatch.setattr(job, "_rank_ic", lambda scores: summarize_ic([next(falling)]))
    _, context = run_fold(tmp_path, make_params(num_epochs=2))
    saved = {name: load_checkpoint(context.checkpoint_dir / name) for name in ("best_model.pt", "latest_checkpoint.pt")}
    assert [state["epoch"] for state in saved.values()] == [1, 2]
    batch = next(iter(job.DateBatches(context.panel, context.test_dates, lookback=10, target="target")))
    scores = feather.read_table(tmp_path / "job" / "scores.feather").column("score").to_numpy()
    same = []
    for state in saved.values():
        model = PatchRanker(num_features=3, lookback=10, **MODEL).eval()
        model.load_state_dict(state["model"])
        with torch.no_grad():
            expected = model(torch.from_numpy(batch.windows)).numpy()
        same.append(np.array_equal(scores[: len(expected)], expected))
    assert same == [False, True]


def test_a_fold_run_again_trains_nothing_and_reports_the_same(planted):
    params, metrics, context, tmp_path = planted
    before = (tmp_path / "job" / "scores.feather").read_bytes()
    saved = (context.checkpoint_dir / "latest_checkpoint.pt").stat().st_mtime_ns
    assert RANKER.train_fold(context, params) == metrics
    assert (tmp_path / "job" / "scores.feather").read_bytes() == before
    assert (context.checkpoint_dir / "latest_checkpoint.pt").stat().st_mtime_ns == saved


def test_folds_are_purged_by_the_horizon_and_every_usable_date_is_tested_once(planted):
    params, _, _, tmp_path = planted
    prepared = RANKER.prepare(PrepareContext(tmp_path / "panels"), params)
    assert prepared.panel.reused
    for train, test in prepared.splits:
        gaps = np.abs(train[:, None] - test[None, :])
        assert gaps.min() > GENERATED["horizon"]
    tested = np.concatenate([test for _, test in prepared.splits])
    # 280 dates: the first 9 have no whole window of 10, the last 2 no target yet
    assert tested.tolist() == list(range(9, 278))


def test_features_are_scaled_by_training_dates_alone(planted):
    _, _, context, _ = planted
    mean, sd = job._scale(context.panel, context.train_dates)
    values = context.panel.values[context.train_dates].reshape(-1, 3).astype(np.float64)
    assert mean == pytest.approx(np.nanmean(values, axis=0), abs=1e-5)
    assert sd == pytest.approx(np.nanstd(values, axis=0), abs=1e-5)
    saved = load_checkpoint(context.checkpoint_dir / "latest_checkpoint.pt")["model"]
    assert np.array_equal(saved["scale.mean_F"].numpy(), mean)
    assert np.array_equal(saved["scale.sd_F"].numpy(), sd)


def test_a_feature_that_never_changes_is_not_divided_by_zero(tmp_path):
    rows = {"date": ["2024-01-02"] * 2, "code": ["A", "B"], "x": [3.0, 3.0], "y": [1.0, None]}
    panel = Panel.build(pa.table(rows), tmp_path, features=["x", "y"])
    mean, sd = job._scale(panel, np.array([0]))
    assert (mean.tolist(), sd.tolist()) == ([3.0, 1.0], [1.0, 1.0])


def test_listnet_is_the_cross_entropy_of_being_first():
    scores, targets = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 4.0, 1.0])
    standard = (targets - 2) / 1.5**0.5
    wanted = -sum(p * np.log(q) for p, q in zip(softmax(standard), softmax(scores), strict=True))
    loss, weight = listnet_loss(scores, targets)
    assert (loss.item(), weight.item()) == (pytest.approx(wanted, rel=1e-5), 1.0)


def softmax(values):
    odds = np.exp(values.numpy().astype(np.float64))
    return odds / odds.sum()


def test_listnet_sees_neither_the_level_nor_the_scale_of_a_days_returns():
    scores, targets = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    assert torch.allclose(listnet_loss(scores, targets)[0], listnet_loss(scores, 0.01 * targets + 5)[0])


def test_equal_targets_pull_all_scores_together_and_give_a_finite_gradient():
    scores = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    listnet_loss(scores, torch.full((3,), 0.02))[0].backward()
    assert scores.grad[0] > 0 > scores.grad[2]
    assert torch.isfinite(scores.grad).all()


def test_the_gradient_of_listnet_is_right():
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: listnet_loss(s, targets)[0], (scores,))


def test_an_asset_is_scored_alone_and_by_its_whole_window():
    torch.manual_seed(0)
    model = PatchRanker(num_features=3, lookback=10, **MODEL).eval()
    x = torch.randn(6, 10, 3)
    with torch.no_grad():
        together = model(x)
        assert torch.allclose(model(x[2:3]), together[2:3], atol=1e-6)
        for date in range(10):
            changed = x.clone()
            changed[0, date, 1] += 1
            assert model(changed)[0] != together[0]


def test_a_generated_market_is_written_once_per_set_of_parameters(tmp_path):
    RANKER.prepare(PrepareContext(tmp_path), make_params())
    (path,) = (tmp_path / "markets").iterdir()
    before = path.stat().st_mtime_ns
    RANKER.prepare(PrepareContext(tmp_path), make_params())
    assert path.stat().st_mtime_ns == before
    RANKER.prepare(PrepareContext(tmp_path), make_params(GENERATED | {"market_seed": 1}))
    assert len(list((tmp_path / "markets").iterdir())) == 2


def test_the_fingerprint_follows_the_content_of_the_data(tmp_path):
    path = tmp_path / "mine.parquet"
    data = {"source": "parquet", "path": path, "features": ["x"], "target": "y"}
    params = make_params(data | {"lookback": 10})
    with pytest.raises(DataError, match=r"mine\.parquet is not there"):
        RANKER.fingerprint(params)
    pq.write_table(pa.table({"x": [1.0]}), path)
    first = RANKER.fingerprint(params)
    assert RANKER.fingerprint(params) == first
    pq.write_table(pa.table({"x": [2.0]}), path)
    assert RANKER.fingerprint(params) != first
    folder = make_params(data | {"lookback": 10, "path": tmp_path})
    assert RANKER.fingerprint(folder) == RANKER.fingerprint(params)
    pq.write_table(pa.table({"x": [3.0]}), tmp_path / "more.parquet")
    assert RANKER.fingerprint(folder) != RANKER.fingerprint(params)
    seeds = {RANKER.fingerprint(make_params(GENERATED | {"market_seed": seed})) for seed in (0, 1)}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": {"source": "generated", "start": "2015-01-01"}}, "start belongs to source: prices"),
        ({"data": {"num_assets": 7}}, "num_assets belongs to source: generated, and source is prices"),
        ({"data": {"source": "parquet"}}, "needs path, features and target"),
        ({"data": {"lookback": 25}}, r"data.lookback \(25\) must be a multiple of model.patch_size \(10\)"),
        ({"model": {"num_heads": 5}}, r"model.width \(32\) must be a multiple of model.num_heads \(5\)"),
        ({"data": {"lokback": 20}}, "lokback"),
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(change, text):
    with pytest.raises(ValidationError, match=text):
        RankerParams.model_validate(change)


def test_resolved_parameters_are_valid_parameters_of_their_own():
    params = make_params()
    assert RankerParams.model_validate(params.model_dump(mode="json")) == params


def test_a_market_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="num_dates=3"):
        RANKER.prepare(PrepareContext(tmp_path), make_params(GENERATED | {"num_dates": 3, "horizon": 5}))


def test_the_shipped_config_is_valid_and_names_this_workload():
    file = Path(str(resources.files("memfit_workloads.ranker"))) / "config.yaml"
    settings = config.resolve(RunConfig, file=file, env={}).value
    assert settings.target == "memfit_workloads.ranker.job:RANKER"
    params = RankerParams.model_validate(settings.params)
    assert (params.data.source, params.splits.n_splits) == ("prices", 5)


def test_the_readmes_sample_config_is_valid():
    text = (Path(job.__file__).parent / "README.md").read_text()
    sample = text.split("```yaml\n")[1].split("```")[0]
    settings = config.resolve(RunConfig, values=yaml.safe_load(sample), env={}).value
    params = RankerParams.model_validate(settings.params)
    assert (params.data.source, params.data.horizon) == ("parquet", 20)


def test_the_demo_config_takes_a_generated_market_by_one_setting():
    file = Path(job.__file__).parent / "config.yaml"
    settings = config.resolve(RunConfig, file=file, env={}, overrides=["params.data.source=generated"])
    assert config.resolve_nested(settings, "params", RankerParams).value.data.source == "generated"


def test_real_prices_become_a_panel_whose_last_dates_are_in_no_fold(tmp_path):
    params = RankerParams(data={"source": "prices", "start": "2021-01-01", "end": "2021-12-31"})
    prepared = RANKER.prepare(PrepareContext(tmp_path), params)
    assert prepared.panel.shape == (252, 20, 5)
    tested = np.sort(np.concatenate([test for _, test in prepared.splits]))
    assert tested.tolist() == list(range(39, 252 - 5))


def test_preparing_a_run_loads_no_torch():
    code = "import sys, memfit_workloads.ranker.job; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    assert Path(job.__file__).name == "job.py"
