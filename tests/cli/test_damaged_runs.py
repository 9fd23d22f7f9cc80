"""Any file of a run directory may be damaged or somebody else's: each command ends in three parts, or goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from memfit.rundir import RunDir

MAP = ["run", "--limit", "300MiB", "--param", "a=1..2", "--name", "demo", "--"]
#: Lives as long as a job has to for a status, an environment and a series of its memory.
TEXT = "until ls runs/demo/*/jobs/cmd_000{a}/memory.jsonl > /dev/null 2>&1; do sleep 0.05; done; test {a} = 1"


def _words(path):
    return path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "x")) + "\n")


def _folder(path):
    path.unlink()
    path.mkdir()


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _link(path):
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "object": lambda path: path.write_bytes(b"{}\n"),
    "words": _words,
    "deep": lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "folder": _folder,
    "fifo": _fifo,
    "link": _link,
}
#: They are read by nobody who could stumble.
NOT_READ = ("err.log",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two commands of which one failed, with every file that a run directory may hold."""
    folder = tmp_path_factory.mktemp("whole")
    words = [sys.executable, "-m", "memfit", *MAP, "sh", "-c", TEXT]
    env = os.environ | {"MEMFIT_CLAIMS_DIR": str(folder / "claims")}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    (run,) = RunDir.all(folder / "runs", "demo")
    failed = run.job_dir("cmd_0002")
    outcome = json.loads((failed / "outcome.json").read_text())
    records = {
        "outcome_1.json": outcome,
        "status.json": outcome | {"state": "running", "ended": None, "attempt": 2},
        "error.json": {"type": "ValueError", "memfit": False, "text": "x"},
        "result.json": {"result": {"loss": 1.0}},
    }
    for name, record in records.items():
        (failed / name).write_text(json.dumps(record))
    (failed / "outcome.json").unlink()
    (failed / "stop_requested").write_text("stop\n")
    return run.path


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    """Copies of the whole run, one at a time, with a file of it damaged."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "demo" / whole.name

    def damaged(name, damage):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(whole, path)
        header = (path / "run.json").read_text().replace(str(whole.parents[2]), str(tmp_path))  # moved, not copied
        (path / "run.json").write_text(header)
        try:
            DAMAGES[damage](path / name)
        except (ValueError, AttributeError):  # no JSON object: it has no fields
            return None
        return path

    return damaged


def files_of(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name not in NOT_READ)


def check(done, what):
    """A command ended as it may: with an error of three parts, or not at all by one."""
    assert done.exit_code in (0, 2, 4, 5), (what, done)
    assert "Traceback" not in done.err, (what, done)
    if done.exit_code == 2:
        assert [line[:8] for line in done.err.splitlines() if line.startswith("  ")] == ["  rule: ", "  do:   "], what


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_reader_of_a_damaged_run_ends_in_a_traceback(memfit, whole, run, damage):
    for name in files_of(whole):
        if (path := run(name, damage)) is None:
            continue
        check(memfit("ps", "--all"), ("ps", name))
        check(memfit("diagnose", path), ("diagnose", name))
        if name.endswith("run.json") or name == "outcome.json":
            check(memfit("watch", path), ("watch", name))
            check(memfit("stop", path), ("stop", name))


@pytest.fixture
def at_most():
    """Ends a test that hangs, after so many seconds."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a reader waits for the writer of a FIFO"))
    yield signal.alarm
    signal.alarm(0)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["fifo", "link"])
def test_no_reader_of_a_run_waits_for_a_fifo_or_follows_a_link(memfit, whole, run, damage, at_most):
    for name in [*files_of(whole), "jobs/cmd_0002/err.log"]:
        at_most(60)
        path = run(name, damage)
        done = {verb: memfit(verb, path) for verb in ("diagnose", "report")}
        for verb, one in done.items():
            check(one, (verb, name))
        if "events/" in name or name.endswith("err.log"):  # said once, by whichever meets it first
            assert [one.exit_code for one in done.values()] == [0, 0], (name, done)
            assert f"passed over: {path / name}: not a regular file" in done["diagnose"].err, done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "jobs/cmd_0002/job.json"])
def test_no_start_of_a_damaged_run_ends_in_a_traceback(memfit, run, name):
    for damage in ("words", "folder"):
        check(memfit("resume", run(name, damage)), (damage, name))


@pytest.mark.core
def test_a_cut_outcome_is_named_and_moved_away_the_command_still_counts_as_done(memfit, run):
    path = run("jobs/cmd_0001/outcome.json", "cut")
    outcome = path / "jobs/cmd_0001/outcome.json"
    done = memfit("resume", path)
    assert (done.exit_code, f"mv {outcome} {outcome}.broken" in done.err) == (2, True)
    assert f"{outcome} is not a JSON object" in done.err
    outcome.rename(f"{outcome}.broken")
    again = memfit("resume", path).out
    assert "1 of 2 commands were done already; --new starts over" in again and "completed 1, failed 1" in again
