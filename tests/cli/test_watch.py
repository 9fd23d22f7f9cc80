"""``memfit watch``: a live run seen from another process."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from cli.conftest import check_refused
from cli.live_run import die, memfit_command, running
from jobs.contract import wait_until
from memfit.files import write_json
from memfit.jobs import stop
from memfit.rundir import RunDir, liveness

pytestmark = pytest.mark.usefixtures("folder_of_jobs")

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def watch(tmp_path, *words):
    command = memfit_command("watch", *words)
    watcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return watcher, watcher.stdout.readline()


@pytest.mark.core
@pytest.mark.proves("S0-47")
def test_a_watcher_sees_what_happens_as_stamped_lines_until_the_run_ends(tmp_path):
    with running(tmp_path) as (process, run):
        watcher, first = watch(tmp_path)
        stop(run, "cmd_0001")
        wait_until(lambda: liveness(run).jobs == ["cmd_0002", "cmd_0003"])
        stop(run)
        out, err = watcher.communicate(timeout=100)
        assert process.wait(60) == 75
    assert (watcher.returncode, first, err) == (0, f"Run {run.path}\n", "")
    *lines, last = out.splitlines()
    assert last == f"Run {run.path} has ended: stopped"
    assert all(re.match(STAMP, line) for line in lines)
    told = [re.split(r" \(| and | with |\. ", re.sub(STAMP, "", line))[0] for line in lines]
    wanted = ["cmd_0001 fold=1 stopped", "cmd_0003 fold=3 started", "cmd_0002 fold=2 stopped"]
    assert [line for line in told if line in wanted] == wanted


@pytest.mark.slow
@pytest.mark.proves("S3-27")
def test_an_error_line_about_memory_is_shown_while_the_job_still_runs(tmp_path):
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB."
    code = f"import sys, time; print({said!r}, file=sys.stderr, flush=True); time.sleep(3)"
    command = memfit_command("run", "--param", "n=1", "--", sys.executable, "-c", code, "{n}")
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
    assert 0 < out.find(f"says: {said}") < out.find("cmd_0001  completed")
    assert out.count(said) == 1


@pytest.mark.slow
def test_interrupting_a_watcher_leaves_the_run_and_without_a_supervisor_its_jobs_are_watched_to_their_end(tmp_path):
    with running(tmp_path, folds="1", at_once=1) as (process, run):
        watcher, _ = watch(tmp_path, "demo")
        os.kill(watcher.pid, signal.SIGINT)
        out, _ = watcher.communicate(timeout=60)
        assert (watcher.returncode, out) == (130, "the run goes on\n")
        assert process.poll() is None and liveness(run).jobs == ["cmd_0001"]
        die(process)
        watcher, _ = watch(tmp_path, run.path)
        told = watcher.stdout.readline()
        stop(run)
        out, _ = watcher.communicate(timeout=100)
    assert told.startswith("no supervisor: its jobs go on; memfit resume ")
    assert out.splitlines()[-1] == f"Run {run.path} has ended: its supervisor died"


@pytest.mark.slow
def test_on_a_terminal_it_shows_jobs_phases_and_the_budget_bar(tmp_path):
    with running(tmp_path, folds="1..3", at_once=2) as (process, run):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
            os.execv(sys.executable, memfit_command("watch", run.path))
        shown = b""

        def has_seen_all():
            nonlocal shown
            shown += os.read(terminal, 65536)
            wanted = (
                b"cmd_0001",
                b"fold=2",
                b"train",
                b"reserved",
                b"waiting 1",
                b"# jobs = reserved o others",
                b"free of",
            )
            return all(text in shown for text in wanted)

        wait_until(has_seen_all)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
        os.close(terminal)
        assert process.poll() is None


def test_a_run_that_has_ended_is_said_to_have_with_how_to_go_on(memfit, tmp_path):
    run = RunDir.create(tmp_path / "runs", "old", "a" * 64)
    done = memfit("watch")
    assert (done.exit_code, done.out) == (
        0,
        f"Run {run.path} does not run any more: interrupted; memfit resume {run.path} goes on with it\n",
    )
    write_json(run.path / "outcome.json", {"state": "completed"})
    assert memfit("watch", "old").out == f"Run {run.path} does not run any more: completed\n"


def test_without_any_run_it_gives_2_and_says_what_to_do(memfit):
    check_refused(memfit("watch"), "no run of yours is alive", "memfit run -- ")


@pytest.mark.slow
def test_a_run_on_another_host_is_watched_as_long_as_it_says_that_it_runs(tmp_path):
    run = RunDir.create(tmp_path / "runs", "far", "a" * 64, {"host": "another-host"})
    watcher, _ = watch(tmp_path, run.path)
    assert watcher.poll() is None
    write_json(run.path / "outcome.json", {"state": "completed"})
    out, _ = watcher.communicate(timeout=60)
    assert out.splitlines()[-1] == f"Run {run.path} has ended: completed"
