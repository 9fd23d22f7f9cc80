"""Measuring real children, and the rules on made-up ones."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.memory import GroupState, JobGroup, ProcReader, Rollup, Stat, Status, TreeMeter, measure

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs this machine's /proc")
MIB = 1 << 20


class Child:
    """A Python process in a session of its own that executes what it is told, a line at a time."""

    LOOP = "import sys\nfor line in sys.stdin:\n    exec(line)\n    print('done', flush=True)"

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.do("import mmap, os, subprocess, time")

    def do(self, line: str) -> str:
        """What the line printed, once it is done."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        printed = []
        for answer in self.process.stdout:
            if answer == "done\n":
                return "".join(printed)
            printed.append(answer)
        raise AssertionError(f"the child died of: {line}")

    def end(self) -> None:
        self.process.communicate(timeout=20)


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child()
    yield started
    if started.process.returncode is None:
        started.end()


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Path]:
    """A file of 300 MiB; its pages are in the page cache once they were read."""
    path = tmp_path / "panel.bin"
    with open(path, "wb") as file:
        file.truncate(300 * MIB)
    yield path
    path.unlink()


MAP = "f = open({path!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); n = sum(m[::4096])"


@pytest.mark.proves("S3-38")
@linux
def test_a_short_spike_between_two_samples_is_in_the_peak(child):
    meter = TreeMeter(child.pid)
    before = meter.sample()
    child.do("b = bytearray(200 << 20); time.sleep(0.1); del b")
    after = meter.sample()
    assert after.private_bytes < before.private_bytes + 20 * MIB
    assert 195 * MIB < after.peak_bytes - before.private_bytes < 220 * MIB
    own, peak = meter.own_bytes(meter.pids)
    assert abs(own - after.private_bytes) < MIB and 195 * MIB < peak - own < 220 * MIB
    assert after.low_bytes <= after.private_bytes <= after.resident_bytes + MIB < after.reserved_bytes
    footprint = meter.footprint()
    assert footprint.private_bytes == after.peak_bytes
    parts = footprint.parts
    assert parts["anonymous"] + parts["shared_memory"] + parts["page_tables"] == footprint.private_bytes


@pytest.mark.slow
@linux
def test_a_mapped_file_is_shared_and_not_private(child, mapped):
    meter = TreeMeter(child.pid)
    start = meter.sample()
    child.do(MAP.format(path=str(mapped)))
    sample = meter.sample()
    assert sample.shared_bytes > 300 * MIB
    assert sample.peak_bytes < start.private_bytes + 20 * MIB
    assert meter.footprint().private_bytes < 60 * MIB
    assert meter.footprint().shared_bytes == sample.shared_bytes


@linux
def test_shared_memory_is_private_to_the_tree(child):
    meter = TreeMeter(child.pid)
    start = meter.sample()
    child.do("m = mmap.mmap(-1, 50 << 20); m[:] = bytes(len(m))")
    meter.sample()
    footprint = meter.footprint()
    assert footprint.parts["shared_memory"] >= 50 * MIB
    assert footprint.private_bytes >= start.private_bytes + 50 * MIB


@linux
def test_grandchildren_count_also_after_their_parents_are_gone(child):
    meter = TreeMeter(child.pid)
    alone = meter.sample()
    inner = "import time; b = bytearray(60 << 20); print('up', flush=True); time.sleep(60)"
    middle = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {inner!r}])"
    child.do(f"import sys; p = subprocess.Popen([sys.executable, '-c', {middle!r}], stdout=subprocess.PIPE)")
    child.do("p.stdout.readline()")
    tree = meter.sample()
    assert tree.num_processes == 3
    assert tree.private_bytes > alone.private_bytes + 60 * MIB
    middle_pid = int(child.do("print(p.pid); p.kill(); p.wait()"))
    assert meter.sample().num_processes == 2
    child.end()
    orphan = meter.sample()
    assert orphan.num_processes == 1
    assert orphan.private_bytes > 60 * MIB
    (inner_pid,) = meter.pids
    assert inner_pid not in (child.pid, middle_pid)
    os.kill(inner_pid, signal.SIGKILL)
    for _ in range(1000):
        if meter.sample() is None:
            break
        time.sleep(0.01)
    assert meter.pids == set()


@linux
def test_an_orphan_that_was_never_seen_with_its_parent_counts(child):
    meter = TreeMeter(child.pid)
    fork_twice = (
        "if os.fork() == 0:\n"
        "    inner = os.fork()\n"
        "    if inner:\n"
        "        os.write(w, str(inner).encode()); os._exit(0)\n"
        "    time.sleep(60); os._exit(0)"
    )
    orphan = int(child.do(f"r, w = os.pipe(); exec({fork_twice!r}); os.wait(); print(int(os.read(r, 20)))"))
    try:
        assert meter.sample().num_processes == 2
        assert meter.pids == {child.pid, orphan}
    finally:
        os.kill(orphan, signal.SIGKILL)


@linux
def test_a_tree_that_is_gone_gives_none(child):
    meter = TreeMeter(child.pid)
    meter.sample()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert meter.sample() is None
    child.process.communicate()
    assert meter.sample() is None


@linux
def test_phases_get_their_own_peaks(child):
    clock = FakeClock()
    meter = TreeMeter(child.pid, clock=clock)
    meter.enter_phase("train")
    clock.now += 10
    meter.sample()
    meter.enter_phase("validate")
    clock.now += 3
    child.do("b = bytearray(120 << 20)")
    meter.sample()
    child.do("del b")
    meter.sample()
    meter.enter_phase("train")
    clock.now += 5
    meter.sample()
    phases = meter.footprint().phases
    assert phases["validate"].private_bytes > phases["train"].private_bytes + 115 * MIB
    assert meter.footprint().peak_phase == "validate"
    assert (phases["train"].seconds, phases["validate"].seconds) == (15, 3)
    assert phases["train"].pss_bytes > 0


@pytest.mark.slow
@pytest.mark.proves("C-12")
@linux
def test_three_processes_that_map_one_file_add_up_to_about_one_copy(child, mapped):
    meter = TreeMeter(child.pid)
    line = MAP.format(path=str(mapped))
    code = f"import mmap, sys; {line}; print('up', flush=True); sys.stdin.read()"
    child.do(f"import sys; command = [sys.executable, '-c', {code!r}]; {line}")
    child.do("ps = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]")
    child.do("[p.stdout.readline() for p in ps]")
    sample = meter.sample()
    child.do("[p.communicate() for p in ps]")
    assert sample.num_processes == 3
    assert sample.rss_bytes > 900 * MIB
    assert 300 * MIB < sample.pss_bytes < 370 * MIB
    assert 300 * MIB < sample.shared_bytes < 330 * MIB
    assert sample.private_bytes < 60 * MIB


@linux
@pytest.mark.parametrize("swept", [True, False])
def test_forked_workers_do_not_multiply_what_they_share(child, swept):
    clock = FakeClock()
    meter = TreeMeter(child.pid, clock=clock)
    child.do("b = bytearray(100 << 20)")
    alone = meter.sample()
    worker = "if os.fork() == 0:\n    os.close(w); os.read(r, 1); os._exit(0)"
    child.do(f"r, w = os.pipe(); exec({worker!r})")
    clock.now += 1000 if swept else 0
    sample = meter.sample()
    assert sample.num_processes == 2
    assert sample.rss_bytes > 200 * MIB
    assert sample.peak_bytes < alone.private_bytes + 12 * MIB
    child.do("os.close(w); os.wait()")
    assert alone.private_bytes - 2 * MIB < meter.sample().private_bytes < alone.private_bytes + 12 * MIB


@pytest.mark.slow
@linux
@pytest.mark.root
def test_private_bytes_are_what_the_kernel_charges_for_forked_workers(child, memory_group):
    group = memory_group(450 * MIB)
    (group / "cgroup.procs").write_text(str(child.pid))
    meter = TreeMeter(child.pid, group=JobGroup(group, 1))
    before = meter.sample().private_bytes
    work = "shared[: 20 << 20] = b'1' * (20 << 20); own = bytearray(20 << 20); os.write(up, b'x')"
    worker = f"if os.fork() == 0:\n    {work}; os.close(w); os.read(r, 1); os._exit(0)"
    child.do("shared = bytearray(120 << 20); r, w = os.pipe(); ready, up = os.pipe()")
    child.do(f"exec({worker!r}); exec({worker!r}); exec({worker!r}); [os.read(ready, 1) for _ in range(3)]")
    meter = TreeMeter(child.pid, group=JobGroup(group, 1))  # a meter's first sample sweeps
    sample = meter.sample()
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    child.do("os.close(w); [os.wait() for _ in range(3)]")
    child.end()
    assert sample.num_processes == 4
    assert sample.rss_bytes > 4 * 120 * MIB + 60 * MIB
    assert abs(sample.private_bytes - before - int(stat["total_rss"])) < 12 * MIB


@linux
@pytest.mark.root
def test_what_a_fork_copied_between_two_samples_is_in_its_peak_and_page_cache_is_not(child, memory_group, tmp_path):
    group = JobGroup(memory_group(450 * MIB), 1)
    child.do("block = bytearray(b'x') * (60 << 20); r, w = os.pipe(); ready, up = os.pipe()")
    copies = f"file = open({str(tmp_path / 'file')!r}, 'wb'); [file.write(bytes(1 << 20)) for _ in range(40)]"
    copies += "; block[::4096] = block[::4096]; del block; os.write(up, b'x'); os.read(r, 1)"
    child.do(f"exec('pid = os.fork()\\nif pid == 0:\\n    os.read(r, 1)' + {'; ' + copies!r} + '; os._exit(0)')")
    pid = int(child.do("print(pid)"))
    meter = TreeMeter(pid, group=group)
    meter.inherited_bytes = ProcReader().status(pid).held
    (group.path / "cgroup.procs").write_text(str(pid))
    before = _sample(meter, group)
    child.do("os.write(w, b'x'); os.read(ready, 1)")
    after = _sample(meter, group)
    child.do("os.write(w, b'x'); os.waitpid(pid, 0)")
    assert after.private_bytes < before.private_bytes + 12 * MIB
    assert 60 * MIB <= after.peak_bytes - before.private_bytes < 72 * MIB
    assert meter.state.charged_peak > 100 * MIB


def _sample(meter, group):
    meter.state = group.state()
    return meter.sample()


@dataclass
class FakeClock:
    """Seconds that pass when they are told to; also a thread's CPU time."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeReader(ProcReader):
    """Made-up processes; a sweep takes 0.02 s of CPU per process."""

    clock: FakeClock
    cpu: FakeClock
    processes: dict[int, tuple[Stat, Status]] = field(default_factory=dict)
    num_sweeps: int = 0

    def set(
        self, pid: int, *, anonymous: int = 10, file: int = 5, mark: int = 0, image: int = 0, parent: int = 1
    ) -> None:
        stat = Stat(pid, parent, pid, 1, start=pid, image=image or pid)
        mark = max(mark, anonymous + file)
        self.processes[pid] = (stat, Status(anonymous * MIB, 0, 0, 0, file * MIB, mark * MIB))

    def stat(self, pid: int) -> Stat | None:
        return self.processes[pid][0] if pid in self.processes else None

    def status(self, pid: int) -> Status | None:
        return self.processes[pid][1] if pid in self.processes else None

    def rollup(self, pid: int) -> Rollup | None:
        self.num_sweeps += 1
        self.clock.now += 0.02
        self.cpu.now += 0.02
        if pid not in self.processes:
            return None
        status = self.processes[pid][1]
        return Rollup(status.rss, status.held, 0, status.file)

    def children(self, pid: int) -> list[int]:
        return [other for other, (stat, _) in self.processes.items() if stat.parent == pid]

    def pids(self) -> list[int]:
        return list(self.processes)


def made_up(group=None, devices=None, **root: int) -> tuple[TreeMeter, FakeReader, FakeClock]:
    clock, cpu = FakeClock(), FakeClock()
    reader = FakeReader(clock, cpu)
    reader.set(10, **root)
    return TreeMeter(10, clock=clock, cpu=cpu, reader=reader, group=group, devices=devices), reader, clock


def test_sweeps_wait_99_times_as_long_as_the_last_one_took():
    meter, reader, clock = made_up()
    reader.set(11, parent=10)
    begin, swept = clock.now, []
    while clock.now < begin + 60:
        count = reader.num_sweeps
        meter.sample()
        if reader.num_sweeps > count:
            swept.append(clock.now)
        clock.now += 0.1
    gaps = [later - earlier for earlier, later in itertools.pairwise(swept)]
    assert min(gaps) >= 99 * 0.04
    assert max(gaps) < 99 * 0.04 + 0.3
    assert reader.cpu.now - 100 <= 0.01 * (clock.now - begin) + 0.04


def test_the_scan_of_all_processes_is_paid_for_too():
    meter, reader, clock = made_up()
    scans = []
    reader.pids = lambda: (scans.append(clock.now), setattr(reader.cpu, "now", reader.cpu.now + 0.01), [])[2]
    for _ in range(100):
        meter.sample()
        clock.now += 0.1
    assert 2 <= len(scans) <= 4


#: What processes hold at each sample, as in ``FakeReader.set``, and the peak since the one before, in MiB.
SPIKES = {
    "a rise of the mark counts without the file pages": [
        ({10: {"anonymous": 50, "file": 300, "mark": 900}}, 50),  # what was before the measurement is not part of it
        ({10: {"anonymous": 50, "file": 300, "mark": 900}}, 50),
        ({10: {"anonymous": 60, "file": 320, "mark": 950}}, 950 - 320)],
    "pages of a file that was mapped in between are none": [
        ({10: {"anonymous": 50, "file": 10}}, 50), ({10: {"anonymous": 50, "file": 400}}, 50)],
    "of a file that was unmapped in between the mark less its pages counts": [
        ({10: {"anonymous": 50, "file": 1100}}, 50), ({10: {"anonymous": 50, "file": 20, "mark": 1160}}, 1160 - 1100)],
    "it adds to what the others hold": [
        ({10: {"anonymous": 100}, 11: {"parent": 10, "anonymous": 40}}, 140),
        ({11: {"parent": 10, "anonymous": 40, "mark": 240}}, 100 + 40 + 195)],
    "a forked child's inherited mark is none, and a new program's own is one": [
        ({10: {"anonymous": 100, "mark": 900}}, 100),
        ({11: {"parent": 10, "anonymous": 100, "mark": 900, "image": 10}}, 100),
        ({11: {"parent": 10, "anonymous": 20, "mark": 75, "image": 11}}, 170)],
}  # fmt: skip


@pytest.mark.parametrize("samples", SPIKES.values(), ids=SPIKES)
def test_a_spike_between_two_samples_shows_in_the_peak(samples):
    meter, reader, _ = made_up()
    for processes, peak in samples:
        for pid, options in processes.items():
            reader.set(pid, **options)
        sample = meter.sample()
        assert sample.peak_bytes == peak * MIB
        assert sample.private_bytes <= sample.peak_bytes


@pytest.mark.parametrize(("exact", "peaks"), [(False, (250, 250)), (True, (250, 50))])
def test_a_spike_around_a_mark_counts_for_both_phases_unless_the_mark_is_exact(exact, peaks):
    meter, reader, _ = made_up(anonymous=50)
    meter.enter_phase("train", exact=exact)
    meter.sample()
    reader.set(10, anonymous=50, mark=255)
    meter.enter_phase("validate", exact=exact)
    meter.sample()
    phases = meter.footprint().phases
    assert (phases["train"].private_bytes >> 20, phases["validate"].private_bytes >> 20) == peaks


def test_a_phase_whose_mark_is_read_after_the_end_has_the_last_level():
    meter, reader, _ = made_up(anonymous=50)
    meter.sample()
    reader.processes.clear()
    meter.enter_phase("checkpoint")
    assert meter.sample() is None
    assert meter.footprint().phases["checkpoint"].private_bytes == 50 * MIB


def test_processes_that_vanish_between_two_reads_are_passed_over():
    meter, reader, _ = made_up()
    reader.set(11, parent=10)
    reader.set(12, parent=10)
    status = reader.status
    reader.status = lambda pid: None if pid == 11 else status(pid)
    rollup = reader.rollup
    reader.rollup = lambda pid: None if pid == 12 else rollup(pid)
    sample = meter.sample()
    assert sample.num_processes == 2
    assert sample.private_bytes == 20 * MIB
    assert sample.pss_bytes == 15 * MIB


@pytest.mark.proves("S0-05")
def test_device_bytes_are_peaks_by_device_and_apart_from_host_bytes():
    used, asked = {"GPU-a": 300}, []
    meter, _, _ = made_up(devices=lambda pids: asked.append(pids) or dict(used))
    meter.enter_phase("train")
    used["GPU-a"] = 200
    assert meter.sample().device_bytes == {"GPU-a": 200}
    assert asked[-1] == {10}
    footprint = meter.footprint()
    assert footprint.device_bytes == footprint.phases["train"].device_bytes == {"GPU-a": 300}
    assert footprint.private_bytes == 10 * MIB


def test_shared_memory_that_is_written_and_then_mapped_counts_once(tmp_path):
    """The floor knows a file in /dev/shm from its birth; mapped and read, it also raises the process's mark."""
    meter, reader, _ = made_up(JobGroup(tmp_path, 1), anonymous=5)
    meter.state = GroupState(105 * MIB, 0, 0, 0, False, 0)
    (tmp_path / "memory.max_usage_in_bytes").write_text(f"{107 * MIB}\n")
    meter.sample()
    reader.set(10, anonymous=5, mark=60)
    assert meter.sample().peak_bytes == 107 * MIB
    assert meter.footprint().private_bytes == 107 * MIB
    reader.set(10, anonymous=5, mark=90)
    stat, status = reader.processes[10]
    reader.processes[10] = stat, replace(status, swapped=9 * MIB)
    assert meter.sample().peak_bytes == 116 * MIB, "what is swapped out is charged no more"


@linux
def test_a_child_is_measured_from_outside(child):
    with measure(child.pid, interval_seconds=0.02) as meter:
        meter.phase("train")
        child.do("b = bytearray(80 << 20); time.sleep(0.1); del b")
        meter.phase("validate")
    phases = meter.footprint.phases
    assert phases["train"].private_bytes > phases["validate"].private_bytes + 75 * MIB
    assert meter.footprint.method == "measured"
    assert phases["train"].seconds > 0


def test_measuring_ends_well_when_its_tree_ends_first():
    started, num_threads = Child(), threading.active_count()
    with measure(started.pid, interval_seconds=0.01) as meter:
        started.end()
        deadline = time.monotonic() + 20
        while threading.active_count() > num_threads and time.monotonic() < deadline:
            time.sleep(0.01)
    assert meter.footprint.private_bytes > MIB


def test_what_fails_in_the_thread_is_raised_at_the_end(monkeypatch):
    with pytest.raises(RuntimeError, match="sampling broke"), measure(interval_seconds=0.001):
        monkeypatch.setattr(TreeMeter, "sample", lambda self: (_ for _ in ()).throw(RuntimeError("sampling broke")))


def test_what_fails_in_the_block_goes_before():
    with pytest.raises(ZeroDivisionError), measure():
        _ = 1 // 0


def test_a_process_that_is_not_there_and_an_interval_of_nothing_are_refused():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for given, words in (({"pid": gone.pid}, f"process {gone.pid} cannot"), ({"interval_seconds": 0}, "each 0 s")):
        with pytest.raises(UsageError, match=words), measure(**given):
            pass
