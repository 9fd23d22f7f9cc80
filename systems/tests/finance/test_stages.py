"""The stages that judge: dates that no model saw, gates that stop, a decision, and what runs again after a change."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from pyarrow import feather
from pydantic import ValidationError

from memfit.errors import ConfigError, UsageError
from memfit.pipeline import Output, run
from memfit_workloads import finance
from memfit_workloads.finance import decide_on, rank_ic, read_scores
from stages_here import digest_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings(here, **changes):
    """The same run under other settings."""
    here.params = type(here.params).model_validate(here.params.model_dump() | changes)
    return here


@pytest.fixture
def judging(blended, stages, tmp_path):
    """A copy of the run whose folds are blended, to be judged under settings."""
    shutil.copytree(blended.run_dir, tmp_path / "runs" / "here" / "run_1")
    return lambda **changes: settings(stages(tmp_path), **changes)


@pytest.fixture(scope="module")
def judged(blended, tmp_path_factory):
    """What the stages after the blends left, and the folder of the user's state."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        found = {name: blended.run(name) for name in ("health", "backtest", "decision")}
    return found | {"here": blended, "state": state}


def text(output):
    """What a run prints of a stage, on one line."""
    assert all("\n" not in line for line in output.result["report"])
    return " ".join(" ".join(output.result["report"]).split())


@pytest.mark.proves("S0-35")
def test_a_perfect_memory_of_the_training_dates_earns_nothing_out_of_fold(judged, memoriser):
    found, here = judged["backtest"], judged["here"]
    ic = found.result["metrics"]["h5_rank_ic"]
    assert abs(ic["mean"]) < 3 * ic["standard_error"]
    decision = judged["decision"].result
    assert (decision["a"], decision["metric"], decision["num_comparisons"]) == ("here/run_1", "h5_rank_ic", 1)
    assert "decision: no difference shown (h5_rank_ic," in text(judged["decision"])
    table, days = found.table("scores"), found.table("days")
    assert len(table) == 155 * 30 and len(set(table["date"].to_pylist())) == 155
    assert set(table["fold"].to_pylist()) == {1, 2, 3, 4}
    assert days.num_rows == 155
    assert {"fold", "date", "h5_delta_p_at_k_pos"} <= set(days.column_names)

    # On the dates that they were trained on the same models know everything.
    panel, model = Output(here.manifest("prepare")).panel(), Output(here.manifest("blend", 1)).path("blended")
    seen = np.flatnonzero(~finance.read_provenance(model).scorable(panel))[30:100]
    scores = read_scores(memoriser.score(panel, seen, model, here.params))
    assert np.nanmean(rank_ic(scores.of("score_h5"), scores.of("target_h5"))) > 0.9


def test_a_comparison_after_the_run_counts_the_run_s_own_decision(judged, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(judged["state"]))
    days = judged["backtest"].table("days")
    for number, metric in enumerate(["h5_spread", "h5_delta_p_at_k_pos"], start=2):
        record = finance.record_of(days, "random", metric)
        found = [finance.decide_on_record(days, "random", metric, 5, record=record) for _ in range(2)]
        assert [one.num_comparisons for one in found] == [number, number]


def test_a_decision_that_cannot_be_counted_is_none_and_says_where_to_count_it(judged, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    here = judged["here"]
    found = here.workload.stage("decision").run(here.context("decision"), here.params)
    assert "verdict" not in found and str(tmp_path / "file") in found["no_decision"]
    assert "XDG_STATE_HOME" in found["no_decision"]


def test_days_are_counted_by_the_raw_data_whatever_panel_is_made_of_them(judging):
    here = judging()
    manifest = json.loads(here.manifest("prepare").read_text())
    for data, named in (("digest", "digest"), ("", Output(here.manifest("prepare")).panel().fingerprint)):
        here.manifest("prepare").write_text(json.dumps(manifest | {"parts": {"data": data}}))
        days = here.run("backtest").table("days")
        assert days.schema.metadata[b"memfit_data"].decode() == named


def test_the_metric_that_decides_is_a_setting_and_a_baseline_needs_no_other(judged, tmp_path):
    days = judged["backtest"].table("days")

    def decided(**of_decision):
        return decide_on(days, finance.JudgeSettings(decision=of_decision), name="this")

    assert decided().num_comparisons == 1
    by_spread = decided(metric="h5_spread")
    assert (by_spread.metric, by_spread.num_comparisons) == ("h5_spread", 2)  # the rank IC decided before
    baseline = tmp_path / "days.feather"
    feather.write_feather(days.select(["date", "fold"]).append_column("h5_rank_ic", [[0.5] * len(days)]), str(baseline))
    assert decided(baseline=str(baseline)).verdict == "B better"


def test_a_baseline_is_another_run_and_counts_by_its_content(judged, judging):
    here = judging(decision={"baseline": str(judged["here"].run_dir)})
    before = finance.fingerprint(here.params)
    here.run("backtest")
    (no,) = here.run("decision").result["report"]
    assert "decision: none. A and B have the same h5_rank_ic" in no
    assert before == finance.fingerprint(here.params) != finance.fingerprint(settings(here, decision={}).params)


def test_the_health_check_names_the_blend_what_to_tune_and_the_command(judging):
    output = judging(on_yellow="stop").run("health")
    assert (output.facts["status"], output.facts["exit_code"]) == ("stopped", 10)
    assert output.facts["why"].startswith("the gate is yellow: ")
    assert {knob["name"] for knob in output.result["verdict"]["knobs"]} >= {"k_ratio", "tau"}
    held = [row["mean_held"] for row in output.result["tried"].values()]
    assert held == sorted(held) and held[0] < held[-1]
    told = text(output)
    assert told.startswith("fold 1, the mean of ema_epoch_1.pt, ema_epoch_2.pt")
    assert "gate: yellow" in told and "change k_ratio" in told
    assert judging().run("health").facts["status"] == "completed"


def test_scores_that_are_too_good_on_unseen_dates_are_red(stages, tmp_path):
    here = stages(tmp_path, skill=1.0)
    for name in ("fold", "blend"):
        here.run(name, 1)
    context = here.context("health")
    context.needs = context.needs | {"blend": [Output(here.manifest("blend", 1))]}
    output = here.run("health", context=context)
    assert output.result["metrics"]["h5_rank_ic"]["mean"] > 0.3
    assert (output.facts["status"], output.facts["exit_code"]) == ("stopped", 11)  # too good is as bad as too bad


def test_scores_that_prefer_calm_assets_are_warned_of(stages, tmp_path):
    here = stages(tmp_path, calm=True)
    for name in ("fold", "blend"):
        here.run(name, 1)
    output = here.run("health")
    found = output.result["volatility"]
    assert found["warns"] and -1 < found["mean"] < -0.8
    assert f"mean rank correlation {found['mean']:+.2f} with the volatility of the last 60 dates" in text(output)
    assert finance.read_backtest(output.path("backtest_json"))["volatility"] == found


def test_a_pattern_that_no_checkpoint_matches_is_refused_with_those_that_are_there(judging):
    with pytest.raises(UsageError, match=r"matches 'late_\*.pt'; it saved ema_epoch_1.pt, ema_epoch_2.pt"):
        judging(blend="late_*.pt").run("blend", 1)


def test_without_snapshots_the_newest_weights_are_judged(judging):
    here = judging()
    manifest = here.manifest("fold", 1)
    facts = json.loads(manifest.read_text())
    newest = facts["outputs"][-1] | {"name": "latest", "path": "step-2"}
    (manifest.with_suffix("") / "ema_epoch_2.pt").rename(manifest.with_suffix("") / "step-2")
    made = {"result": facts["result"], "outputs": [newest]}
    manifest.write_text(json.dumps(facts | made | {"digest": digest_of(**made)}))
    assert here.run("blend", 1).result["sources"] == ["latest"]


def test_a_period_leaves_out_the_folds_without_its_dates(judged, judging):
    days = sorted(set(judged["backtest"].table("days")["date"].to_pylist()))
    here = judging(start_date=days[90])
    assert text(here.run("health")) == f"gate: not asked. Fold 1 has no date from {days[90]} to the last."
    found = here.run("backtest")
    written = finance.read_backtest(found.path("backtest_json"))
    assert [one["fold"] for one in written["folds"]] == [3, 4]
    assert found.result["summary"]["start"] == str(days[90])
    with pytest.raises(UsageError, match="no fold tests a date from 2031-01-01"):
        judging(start_date="2031-01-01").run("health")


def test_too_few_dates_for_a_decision_leave_the_rest_standing(judged, judging):
    days = sorted(set(judged["backtest"].table("days")["date"].to_pylist()))
    here = judging(start_date=days[10], end_date=days[30])
    here.run("backtest")
    assert "21 dates are there" in here.run("decision").result["no_decision"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"decision": {"metric": "rank_ic"}}, ValidationError, "decision.metric"),
        ({"decision": {"metric": "h7_rank_ic"}}, ConfigError, "asks for the horizon 7"),
        ({"backtest": {"horizon": 2}}, ConfigError, r"params.backtest.horizon asks for the horizon 2.* score 5"),
        ({"start_date": "2020-05-01", "end_date": "2020-01-01"}, ValidationError, "must not be before start_date"),
        ({"decision": {"baseline": "runs/absent"}}, UsageError, "baseline runs/absent is not there"),
    ],
)
def test_what_could_only_fail_after_the_training_is_refused_before_it(memoriser, changes, error, message):
    with pytest.raises(error, match=message):
        memoriser.MEMORISER.fingerprint(memoriser.MemoriserParams.model_validate(changes))


def test_positions_are_held_for_the_main_horizon_where_the_config_does_not_say(memoriser):
    class Longer(memoriser.MemoriserParams):
        @property
        def scored_horizons(self):
            return (20, 5)

    assert Longer().backtest.horizon == 20 and Longer().metric == "h20_rank_ic"
    assert Longer(backtest={"horizon": 5}).backtest.horizon == 5


def test_a_setting_of_the_judging_trains_nothing_and_judges_anew(memoriser, judged, judging):
    reads = {stage.name for stage in memoriser.MEMORISER.stages if "backtest" in stage.reads}
    assert reads == {"health", "backtest", "decision"}
    before, after = judged["backtest"], judging(backtest={"k_min": 2, "cost_bps": 50}).run("backtest")
    # The days are the same, for their metrics know no costs, but what was earned is not.
    assert after.result["summary"]["total_return"] < after.result["summary"]["total_return_gross"]
    assert after.table("days").equals(before.table("days"))


@pytest.mark.proves("S0-34", "S0-50")
@pytest.mark.long
def test_a_red_gate_ends_a_run_before_the_other_folds(tmp_path):
    shutil.copy(Path(__file__).parents[3] / "tests/pipeline/memoriser.py", tmp_path)
    params = {"n_splits": 2, "num_dates": 100, "backtest": {"k_min": 2, "cost_bps": 0}, "price_error": True}
    content = {"schema_version": 1, "experiment": "memory", "target": "memoriser:MEMORISER", "seed": 3}
    content |= {"runs_dir": str(tmp_path / "runs"), "panels_dir": str(tmp_path / "panels"), "params": params}
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    result = run(tmp_path / "config.yaml")
    assert (result.state, result.exit_code) == ("stopped", 11)
    cause = json.loads((result.path / "outcome.json").read_text())["why"]
    assert "the gate is red" in cause and "price_jump" in cause
    assert not (result.path / "jobs" / "fold_2").exists()
    assert not (result.path / "checkpoints" / "stage_backtest.json").exists()
