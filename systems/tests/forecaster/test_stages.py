"""The forecaster's stages: settings, training, pre-training, evaluation, and a run that is killed."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import kills
from memfit import config
from memfit.config import Settings
from memfit.errors import ConfigError
from memfit.pipeline import RunConfig, describe
from memfit.training import load_checkpoint
from memfit.tuning import TuneSettings
from memfit_workloads import finance
from memfit_workloads.forecaster import stages
from memfit_workloads.forecaster.params import ForecasterParams
from memfit_workloads.forecaster.stages import FORECASTER
from stages_here import StagesHere

TARGET = "memfit_workloads.forecaster.stages:FORECASTER"
FOLDER = Path(stages.__file__).parent
DATA = {"source": "generated", "num_dates": 240, "num_assets": 24, "num_features": 2, "lookback": 6,
        "information_coefficient": 0.5, "horizons": [1, 4], "main_horizon": 4, "turnover": 0.2}  # fmt: skip
SMALL = {
    "data": DATA,
    "splits": {"n_splits": 2, "embargo_size": 2},
    "graph": {"neighbours": 3, "window": 20},
    "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.0},
    "train": {"num_epochs": 4, "batch_size": 240, "learning_rate": 0.01, "device": "cpu"},
}
#: A setting of each source, splits and so on, and another value for it; what it needs beside it is in `WITH`.
CHANGED = {
    "data.source": "generated", "data.lookback": 7, "data.horizons": [5, 10], "data.main_horizon": 10,
    "data.start": "2013-01-01", "data.end": "2020-12-31", "data.num_dates": 900, "data.num_assets": 50,
    "data.num_features": 3, "data.information_coefficient": 0.2, "data.turnover": 0.3, "data.market_seed": 1,
    "data.path": "other.parquet", "data.features": ["y"], "data.targets": {1: "a", 5: "b", 10: "c", 20: "e"},
    "data.columns.date": "Date", "data.columns.asset": "Code",
    "data.close": "price", "data.volume": "shares", "data.sector": "kind",
    "splits.n_splits": 4, "splits.embargo_size": 6,
    "graph.neighbours": 4, "graph.window": 50, "graph.sectors": False,
    "model.hidden_size": 128, "model.num_layers": 3, "model.num_heads": 8, "model.dropout": 0.2,
    "pretrain.num_epochs": 2, "pretrain.learning_rate": 0.01,
    "train.num_epochs": 5, "train.batch_size": 1024, "train.optimizer": "adabelief", "train.schedule": "constant",
    "train.learning_rate": 0.01, "train.weight_decay": 0.1, "train.floor_share": 0.1, "train.cycles": 3,
    "train.warmup_share": 0.2, "train.horizon_weights": {5: 2.0}, "train.rank_weight": 0.2,
    "train.regime_strength": 0.5, "train.max_grad_norm": 2.0,
    "train.precision": "float32", "train.device": "cpu", "train.microbatch_size": 8, "train.num_workers": 2,
    "train.valid_share": 0.2,
}  # fmt: skip
PARQUET = {"source": "parquet", "path": "mine.parquet", "features": ["x"],
           "targets": {1: "a", 5: "b", 10: "c", 20: "d"}}  # fmt: skip
OF_GENERATED = ("num_dates", "num_assets", "num_features", "information_coefficient", "turnover", "market_seed")
OF_PARQUET = ("path", "columns", "features", "targets", "close", "volume", "sector")
WITH = {
    **{name: {"data": {"source": "generated"}} for name in OF_GENERATED},
    **{name: {"data": {**PARQUET, "close": "c"}} for name in OF_PARQUET},
    "main_horizon": {"data": {"horizons": [5, 10]}},
    "cycles": {"train": {"schedule": "warm_restarts"}},
    "learning_rate": {"pretrain": {"num_epochs": 1}},
}  # fmt: skip


def leaves(model, prefix=""):
    for name, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
        yield from leaves(field.annotation, f"{prefix}{name}.") if nested else [prefix + name]


def merged(*parts):
    found = {}
    for part in parts:
        for section, values in part.items():
            found[section] = found.get(section, {}) | values
    return found


def settings_of(params):
    whole = config.resolve(RunConfig, values={"experiment": "here", "target": TARGET, "params": params}, env={})
    return {one["name"]: one["settings"] for one in describe(TARGET, whole.to_json())["stages"]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    days = np.arange("2015-01-01", "2016-01-01", dtype="datetime64[D]")
    rows = {name: np.repeat(days, 2) for name in ("date", "Date")}
    rows |= {name: ["A", "B"] * len(days) for name in ("code", "Code", "kind")}
    rows |= {name: np.arange(2.0 * len(days)) for name in ("x", "y", "a", "b", "c", "d", "e", "price", "shares")}
    for name in ("mine", "other"):
        pq.write_table(pa.table(rows), f"{name}.parquet")


def test_what_a_config_cannot_train_with_is_refused_before_the_first_job_by_the_names_of_its_settings(files):
    def refused(why, **params):
        with pytest.raises(ConfigError, match=why) as caught:
            settings_of(merged(SMALL, params))
        assert "--set params." in caught.value.remedy, caught.value
        return caught.value.remedy

    cycles = {"schedule": "warm_restarts", "cycles": 5, "num_epochs": 2}
    assert "--set params.train.cycles=3" in refused("5 cycles take 62 steps at least, and the run has 17", train=cycles)
    settings_of(merged(SMALL, {"train": cycles | {"num_epochs": 40}}))
    assert "params.splits.n_splits" in refused("cannot be cut into 300 test blocks", splits={"n_splits": 300})
    assert "params.train.valid_share" in refused("none is left to fit on", train={"valid_share": 0.99})
    with pytest.raises(ConfigError, match="0 columns named 'Sector'") as caught:
        settings_of({"data": PARQUET | {"sector": "Sector"}})
    assert "--set params.data.sector" in caught.value.remedy


def test_every_setting_has_a_changed_value_here():
    assert set(CHANGED) | {"model.target", "model.params"} == set(leaves(ForecasterParams))  # test_own.py has these


@pytest.mark.proves("S2-31")
@pytest.mark.long
@pytest.mark.slow
def test_every_setting_changes_what_a_stage_is_keyed_by(files):
    before = {}
    for name, value in CHANGED.items():
        section, leaf, *below = name.split(".")
        base = WITH.get(leaf, {})
        if repr(base) not in before:
            before[repr(base)] = settings_of(base)
        after = settings_of(merged(base, {section: {leaf: {below[0]: value} if below else value}}))
        assert before[repr(base)] != after, name


@pytest.mark.proves("S2-02", "S2-14")
@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"model": {"hidden_size": 30, "num_heads": 4}}, "must be a multiple of model.num_heads"),
        ({"model": {"hidden_size": 9, "num_heads": 3}}, "must be even"),
        ({"model": {"num_layers": 7}}, "less than or equal to 6"),
        ({"train": {"optimizer": "adabelif"}}, "'adamw' or 'adabelief'"),
        ({"model": {"dropout": 1.0}}, "less than 1"),
        ({"train": {"cycles": 3}}, "cycles belongs to schedule: warm_restarts"),
        ({"train": {"schedule": "cosine_restart"}}, "'constant', 'cosine' or 'warm_restarts'"),
        ({"train": {"rank_weight": float("nan")}}, "greater than or equal to 0"),
        ({"train": {"floor_share": 1.0}}, "less than 1"),
        ({"train": {"horizon_weights": {3: 1.0}}}, r"names \[3\], and data.horizons are"),
        ({"train": {"horizon_weights": {1: 0, 5: 0, 10: 0, 20: 0}}}, "gives every horizon the weight 0"),
        ({"train": {"microbatch_size": 0}}, "greater than or equal to 1"),
        ({"data": {"sector": "kind"}}, "sector belongs to source: parquet, and source is prices"),
        ({"train": {"lr": 0.1}}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_starts(params, why):
    with pytest.raises(ValidationError, match=why):
        ForecasterParams.model_validate(params)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    here = StagesHere(tmp_path_factory.mktemp("trained"), FORECASTER, ForecasterParams.model_validate(SMALL))
    return here, [here.run("fold", fold) for fold in (1, 2)], here.run("evaluate")


@pytest.mark.slow
def test_a_planted_signal_is_found_and_the_figures_are_those_of_the_saved_scores(trained):
    here, folds, evaluated = trained
    for fold in folds:
        scores = finance.read_scores(fold.table("scores"))
        dates, found = scores.dates, finance.rank_ic(scores.of("score_h4"), scores.of("target_h4"))
        splits, panel = fold_dates(here, fold)
        assert set(dates) == set(panel.dates[splits])
        result = fold.result
        assert result["rank_ic"] == result["h4_rank_ic"] == pytest.approx(np.nanmean(found))
        assert result["rank_ic"] > 5 * result["rank_ic_sd"] / math.sqrt(result["num_dates"] / 4)
        assert (
            result["valid_rank_ic"] > 0.1
            and result["ic"] > 0.1
            and result["sharpe"] > 1
            and 1 <= result["best_epoch"] <= 4
        )
    result = evaluated.result
    assert result["rank_ic"] == pytest.approx(np.mean([fold.result["rank_ic"] for fold in folds]), abs=0.02)
    assert result["rank_ic_num_dates"] == sum(fold.result["num_dates"] for fold in folds)
    assert 0 < result["h1_rank_ic_se"] < result["h1_rank_ic"]
    assert len(result["report"]) == 3
    assert {name.removeprefix("evaluate.") for name in config.read_file(FOLDER / "targets.yaml")} <= result.keys()


def fold_dates(here, fold):
    prepared = here.context("evaluate")["prepare"]
    return prepared.arrays("splits")[f"test_{fold.unit['fold']}"], prepared.panel()


@pytest.mark.proves("S2-44")
@pytest.mark.slow
def test_an_encoder_that_was_pretrained_starts_a_folds_training(tmp_path, monkeypatch):
    params = ForecasterParams.model_validate(merged(SMALL, {"pretrain": {"num_epochs": 4}, "train": {"num_epochs": 1}}))
    here = StagesHere(tmp_path, FORECASTER, params)
    cold = stages._started_model(*parts(StagesHere(tmp_path / "cold", FORECASTER, without(params))))
    pretrained = here.run("pretrain", 1)
    seen = []
    fitted = stages.DayBatches

    def watched(prepared, dates, params, scale, **options):
        seen.extend(dates.tolist())
        return fitted(prepared, dates, params, scale, **options)

    monkeypatch.setattr(stages, "DayBatches", watched)
    again = here.run("pretrain", 1)
    assert again.result == pretrained.result and again.result["valid_loss"] < 1.5
    assert set(seen) <= set(here.context("fold", 1)["prepare"].arrays("splits")["train_1"].tolist())
    monkeypatch.setattr(stages, "DayBatches", fitted)

    warm = stages._started_model(*parts(here))
    encoder = load_checkpoint(pretrained.path("latest"))["model"]
    for name, value in warm.state_dict().items():
        if name.startswith("heads."):
            assert torch.equal(value, cold.state_dict()[name])
        else:
            assert torch.equal(value, encoder[f"forecaster.{name}"])
    assert not torch.equal(warm.trunk.query.weight, cold.trunk.query.weight)
    assert here.run("fold", 1).result["num_epochs"] == 1


def parts(here):
    context = here.context("fold", 1)
    return context, here.params


def without(params):
    return params.model_copy(update={"pretrain": params.pretrain.model_copy(update={"num_epochs": 0})})


@pytest.mark.proves("S2-41")
def test_the_least_memory_of_a_job_grows_with_what_takes_it():
    def least(**changed):
        return FORECASTER.stage("fold").probe.memory(ForecasterParams.model_validate(merged(SMALL, changed)))

    small = least()
    assert 150 << 20 < small < 300 << 20
    for changed in (
        {"train": {"batch_size": 100_000}},
        {"model": {"hidden_size": 1024}},
        {"model": {"num_layers": 6, "hidden_size": 256}},
        {"data": {"num_assets": 20_000}},
    ):
        assert least(**changed) > small
    whole, cut = (least(train={"batch_size": 100_000, "microbatch_size": size}) for size in (None, 10))
    assert cut < whole


@pytest.mark.parametrize("name", ["baseline", "config", "report2"])
def test_the_shipped_configs_hold_known_settings_and_every_corner_of_their_searches_is_valid(name):
    given = config.resolve(RunConfig, file=FOLDER / f"{name}.yaml", env={}).value
    params = ForecasterParams.model_validate_json(json.dumps(given.params, default=str))
    if name == "baseline":
        assert (params.train.learning_rate, params.train.batch_size, params.train.optimizer) == (5.61e-5, 512, "adamw")
        assert (params.model.hidden_size, params.model.dropout, params.model.num_layers) == (384, 0.312, 2)
        return
    searched = TuneSettings.model_validate(given.tune).space
    for values in itertools.product(*(one.choices or (one.low, one.high) for one in searched)):
        plain = params.model_dump(mode="json")
        for one, value in zip(searched, values, strict=True):
            _, section, leaf = one.name.split(".")
            plain[section][leaf] = value
        ForecasterParams.model_validate_json(json.dumps(plain))


KILLED = merged(
    SMALL, {"pretrain": {"num_epochs": 1}, "train": {"num_epochs": 2, "num_workers": 1, "regime_strength": 0.3}}
)


@pytest.mark.proves("S2-13", "S2-34")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_forecaster_killed_in_an_epoch_leaves_what_its_stages_leave_here(tmp_path, one_thread):
    here = StagesHere(tmp_path / "here", FORECASTER, ForecasterParams.model_validate(KILLED), seed=7)
    for fold in (1, 2):
        here.run("pretrain", fold)
        here.run("fold", fold)
    here.run("evaluate")
    content = {"experiment": "forecaster", "target": TARGET, "seed": 7, "params": KILLED}
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    killed = kills.run(tmp_path, kill_at=[kills.epoch("fold_2", 1)])
    left = kills.numbers_in(here.run_dir)
    assert kills.numbers_in(killed.path) == left
    assert {"pretrain_1", "fold_2/latest", "stage_evaluate"} < set(left)
    expected = Counter((f"{stage}_{fold}", epoch) for stage, last in (("pretrain", 1), ("fold", 2))
                       for fold in (1, 2) for epoch in range(1, last + 1))  # fmt: skip
    assert kills.epochs(killed) == expected
    (started, *_) = [one for one in killed.events() if one["kind"] == "trainer" and one["job"] == "fold_1"]
    assert "AdamW(" in started["optimizer"] and "rank_weight=0.1" in started["loss"]
    assert (started["num_threads"], started["num_workers"]) == (1, 1)
    epochs = [one for one in killed.events() if one["kind"] == "epoch" and one["job"] == "fold_1"]
    assert all({"valid_rank_ic", "memory"} <= set(one) for one in epochs)
    # One that goes on after an epoch's last step has trained nothing in it.
    assert any({"samples_per_second", "wait_share"} <= set(one) for one in epochs)
