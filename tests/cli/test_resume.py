"""``memfit resume``: a run goes on where it stood, from any folder."""

import json
import re
import threading

import pytest

from cli.conftest import check_refused
from cli.live_run import die, running
from jobs.contract import wait_until
from memfit.jobs import read_status
from memfit.rundir import liveness

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder_of_jobs")]


@pytest.mark.core
def test_a_stopped_run_goes_on_with_what_is_not_done(memfit, tmp_path, monkeypatch):
    with running(tmp_path) as (process, run):
        memfit("stop", run.path)
        assert process.wait(60) == 75
    (tmp_path / "job.py").write_text("print('done')\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = memfit("resume", run.path)
    assert (done.exit_code, run.state) == (0, "completed")
    assert re.search(r"(?m)^jobs +completed 3$", done.out)
    assert [read_status(run, f"cmd_000{number}").attempt for number in (1, 2, 3)] == [2, 2, 1]


@pytest.mark.core
def test_jobs_that_outlived_their_supervisor_are_taken_over(memfit, tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys, time\nopen(sys.argv[1] + '.started', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
    )
    with running(tmp_path) as (process, run):
        die(process)
        assert liveness(run).jobs == ["cmd_0001", "cmd_0002"]

        def let_go_when_taken_over():
            wait_until(lambda: any("taken over" in event.get("why", "") for event in run.events()))
            (tmp_path / "go").touch()

        thread = threading.Thread(target=let_go_when_taken_over)
        thread.start()
        done = memfit("resume", "demo", "--json")
        thread.join()
        found = json.loads(done.out)
    assert (done.exit_code, found["run"], found["counts"]) == (0, str(run.path), {"completed": 3})
    assert [job["attempt"] for job in found["jobs"]] == [1, 1, 1]
    assert "taken over" in done.err


def test_a_run_that_is_run_already_and_one_that_is_none_give_2(memfit, tmp_path):
    with running(tmp_path, folds="1", at_once=1) as (process, run):
        done = memfit("resume", run.path)
        assert (done.exit_code, done.out) == (2, "")
        assert "is being run by another process" in done.err
        wait_until(lambda: liveness(run).jobs == ["cmd_0001"])
        assert process.poll() is None
    check_refused(memfit("resume", "absent"), "'absent' names no run")
