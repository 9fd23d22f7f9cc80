"""``memfit run`` as a command: its flags, what it writes where, its exit codes."""

import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from cli.conftest import TINY, check_refused, tiny_config
from cli.live_run import memfit_command
from memfit.config import read_file
from memfit.rundir import RunDir

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


WORDS = [
    "--max-parallel",
    1,
    "--set",
    "params.epoch_seconds=0.5",
    "--units",
    "1-2",
    "--set",
    "params.hold_mib=2",
    "--set",
    "params.n_splits=3",
]


def run_once(folder, *words):
    """A run of its own process in a folder that is kept for all tests of this file."""
    env = os.environ | {"MEMFIT_CLAIMS_DIR": str(folder.with_name(f"{folder.name}_claims"))}
    done = subprocess.run(memfit_command(*words), cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return SimpleNamespace(out=done.stdout, folder=folder)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """Two folds of the tiny workload, run once; a test that goes on with it copies the folder."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(TINY, folder)
    (folder / "config.yaml").write_text(tiny_config())
    return run_once(folder, "run", "config.yaml", *WORDS, "--on-failure", "stop")


@pytest.mark.core
def test_a_run_is_logged_and_summed_up(one_run):
    head, _, summary = one_run.out.partition("\n\n")
    path, *lines = head.splitlines()
    assert path.startswith("Run ")
    assert all(re.match(STAMP, line) for line in lines)
    assert re.search(rf"^{STAMP}fold_2 completed \(\d+\.\ds\), peak [\d.]+ MiB", head, re.MULTILINE)
    assert re.search(r"^1 +completed +\d.*\n2 +completed", summary, re.MULTILINE)
    assert "mean of 2" in summary and "fold_3" not in one_run.out

    run = RunDir.open(next(iter(RunDir.all(one_run.folder / "runs", "tiny"))).path)
    effective = read_file(run.path / "config.yaml")
    assert (effective["max_parallel"], effective["units"], effective["on_failure"]) == (1, "1-2", "stop")
    assert effective["params"]["n_splits"] == 3
    assert [e["num_running"] for e in run.events() if e["kind"] == "admit"] == [1, 1, 1]


@pytest.mark.core
def test_the_same_command_goes_on_and_a_changed_setting_runs_what_reads_it(memfit, one_run, tmp_path):
    shutil.copytree(one_run.folder, tmp_path, dirs_exist_ok=True)
    [run] = RunDir.all(tmp_path / "runs", "tiny")

    # With --json the log goes to stderr and stdout is JSON alone.
    second = memfit("run", "config.yaml", *WORDS, "--json")
    found = json.loads(second.out)
    assert (second.exit_code, found["run"], found["state"]) == (0, str(run.path), "completed")
    assert [(job["state"], job["attempt"]) for job in found["jobs"]] == [("kept", 1)] * 3
    assert [(stage["counts"], stage["units"]) for stage in found["stages"]] == [({"kept": 1}, 1), ({"kept": 2}, 2)]
    assert all(stage["saved_seconds"] > 0 for stage in found["stages"])
    assert f"Run {run.path}" in second.err and "fold_1 and fold_2 are kept, which saves " in second.err
    assert "fold_1 starts" not in second.err

    fourth = memfit("run", "config.yaml", *WORDS, "--set", "params.num_epochs=2")
    assert "prepare is reused from run_" in fourth.out
    assert "fold_1 and fold_2 run again: num_epochs 1 -> 2" in fourth.out
    assert re.search(r"^fold +completed 2: num_epochs 1 -> 2$", fourth.out, re.MULTILINE)


@pytest.mark.core
def test_a_failed_fold_gives_4_and_is_named_with_its_log_and_cause(memfit, config):
    done = memfit("run", config(fail_fold=1), "--on-failure", "stop")
    assert done.exit_code == 4
    assert re.search(r"^fold_1 failed: .*ValueError: a planted bug\n  log: runs/tiny/.*/jobs/fold_1/err\.log", done.out,
                     re.MULTILINE)  # fmt: skip
    assert "fold_2 starts" not in done.out


@pytest.mark.core
def test_what_does_not_fit_gives_3_with_the_arithmetic(memfit, config):
    path = config("memory: {job: 900TiB}")
    refused = memfit("run", path, "--json", "--units", 1)
    assert (refused.exit_code, refused.out) == (3, "")
    assert "prepare completed" in refused.err
    assert "memfit: fold_1 needs 900.00 TiB of host memory (as declared); " in refused.err
    assert " available = " in refused.err and "--force" in refused.err.splitlines()[-1]


CONFIG = "config.yaml"
REFUSED = [
    # words of memfit run, what is wrong, what to do
    ([CONFIG, "--set", "max_paralel=2"], "max_paralel", "did you mean 'max_parallel'?"),
    ([CONFIG, "--set", "memory=4GiB"], "memory must have names below it", "--set memory.limit=4GiB"),
    (
        [CONFIG, "--set", "units=1", "--units", "2"],
        "units is given twice: --units and --set units=1",
        "leave out --set",
    ),
    ([CONFIG, "--until", "nonesuch"], "there is no stage 'nonesuch'", ""),
    ([CONFIG, "--skip", "prepare"], "stage prepare cannot be skipped", ""),
    ([CONFIG, "--param", "a=1..2"], "has stages with units of their own", ""),
    (["absent.yaml"], "absent.yaml", ""),
    ([], "was given nothing to run", ""),
    (["--"], "was given nothing to run", ""),
    ([CONFIG, "--", "ls"], "a config (config.yaml) and a command are both given", ""),
    (["--units", "1-2", "--", "ls"], "has no stages to choose (--units)", "--param fold=2..5"),
    (["--", "nonesuch"], "there is no program 'nonesuch'", ""),
    (["--max-parallel", "two", "--", "ls"], "--max-parallel must be 'auto' or", "--max-parallel auto"),
    (["--on-failure", "panic", "--", "ls"], "--on-failure must be", "--on-failure"),
    (["--grace", "1m", "--", "ls"], "--grace must be a valid number", "--grace 60"),
    (["--retries", "-1", "--", "ls"], "--retries must be", ""),
    (["--limit", "4", "--", "ls"], "--limit must be a size of 1MiB or more, such as 8GiB", "--limit 4GiB"),
    (
        ["--limit", "2MiB", "--", "ls"],
        '--limit must be 16MiB or more, so that a process can start in it, got "2MiB"',
        "",
    ),
    (["--reserve", "900KiB", "--", "ls"], "--reserve must be a size of 1MiB or more", ""),
    (["--memory", "[1", "--", "ls"], "--memory must be a size of 1MiB or more", "--memory"),
    (["--name", "a/b", "--", "ls"], "--name: string should match pattern '^[A-Za-z0-9]", ""),
    (["--runs-dir=", "--", "ls"], '--runs-dir must name a folder, got "".', ""),
    (["--param", "a=1", "--", "ls"], "the parameter a is not used", ""),
    (["--param", "a=3..1", "--", "ls", "{a}"], "a=3..1 is an empty range", ""),
    (["--param", "absent.csv", "--", "ls", "{a}"], "absent.csv is not name=values", ""),
    (["--param", "a=1-5", "--", "ls", "{a}"], "a=1-5 is no range", ""),
    (["--param", "a=12", "--memory", "{a}", "--plan", "--", "ls", "{a}"], "'12' is 12 B: less than 1 MiB", ""),
    (["--param", "a=1", "--", "python", "nonesuch.py", "{a}"], "there is no script 'nonesuch.py'", ""),
]


@pytest.mark.parametrize(("words", "what", "remedy"), REFUSED)
def test_bad_input_is_refused_in_three_parts_before_anything_is_made(memfit, config, tmp_path, words, what, remedy):
    config()
    check_refused(memfit("run", *words), what, remedy)
    assert not list(tmp_path.glob("runs/*/*/jobs/*"))


FUNCTION = """
from memfit.pipeline import Context

def train(ctx: Context, lr: float = 0.1, fold: int = 0) -> dict:
    return {"loss": lr * fold}
"""


@pytest.mark.slow
def test_a_plain_function_runs_once_or_for_each_value(memfit, tmp_path):
    (tmp_path / "job.py").write_text(FUNCTION)
    once = json.loads(memfit("run", "job:train", "--set", "params.fold=3", "--json").out)
    assert [(job["job"], job["result"]["loss"]) for job in once["jobs"]] == [("train", pytest.approx(0.3))]
    each = memfit("run", "job:train", "--param", "fold=1..2", "--param", "lr=0.5", "--json")
    found = json.loads(each.out)
    assert [job["result"]["loss"] for job in found["jobs"]] == [0.5, 1]
    assert found["jobs"][1]["params"] == {"fold": "2", "lr": "0.5"}
    assert found["stages"][0]["metrics"]["loss"]["mean"] == 0.75


GATED = """
from pydantic import BaseModel
from memfit.pipeline import Stage, Stop, Workload

class Params(BaseModel, extra="forbid", frozen=True):
    limit: float = 2.0

def prepare(ctx, params):
    return {"folds": 3, "market": "daily"}

def fold(ctx, params):
    held = b"1" * (24 << 20)
    return {"loss": float(ctx.unit)}

def gate(ctx, params):
    report = ["the first loss is 1.0"]
    if params.limit < 1:
        raise Stop("the first fold is too bad", exit_code=11, result={"report": report})
    return {"report": report}

WORKLOAD = Workload(Params, (
    Stage("prepare", prepare, reads=()),
    Stage("fold", fold, needs=("prepare",), each="fold in prepare.folds", reads=()),
    Stage("gate", gate, needs=("fold",), holds="fold"),
))
"""


@pytest.fixture
def gated(tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    return ["run", "gated:WORKLOAD"]


@pytest.fixture(scope="module")
def gated_run(tmp_path_factory):
    """The gated workload, run once."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "gated.py").write_text(GATED)
    return run_once(folder, "run", "gated:WORKLOAD")


@pytest.mark.slow
def test_a_gate_that_stops_the_run_is_told_with_what_it_skipped(memfit, gated):
    done = memfit(*gated, "--set", "params.limit=0.5")
    assert done.exit_code == 11
    assert "gate stops the run here: the first fold is too bad" in done.out
    assert "fold_2 and fold_3 are skipped: gate stopped the run" in done.out
    assert re.search(r"^gate +stopped the run \(exit code 11\): the first fold is too bad\n +the first loss is 1.0$",
                     done.out, re.MULTILINE)  # fmt: skip
    assert memfit(*gated, "--set", "params.limit=0.5", "--json").exit_code == 11
    # What it held goes on when it passes, and what is valid is not run again.
    passed = memfit(*gated, "--set", "params.limit=2")
    assert passed.exit_code == 0
    assert "prepare is reused" in passed.out and "gate runs again: limit 0.5 -> 2.0" in passed.out
    assert re.search(r"^fold +reused 1, completed 2, which saved", passed.out, re.MULTILINE)


@pytest.mark.slow
def test_a_choice_of_stages_and_units_runs_these_alone(memfit, gated, gated_run, tmp_path):
    def runs(*words):
        found = json.loads(memfit(*gated, *words, "--plan", "--json").out)
        return {stage["name"]: stage["num_runs"] for stage in found["stages"]}

    assert runs("--until", "prepare") == {"prepare": 1}
    shutil.copytree(gated_run.folder, tmp_path, dirs_exist_ok=True)
    assert runs("--from", "prepare", "--until", "fold", "--units", "2", "--skip", "gate") == {"prepare": 1, "fold": 1}
    found = json.loads(memfit(*gated, "--from", "fold", "--units", "1", "--json").out)
    assert {stage["name"]: stage["counts"] for stage in found["stages"]} == {
        "prepare": {"reused": 1}, "fold": {"completed": 1}, "gate": {"completed": 1},
    }  # fmt: skip


@pytest.mark.core
@pytest.mark.proves("S0-05", "S0-46")
def test_a_plan_says_what_would_run_why_and_what_fits_and_starts_nothing(memfit, gated, gated_run, tmp_path):
    first = memfit(*gated, "--plan", "--no-steps")
    assert first.exit_code == 0 and not (tmp_path / "runs").exists()
    assert "prepare   would run 1: it was not made yet" in first.out
    shutil.copytree(gated_run.folder, tmp_path, dirs_exist_ok=True)
    done = json.loads(memfit(*gated, "--plan", "--json").out)
    assert [stage["states"] for stage in done["stages"]] == [{"kept": 1}, {"kept": 3}, {"kept": 1}]
    assert all(stage["num_runs"] == 0 and stage["saved_seconds"] >= 0 for stage in done["stages"])
    anew = memfit(*gated, "--plan", "--from", "fold")
    assert re.search(r"^fold +would run 1, would run later 2: it is asked for \(--from fold\)$", anew.out, re.MULTILINE)
    assert re.search(
        r"one job: \S+ MiB of host memory \(measured on fold_\d of run_\w+\) = anonymous \S+ MiB \+ ", anew.out
    )
    assert re.search(r"reserved: \S+ MiB = \S+ MiB \+ \d+ % slack", anew.out)
    fold = json.loads(memfit(*gated, "--plan", "--from", "fold", "--json").out)["stages"][1]
    parts = {name: size for name, size in fold["footprint"]["parts"].items() if name != "file"}
    assert sum(parts.values()) == pytest.approx(fold["footprint"]["private_bytes"], rel=0.15)
    assert re.search(r"^ +all 3 +\S+ MiB +\S+ GiB  yes +about \d", anew.out, re.MULTILINE)
    large = memfit(*gated, "--plan", "--from", "fold", "--limit", "16MiB")
    assert large.exit_code == 3 and re.search(r" -\S+ MiB +no ", large.out)
    two = memfit(
        *gated, "--plan", "--from", "fold", "--limit", str(5 * fold["rows"][0]["needed_bytes"] // 2), "--reserve", "0"
    )
    assert re.search(r"^ +2 +\S+ MiB +\S+ MiB  yes +about \d", two.out, re.MULTILINE)
    assert not [
        job
        for job in tmp_path.glob("runs/*/*/jobs/*")
        if job.name not in ("prepare", "gate") and not job.name.startswith("fold_")
    ]


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (["run", "--unti", "fold"], "memfit run: no such option: --unti.", "did you mean '--until'?"),
        (["estimte"], "memfit has no verb 'estimte'.", "did you mean 'estimate'?"),
        (["ps", "more"], "memfit ps: got unexpected extra argument(s) (more).", "see memfit ps --help"),
        (["stop"], "memfit stop: missing argument 'RUN|RUN/JOB'.", "see memfit stop --help"),
        (["run", "--param"], "memfit run: option '--param' requires an argument.", "see memfit run --help"),
    ],
)
def test_a_command_line_that_is_no_command_is_refused_in_three_parts(memfit, words, what, remedy):
    check_refused(memfit(*words), what, remedy)
