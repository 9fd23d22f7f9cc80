"""What another user of the host puts in this one's way: a real second user, whom no verb may serve."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from cli.live_run import die, in_a_folder_of_jobs, running
from memfit.jobs import stop
from memfit.memory import Claims
from memfit.rundir import RunDir, liveness
from nobody import UID, as_nobody, needs_root, shared_folder

pytestmark = needs_root


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that all users may write to, where commands are given."""
    with shared_folder() as made:
        in_a_folder_of_jobs(made, monkeypatch)
        yield made


def forge(folder, experiment="train", name="run_99991231_235959_00000000"):
    """A run of the other user's whose command leaves a mark."""
    path = folder / "runs" / experiment / name
    facts = {
        "schema_version": 2,
        "kind": "commands",
        "template": ["touch", str(folder / "mark")],
        "combinations": [{}],
        "cwd": str(folder),
        "settings": {"experiment": experiment},
        "origins": {},
    }

    def make():
        (path / "jobs" / "cmd_0001").mkdir(parents=True)
        (path / "events").mkdir()
        (path / "run.json").write_text(json.dumps(facts))
        (path / "supervisor.lock").symlink_to("/dev/null")

    as_nobody(make)
    return path


def own_run(memfit, folder):
    """A run of this user's that failed, in a folder of runs that others may write to."""
    (folder / "runs" / "train").mkdir(parents=True)
    for path in (folder / "runs", folder / "runs" / "train"):
        path.chmod(0o1777)
    done = memfit("run", "--name", "train", "--", "sh", "-c", "test -e go")
    assert done.exit_code == 1, done.err
    [run] = RunDir.all(folder / "runs", "train")
    return run


@pytest.mark.slow
def test_a_forged_run_of_the_same_name_is_not_taken_for_ones_own(memfit, folder):
    run = own_run(memfit, folder)
    forged = forge(folder)
    (folder / "go").touch()
    assert memfit("resume", "train").exit_code == 0
    assert run.state == "completed"
    assert not (folder / "mark").exists()
    assert str(forged) not in memfit("ps", "--all").out


@pytest.mark.slow
def test_the_same_command_goes_on_beside_a_forged_run(memfit, folder):
    run = own_run(memfit, folder)
    forge(folder, name=f"run_99991231_235959_{run.path.name[-8:]}")
    (folder / "go").touch()
    assert memfit("run", "--name", "train", "--", "sh", "-c", "test -e go").exit_code == 0
    assert run.state == "completed"


@pytest.mark.parametrize("verb", ["resume", "stop", "watch"])
@pytest.mark.parametrize("how", ["path", "name", "job"])
def test_another_users_run_is_refused_with_its_owner_and_what_to_do(memfit, folder, verb, how):
    forged = forge(folder)
    name = {"path": forged, "name": "train", "job": f"{forged}/cmd_0001"}[how]
    done = memfit(verb, name)
    assert (done.exit_code, done.out) == (2, "")
    shown = forged.relative_to(folder) if how == "name" else forged
    assert f"{shown} belongs to uid {UID}; this is uid {os.geteuid()}." in done.err
    assert f"sudo -u '#{UID}' memfit" in done.err
    assert not (folder / "mark").exists()
    assert list((forged / "jobs/cmd_0001").iterdir()) == []


def test_a_run_whose_files_are_fifos_is_refused_and_waited_for_by_nobody(memfit, folder):
    forged = folder / "runs" / "train" / "run_99991231_235959_00000000"

    def make():
        (forged / "jobs" / "cmd_0001").mkdir(parents=True)
        for name in ("run.json", "supervisor.lock", "jobs/cmd_0001/lock", "outcome.json"):
            os.mkfifo(forged / name)

    as_nobody(make)
    for words in (("stop", forged), ("resume", "train"), ("watch", forged)):
        assert memfit(*words).exit_code == 2
    assert memfit("ps", "--all").exit_code == 0


@pytest.mark.slow
def test_another_user_can_lock_neither_a_run_nor_its_jobs(folder):
    with running(folder, folds="1", at_once=1) as (process, run):

        def attack():
            for path in (run.path / "supervisor.lock", run.job_dir("cmd_0001") / "lock"):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDONLY)

        as_nobody(attack)
        die(process)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_lock_that_is_no_file_is_held_by_nobody_and_no_process_gets_a_signal(tmp_path, kind):
    run = RunDir.create(tmp_path / "runs", "train", "0" * 64)
    lock = run.path / "supervisor.lock"
    lock.symlink_to("/dev/null") if kind == "link" else os.mkfifo(lock)
    holds = (
        "import sys; from pathlib import Path; from memfit.memory import Claims\n"
        "claims = Claims(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        other.stdout.readline()
        assert liveness(run).supervisor is None
        assert stop(run) == []
        assert other.communicate()[0] == b""
    assert other.returncode == 0


def test_a_folder_of_claims_that_another_user_took_first_is_named_and_the_run_goes_on(folder, memfit, monkeypatch):
    monkeypatch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "claims"))
    as_nobody((folder / "claims").mkdir)
    done = memfit("run", "--", "true")
    assert done.exit_code == 0
    assert "do not share one budget" in done.err
    assert f"uid {UID}" in done.err
    assert list((folder / "claims").iterdir()) == []


def test_one_users_runs_are_neither_shown_to_another_nor_counted_there(folder, memfit, monkeypatch):
    claims = Claims(folder / "runs" / "mine")
    claims.write(used=Counter(), unused=Counter(host=1 << 50))
    monkeypatch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "theirs"))

    def look():
        theirs = Claims(folder / "runs" / "theirs")
        assert (theirs.problem, theirs.others().num) == ("", Counter())
        os._exit(0)

    as_nobody(look)
    assert "no run of yours is alive" in memfit("ps").out
    claims.close()


def test_another_users_run_is_not_diagnosed_by_its_folder_its_job_or_its_experiment(memfit, folder):
    forged = forge(folder)
    for path in (forged, forged / "jobs/cmd_0001", forged.parent):
        done = memfit("diagnose", path)
        assert (done.exit_code, f"belongs to uid {UID}" in done.err) == (2, True), (path, done)


def test_a_file_of_another_user_in_ones_own_run_is_passed_over(memfit, folder, capsys):
    assert memfit("run", "--name", "own", "--", "true").exit_code == 0
    [run] = RunDir.all(folder / "runs", "own")
    run.events_dir.chmod(0o777)
    forged = run.events_dir / "forged-1-1.jsonl"
    as_nobody(lambda: forged.write_text('{"time": 1.0, "job": "cmd_0001", "kind": "oom", "memory": "device"}\n'))
    done = memfit("diagnose", run.path)
    assert f"passed over: {forged}: it belongs to uid {UID}" in done.err
    assert "completed" in done.out
