"""What a job's watcher says of its memory, its phase and its limit."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.files import write_json
from memfit.jobs import Growing, JobStatus, Monitor
from memfit.memory import HOST, Budget, GroupState, JobGroup, Sample, read_series
from memfit.rundir import Beat, EventWriter, RunDir, open_beats, read_events
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
        devices = [{"bytes": held, "peak_bytes": peak, "allocated_bytes": 0} for held, peak in ((held, 90), (0, 7))]
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
        watch.note_last_peak(MIB, None, is_bound=True)
        assert (watch.status().peak_bytes > 0, watch.status().footprint is not None) == (is_known, is_known)


@pytest.mark.root
@pytest.mark.parametrize("more", ["", "import posix; open('big', 'wb').write(bytes(99 << 20)); posix.remove('big'); "])
def test_what_a_short_job_took_after_the_last_look_is_known_by_its_group(tmp_path, memory_group, more):
    group = JobGroup(memory_group(400 * MIB), 1)
    program = f"input(); open('file', 'wb').write(bytes(9 << 20)); bytearray(b'x') * (15 << 20); {more}input()"
    with subprocess.Popen([sys.executable, "-ISc", program], stdin=-1, cwd=tmp_path) as job:
        first = group.state()
        (group.path / "cgroup.procs").write_text(str(job.pid))
        watch = Monitor(RunDir(tmp_path), ORDER, replace(here("cmd_0001"), pid=job.pid), group, first=first)
        watch.observe()
        job.communicate(b"\n\n")
    watch.note_last_peak(26 * MIB, group.state(), is_bound=True)
    assert 15 * MIB <= watch.status().peak_bytes < (26.1 if more else 18) * MIB


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


def grown(ranks=(), device=0.0, own=2.0, *, steps=True, seconds=350):
    """What is told of a job of 1000 steps of a second, whose memory grows so many MiB a step, after some of them."""
    growing, told = Growing(), []
    for number in range(2 * seconds):
        now = 1e9 + number / 2
        if steps:
            event = {"time": now, "epoch": 1, "step": int(number / 2), "num_steps": 1000, "num_epochs": 1}
            growing.steps.take(event)
        low = round((500 + own * number / 2) * MIB)
        sizes = {str(rank): round((100 + one * number / 2) * MIB) for rank, one in enumerate(ranks)}
        devices = {"GPU-a": round((100 + device * number / 2) * MIB)} if device else {}
        more = {"step": growing.steps.at(now), "ranks": sizes, "allocated_bytes": devices, "device_bytes": devices}
        line = Sample(now, 1, low, 0, low, 0, "train", peak_bytes=low, low_bytes=low, **(more | {"reserved_bytes": 0}))
        line = replace(line, resident_bytes=low, reserved_bytes=low)
        if growing.look(line, lambda: {HOST: 1500 * MIB, "GPU-a": 1500 * MIB}):
            told.append(growing.told)
    return growing, told


@pytest.mark.parametrize(
    ("options", "who", "place", "unit"),
    [
        ({}, "", "", "step"),
        ({"ranks": (0.0, 2.0)}, "rank 1", "", "step"),
        ({"ranks": (1.0, 1.0)}, "", "", "step"),  # each as much: the job
        ({"own": 0.0, "device": 3.5}, "", "GPU-a", "step"),
        ({"steps": False}, "", "", "second"),
    ],
)
def test_growth_is_told_of_the_rank_or_device_that_grows_early_first_and_then_as_sure(options, who, place, unit):
    growing, told = grown(**options)
    assert {(one.who, one.place, one.unit, one.phase) for one in told} == {(who, place, unit, "train")}
    assert [one.is_sure for one in told] == ([False, True] if unit == "step" else [False])
    assert growing.explain(is_device=bool(place)) == ("growth" if unit == "step" else "open")


def test_growth_that_ends_is_taken_back():
    growing, _ = grown()
    assert growing.told is not None
    for number in range(700, 1400):
        low = 1200 * MIB
        line = Sample(1e9 + number / 2, 1, low, 0, low, 0, "train", peak_bytes=low, low_bytes=low, step=number / 2)
        growing.look(replace(line, resident_bytes=low, reserved_bytes=low), lambda: {HOST: 1500 * MIB})
    assert growing.told is None


def test_a_job_that_grows_is_told_in_its_status_and_by_an_event(tmp_path):
    watch = Monitor(RunDir(tmp_path), ORDER, here("fold_1"))
    watch.growing, _ = grown()
    watch._tell_growth()
    assert watch.status().growth == watch.growing.told.to_dict()
    (event,) = read_events(tmp_path / "events")
    assert (event["kind"], event["job"], event["what"], event["is_sure"]) == ("growth", "fold_1", "growth", True)
    assert event["text"].startswith("fold_1: it grows by 2.0 MiB a step in train")


def test_the_line_of_a_job_has_its_step_and_what_tensors_take_of_its_devices(tmp_path):
    job = {"phases": [], "num_devices": 1, "env": {"CUDA_VISIBLE_DEVICES": "GPU-a"}}
    watch = Monitor(RunDir(tmp_path), job, here("fold_1"))
    (tmp_path / "jobs/fold_1").mkdir(parents=True)
    watch.observe()
    writer = EventWriter(tmp_path / "events", "fold_1")
    held = {"bytes": 50, "peak_bytes": 90, "allocated_bytes": 40}
    writer.write("step", epoch=3, step=5, num_steps=10, num_epochs=4, devices=[held])
    writer.close()
    watch._looked = 0.0
    watch.open_series()
    watch.observe()
    (line,) = read_series(tmp_path / "jobs/fold_1/memory.jsonl")
    assert (line.step, line.allocated_bytes, line.device_bytes) == (25, {"GPU-a": 40}, {"GPU-a": 50})
    assert 0 < line.low_bytes <= line.resident_bytes <= line.reserved_bytes


@pytest.mark.parametrize(("order", "has_group", "limit"), [({}, False, 5000 * MIB), ({"data_limit_bytes": 700}, False, 700),
                                                          ({"data_limit_bytes": 700}, True, 600)])  # fmt: skip
def test_a_job_may_reach_what_is_free_beside_others_up_to_the_limit_of_its_run(
    tmp_path, monkeypatch, order, has_group, limit
):
    device = SimpleNamespace(uuid="GPU-a", total_bytes=400)
    monkeypatch.setattr(Budget, "read", lambda: SimpleNamespace(headroom_bytes=5000 * MIB, devices=[device]))
    states = {"run": GroupState(500, 500, 0, 1000, False, 0), "job": GroupState(100, 100, 0, 200, False, 0)}
    monkeypatch.setattr(JobGroup, "state", lambda self: states[self.path.name])
    env = {"PYTORCH_ALLOC_CONF": "a:b,per_process_memory_fraction:0.2500"}
    group = JobGroup(tmp_path / "run/job", 1) if has_group else None
    watch = Monitor(RunDir(tmp_path), ORDER | {"env": env} | order, JobStatus("fold_1", "running"), group)
    watch.look_at_group()
    assert watch._limits() == {HOST: limit, "GPU-a": 100}


def test_the_line_of_a_job_has_what_each_rank_holds_and_its_peak_is_a_high_water_mark(tmp_path):
    spike, pipes = "input(); bytearray(b'x') * (200 << 20); print(flush=True); input()", {"stdin": -1, "stdout": -1}
    with subprocess.Popen([sys.executable, "-ISc", spike], **pipes) as other:
        watch = Monitor(RunDir(tmp_path), ORDER, here("fold_1"))
        for rank, pid in enumerate((os.getpid(), other.pid)):
            beat = Beat(rank, pid, socket.gethostname(), "", "microbatch")
            os.write(open_beats(tmp_path / "jobs/fold_1/ranks/1_0", rank), beat.to_line())
        watch.open_series()
        watch.observe()
        assert [one["rank"] for one in watch.status().ranks] == [0, 1]
        os.write(other.stdin.fileno(), b"\n")
        other.stdout.readline()
        watch.observe()
        watch.series.close()
        other.kill()
    line = read_series(tmp_path / "jobs/fold_1/memory.jsonl")[-1]
    ranks = watch.ranks()
    assert {*line.ranks} == {"0", "1"} and 0 < line.ranks["1"] < 50 * MIB < 200 * MIB < ranks[1][
        "peak_bytes"
    ] < 260 * MIB
