"""``memfit.run`` from end to end on a workload without torch: real panel, real splits, real children where they count."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather

import memfit
from jobs.contract import is_alive, wait_until
from memfit.errors import ConfigError, DataError, SplitError, UsageError
from memfit.files import read_json
from memfit.pipeline import Choice, resume
from memfit.rundir import RunDir

real, here = pytest.mark.slow, pytest.mark.usefixtures("here")  # with processes, and without any


def fold_table(result):
    return feather.read_table(result.path / "kfold_results.feather")


def events_of(result, kind):
    return [event for event in RunDir(result.path).events() if event["kind"] == kind]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with a config of which the run has finished, and what came of that."""
    folder = tmp_path_factory.mktemp("done")
    shutil.copy(Path(__file__).with_name("tiny.py"), folder)
    (folder / "config.yaml").write_text(
        "experiment: tiny\ntarget: tiny:TINY\nseed: 7\n"
        "params: {num_epochs: 2, hold_mib: 20, epoch_seconds: 0.3, awaits_second: true}\n"
    )
    with contextlib.chdir(folder):
        return folder, memfit.run("config.yaml")


@pytest.fixture
def finished(done, tmp_path, monkeypatch):
    """The config and the result of a finished run, in a folder of its own, which is the current one."""
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("config.yaml"), replace(done[1], path=tmp_path / done[1].path.relative_to(done[0]))


@pytest.mark.core
@pytest.mark.proves("S1-41", "S1-44")
@real
def test_folds_are_measured_tabled_and_kept(finished):
    config, result = finished
    assert (result.state, result.exit_code) == ("completed", 0)
    table = fold_table(result)
    assert table.schema.names[:4] == ["fold", "state", "seconds", "peak_private_bytes"]
    assert table.schema.field("fold").type == pa.int32()
    assert table["fold"].to_pylist() == [1, 2, 3]
    assert table["state"].to_pylist() == ["completed"] * 3
    assert min(table["peak_private_bytes"].to_pylist()) > 20 << 20
    assert len(set(table["draw"].to_pylist())) == 3
    decided = json.loads((result.path / "plan.json").read_text())
    assert decided["num_parallel"] == 3
    assert decided["footprint"]["phases"].keys() >= {"load", "train", "checkpoint", "validate"}

    # Each fold could double, so that the second did not wait until one was measured.
    admitted = {event["job"]: event for event in events_of(result, "admit")}
    measured = min(event["time"] for event in events_of(result, "footprint") if event["job"].startswith("fold"))
    assert admitted["fold_2"]["time"] < measured
    assert max(event["num_running"] for event in admitted.values()) >= 2
    assert "available = " in admitted["fold_2"]["why"]

    # What was forecast from the first fold is what the others took.
    peaks = [status.peak_bytes for job, status in result.statuses.items() if job != "prepare"]
    assert all(0.8 * decided["footprint"]["private_bytes"] <= peak <= decided["reservation_bytes"] for peak in peaks)

    # The same command shows the finished run, and says what that saved.
    again = memfit.run(config)
    assert (again.path, again.metrics) == (result.path, result.metrics)
    assert {status.attempt for status in again.statuses.values()} == {1}
    kept = {event["stage"]: event for event in events_of(again, "stage") if event["state"] == "kept"}
    assert kept["fold"]["jobs"] == [f"fold_{i}" for i in range(1, 4)] and kept["fold"]["seconds"] > 1


@pytest.mark.slow
@here
def test_the_table_holds_the_folds_of_all_commands_and_how_they_are_admitted_makes_no_other_run(tiny):
    config = tiny()
    first = memfit.run(config, overrides=["units=1"])
    second = memfit.run(config, overrides=["units=3"])
    assert (second.path, fold_table(second)["fold"].to_pylist()) == (first.path, [1, 3])
    assert sorted(second.metrics) == ["fold_3", "prepare"]
    whole = memfit.run(config, overrides=["units=all", "max_parallel=2", "on_failure=stop"])
    assert (whole.path, len(whole.metrics)) == (first.path, 4)
    assert json.loads((whole.path / "plan.json").read_text())["num_jobs"] == 3
    assert {status.attempt for status in whole.statuses.values()} == {1}


@here
def test_the_resolved_config_is_itself_a_valid_input(tiny):
    begun, env = Choice(until="prepare"), {**os.environ, "MEMFIT_SEED": "9"}
    first = memfit.run(tiny(), overrides=["params.num_epochs=1"], env=env, choice=begun)
    again = memfit.run(first.path / "config.yaml", choice=begun)
    assert again.path == first.path


@here
@pytest.mark.parametrize(
    ("more", "values", "overrides", "error", "said"),
    [
        ("", {"num_epoch": 3}, (), ConfigError, "num_epoch"),
        ("", {}, ["units=9-2"], ConfigError, "'9-2' names no unit"),
        ("", {"num_dates": 3}, (), SplitError, "."),
        ("panels_dir: taken", {}, (), DataError, "panels cannot be kept in"),
    ],
)
def test_bad_input_is_refused_and_a_wrong_config_makes_nothing(tiny, tmp_path, more, values, overrides, error, said):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(error, match=said):
        memfit.run(tiny(more, **values), overrides=overrides)
    assert error is not ConfigError or not (tmp_path / "runs").exists()


@pytest.mark.proves("S0-17")
@real
def test_a_users_limit_bounds_how_many_run_at_once(tiny):
    config = tiny("memory: {limit: 500MiB, reserve: 50MiB}", hold_mib=120, epoch_seconds=0.8)
    result = memfit.run(config)
    decided = json.loads((result.path / "plan.json").read_text())
    assert (result.exit_code, decided["limited_by"]) == (0, "memory")
    assert decided["num_parallel"] in (1, 2)
    measured = min(e["time"] for e in events_of(result, "footprint") if e["job"].startswith("fold"))
    later = [e["num_running"] for e in events_of(result, "admit") if e["time"] > measured]
    assert max(later, default=0) < 3  # before, three small ones may run that could grow


@pytest.mark.core
@real
def test_ctrl_c_stops_at_a_checkpoint_and_the_same_command_goes_on(tiny):
    config = tiny(num_epochs=5, epoch_seconds=0.4, n_splits=2)
    command = [sys.executable, "-m", "memfit", "run", str(config), "--max-parallel", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    runs = config.parent / "runs" / "tiny"
    wait_until(lambda: any(runs.glob("run_*/checkpoints/fold_1/state.json")))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    run_dir = next(runs.iterdir())
    assert json.loads((run_dir / "outcome.json").read_text())["state"] == "preempted"
    result = memfit.run(config)
    assert (result.path, result.exit_code) == (run_dir, 0)
    epochs = [e["epoch"] for e in RunDir(run_dir).events() if e["kind"] == "epoch" and e["job"] == "fold_1"]
    assert epochs == [1, 2, 3, 4, 5]


@real
def test_ctrl_c_after_a_request_to_stop_ends_at_once_and_leaves_no_process(tiny):
    config = tiny(epoch_seconds=300)
    process = subprocess.Popen([sys.executable, "-m", "memfit", "run", str(config)], stdout=subprocess.DEVNULL)
    runs = config.parent / "runs" / "tiny"
    wait_until(lambda: any(runs.glob("run_*/jobs/fold_1/status.json")))
    status = next(runs.glob("run_*/jobs/fold_1/status.json"))
    child = json.loads(status.read_text())["pid"]
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: any(e["kind"] == "stop" for e in RunDir(status.parents[2]).events()))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    wait_until(lambda: not is_alive(child))


@pytest.mark.core
@real
def test_the_supervisor_loads_no_heavy_module(tiny):
    config = tiny()
    code = (
        "import sys, memfit; from pathlib import Path\n"
        f"result = memfit.run(Path({str(config)!r}), overrides=['units=1'])\n"
        "print([m for m in ('torch', 'pandas', 'numpy', 'pyarrow', 'tiny') if m in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
@here
def test_resume_makes_anew_what_is_damaged_and_refuses_changed_code(tiny, tmp_path):
    result = memfit.run(tiny(), overrides=["units=1"])
    (result.path / "checkpoints/fold_1.json").write_text("{")
    again = resume(result.path)
    assert (again.path, again.metrics) == (result.path, result.metrics)
    assert {job: one.attempt for job, one in again.statuses.items()} == {"prepare": 1, "fold_1": 2}
    code = tmp_path / "tiny.py"
    code.write_text(code.read_text().replace("loss=1 / epoch", "loss=2 / epoch"))
    with pytest.raises(UsageError, match=r"the code or the data of .* changed since it was finished"):
        resume(result.path)


@real
def test_a_run_goes_on_with_its_panel_where_its_folder_was_moved_to(finished, tmp_path, monkeypatch):
    config, result = finished
    shutil.rmtree(result.path / "checkpoints/fold_1")
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    monkeypatch.chdir(moved)
    again = memfit.run(config)
    assert again.path == moved / result.path.relative_to(tmp_path) and again.metrics == result.metrics
    assert {job: one.attempt for job, one in again.statuses.items() if one.attempt != 1} == {"fold_1": 2}
    panel = next(again.path.rglob("*.panel.json"))
    assert Path(panel.parent, read_json(panel)["path"]).resolve().parent == moved / "panels"  # not the first folder's


@real
def test_run_takes_the_words_of_a_command_and_no_function_itself(tiny):
    tiny()
    assert memfit.run(["sh", "-c", "echo done > made"]).exit_code == 0 and Path("made").exists()
    with pytest.raises(UsageError, match=r"memfit\.run was given <built-in function print>"):
        memfit.run(print)


@pytest.mark.core
@real
def test_folds_are_forked_from_one_process_unless_told_otherwise(tiny):
    config = tiny(n_splits=2)
    result = memfit.run(config)
    assert {status.evidence.get("start") for status in result.statuses.values()} == {"warm"}
    fresh = memfit.run(config, overrides=["warm=never"], new=True)
    assert {status.evidence.get("start") for status in fresh.statuses.values()} == {None}
    assert fresh.metrics == result.metrics


@real
def test_the_process_that_is_forked_counts_once_in_the_budget(tiny):
    """A fold that fits a limit only without it has it end, and runs in a new interpreter."""
    config = tiny(
        "memory: {limit: 512MiB, reserve: 16MiB}\nstages: {fold: {memory: 480MiB}}\naccept_tight: true", n_splits=2
    )
    result = memfit.run(config)
    assert result.state == "completed"
    starts = {job: status.evidence.get("start") for job, status in result.statuses.items()}
    assert starts["fold_1"] is None and "warm" in starts.values()
    assert any("a job needs the" in event["text"] for event in events_of(result, "plan"))
