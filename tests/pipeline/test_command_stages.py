"""A config whose stages are commands: what their placeholders stand for, what is kept, and what a kill leaves."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from jobs.contract import wait_until
from memfit.errors import ConfigError, UsageError
from memfit.jobs import read_status
from memfit.pipeline import Choice
from memfit.rundir import RunDir

pytestmark = pytest.mark.usefixtures("here")

WAIT = "until test -e go; do sleep 0.05; done"


def run(stages, choice=None, *, view=None, **settings):
    return memfit.run(config_of(stages, **settings), choice=choice or Choice(), view=view)


def config_of(stages, **settings):
    return {"experiment": "demo", "stages": stages, **settings}


def killed(stages, moment, **settings):
    """Start a run, and kill its supervisor alone when the moment has come; the run."""
    Path("killed.json").write_text(json.dumps(config_of(stages, **settings)))  # YAML too
    process = subprocess.Popen([sys.executable, "-m", "memfit", "run", "killed.json"], stdout=subprocess.DEVNULL)
    wait_until(moment)
    process.kill()
    process.wait()
    return RunDir.all(Path("runs"), "demo")[0]


def script(name, text):
    Path(name).write_text(text)


def kept(path, job):
    return (path / "checkpoints" / job).read_text()


@pytest.mark.core
def test_units_come_from_a_result_and_meet_and_a_join_gets_all_of_them():
    folds = '{"folds": [{"fold": "a", "rows": 1}, {"fold": "b.5", "rows": 2}]}'
    stages = {
        "prepare": {"run": f"echo '{folds}' > {{dir}}/result.json"},
        "fold": {"each": "fold in prepare.folds", "run": "echo {unit} {fold} {rows} > {dir}/own"},
        "score": {"each": "fold in prepare.folds", "run": ["cp", "{fold}/own", "{dir}/copy"]},
        "double": {"each": "n in params.sizes", "run": "echo '{\"twice\": '$(({n} * 2))'}' > {dir}/result.json"},
        "join": {"run": 'for one in {score}; do cat "$one"/copy; done > {dir}/all; ls {score}>/dev/null'},
        "words": {"run": ["cp", "-r", "{score}", "{dir}"]},
        "again": {"each": "fold in prepare.folds", "run": "cat {fold}/own > {dir}/own"},  # its own fold
    }
    result = run(stages, params={"sizes": [3, 5]})
    assert result.state == "completed"
    assert kept(result.path, "stage_join/all") == "a a 1\nb.5 b.5 2\n"
    assert {one.name for one in (result.path / "checkpoints/stage_words").iterdir()} >= {"score_a", "score_b.5"}
    assert kept(result.path, "fold_b.5/own") == kept(result.path, "again_b.5/own") == "b.5 b.5 2\n"
    assert [result.metrics[job]["twice"] for job in ("double_3", "double_5")] == [6, 10]
    again = run(stages, params={"sizes": [3, 5]})
    assert again.path == result.path and {one.attempt for one in again.statuses.values()} == {1}


@pytest.mark.parametrize(
    "command",
    [
        "cat {fold}/own > {dir}/all",
        "cat '{fold}'",
        "join --in={fold}",
        ["join", "{fold}/own"],
        ["sh", "-c", "ls {fold}"],
    ],
)
def test_the_folders_of_several_units_within_a_word_are_refused_with_a_loop(command):
    stages = {"fold": {"each": "fold in params.folds", "run": "true"}, "join": {"run": command}}
    with pytest.raises(ConfigError, match=r"has \{fold\} within a word of its command") as caught:
        run(stages, params={"folds": 2})
    assert 'for one in {fold}; do cat "$one"/result.json; done' in caught.value.remedy


@pytest.mark.slow
def test_a_job_of_a_killed_supervisor_that_is_not_asked_for_any_more_is_stopped_before_a_result_is_reused():
    stages = {"make": {"run": "sh make.sh {dir}"}}
    script("make.sh", "echo one > $1/out")
    first = run(stages)
    script("make.sh", f"trap 'touch saved; exit 75' TERM; touch began; {WAIT}; echo two > $1/out")
    left = killed(stages, Path("began").exists)
    assert left.path != first.path
    script("make.sh", "echo one > $1/out")
    result = run(stages)  # the result of the first run is linked to where the other job would write
    Path("go").touch()
    assert (result.path, result.exit_code) == (left.path, 0)
    assert kept(result.path, "stage_make/out") == "one\n"
    assert read_status(left, "make").asked and Path("saved").exists()
    assert kept(first.path, "stage_make/out") == "one\n"


@pytest.mark.slow
def test_a_job_that_waits_for_what_runs_anew_or_is_asked_for_anew_is_stopped_and_one_that_is_as_asked_goes_on():
    stages = {
        "a": {"run": "sh a.sh > {dir}/out", "memory": "64MiB"},
        "b": {"run": f"cat {{a}}/out; echo x >>b.log; {WAIT}", "memory": "64MiB"},
        "c": {"run": f"echo x >>c.log; {WAIT}", "memory": "64MiB"},
    }
    script("a.sh", "echo 1")
    began = [Path("b.log"), Path("c.log")]
    left = killed(stages, lambda: all(path.exists() for path in began))
    script("a.sh", f"touch go; {WAIT}; echo 2")
    result = run(stages)
    assert (result.path, result.exit_code) == (left.path, 0)
    assert (Path("b.log").read_text(), Path("c.log").read_text()) == ("x\nx\n", "x\n")
    assert {job: one.attempt for job, one in result.statuses.items()} == {"a": 2, "b": 2, "c": 1}


@pytest.mark.core
def test_from_runs_what_reads_a_stage_from_the_beginning_and_never_in_a_finished_run():
    stages = {
        "a": {"run": "echo 1 > {dir}/out; echo a >>ran"},
        "gate": {"run": "echo gate >>ran", "after": ["a"]},
        "b": {"run": "cat {a}/out; echo b >>ran; echo x >> {dir}/steps; ls ok*", "after": ["gate"]},
    }
    first = run(stages)
    assert first.exit_code == 4
    key = first.path / "checkpoints/stage_b/.key"
    before = key.stat().st_mtime_ns
    (left := key.with_name(".arrays.4711-1.tmp")).mkdir()  # of a kill
    assert len(kept(run(stages).path, "stage_b/steps")) == 4  # what was begun goes on
    assert not left.exists()
    assert key.stat().st_mtime_ns == before  # a full disk would leave none, and nothing would go on
    (first.path / "checkpoints/stage_a.json").write_text("{")
    Path("ok").touch()
    Path("ran").unlink()
    done = run(stages, Choice(anew="b"))
    assert (done.path, kept(done.path, "stage_b/steps")) == (first.path, "x\n")
    assert Path("ran").read_text() == "a\nb\n"  # the damaged one, and what was asked for
    gate = run(stages, Choice(anew="gate"))
    assert Path("ran").read_text() == "a\nb\ngate\n"  # nothing reads the gate, and the others are taken over
    assert gate.path != done.path
    assert run(stages, Choice(anew="a")).exit_code == 0
    assert Path("ran").read_text() == "a\nb\ngate\na\nb\n"
    assert sorted(path.name for path in (done.path / "checkpoints").glob("*.json")) == [
        "stage_a.json", "stage_b.json", "stage_gate.json",
    ]  # fmt: skip


def test_a_script_that_is_edited_before_its_job_starts_gives_no_result_under_the_old_key():
    script("b.sh", "echo 1 > $1/out")
    stages = {"a": {"run": "echo 'echo 2 > $1/out' > b.sh"}, "b": {"run": ["sh", "b.sh", "{dir}"], "after": ["a"]}}
    first = run(stages)
    assert (first.exit_code, first.statuses["b"].state) == (4, "failed")
    assert "the code of stage b is not what it was when this run started: b.sh changed" in first.statuses["b"].cause
    assert kept(run(stages).path, "stage_b/out") == "2\n"


def test_a_bad_result_file_fails_its_job_alone_and_the_run_goes_on():
    stages = {
        "bad": {"run": "echo nothing > {dir}/result.json"},
        "user": {"needs": ["bad"], "run": "true"},
        "good": {"run": "echo '{\"n\": 1}' > {dir}/result.json"},
    }
    result = run(stages)
    assert (result.exit_code, result.metrics) == (4, {"good": {"n": 1}})
    assert {job: one.state for job, one in result.statuses.items()} == {
        "bad": "failed", "user": "pending", "good": "completed",
    }  # fmt: skip
    assert "result.json is not a JSON object" in result.statuses["bad"].cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("10000000000", "has each='fold in list.folds', and that is 10000000000"),
        ('["a_b"]', "stages fold_a and fold both have a job named fold_a_b"),
    ],
)
def test_what_is_refused_while_a_run_goes_on_fails_its_stage_and_the_others_go_on(units, message):
    stages = {
        "list": {"run": f"echo '{{\"folds\": {units}}}' > {{dir}}/result.json"},
        "fold": {"each": "fold in list.folds", "run": "true"},
        "fold_a": {"each": "name in params.names", "run": "true"},
        "other": {"after": ["list"], "run": "true"},
    }
    with pytest.raises(UsageError, match=message):
        run(stages, Choice(), params={"names": ["b"]})
    [made] = RunDir.all(Path("runs"), "demo")
    outcome = json.loads((made.path / "outcome.json").read_text())
    assert outcome["state"] == "failed" and any(message in job["cause"] for job in outcome["jobs"].values())
    assert outcome["jobs"]["other"]["state"] == "completed"


def test_jobs_of_one_name_are_refused_before_anything_is_made():
    stages = {
        "fold": {"each": "one in params.names", "run": "true"},
        "fold_1": {"each": "two in params.sizes", "run": "true"},
    }
    with pytest.raises(ConfigError, match="stages fold and fold_1 both have a job named fold_1_2"):
        run(stages, params={"names": ["1_2"], "sizes": [2]})
    assert not Path("runs").exists()


@pytest.mark.slow
def test_large_outputs_are_hashed_while_other_jobs_start():
    stages = {
        "a": {"run": "truncate -s 512M {dir}/out"},
        "b": {"run": "true"},
        "c": {"needs": ["a"], "run": "stat -c %s {a}/out"},
    }
    result = run(stages, max_parallel=1)
    assert result.exit_code == 0
    assert (result.path / "jobs/c/out.log").read_text() == f"{1 << 29}\n"
    events = [event for event in RunDir(result.path).events() if event["kind"] in ("admit", "stage")]
    began = next(n for n, event in enumerate(events) if event["kind"] == "admit" and event["job"] == "b")
    hashed = next(n for n, event in enumerate(events) if event.get("state") == "completed" and event["jobs"] == ["a"])
    assert began < hashed


def test_secrets_of_units_can_be_read_by_their_owner_alone():
    secret = "s3cr3t-of-mine"
    stages = {"pull": {"each": "one in params.accounts", "run": "echo done > {dir}/out"}}
    result = run(stages, params={"accounts": [{"one": "a", "api_key": secret}]})
    assert result.exit_code == 0
    holding = [path for path in result.path.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]
    assert holding and {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    again = run(stages | {"more": {"run": "true"}}, params={"accounts": [{"one": "a", "api_key": secret}]})
    assert stat.S_IMODE((again.path / "checkpoints/pull_a.json").stat().st_mode) == 0o600  # the reused one too


@pytest.mark.slow
def test_the_table_leaves_out_the_units_whose_code_has_changed_since():
    from pyarrow import feather

    stages = {"fold": {"each": "fold in params.folds", "run": "sh fold.sh {fold} > {dir}/result.json"}}
    script("fold.sh", 'echo "{\\"n\\": $1}"')
    params = {"folds": 3}
    run(stages, params=params, units="1-2")
    result = run(stages, params=params, units="3")
    table = feather.read_table(result.path / "kfold_results.feather")
    assert (table["fold"].to_pylist(), table["n"].to_pylist()) == ([1, 2, 3], [1, 2, 3])
    (result.path / "checkpoints/fold_3.json").unlink()
    script("fold.sh", 'echo "{\\"n\\": 10$1}"')
    changed = run(stages, params=params, units="3")
    assert changed.path == result.path  # nothing is overwritten
    table = feather.read_table(result.path / "kfold_results.feather")
    assert (table["fold"].to_pylist(), table["n"].to_pylist()) == ([3], [103])


def test_an_error_before_any_job_starts_leaves_a_finished_run_finished():
    stages = {"a": {"run": "true"}}
    result = run(stages)
    with pytest.raises(ZeroDivisionError):
        run(stages, view=lambda run: 1 / 0)
    assert RunDir(result.path).state == "completed"
    assert run(stages).path == result.path
