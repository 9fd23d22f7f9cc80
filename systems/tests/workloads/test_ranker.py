"""The ranker's training: it finds a signal that is there and none that is not, on dates that it never looked at."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from memfit.data import Panel
from memfit.pipeline import Output
from memfit.training import CheckpointWarning, load_checkpoint
from memfit_workloads import finance, folds
from memfit_workloads.finance.generated import Market
from memfit_workloads.finance.panels import hold_out, scale_of
from memfit_workloads.ranker import stages
from memfit_workloads.ranker.model import PatchRanker
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import StagesHere

pytestmark = pytest.mark.slow

MODEL = {"patch_size": 5, "width": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.1}
GENERATED = {
    "source": "generated", "num_dates": 280, "num_assets": 50, "num_features": 3, "information_coefficient": 0.5,
    "horizons": (1, 2, 5), "main_horizon": 2, "lookback": 10,
}  # fmt: skip
SMALL = GENERATED | {"num_dates": 110, "num_assets": 10, "num_features": 2, "horizons": (1, 2)}
FAST = {"dates_per_batch": 2, "learning_rate": 3e-3, "device": "cpu"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in a fold; two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_params(data=GENERATED, splits=(("n_splits", 3), ("embargo_size", 2)), **train):
    return RankerParams(data=data, splits=dict(splits), model=MODEL, train=FAST | train)


class Fold(folds.Fold):
    """A fold's training as a job does it, here."""

    def __init__(self, tmp_path, params, fold=1, *, previous=None, folder=None):
        self.here, self.params = StagesHere(tmp_path, RANKER, params), params
        self.context = self.here.context("fold", fold, folder=folder)
        self.context.previous = previous
        self.dir = self.context.dir
        super().__init__(self.context, params)
        self.train_dates = finance.fold_of(self.context)[1]

    def train(self):
        return dict(self.here.run("fold", context=self.context).result)

    @property
    def scores(self):
        return Output(self.dir.with_suffix(".json")).table("scores")

    def scored_by(self, name, dates=None, params=None):
        dates = self.test_dates if dates is None else dates
        return stages.score(self.panel, dates, self.dir / name, params or self.params)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A fold of a market with a strong planted signal."""
    fold = Fold(tmp_path_factory.mktemp("planted"), make_params(num_epochs=4, ema_epochs=(3, 4)))
    return fold.params, fold.train(), fold


def test_a_planted_signal_is_found_at_every_horizon(planted):
    params, metrics, _ = planted
    market = Market(280, 50, 3, 0.5, horizon=2, horizons=(1, 2, 5))
    planted_ic = {horizon: market.rank_ic(horizon) for horizon in params.data.horizons}
    print(metrics, planted_ic)
    assert metrics["num_dates"] > 80
    for horizon in params.data.horizons:
        assert metrics[f"h{horizon}_rank_ic"] > 0.75 * planted_ic[horizon]
        assert metrics[f"h{horizon}_delta_p_at_k_pos"] > 0.1
    standard_error = metrics["rank_ic_sd"] / (metrics["num_dates"] / 2) ** 0.5  # labels of 2 dates overlap
    assert metrics["rank_ic"] == metrics["h2_rank_ic"] > 5 * standard_error
    assert metrics["icir"] == pytest.approx(metrics["rank_ic"] / metrics["rank_ic_sd"])


def test_the_reported_figures_are_those_of_the_saved_scores_on_test_dates_alone(planted):
    _, metrics, fold = planted
    scores = fold.scores
    names = [f"{what}_h{horizon}" for what in ("score", "target") for horizon in (1, 2, 5)]
    assert scores.column_names == ["date", "code", *names]
    read = finance.read_scores(scores)
    assert set(read.dates) == set(fold.panel.dates[fold.test_dates])
    for horizon in (1, 2, 5):
        ic = finance.rank_ic(read.of(f"score_h{horizon}"), read.of(f"target_h{horizon}"))
        assert metrics[f"h{horizon}_rank_ic"] == pytest.approx(np.nanmean(ic))
    first = scores.slice(0, 1).to_pylist()[0]
    date = np.flatnonzero(fold.panel.dates == np.datetime64(first["date"]))[0]
    asset = fold.panel.assets.index(first["code"])
    assert fold.panel.target("target_h5")[date, asset] == np.float32(first["target_h5"])


def test_a_checkpoint_scores_any_dates_and_the_test_dates_as_the_fold_did(planted):
    _, _, fold = planted
    assert fold.scored_by("latest").equals(fold.scores)
    average = fold.scored_by("ema_epoch_4.pt")
    assert average.select(["date", "code", "target_h1"]).equals(fold.scores.select(["date", "code", "target_h1"]))
    assert not average.equals(fold.scores)
    newest = fold.scored_by("latest", np.array([278, 279]))
    assert (
        newest.column("target_h1").null_count
        == newest.num_rows
        - newest.filter(pa.compute.equal(newest.column("date"), pa.scalar(fold.panel.dates[278].item()))).num_rows
    )
    assert newest.column("score_h5").null_count == 0 < newest.num_rows
    assert newest.column("target_h5").null_count == newest.num_rows


def test_checkpoints_say_where_they_belong_and_the_step_size_has_come_down(planted):
    params, metrics, fold = planted
    for name in ("latest", "ema_epoch_3.pt", "best"):
        found = finance.read_provenance(fold.dir / name)
        assert (found.fold, found.panel, found.label_dates) == (1, fold.panel.fingerprint, 5)
        assert found.params["train"]["num_epochs"] == 4 and "gate" not in found.params
    (group,) = load_checkpoint(fold.dir / "latest")["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(params.train.learning_rate * params.train.floor_share, rel=0.01)
    assert (metrics["num_epochs"], metrics["num_snapshots"]) == (4, 2)
    assert "warm_start" not in metrics


def test_a_fold_run_again_trains_nothing_and_reports_the_same(planted):
    _, metrics, fold = planted
    before = (fold.dir / "scores.feather").read_bytes()
    saved = (fold.dir / "latest").stat().st_mtime_ns
    assert fold.train() == metrics
    assert (fold.dir / "scores.feather").read_bytes() == before
    assert (fold.dir / "latest").stat().st_mtime_ns == saved


def test_what_is_fitted_and_validated_is_of_the_training_dates_and_apart(tmp_path, monkeypatch):
    seen, made = {}, stages.ListBatches

    def watched(panel, dates, params, **options):
        seen[("fit", "valid", "test")[len(seen)]] = set(dates.tolist())
        return made(panel, dates, params, **options)

    monkeypatch.setattr(stages, "ListBatches", watched)
    params = make_params(SMALL, num_epochs=1, valid_share=0.2)
    fold = Fold(tmp_path, params, 2)
    fold.train()
    assert seen["test"] == set(fold.test_dates.tolist())
    assert seen["fit"] | seen["valid"] <= set(fold.train_dates.tolist())
    assert max(seen["fit"]) + 2 < min(seen["valid"])
    for part in ("fit", "valid"):
        assert min(abs(one - other) for one in seen[part] for other in seen["test"]) > 2
    fit_dates, _ = hold_out(fold.train_dates, 0.2, 2)
    mean, sd = scale_of(fold.panel, fit_dates)
    values = fold.panel.values[fit_dates].reshape(-1, 2).astype(np.float64)
    assert mean == pytest.approx(np.nanmean(values, axis=0), abs=1e-5)
    assert sd == pytest.approx(np.nanstd(values, axis=0), abs=1e-5)
    saved = load_checkpoint(fold.dir / "latest")["model"]
    assert np.array_equal(saved["scale_mean_F"].numpy(), mean)
    assert np.array_equal(saved["scale_sd_F"].numpy(), sd)


def test_an_early_stop_is_on_validation_and_reports_the_snapshots_that_are_missing(tmp_path, monkeypatch):
    falling = iter([0.9, 0.2, 0.1])
    monkeypatch.setattr(stages, "validation_metrics", lambda scores, params: {"valid_lift": next(falling)})
    params = make_params(SMALL, num_epochs=6, patience=2, ema_epochs=(2, 5))
    fold = Fold(tmp_path, params)
    with pytest.warns(CheckpointWarning, match=r"at epochs \[5\]"):
        metrics = fold.train()
    assert (metrics["num_epochs"], metrics["num_snapshots"]) == (3, 1)
    assert [path.name for path in fold.dir.glob("ema_epoch_*")] == ["ema_epoch_2.pt"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_fold_takes_the_gpu_where_there_is_one(tmp_path):
    params = make_params(SMALL, num_epochs=1, device="auto")
    fold = Fold(tmp_path, params)
    assert next(stages._started_model(fold.context, params, fold).parameters()).is_cuda
    fold.train()
    assert load_checkpoint(fold.dir / "latest")["identity"]["precision"] is not None
    assert fold.scored_by("latest").num_rows == fold.scores.num_rows


@pytest.mark.proves("S0-45", "C-48")
def test_a_warm_start_begins_with_the_weights_of_the_fold_before_and_says_so(tmp_path):
    splits = {"kind": "walk_forward", "n_splits": 3, "embargo_size": 1, "warm_start": True}
    params = make_params(SMALL, splits, num_epochs=1, valid_share=0)
    first = Fold(tmp_path, params)
    assert first.train()["warm_start"] == 1
    second = Fold(tmp_path, params, 2, previous=Output(first.here.manifest("fold", 1)))
    assert set(first.train_dates) < set(second.train_dates)
    trained = load_checkpoint(first.dir / "latest")["model"]
    warm = stages._started_model(second.context, params, second).state_dict()
    assert all(torch.equal(warm[name], trained[name]) for name in trained)
    second.context.previous = None
    cold = stages._started_model(second.context, params, second).state_dict()
    assert not torch.equal(cold["heads.weight"], trained["heads.weight"])


def test_a_feature_that_never_changes_is_not_divided_by_zero(tmp_path):
    rows = {"date": ["2024-01-02"] * 2, "code": ["A", "B"], "x": [3.0, 3.0], "y": [1.0, None]}
    panel = Panel.build(pa.table(rows), tmp_path, features=["x", "y"])
    mean, sd = scale_of(panel, np.array([0]))
    assert (mean.tolist(), sd.tolist()) == ([3.0, 1.0], [1.0, 1.0])


def test_an_asset_is_scored_alone_and_by_its_whole_window_with_a_head_for_each_horizon():
    torch.manual_seed(0)
    model = PatchRanker(num_features=3, lookback=10, num_horizons=2, **MODEL).eval()
    x = torch.randn(6, 10, 3)
    with torch.no_grad():
        together = model(x)
        assert together.shape == (6, 2)
        assert not torch.allclose(together[:, 0], together[:, 1])
        assert torch.allclose(model(x[2:3]), together[2:3], atol=1e-6)
        for date in range(10):
            changed = x.clone()
            changed[0, date, 1] += 1
            assert (model(changed)[0] != together[0]).all()
