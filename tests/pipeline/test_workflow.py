"""The workflow from end to end: phases as jobs, gates that stop, dates that no model saw, and kills in between."""

import contextlib
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pyarrow import feather
from rich.console import Console

from memfit.data import Panel
from memfit.errors import MemfitError, UsageError
from memfit.evaluation import decide, rank_ic, read_scores
from memfit.pipeline import ScoreContext, backtest_checkpoints, resume, workflow
from memfit.pipeline._judge import decide_on
from memfit.pipeline._provenance import read_provenance
from memfit.pipeline._workflow_settings import WorkflowSettings
from memfit.reports import print_workflow
from memfit.rundir import RunDir, read_json
from memfit.testing import wait_until

TEXT = """
schema_version: 1
experiment: memory
target: memoriser:MEMORISER
seed: 3
workflow:
  backtest: {{k_min: 2, cost_bps: 0}}
{workflow}
params:
{params}
"""


def write_config(folder, workflow="", **params):
    """A config in a folder, for the workload that remembers its training dates."""
    shutil.copy(Path(__file__).with_name("memoriser.py"), folder / "memoriser.py")
    lines = "\n".join(f"  {name}: {value}" for name, value in {"num_dates": 160, **params}.items())
    path = folder / "config.yaml"
    path.write_text(TEXT.format(workflow=workflow, params=lines))
    return path


@pytest.fixture
def memoriser(tmp_path, monkeypatch):
    """Writes a config, and makes its folder the current one."""
    monkeypatch.chdir(tmp_path)
    return partial(write_config, tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a workflow that is done."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert workflow(write_config(folder)).exit_code == 0
    return folder


@pytest.fixture
def done(finished, tmp_path, monkeypatch):
    """A copy of it, the current folder: its config, and its run's folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml", next(tmp_path.glob("runs/memory/run_*"))


def stage(run, name):
    return (read_json(run / "jobs" / name / "result.json") or {}).get("result")


def test_a_perfect_memory_of_the_training_dates_earns_nothing_out_of_fold(done):
    _, run = done
    found = stage(run, "results")
    ic = found["metrics"]["h5_rank_ic"]
    assert abs(ic["mean"]) < 3 * ic["standard_error"]
    assert found["decision"]["verdict"] == "no difference shown"
    table = feather.read_table(run / "results" / "scores.feather")
    assert len(table) == 155 * 30 and len(set(table["date"].to_pylist())) == 155
    assert set(table["fold"].to_pylist()) == {1, 2, 3, 4}
    days = feather.read_table(run / "results" / "days.feather")
    assert days.num_rows == 155
    assert {"fold", "date", "h5_delta_p_at_k_pos"} <= set(days.column_names)

    # On the dates that they were trained on the same models know everything.
    spec = importlib.util.spec_from_file_location("memoriser", run.parents[2] / "memoriser.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    panel = Panel.open(Path(read_json(run / "checkpoints/stage_prepare.json")["panel"]))
    seen = np.flatnonzero(~read_provenance(run / "checkpoints/fold_1/blended.pt").scorable(panel))[30:100]
    context = ScoreContext(panel, seen, run / "checkpoints/fold_1/blended.pt")
    scores = read_scores(module.score(context, module.MemoriserParams()))
    assert np.nanmean(rank_ic(scores.of("score_h5"), scores.of("target_h5"))) > 0.9


def printed(run):
    """What is printed of a workflow, on one line."""
    console = Console(record=True, width=400)
    print_workflow(RunDir(run), console)
    return " ".join(console.export_text().split())


def test_the_rank_ic_decides_and_the_spread_beside_it_is_no_comparison(done):
    _, run = done
    decision = stage(run, "results")["decision"]
    days = feather.read_table(run / "results" / "days.feather")
    spread = decide(days, "random", "h5_spread", 5).to_dict()
    assert (decision["metric"], decision["num_comparisons"]) == ("h5_rank_ic", 1)
    assert decision["beside"] == {name: spread[name] for name in decision["beside"]}
    assert "verdict" not in decision["beside"]
    assert len((run.parent / "comparisons.jsonl").read_text().splitlines()) == 1
    text = printed(run)
    assert "decision: no difference shown (h5_rank_ic," in text and "after Holm for 1 comparison;" in text
    assert "beside it h5_spread: effect" in text and "warning" not in text


def test_the_metric_that_decides_is_a_setting_and_a_baseline_needs_no_other(done):
    _, run = done
    days, record = feather.read_table(run / "results" / "days.feather"), run.parent / "comparisons.jsonl"

    def decided(**settings):
        return decide_on(days, WorkflowSettings(decision=settings), name="this", record=record)

    by_spread = decided(metric="h5_spread")
    assert (by_spread["metric"], by_spread["beside"]["metric"]) == ("h5_spread", "h5_rank_ic")
    assert by_spread["num_comparisons"] == 2  # the rank IC decided before
    baseline = run.parent / "days.feather"
    feather.write_feather(days.select(["date", "fold"]).append_column("h5_rank_ic", [[0.5] * len(days)]), str(baseline))
    against = decided(baseline=str(baseline))
    assert (against["verdict"], against["no_beside"]) == ("B better", "B has no column h5_spread.")


@pytest.mark.usefixtures("judged_here")
def test_scores_that_prefer_calm_assets_are_warned_of(memoriser):
    result = workflow(memoriser(calm="true"), until="health")
    found = stage(result.path, "health")["volatility"]
    assert found["warns"] and -1 < found["mean"] < -0.8
    assert f"mean rank correlation {found['mean']:+.2f} with the volatility of the last 60 dates" in printed(
        result.path
    )
    report = json.loads((result.path / "results/health/backtest.json").read_text())
    assert report["facts"]["volatility"] == found


@pytest.mark.usefixtures("judged_here")
def test_what_an_older_version_judged_otherwise_is_judged_anew(done, monkeypatch):
    config, run = done
    file = run / "jobs" / "health" / "result.json"
    kept = file.read_bytes()
    assert workflow(config, until="health").exit_code == 0
    assert file.read_bytes() == kept
    monkeypatch.setattr("memfit.pipeline._workflow._JUDGED_AS", 10**6)
    assert workflow(config, until="health").exit_code == 0
    assert file.read_bytes() != kept


@pytest.mark.usefixtures("judged_here")
def test_scores_that_are_too_good_on_unseen_dates_are_red(memoriser):
    config = memoriser(skill=1.0)
    result = workflow(config, until="health")
    assert stage(result.path, "health")["metrics"]["h5_rank_ic"]["mean"] > 0.3
    assert stage(result.path, "health")["verdict"]["colour"] == "red"  # too good is as bad as too bad


@pytest.mark.usefixtures("judged_here")
def test_a_red_gate_stops_before_the_other_folds(memoriser):
    config = memoriser(price_error="true")
    result = workflow(config)
    assert (result.state, result.exit_code) == ("failed", 11)
    outcome = json.loads((result.path / "outcome.json").read_text())
    assert "the gate is red" in outcome["cause"] and "price_jump" in outcome["cause"]
    assert not (result.path / "jobs" / "fold_2").exists()
    assert stage(result.path, "results") is None
    # Asked again it says the same, and trains nothing.
    again = workflow(config)
    assert (again.path, again.exit_code) == (result.path, 11)
    assert again.statuses["fold_1"].attempt == 1


@pytest.mark.usefixtures("judged_here")
def test_a_yellow_gate_names_what_to_tune_sweeps_and_stops_where_the_config_says_so(memoriser):
    config = memoriser(workflow="  on_yellow: stop\n  sweep: {skill: [0.02]}\n")
    result = workflow(config)
    assert (result.state, result.exit_code) == ("failed", 10)
    health = stage(result.path, "health")
    assert {knob["name"] for knob in health["verdict"]["knobs"]} >= {"k_ratio", "tau"}
    held = [row["mean_held"] for row in health["tried"]]
    assert held == sorted(held) and held[0] < held[-1]
    assert read_json(result.path / "jobs/sweep_01/job.json")["params"] == {"skill": "0.02"}
    assert (result.path / "checkpoints" / "sweep_01" / "ema_epoch_2.pt").exists()
    assert not (result.path / "jobs" / "fold_2").exists()


@pytest.mark.usefixtures("judged_here")
def test_phases_that_are_done_stay_done_until_their_settings_change(done):
    config, run = done
    files = [run / "jobs" / name / "result.json" for name in ("health", "results")]
    before = [file.read_bytes() for file in files]
    times = [file.stat().st_mtime_ns for file in files]
    again = workflow(config)
    assert (again.path, [file.stat().st_mtime_ns for file in files]) == (run, times)
    config.write_text(config.read_text().replace("cost_bps: 0", "cost_bps: 50"))
    changed = workflow(config)
    assert (changed.path, {status.attempt for status in changed.statuses.values()}) == (run, {1})
    assert [file.read_bytes() for file in files] != before
    summary = stage(run, "results")["summary"]
    assert summary["total_return"] < summary["total_return_gross"]


def test_killed_at_any_moment_it_goes_on_to_the_same_tables(memoriser, tmp_path, finished):
    command = [sys.executable, "-m", "memfit", "workflow", str(memoriser()), "--quiet"]
    for name, seconds in (("prepare", 0.5), ("fold_1", 1.5), ("health", 1.0), ("fold_2", 0.5), ("results", 2.0)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda name=name: any(tmp_path.glob(f"runs/memory/*/jobs/{name}/job.json")))
        time.sleep(seconds)
        process.kill()
        process.wait()
    (run,) = tmp_path.glob("runs/memory/run_*")
    assert resume(run).exit_code == 0
    (other,) = finished.glob("runs/memory/run_*")
    for name in ("scores.feather", "days.feather"):
        tables = [feather.read_table(one / "results" / name) for one in (run, other)]
        assert tables[0].equals(tables[1]), name
    ours, theirs = stage(run, "results"), stage(other, "results")
    for name in ("summary", "metrics", "controls", "verdict", "tried"):
        assert ours[name] == theirs[name]


def test_a_checkpoint_of_another_run_is_refused_by_name(done):
    from memfit.training import load_checkpoint, save_checkpoint

    config, run = done
    path = run / "checkpoints" / "fold_1" / "ema_epoch_2.pt"
    state = load_checkpoint(path)
    for epoch in (1, 2):  # as if copied from a run with another seed
        state["provenance"]["run"] = "0" * 64
        save_checkpoint(path.with_name(f"ema_epoch_{epoch}.pt"), state)
    config.write_text(config.read_text().replace("cost_bps: 0", "cost_bps: 1"))
    with pytest.raises(UsageError, match="is of the run 00000000, and this run is"):
        workflow(config)


def test_the_inventory_names_every_checkpoint_and_result(done):
    _, run = done
    files = json.loads((run / "results" / "inventory.json").read_text())["files"]
    names = {one["name"] for one in files}
    for fold in (1, 2, 3, 4):
        assert {f"checkpoints/fold_{fold}/{name}.pt" for name in ("ema_epoch_1", "ema_epoch_2", "blended")} <= names
    assert {"results/backtest.json", "results/scores.feather", "results/health/backtest.json", "config.yaml"} <= names
    assert all(len(one["sha256"]) == 64 and one["bytes"] > 0 for one in files)


def test_a_workload_without_scores_has_no_workflow(tiny):
    with pytest.raises(UsageError, match="gives no scores"):
        workflow(tiny())


def test_an_unknown_phase_is_refused_with_the_nearest_known_one(memoriser):
    with pytest.raises(UsageError, match="health"):
        workflow(memoriser(), until="helth")


@pytest.mark.usefixtures("judged_here")
def test_checkpoints_anywhere_score_only_dates_that_they_did_not_see(done, tmp_path):
    config, run = done
    moved = [Path(shutil.copy(run / f"checkpoints/fold_{i}/blended.pt", tmp_path / f"fold{i}.pt")) for i in (1, 2)]
    found = backtest_checkpoints(config, moved, output=tmp_path / "out" / "two.json")
    assert [one["fold"] for one in found["folds"]] == [1, 2]
    scores = feather.read_table(tmp_path / "out" / "two_scores.feather")
    days = sorted(set(scores["date"].to_pylist()))
    # What each was tested on, and no date next to its training dates: less than the two blocks and what was purged.
    tested = 2 * 39
    assert tested <= sum(one["num_dates"] for one in found["folds"]) <= tested + 2 * 14
    assert abs(found["metrics"]["h5_rank_ic"]["mean"]) < 0.15
    limited = backtest_checkpoints(
        config, moved, overrides=[f"workflow.start_date={days[10]}", f"workflow.end_date={days[50]}"]
    )
    assert sum(one["num_dates"] for one in limited["folds"]) <= 41


@pytest.mark.usefixtures("judged_here")
def test_a_period_without_scored_dates_is_refused(done):
    config, run = done
    with pytest.raises(UsageError, match="no date from 2031-01-01"):
        backtest_checkpoints(
            config, [run / "checkpoints/fold_1/blended.pt"], overrides=["workflow.start_date=2031-01-01"]
        )


@pytest.mark.usefixtures("judged_here")
def test_two_checkpoints_of_one_fold_are_refused(done):
    config, run = done
    with pytest.raises(UsageError, match="so is another"):
        folder = run / "checkpoints/fold_1"
        backtest_checkpoints(config, [folder / "blended.pt", folder / "ema_epoch_1.pt"])


@pytest.mark.usefixtures("judged_here")
def test_folds_in_order_run_one_after_another_and_see_the_one_before(memoriser, tmp_path):
    config, source = memoriser(n_splits=3), tmp_path / "memoriser.py"
    changes = {
        "    market=market,\n": "    market=market,\n    in_order=lambda params: True,\n",
        '    return {"num_train"': "    assert (context.fold == 1) == (context.previous_dir is None)\n"
        '    assert context.fold == 1 or (context.previous_dir / "ema_epoch_2.pt").exists()\n'
        '    return {"num_train"',
    }
    text = source.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    source.write_text(text)
    result = workflow(config, until="folds")
    assert result.exit_code == 0
    spans = sorted((status.started, status.ended) for status in result.statuses.values())
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.usefixtures("judged_here")
def test_results_that_were_deleted_are_made_again_and_a_red_gate_takes_old_ones_back(done):
    config, run = done
    shutil.rmtree(run / "results")
    assert workflow(config).exit_code == 0
    assert (run / "results" / "backtest.json").exists() and (run / "results" / "health" / "days.csv").exists()
    config.write_text(config.read_text().replace("workflow:", "workflow:\n  gate: {max_hit_rate: 0.01}"))
    assert workflow(config).exit_code == 11
    assert [path.name for path in (run / "results").iterdir()] == ["health"]


@pytest.mark.usefixtures("judged_here")
def test_a_checkpoint_is_scored_with_the_parameters_that_it_was_trained_with(done):
    config, run = done
    blended = run / "checkpoints/fold_1/blended.pt"
    mine = backtest_checkpoints(config, [blended])
    other = backtest_checkpoints(config, [blended], overrides=["params.skill=0.9"])
    assert (mine["summary"], mine["metrics"]) == (other["summary"], other["metrics"])


@pytest.mark.usefixtures("judged_here")
def test_a_period_leaves_out_the_folds_without_its_dates(done):
    config, run = done
    days = sorted(set(feather.read_table(run / "results/days.feather")["date"].to_pylist()))
    config.write_text(config.read_text().replace("workflow:", f"workflow:\n  start_date: {days[90]}"))
    assert workflow(config).exit_code == 0
    assert [one["fold"] for one in stage(run, "health")["folds"]] == [3]
    assert [one["fold"] for one in stage(run, "results")["folds"]] == [3, 4]
    assert stage(run, "results")["summary"]["start"] == str(days[90])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("start_date: 2031-01-01", "no fold tests a date"),
        ("decision: {metric: rank_ic}", "workflow.decision.metric"),
        ("decision: {baseline: runs/absent}", "baseline runs/absent is not there"),
        ("decision: {metric: h7_rank_ic}", "asks for the horizon 7"),
        ("sweep: {skil: [1.0]}", "sweep sets params.skil"),
        ("sweep: {skill: 1.0}", "needs a list of values"),
    ],
)
def test_what_could_only_fail_after_the_training_is_refused_before_it(memoriser, tmp_path, setting, message):
    with pytest.raises(MemfitError, match=message):
        workflow(memoriser(workflow=f"  {setting}"))
    assert not list(tmp_path.glob("runs/*/*/jobs/fold_1"))


@pytest.mark.usefixtures("judged_here")
def test_too_few_dates_for_a_decision_leave_the_rest_standing(done):
    config, run = done
    days = sorted(set(feather.read_table(run / "results/days.feather")["date"].to_pylist()))
    period = f"workflow:\n  start_date: {days[10]}\n  end_date: {days[30]}"
    config.write_text(config.read_text().replace("workflow:", period))
    assert workflow(config).exit_code == 0
    found = stage(run, "results")
    assert "decision" not in found and "21 dates can be paired" in found["no_decision"]
    assert (run / "results/backtest.json").exists()
