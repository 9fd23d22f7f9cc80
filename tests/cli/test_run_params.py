"""``memfit run`` as a command: what it runs, what it prints, its exit codes."""

import json
import re
from pathlib import Path

import pytest

from cli.conftest import check_refused
from memfit.config import resolve
from memfit.pipeline import RunConfig
from memfit.rundir import RunDir

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


@pytest.mark.slow
@pytest.mark.proves("S0-10", "S0-13")
def test_a_range_of_folds_runs_one_at_a_time_with_times_memory_and_a_summary(memfit, tmp_path):
    words = ["--param", "fold=2..5", "--max-parallel", 1, "--name", "folds"]
    done = memfit("run", *words, "--", "sh", "-c", "echo {fold} >> ran; echo trained {fold}")
    assert (done.exit_code, done.err) == (0, "")
    assert (tmp_path / "ran").read_text() == "2\n3\n4\n5\n"
    for number in range(1, 5):
        assert re.search(rf"(?m)^{STAMP}cmd_000{number} fold={number + 1} started.* \(.*\d [KMG]?i?B free\)$", done.out)
        assert re.search(rf"(?m)^{STAMP}cmd_000{number} fold={number + 1} completed \(\d+\.\ds\), peak \S+", done.out)
    [run] = RunDir.all(tmp_path / "runs", "folds")
    assert [e["num_running"] for e in run.events() if e["kind"] == "admit"] == [1, 1, 1, 1]
    assert (run.job_dir("cmd_0003") / "out.log").read_text() == "trained 4\n"


@pytest.mark.slow
@pytest.mark.proves("S0-12")
def test_the_first_failure_stops_the_rest_and_its_log_is_named(memfit, tmp_path):
    words = ["--param", "fold=1..4", "--max-parallel", 1, "--on-failure", "stop"]
    done = memfit("run", *words, "--", "sh", "-c", "echo {fold} >> ran; echo broken >&2; test {fold} != 2")
    assert done.exit_code == 4
    assert (tmp_path / "ran").read_text() == "1\n2\n"
    log = re.search(r"(?m)^cmd_0002 .*failed: exit code 1.*\n  log: (\S+)", done.out)
    assert log and (tmp_path / log[1]).with_name("err.log").read_text() == "broken\n"


@pytest.mark.slow
@pytest.mark.proves("S0-19")
def test_with_continue_all_run_and_all_failures_are_reported(memfit):
    done = memfit("run", "--param", "a=1..4", "--json", "--", "sh", "-c", "exit {a}")
    found = json.loads(done.out)
    assert (done.exit_code, found["state"]) == (4, "failed")
    assert "measuring" in found["waited_seconds"], "the first ran alone"
    assert set(found["host_cpu"]) == {"busy", "disk"} and 0 < found["host_cpu"]["busy"] <= 1
    run = RunDir.open(Path(found["run"]))
    outcome = json.loads((run.path / "outcome.json").read_text())
    assert [job["cause"] for job in outcome["jobs"].values()] == [f"exit code {code}" for code in (1, 2, 3, 4)]
    assert "cmd_0004 a=4 failed" in done.err


def test_a_plan_prints_commands_and_budget_and_starts_nothing(memfit, tmp_path):
    (tmp_path / "train.py").touch()
    words = ["--param", 'model=big,"small, old"', "--param", "fold=1..2", "--limit", "64MiB", "--plan", "--no-steps"]
    command = ["python", "train.py", "{model}", "--json", '{"lr": 1, "fold": {fold}}']
    done = memfit("run", *words, "--", *command)
    assert done.exit_code == 0
    assert done.out.splitlines()[:4] == [
        """python train.py big --json '{"lr": 1, "fold": 1}'""",
        """python train.py big --json '{"lr": 1, "fold": 2}'""",
        """python train.py 'small, old' --json '{"lr": 1, "fold": 1}'""",
        """python train.py 'small, old' --json '{"lr": 1, "fold": 2}'""",
    ]
    assert (
        "for jobs (cap)" in done.out and "one job: not measured yet: plan it without --no-steps, or run one" in done.out
    )
    found = json.loads(memfit("run", *words, "--json", "--", *command).out)
    assert found["commands"][3][4] == '{"lr": 1, "fold": 2}'
    assert found["budget"]["limit_bytes"] == 64 << 20
    assert not (tmp_path / "runs").exists()


def test_what_stands_behind_the_first_dashes_is_the_commands_alone(memfit, tmp_path):
    done = memfit("run", "--param", "a=1", "--", "sh", "-c", 'echo "$@" >> ran', "--", "--plan", "--", "{a}")
    assert done.exit_code == 0
    assert (tmp_path / "ran").read_text() == "--plan -- 1\n"


@pytest.mark.slow
def test_what_is_tight_ends_with_3_in_a_plan_and_in_a_run_unless_it_is_accepted(memfit, tmp_path):
    words = ["--param", "a=1", "--memory", "97MiB", "--limit", "100MiB", "--reserve", "0"]
    command = ["--", "sh", "-c", "echo {a} >> ran"]
    plan = memfit("run", *words, "--plan", *command)
    assert plan.exit_code == 3
    assert re.search(r"tight: 97\.0 MiB of .* leave \d\.\d%, under 5%; to accept that: --accept-tight", plan.out)
    assert memfit("run", *words, "--plan", "--accept-tight", *command).exit_code == 0
    assert memfit("run", *words, *command).exit_code == 3 and not (tmp_path / "ran").exists()
    assert memfit("run", *words, "--accept-tight", *command).exit_code == 0 and (tmp_path / "ran").exists()


def test_the_help_fits_a_screen_and_ends_with_settings_that_a_config_takes(memfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(memfit("run", "--help").out.splitlines()) <= 60
    monkeypatch.setenv("COLUMNS", "100")
    text = memfit("run", "--help").out
    flags = "param plan max-parallel memory gpu-memory limit reserve retries on-failure name runs-dir"
    for flag in [*flags.split(), "grace", "set", "new", "force", "json"]:
        assert re.search(rf"^ +--{flag}\b.*  \w", text, re.MULTILINE), flag
    assert len(text.splitlines()) <= 60
    keys = [word for line in text.splitlines()[-3:] for word in line.split()]
    found = resolve(RunConfig, values={"experiment": "x"}, env={}, overrides=keys)
    assert len(keys) == 12 and list(found.origins.values()).count("--set") == 12


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["status"], "did you mean memfit ps?"),
        (["list"], "did you mean memfit ps?"),
        (["logs", "demo"], "did you mean memfit watch?"),
        (["kill", "demo"], "did you mean memfit stop?"),
        (["help"], "did you mean memfit --help?"),
        (["resme", "demo"], "did you mean 'resume'?"),
        (["run", "--jobs", "2", "--", "ls"], "did you mean --max-parallel?"),
        (["run", "-j", "2", "--", "ls"], "did you mean --max-parallel?"),
        (["run", "-n", "2", "--", "ls"], "did you mean --max-parallel?"),
        (
            ["run", "--timeout", "1h", "--", "ls"],
            "did you mean -- timeout 1h python train.py; on Slurm: --set slurm.time=",
        ),
        (["tune", "-n", "2"], "see memfit tune --help"),
    ],
)
def test_what_people_type_is_answered_with_ours(memfit, words, remedy):
    check_refused(memfit(*words), "", remedy)


@pytest.mark.parametrize("key", ["command", "cmd", "script", "rnu"])
def test_the_command_of_a_stage_is_called_run(memfit, tmp_path, key):
    (tmp_path / "c.yaml").write_text(f"experiment: x\nstages:\n  train:\n    {key}: python t.py\n")
    for verb in ("run", "tune", "launch"):
        done = memfit(verb, "c.yaml")
        check_refused(done, f"stages.train.{key} is no setting (c.yaml:4)", "did you mean 'stages.train.run'?")
        assert "RunConfig" not in done.err


def test_the_help_of_run_begins_with_the_flags_that_are_used_most(memfit):
    flags = re.findall(r"(?m)^ +--([\w-]+)", memfit("run", "--help").out.partition("Options:")[2])
    most = ["param", "plan", "limit", "memory", "max-parallel", "nproc", "backend", "set", "name", "new"]
    assert flags[:10] == most


SWEEP = ["--param", "n=1..13", "--max-parallel", "4", "--", "sh", "-c", "exit $(({n} == 7))"]


@pytest.mark.slow
def test_of_many_commands_each_end_is_a_line_and_quiet_tells_failures_alone(memfit):
    done = memfit("run", *SWEEP)
    lines = done.out.partition("\nbudget ")[0].splitlines()
    assert done.exit_code == 4
    assert sum(" n=" in line for line in lines) == 13
    assert not any(" started" in line for line in lines)
    quiet = memfit("run", "-q", *SWEEP).out.partition("\nbudget ")  # the failed one runs again
    assert quiet[1] and quiet[0].count(" n=") == 1 and "cmd_0007 n=7 failed" in quiet[0]
