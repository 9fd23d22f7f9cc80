"""``memfit stop``: real runs and jobs are asked to stop from outside, with and without a supervisor."""

import fcntl
import os
import re
import signal
import subprocess
import sys

import pytest

from cli.live_run import die, memfit_command, running
from jobs.contract import submit, wait_until
from memfit.errors import UsageError
from memfit.jobs import Job, LocalBackend, read_status, stop
from memfit.memory import list_entries
from memfit.rundir import RunDir, liveness

pytestmark = pytest.mark.usefixtures("folder_of_jobs")


@pytest.mark.core
def test_a_run_is_stopped_at_a_checkpoint_and_says_how_to_go_on(memfit, tmp_path, monkeypatch):
    with running(tmp_path) as (process, run):
        assert liveness(run).supervisor == process.pid
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="cannot be seen from here"):
            patch.setattr("memfit.rundir._liveness._holds", lambda pid, lock: False)  # as in another container
            stop(run)
        for name, known in (
            ("dmo", "demo"),
            (f"{run.path.name}x", run.path.name),
            ("demo/cmd_0009", r"demo/cmd_000\d"),
        ):
            refused = memfit("stop", name)
            assert (refused.exit_code, refused.out) == (2, "")
            assert re.fullmatch(rf"memfit: '{name}' names no run .*\n  rule: .*\n  do: .*'{known}'.*\n", refused.err)
        done = memfit("stop", "demo")
        assert done.exit_code == 0
        assert process.wait(60) == 75
        assert re.search(r"(?m)^cmd_0001 stopped: stopped after a checkpoint in phase train", done.out)
        assert re.search(r"(?m)^cmd_0002 stopped: ", done.out)
        assert f"to go on: memfit resume {run.path}" in done.out
        assert run.state == "preempted"
        assert not (run.path / "jobs/cmd_0003/outcome.json").exists()
    again = memfit("stop", run.path)
    assert (again.exit_code, again.out) == (0, f"{run.path} does not run: there is nothing to stop\n")


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["signal.SIG_DFL", "lambda *_: sys.exit(0)"])
def test_a_job_without_a_checkpoint_is_said_to_start_from_the_beginning(memfit, tmp_path, answer):
    text = f"import signal, sys, time\nsignal.signal(signal.SIGTERM, {answer})\nif False: import lightning\n"
    (tmp_path / "job.py").write_text(f"{text}open(sys.argv[1] + '.started', 'w').close(); time.sleep(300)\n")
    with running(tmp_path, folds="1", at_once=1) as (process, run):
        told = memfit("stop", run.path).out
        assert process.wait(60) == 75
        said = (tmp_path / "demo.log").read_text()
        assert f"stopped; to go on: memfit resume {run.path}\n" in said and run.state == "preempted"
        anew = "cmd_0001 starts from the beginning, unless the command saves and loads checkpoints of its own; job.py:3 uses"
        assert f'{anew} Lightning: Stop("out").fit(trainer, ...) saves at a stop' in told
        assert said.count(anew) == 1 and said.count("uses Lightning") == 1
        assert "exit code 75" not in said and "preempted" not in said and "cancelled" not in said
    out = memfit("diagnose", run.path).out
    assert "memfit resume RUN" in out and "sacct" not in out


def test_a_run_of_which_no_job_runs_is_said_to_have_stopped(memfit, tmp_path):
    run = RunDir.create(tmp_path / "runs", "idle", "0" * 64)
    code = (
        "import os, signal, sys; from memfit.memory import lock_file\n"
        "lock = lock_file(sys.argv[1] + '/supervisor.lock')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(75)); print('on', flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, run.path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        assert memfit("stop", run.path).out == f"{run.path} has stopped: no job of it ran\n"
        assert process.wait(60) == 75


@pytest.mark.slow
def test_asking_again_in_any_way_ends_no_job_before_its_checkpoint(tmp_path):
    slow = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(75)))\n"
    (tmp_path / "job.py").write_text(slow + "open(sys.argv[1] + '.started', 'w').close(); time.sleep(300)\n")
    with running(tmp_path, folds="1", at_once=1) as (process, run):
        first = subprocess.Popen(memfit_command("stop", run.path), cwd=tmp_path, stdout=subprocess.DEVNULL)
        wait_until(lambda: any(event["kind"] == "stop" for event in run.events()))
        process.terminate()
        assert [event["asked"] for event in run.events() if event["kind"] == "stop"] == [1]
        for path in run.events_dir.iterdir():
            path.unlink()  # as on a full disk, where events wait in memory
        assert [status.state for status in stop(run)] == ["preempted"]
        assert (first.wait(60), process.wait(60)) == (0, 75)


@pytest.mark.core
def test_one_job_is_stopped_the_others_go_on_one_that_waits_never_starts_and_now_is_without_a_checkpoint(
    memfit, tmp_path
):
    with running(tmp_path, folds="1..4") as (process, run):
        assert "cmd_0003 stopped: stopped by memfit stop while it waited" in memfit("stop", "demo/cmd_0003").out
        done = memfit("stop", run.job_dir("cmd_0002"))
        assert [line.split(":")[0] for line in done.out.splitlines()] == ["cmd_0002 stopped", "to go on"]
        # It was asked for, so it does not come again: the next job that waited takes its place.
        wait_until(lambda: liveness(run).jobs == ["cmd_0001", "cmd_0004"])
        assert process.poll() is None and not (tmp_path / "demo_3.started").exists()
        assert "nothing to stop" in memfit("stop", f"{run.path}/cmd_0002").out
        memfit("stop", run.path)
        assert process.wait(60) == 75
    resumed = subprocess.Popen(memfit_command("resume", run.path), cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: "cmd_0002" in liveness(run).jobs)
        memfit("stop", f"{run.path}/cmd_0002")
        wait_until((tmp_path / "demo_3.started").exists)
    finally:
        done, code = memfit("stop", "--now", run.path.name), resumed.wait(60)
    assert (code, re.search(r"(?m)^cmd_0001 stopped: ", done.out) is not None) == (130, True)


@pytest.mark.slow
def test_jobs_without_a_supervisor_are_stopped_too(memfit, tmp_path):
    with running(tmp_path) as (process, run):
        (entry,) = list_entries()
        die(process)
        assert (liveness(run).supervisor, entry.pid) == (None, process.pid)  # by the lock, not by a number alone
        assert liveness(run).jobs == ["cmd_0001", "cmd_0002"]
        done = memfit("stop", run.path)
        assert re.findall(r"(?m)^(cmd_\d+ \w+):", done.out) == ["cmd_0001 stopped", "cmd_0002 stopped"]
        assert liveness(run).jobs == []


@pytest.mark.slow
def test_jobs_of_a_backend_are_stopped_from_another_process_now(tmp_path):
    run = RunDir.create(tmp_path / "runs", "bare", "0" * 64)
    backend = LocalBackend(run)
    submit(backend, Job("deaf", command=("sh", "-c", "trap '' TERM; touch ready; sleep 300"), cwd=str(tmp_path)))
    wait_until((tmp_path / "ready").exists)
    subprocess.run(memfit_command("stop", "--now", run.job_dir("deaf")), check=True, timeout=60)
    assert read_status(run, "deaf").state == "cancelled"
    wait_until(lambda: backend.poll()["deaf"].state == "cancelled")
    backend.close()


def test_a_request_that_a_beginning_job_forgets_is_made_again(tmp_path):
    """A job that begins takes its lock, and then removes what an earlier attempt was asked."""
    run = RunDir.create(tmp_path / "runs", "begins", "0" * 64)
    folder = run.job_dir("fold_1")
    folder.mkdir(parents=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    ticks = []

    def begin(left):
        ticks.append((folder / "stop_requested").exists())
        if len(ticks) == 1:
            (folder / "stop_requested").unlink()
        else:
            fcntl.flock(lock, fcntl.LOCK_UN)

    stop(run, "fold_1", now=True, on_tick=begin)
    os.close(lock)
    assert ticks[:2] == [True, True] and (folder / "stop_requested").read_text() == "now\n"


@pytest.mark.slow
def test_interrupting_the_wait_leaves_the_request_standing(tmp_path):
    (tmp_path / "job.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), sys.exit(75)))\n"
        "open(sys.argv[1] + '.started', 'w').close(); time.sleep(300)\n"
    )
    with running(tmp_path, folds="1", at_once=1) as (process, run):
        command = memfit_command("stop", run.path)
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as stopper:
            wait_until(lambda: any(event["kind"] == "stop" for event in run.events()))
            os.kill(stopper.pid, signal.SIGINT)
            out, _ = stopper.communicate(timeout=60)
        assert (stopper.returncode, "was asked to stop all the same" in out) == (130, True)
        assert process.wait(60) == 75
