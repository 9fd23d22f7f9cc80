"""What a job's watcher says of its memory, its phase and its limit."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from memfit.files import write_json
from memfit.jobs import JobStatus, Monitor
from memfit.memory import GroupState, JobGroup
from memfit.rundir import EventWriter, RunDir
from memfit.units import MIB

ORDER = {"phases": [], "num_devices": 0, "env": {}}


def here(job_id):
    """A job whose process is this one."""
    return JobStatus(job_id, "running", pid=os.getpid())


def test_where_the_driver_shows_no_processes_a_job_counts_with_what_its_torch_holds(tmp_path):
    job = {"phases": [], "num_devices": 2, "env": {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}}
    watch = Monitor(RunDir(tmp_path), job, JobStatus("fold_1", "running", pid=os.getpid()))
    watch.observe()
    writer = EventWriter(tmp_path / "events", "fold_1")
    for held in (50, 30):
        devices = [{"bytes": held, "peak_bytes": 90}, {"bytes": 0, "peak_bytes": 7}]
        writer.write("phase", phase="train", devices=devices)
    writer.write("phase", phase="train", devices="what else a job may write")
    writer.close()
    watch._looked = 0.0
    watch.observe()
    assert watch.status().device_used_bytes == {"GPU-a": 30, "GPU-b": 0}
    assert watch.footprint().device_bytes == {"GPU-a": 90, "GPU-b": 7}


def test_a_wall_that_was_met_and_raised_before_the_first_look_was_met(tmp_path, monkeypatch):
    first = GroupState(0, 0, 0, 100 * MIB, False, 0)
    raised = GroupState(150 * MIB, 150 * MIB, 0, 400 * MIB, False, 1)
    monkeypatch.setattr(JobGroup, "state", lambda self: raised)
    group = JobGroup(tmp_path, 1)
    monitor = Monitor(RunDir(tmp_path), ORDER, here("grower"), group, first=first)
    monitor.look_at_group()
    assert monitor.known.wants_more
    never_met = Monitor(RunDir(tmp_path), ORDER, here("grower"), group, first=replace(first, met_wall=1))
    never_met.look_at_group()
    assert not never_met.known.wants_more
    room = Monitor(RunDir(tmp_path), ORDER, here("reader"), group, first=replace(first, wall_bytes=400 * MIB))
    room.look_at_group()  # what met the limit was page cache, which the kernel took back
    assert not room.known.wants_more
    # The look after it sees the peak: the first one came when the process had freed nearly all on its way out.
    freed = replace(raised, used_bytes=10 * MIB, wall_bytes=100 * MIB)
    monkeypatch.setattr(JobGroup, "state", lambda self: freed)
    leaving = Monitor(RunDir(tmp_path), ORDER, here("leaver"), group, first=first)
    leaving.look_at_group()
    assert not leaving.known.wants_more
    leaving.note_refusals(freed, 100 * MIB)
    assert leaving.known.wants_more


@pytest.mark.parametrize(
    ("told", "phases"), [((), ("train", "validate", "checkpoint")), (("load", "fit"), ("fit", "load", "save"))]
)
def test_a_job_that_was_in_each_phase_that_it_told_or_that_a_training_has_is_settled_at_once(tmp_path, told, phases):
    watch = Monitor(RunDir(tmp_path), ORDER | {"phases": told}, here("cmd_0001"))
    for phase in phases:
        assert not watch.settled
        watch._enter(phase)
    assert watch.settled


def test_the_cpu_time_of_a_running_job_counts_children_that_ended(tmp_path):
    subprocess.run([sys.executable, "-ISc", "sum(range(4_000_000))"], check=True)
    watch, used = Monitor(RunDir(tmp_path), ORDER, here("cmd_0001")), os.times()
    watch.observe()
    assert watch.status().cpu_seconds >= sum(used[:4]) - 0.05 > 0


def test_what_a_job_took_is_not_known_if_most_of_its_life_was_not_seen(tmp_path):
    watch = Monitor(RunDir(tmp_path), ORDER, here("cmd_0001"))
    watch.observe()
    for started, is_known in ((watch.sample.time - 60, True), (watch.sample.time, False)):
        watch.note(started=started)
        watch.note_last_peak(0, None)
        assert (watch.status().peak_bytes > 0, watch.status().footprint is not None) == (is_known, is_known)


def test_a_checkpoint_counts_as_new_if_no_earlier_attempt_had_it(tmp_path):
    def save(attempt, *found):
        folder = tmp_path / "jobs/fold_1"
        folder.mkdir(parents=True, exist_ok=True)
        watch = Monitor(RunDir(tmp_path), ORDER, replace(here("fold_1"), attempt=attempt, started=1.0))
        for name, epoch, step in found:
            watch._note_checkpoint({"time": 5.0, "path": f"{name}/step-{step}", "epoch": epoch, "step": step})
        write_json(folder / f"outcome_{attempt}.json", watch.status().to_dict())
        return watch.known.checkpointed

    assert save(1, ("a", 0, 10), ("a", 1, 20)) == 5.0
    assert save(2, ("a", 1, 20)) == 1.0  # its start
    assert save(3) is None
    assert save(4, ("a", 1, 20), ("a", 1, 30)) == save(5, ("b", None, 5)) == 5.0
