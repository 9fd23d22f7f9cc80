"""What another host did is not done again: the absence of its files counts late, and its processes are its own."""

import errno
import json
import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from jobs.contract import submit, wait_for_end
from memfit.files import read_json, write_json
from memfit.jobs import Job, JobStatus, LocalBackend, SlurmBackend, read_status
from memfit.memory import is_locked, lock_file
from memfit.rundir import EventWriter, FolderTail, RunDir


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "shared", "0" * 64)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def order_elsewhere(run_dir, host="elsewhere", pid=None):
    """Leave what a shim on another host has written of job ``a`` before its end."""
    folder = run_dir.job_dir("a")
    folder.mkdir(parents=True)
    write_json(folder / "job.json", {"attempt": 1, "group": None, "host": host})
    write_status(folder, pid=pid)
    return folder


def write_outcome(folder):
    write_json(folder / "outcome.json", replace(JobStatus("a", "completed"), exit_code=0).to_dict())


def write_status(folder, **fields):
    write_json(folder / "status.json", replace(JobStatus("a", "running"), **fields).to_dict())


def backend_of(run_dir):
    backend, clock, said = LocalBackend(run_dir), Clock(), []
    backend.now, backend.say = clock, said.append
    return backend, clock, said


def test_an_outcome_that_another_host_wrote_is_taken_when_it_shows_late(run_dir):
    folder = order_elsewhere(run_dir)
    lock = lock_file(folder / "lock")
    backend, clock, said = backend_of(run_dir)
    assert backend.adopt(["a"]) == {"a"}
    os.close(lock)  # its shim ended, and the name of its outcome is not seen here yet
    for _ in range(3):
        assert backend.poll()["a"].state == "running"
        clock.now += 20.0
    assert len(said) == 1 and said[0].startswith("a has ended on elsewhere: waiting up to 61 s for its outcome")
    write_outcome(folder)
    assert backend.poll()["a"].state == "completed"


def test_a_job_that_ended_elsewhere_before_the_takeover_is_waited_for_and_not_settled(run_dir):
    folder = order_elsewhere(run_dir)
    backend, clock, _ = backend_of(run_dir)
    assert backend.adopt(["a"]) == {"a"}
    backend.poll()
    clock.now += 59.0
    assert backend.poll()["a"].state == "running" and not (folder / "outcome.json").exists()
    write_outcome(folder)
    assert backend.poll()["a"].state == "completed"


def test_after_a_minute_without_an_outcome_its_watcher_counts_as_dead_and_no_process_here_is_ended(run_dir):
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)  # it has the number of its job there
    order_elsewhere(run_dir, pid=stranger.pid)
    backend, clock, _ = backend_of(run_dir)
    backend.poll()
    clock.now += 62.0
    status, code = backend.poll()["a"], stranger.poll()
    stranger.kill()
    stranger.wait()
    assert code is None
    assert (status.state, "its watcher on elsewhere died" in status.cause) == ("node_fail", True)
    assert read_status(run_dir, "a").state == "node_fail"


@pytest.mark.parametrize("host", ["elsewhere", None])
def test_a_job_elsewhere_whose_lock_does_not_show_here_runs_on_while_its_status_changes(run_dir, host):
    folder = order_elsewhere(run_dir, host)
    backend, clock, said = backend_of(run_dir)
    for number in range(10):
        write_status(folder, used_bytes=number)
        assert backend.poll()["a"].state == "running"
        clock.now += 30.0
    assert len(said) == 1 and ("on elsewhere" if host else "on another host") in said[0]


def test_a_job_of_this_host_is_not_waited_for(run_dir):
    order_elsewhere(run_dir, host=os.uname().nodename)
    LocalBackend(run_dir)
    assert read_status(run_dir, "a").state == "node_fail"
    first = LocalBackend(run_dir)
    submit(first, Job("b", command=("true",)))
    assert wait_for_end(first, "b").state == "completed"
    assert json.loads((run_dir.job_dir("b") / "job.json").read_text())["host"] == os.uname().nodename


def slurm_says(run_dir, tmp_path, monkeypatch, state):
    """Return a backend with one submitted job of which Slurm says this state."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, answer in {"sbatch": "7", "squeue": f"7_0|{state}|None|n1", "sacct": "", "scancel": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    clock, said = Clock(), []
    backend = SlurmBackend(run_dir, now=clock)
    backend.say = said.append
    submit(backend, Job("a", command=("true",)))
    return backend, clock, said


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "OUT_OF_MEMORY"])
def test_a_job_that_slurm_ran_may_show_its_files_late(run_dir, tmp_path, monkeypatch, state):
    backend, clock, said = slurm_says(run_dir, tmp_path, monkeypatch, state)
    for _ in range(3):
        assert backend.poll()["a"].state == "pending"
        clock.now += 20.0
    assert len(said) == 1 and said[0].startswith("a has ended in Slurm: waiting up to 61 s")
    write_outcome(run_dir.job_dir("a"))
    assert backend.poll()["a"].state == "completed"


def test_a_job_that_slurm_never_began_is_not_waited_for(run_dir, tmp_path, monkeypatch):
    backend, clock, said = slurm_says(run_dir, tmp_path, monkeypatch, "CANCELLED")
    backend.poll()
    clock.now += 3.0
    assert (backend.poll()["a"].state, said) == ("cancelled", [])


def test_a_record_that_another_host_replaced_is_looked_up_anew_at_once(run_dir, monkeypatch):
    path, looked, real = order_elsewhere(run_dir) / "status.json", [], os.open

    def remember(name, flags, *rest):
        looked.extend([name] if flags & os.O_DIRECTORY else [])
        if Path(name) == path and path.parent not in looked:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr("memfit.files._AWAY_SECONDS", 0.0)
    assert read_status(run_dir, "a").state == "running"


def away(*_, **__):
    raise OSError(errno.EIO, "Input/output error")


def test_a_lock_that_cannot_be_asked_is_neither_held_nor_free(run_dir, monkeypatch):
    folder = order_elsewhere(run_dir)
    lock = lock_file(folder / "lock")
    backend, clock, said = backend_of(run_dir)
    backend.poll()
    with monkeypatch.context() as patch:
        patch.setattr("memfit.memory._locks.open_regular", away)
        for _ in range(3):
            assert backend.poll()["a"].state == "running"
            clock.now += 61.0
    assert not said and not (folder / "outcome.json").exists()
    os.close(lock)
    assert not is_locked(folder / "lock") and not is_locked(folder / "no such file")


def test_what_a_drive_refuses_for_a_while_is_read_and_written_once_it_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("memfit.files._AWAY_PAUSE", 0.0)
    for name in ("fsync", "open"):
        with monkeypatch.context() as patch:
            real, left = getattr(os, name), [away, away]
            patch.setattr(os, name, lambda *a, real=real, left=left, **how: (left.pop() if left else real)(*a, **how))
            write_json(tmp_path / "outcome.json", {"state": name})
            assert not left
    assert read_json(tmp_path / "outcome.json") == {"state": "open"}
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    assert "trying again for 90 s" in capsys.readouterr().err


def test_a_drive_that_stays_away_is_an_error_and_a_full_disk_is_one_at_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("memfit.files._AWAY_SECONDS", 0.0)
        patch.setattr(os, "fsync", away)
        with pytest.raises(OSError, match="Input/output"):
            write_json(tmp_path / "one.json", {})
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "one.json", {})
    assert full.call_count == 1 and not [*tmp_path.iterdir()]


def test_events_are_read_to_their_end_although_the_size_of_their_file_is_an_old_one(run_dir, monkeypatch):
    writer, tail = EventWriter(run_dir.events_dir, "a"), FolderTail(run_dir.events_dir)
    writer.write("report", value=1)
    assert len(tail.read()) == 1
    old, stat = writer.path.stat(), Path.stat
    writer.write("report", value=2)
    # As an NFS client remembers it.
    monkeypatch.setattr(Path, "stat", lambda path, **how: old if path == writer.path else stat(path, **how))
    assert tail.read() == []
    assert [event["value"] for event in tail.read(anew=True)] == [2]
    writer.close()


def test_a_copy_of_a_run_ends_nothing_of_the_run_that_is_there_still(run_dir, tmp_path, monkeypatch):
    folder, ended = order_elsewhere(run_dir, socket.gethostname()), []
    write_json(folder / "job.json", {"attempt": 1, "group": "/jobs/a", "host": socket.gethostname()})
    monkeypatch.setattr("memfit.jobs._local.end_group", lambda group, keep: ended.append(group.path))
    for name in ("copy", "moved"):
        shutil.copytree(run_dir.path, tmp_path / name)
    LocalBackend(RunDir.open(tmp_path / "copy"))
    assert not ended
    shutil.rmtree(run_dir.path)
    LocalBackend(RunDir.open(tmp_path / "moved"))
    assert ended == [Path("/jobs/a")]
