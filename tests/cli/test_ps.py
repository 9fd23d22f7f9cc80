"""``memfit ps``: this user's live runs on this host, wherever they lie."""

import json
import os
import re
import signal
from contextlib import suppress

import pytest

from cli.live_run import die, running
from jobs.contract import wait_until
from memfit.files import write_json
from memfit.jobs import read_status
from memfit.memory import Claims
from memfit.rundir import RunDir, liveness

pytestmark = pytest.mark.usefixtures("folder_of_jobs")


def test_without_a_run_it_says_so(memfit):
    done, told = memfit("ps"), "no run of yours is alive on this host; memfit ps --all shows those that ended\n"
    assert (done.exit_code, done.out) == (0, told)
    assert memfit("ps", "--json").out == "[]\n"


@pytest.mark.slow
@pytest.mark.proves("S0-20")
def test_a_live_run_is_shown_from_any_folder_with_its_jobs_and_their_memory(memfit, tmp_path, monkeypatch):
    with running(tmp_path) as (process, run):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        wait_until(
            lambda: all(job["used_bytes"] > 20 << 20 for job in json.loads(memfit("ps", "--json").out)[0]["jobs"])
        )
        (found,) = json.loads(memfit("ps", "--json").out)
        assert (found["run"], found["supervisor"], found["state"]) == (str(run.path), process.pid, "running")
        assert found["counts"] == {"running": 2, "waiting": 1}
        assert found["used_bytes"] == sum(job["used_bytes"] for job in found["jobs"])
        first = found["jobs"][0]
        assert (first["job"], first["params"], first["state"], first["phase"]) == (
            "cmd_0001", {"fold": "1"}, "running", "train",
        )  # fmt: skip
        assert 20 << 20 < first["used_bytes"] <= first["peak_bytes"] < 200 << 20
        assert first["pid"] not in (None, process.pid)

        head, line, table, *jobs = memfit("ps").out.splitlines()
        assert head == str(run.path)
        held = r"\S+ MiB used of \S+ MiB reserved"
        assert re.fullmatch(rf"  supervisor {process.pid}; running 2, waiting 1; {held}", line)
        assert table.split() == ["job", "pid", "phase", "memory", "peak", "reserved", "time"]
        assert [job.split()[:4] for job in jobs] == [
            [job["job"], f"fold={job['params']['fold']}", str(job["pid"]), "train"] for job in found["jobs"]
        ]

        die(process)
        assert "supervisor none (its jobs go on; memfit resume); running 2" in memfit("ps").out
        assert json.loads(memfit("ps", "--json").out)[0]["supervisor"] is None
        memfit("stop", run.path)
        assert "no run of yours is alive" in memfit("ps").out


@pytest.mark.slow
def test_a_job_whose_watcher_died_with_all_others_is_not_told_as_waiting(memfit, tmp_path):
    with running(tmp_path) as (process, run):
        wait_until(lambda: all(read_status(run, f"cmd_000{number}").pid for number in (1, 2)))
        jobs = [read_status(run, f"cmd_000{number}") for number in (1, 2)]
        for pid in (process.pid, *(job.watcher_pid for job in jobs)):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not liveness(run).jobs)
        assert "interrupted; waiting 1, node_fail 2" in memfit("ps", "--all").out
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def test_all_shows_the_runs_that_ended_and_those_that_were_interrupted(memfit, tmp_path):
    old = RunDir.create(tmp_path / "runs", "old", "a" * 64)
    write_json(old.path / "outcome.json", {"state": "failed"})
    cut = RunDir.create(tmp_path / "runs", "cut", "b" * 64)
    assert "no run of yours is alive" in memfit("ps").out
    lines = memfit("ps", "--all").out.splitlines()
    told = dict(zip(lines[::2], lines[1::2], strict=True))
    assert told == {str(old.path): "  failed; no jobs", str(cut.path): "  interrupted; no jobs"}


def test_a_run_that_cannot_be_read_is_shown_with_the_reason(memfit, tmp_path):
    run = RunDir.create(tmp_path / "runs", "broken", "a" * 64)
    (run.path / "run.json").write_text("[]")
    claims = Claims(run.path)
    done = memfit("ps")
    claims.close()
    assert done.exit_code == 0
    assert done.out.splitlines() == [str(run.path), f"  {run.path / 'run.json'} is not a JSON object (2 bytes)."]
