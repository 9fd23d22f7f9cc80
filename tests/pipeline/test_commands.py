"""``run_commands`` and ``resume`` with real commands: what runs, how often, where it is kept, what goes on."""

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import memfit.pipeline
from jobs.contract import wait_until
from memfit.config import read_file
from memfit.errors import DoesNotFitError, UsageError
from memfit.jobs import LocalBackend, read_status
from memfit.memory import is_locked
from memfit.pipeline import resume, run_commands
from memfit.rundir import RunDir

real, here = pytest.mark.slow, pytest.mark.usefixtures("here")  # with processes, and with none but the commands

MEMFIT = [sys.executable, "-m", "memfit"]


def run_sh(text, *params, settings=(), env=None, **options):
    """Run a shell text for all combinations of parameters."""
    return run_commands(["sh", "-c", text], params=params, overrides=settings, env=env or {}, **options)


def lines(path):
    return sorted(Path(path).read_text().splitlines())


def states(result):
    return {job: status.state for job, status in result.statuses.items()}


@pytest.mark.core
@here
def test_every_combination_runs_once_and_is_kept_with_its_parameters():
    result = run_sh("echo {a}{b} >> ran; echo out {a}; echo err {b} >&2", "a=1..2", "b=x,y")
    assert (result.state, result.exit_code) == ("completed", 0)
    assert lines("ran") == ["1x", "1y", "2x", "2y"]
    assert states(result) == dict.fromkeys(["cmd_0001", "cmd_0002", "cmd_0003", "cmd_0004"], "completed")
    job = result.path / "jobs/cmd_0003"
    assert ((job / "out.log").read_text(), (job / "err.log").read_text()) == ("out 2\n", "err x\n")
    ordered = json.loads((job / "job.json").read_text())
    assert ordered["params"] == {"a": "2", "b": "x"} and ordered["cwd"] == str(Path.cwd())
    assert result.path.parent == Path.cwd() / "runs/sh"
    header = RunDir(result.path).header
    assert (header["kind"], header["cwd"]) == ("commands", str(Path.cwd()))
    assert header["template"] == ["sh", "-c", "echo {a}{b} >> ran; echo out {a}; echo err {b} >&2"]
    assert header["combinations"][1] == {"a": "1", "b": "y"}


@here
def test_settings_count_flag_before_environment_before_default_and_their_origins_are_kept():
    env = {"MEMFIT_RETRIES": "5", "MEMFIT_MAX_PARALLEL": "3", "MEMFIT_PANELS_DIR": "of folds alone"}
    result = run_sh("true {a}", "a=1", settings=["max_parallel=1", "memory.limit=4GiB"], env=env)
    settings, origins = read_file(result.path / "config.yaml"), RunDir(result.path).header["origins"]
    assert (settings["retries"], settings["max_parallel"], settings["memory"]["limit"]) == (5, 1, "4GiB")
    assert origins["retries"] == "environment MEMFIT_RETRIES"
    assert origins["max_parallel"] == origins["memory.limit"] == "--set"
    assert (settings["on_failure"], origins["on_failure"]) == ("continue", "default")
    [budget] = [event for event in RunDir(result.path).events() if event["kind"] == "budget"]
    assert any(one["name"] == "cap" and one["limit_bytes"] == 4 << 30 for one in budget["limits"])


@pytest.mark.slow
@here
def test_a_single_command_may_use_all_cores_unless_told_otherwise_and_has_the_environment(monkeypatch):
    cores = memfit.Budget.read().num_cpus
    monkeypatch.setenv("MAX_EPOCHS", "15")
    run_sh("echo $OMP_NUM_THREADS >> ran")
    run_sh("echo $OMP_NUM_THREADS >> ran", env={"MEMFIT_THREADS_PER_JOB": str(cores + 1)})
    run_sh("echo $OMP_NUM_THREADS $MAX_EPOCHS {a} >> ran", "a=1")
    assert lines("ran") == sorted([f"{cores}", f"{cores + 1}", "1 15 1"])


OWN = {"OMP_NUM_THREADS": "3"}
#: The parameters, the user's environment, the settings, what each process gets, and whether the run tells of a change.
THREADS = {
    "one command": ((), OWN, [], ["3"], False),
    "jobs of a sweep": (("a=1",), OWN, [], ["3"], False),
    "two ranks": ((), OWN, ["resources.ranks=2"], ["3", "3"], False),
    "the same as the settings say": ((), OWN, ["threads_per_job=3"], ["3"], False),
    "a list for nested teams": ((), {"OMP_NUM_THREADS": "3,2"}, [], ["3"], True),
    "the settings": ((), OWN, ["threads_per_job=2"], ["2"], True),
    "the environment's settings": ((), OWN | {"MEMFIT_THREADS_PER_JOB": "2"}, [], ["2"], True),
    "no number": (("a=1",), {"OMP_NUM_THREADS": "all"}, [], ["1"], True),
    "another library's alone": (("a=1",), {"MKL_NUM_THREADS": "3"}, [], ["1"], True),
}


@here
@pytest.mark.parametrize(("params", "env", "settings", "given", "is_told"), THREADS.values(), ids=THREADS)
def test_the_users_own_number_of_threads_counts_where_no_setting_says_another_and_a_change_is_told(
    monkeypatch, params, env, settings, given, is_told
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    text = f"echo $OMP_NUM_THREADS {'{a}' if params else ''} >> ran"
    result = run_sh(text, *params, settings=settings, env=env)
    assert [line.split()[0] for line in lines("ran")] == given
    told = [
        one["text"]
        for one in RunDir(result.path).events()
        if one["level"] == "line" and " becomes " in one.get("text", "")
    ]
    assert len(told) == is_told
    if is_told:
        name, value = next(iter(env.items()))
        assert told[0].startswith(f"{name}={value} becomes {given[0]}: threads_per_job, from ")


@pytest.mark.core
@here
def test_a_run_that_goes_on_keeps_its_number_of_threads_and_a_new_one_takes_the_users_own():
    def go(env, **options):
        return run_sh("echo $OMP_NUM_THREADS >> ran; test -e ready", env=env, **options)

    first = go({"OMP_NUM_THREADS": "3"})
    assert go({"OMP_NUM_THREADS": "5"}).path == go({}).path == first.path
    assert go({"OMP_NUM_THREADS": "5"}, settings=["threads_per_job=2"]).path == first.path
    Path("ready").touch()
    assert go({"OMP_NUM_THREADS": "5"}, new=True).path != first.path
    resume(first.path)
    assert go({"OMP_NUM_THREADS": "7"}).path != first.path
    assert Path("ran").read_text().split() == ["3", "3", "3", "2", "5", "2", "7"]


@here
def test_the_users_own_number_of_processes_of_joblib_counts_and_else_that_of_threads(monkeypatch):
    for env in ({}, {"LOKY_MAX_CPU_COUNT": "5"}):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        run_sh("echo $LOKY_MAX_CPU_COUNT >> ran", settings=["threads_per_job=2"])
    assert lines("ran") == ["2", "5"]


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.proves("S0-50")
@here
def test_after_a_failure_the_same_command_runs_only_what_is_not_done():
    text = "echo {a} >> ran; test -e ready || test {a} != 2"
    first = run_sh(text, "a=1..3")
    assert (first.state, first.exit_code) == ("failed", 4)
    assert states(first) == {"cmd_0001": "completed", "cmd_0002": "failed", "cmd_0003": "completed"}
    Path("ready").touch()
    second = run_sh(text, "a=1..3", settings=["max_parallel=1"])
    assert (second.path, second.exit_code) == (first.path, 0)
    assert lines("ran") == ["1", "2", "2", "3"]
    assert second.statuses["cmd_0002"].attempt == 2
    assert read_file(second.path / "config.yaml")["max_parallel"] == 1


@pytest.mark.slow
@here
def test_another_command_other_parameters_and_another_folder_are_other_runs(tmp_path, monkeypatch):
    first = run_sh("echo {a}; false", "a=1")
    others = [run_sh("echo {a} ; false", "a=1"), run_sh("echo {a}; false", "a=2")]
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    others.append(run_sh("echo {a}; false", "a=1", settings=[f"runs_dir={tmp_path / 'runs'}"]))
    assert len({first.path, *(other.path for other in others)}) == 4


@here
def test_a_program_that_is_not_there_is_refused_before_anything_is_made():
    with pytest.raises(UsageError, match="there is no program 'nonesuch'"):
        run_commands(["nonesuch"])
    with pytest.raises(UsageError, match=r"there is no program './no\.sh'"):
        run_commands(["./{a}"], params=["a=no.sh"])
    assert not Path("runs").exists()


@pytest.mark.proves("S0-23")
@real
def test_what_does_not_fit_is_refused_with_the_arithmetic_and_runs_by_force():
    with pytest.raises(DoesNotFitError, match=r"cmd_0001 needs 900\.00 TiB of host memory \(as declared\)"):
        run_sh("echo {a} >> ran", "a=1", settings=["memory.job=900TiB"])
    assert not Path("ran").exists()
    forced = run_sh("echo {a} >> ran", "a=1", settings=["memory.job=900TiB"], force=True)
    [admitted] = [event["text"] for event in RunDir(forced.path).events() if event["kind"] == "admit"]
    assert forced.exit_code == 0 and "not checked against the budget (--force)" in admitted


@real
def test_a_command_that_ends_while_a_new_supervisor_looks_for_those_that_run_does_not_run_again(monkeypatch):
    text = "echo {a} >> ran; until test -e go; do sleep 0.05; done; echo {a}"
    process = subprocess.Popen([*MEMFIT, "run", "--param", "a=1", "--", "sh", "-c", text], stdout=subprocess.DEVNULL)
    wait_until(lambda: Path("ran").exists())
    process.kill()
    process.wait()
    [run] = RunDir.all(Path("runs"), "sh")
    adopt = LocalBackend.adopt

    def late(self, job_ids):
        Path("go").touch()
        wait_until(lambda: read_status(run, "cmd_0001").state == "completed")
        wait_until(lambda: not is_locked(run.job_dir("cmd_0001") / "lock"))
        return adopt(self, job_ids)

    monkeypatch.setattr(LocalBackend, "adopt", late)
    result = run_sh(text, "a=1")
    assert (result.path, result.exit_code, lines("ran")) == (run.path, 0, ["1"])
    assert (run.job_dir("cmd_0001") / "out.log").read_text() == "1\n"


@real
def test_first_starts_at_the_same_moment_make_one_run(tmp_path):
    text, together = "echo {a} >> ran; until test -e go; do sleep 0.05; done", threading.Barrier(4)

    def start(_):
        together.wait()
        return run_sh(text, "a=1", settings=["memory.job=64MiB"]).state

    with ThreadPoolExecutor(4) as threads:
        starts = [threads.submit(start, number) for number in range(4)]
        wait_until(lambda: sum(one.done() for one in starts) == 3)
        Path("go").touch()
    refused = [one.exception() for one in starts if one.exception()]
    assert len(refused) == 3 and all("run by another process" in str(error) for error in refused)
    assert lines("ran") == ["1"]
    assert [path.name for path in Path("runs/sh").iterdir()] == [RunDir.all(Path("runs"), "sh")[0].path.name]


@pytest.mark.slow
@here
def test_an_interrupted_run_goes_on_although_the_clock_was_set_back():
    text = "echo {a} >> ran; test -e ready"
    Path("ready").touch()
    ahead = run_sh(text, "a=1").path
    ahead.rename(ahead.with_name(f"run_21000101_000000_{ahead.name[-8:]}"))
    Path("ready").unlink()
    failed = run_sh(text, "a=1", new=True)
    assert failed.exit_code == 4
    Path("ready").touch()
    again = run_sh(text, "a=1")
    assert (again.path, again.exit_code) == (failed.path, 0)


@here
def test_one_damaged_run_blocks_no_other(capsys):
    first = run_sh("true {a}", "a=1").path
    (first / "run.json").write_text('{"schema_ver')
    second = run_sh("true {a}", "a=1")
    assert second.exit_code == 0 and second.path != first
    assert f"{first}/run.json is not a JSON object" in capsys.readouterr().err


@pytest.mark.core
@here
def test_resume_goes_on_in_the_folder_and_with_the_settings_of_the_run(tmp_path, monkeypatch):
    text = "echo {a} $OMP_NUM_THREADS >> ran; test -e ready"
    first = run_sh(text, "a=1..2", settings=["threads_per_job=2"])
    assert first.exit_code == 4
    Path("ready").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("MEMFIT_THREADS_PER_JOB", "1")
    result = resume(first.path)
    assert (result.path, result.exit_code) == (first.path, 0)
    assert Path.cwd() == tmp_path / "elsewhere"
    assert lines(tmp_path / "ran") == ["1 2", "1 2", "2 2", "2 2"]
    again = resume(first.path)  # nothing is left to do
    assert again.exit_code == 0 and len(lines(tmp_path / "ran")) == 4


@pytest.mark.slow
@here
def test_a_run_goes_on_where_its_folder_was_moved_to_and_not_in_a_copy(tmp_path, monkeypatch):
    text = "echo {a} >> ran; test -e ready || test {a} != 2"
    (tmp_path / "before").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    first = run_sh(text, "a=1..2", env={"OMP_NUM_THREADS": "3"})
    shutil.copytree(tmp_path / "before", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    other = run_sh(text, "a=1..2")
    assert other.path.name != first.path.name and lines("ran") == ["1", "1", "2", "2"]
    assert RunDir(other.path).header["origins"]["threads_per_job"] == "default"  # not those of the copied run
    with pytest.raises(UsageError, match="is a copy of"):
        resume(tmp_path / "copy" / first.path.relative_to(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    (tmp_path / "after/ready").touch()
    monkeypatch.chdir(tmp_path / "after")
    moved = tmp_path / "after" / first.path.relative_to(tmp_path / "before")
    with pytest.raises(UsageError, match="before is not there"):
        resume(moved)
    second = run_sh(text, "a=1..2")
    assert (second.path, second.exit_code) == (moved, 0) and lines("ran") == ["1", "2", "2"]


@here
def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is no run directory"):
        resume(tmp_path)
