"""The parsers, the readers and the tree walk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.memory import ProcReader, Sharing, Tree, parse_counters, parse_rollup, parse_stat

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads this machine's /proc")
MIB = 1 << 20

STAT = "{pid} (job {pid}) {state} {parent} {group} {session} 0 -1 0 9 0 1 0 0 0 0 0 20 0 1 0 {start} 1 1 1 2 3 {image}"
STATUS = """Name:\tjob
VmHWM:\t    9000 kB
VmRSS:\t    8000 kB
RssAnon:\t    4000 kB
RssFile:\t    3000 kB
RssShmem:\t    1000 kB
VmPTE:\t      40 kB
VmSwap:\t       8 kB
Threads:\t1
"""


def lay(root: Path, pid: int, *, parent: int = 1, session: int = 1, start: int = 500, children: str = "") -> Path:
    """A process in a made-up /proc."""
    folder = root / "proc" / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
    text = STAT.format(pid=pid, state="S", parent=parent, group=session, session=session, start=start, image=pid)
    (folder / "stat").write_text(text)
    (folder / "status").write_text(STATUS)
    (folder / "task" / str(pid) / "children").write_text(children)
    return folder


def test_a_text_cut_anywhere_is_none_or_whole_never_an_error():
    stat = STAT.format(pid=3, state="R", parent=2, group=3, session=4, start=77, image=8)
    rollup = "0-1 ---p [rollup]\nPss: 4 kB\nPss_Anon: 1 kB\nPss_File: 3 kB\nPss_Shmem: 0 kB\n"
    whole = [parse_stat(stat), parse_counters(STATUS), parse_rollup(rollup)]
    assert None not in whole
    for end in range(len(STATUS)):
        assert parse_counters(STATUS[:end]) in (None, whole[1]) or end > STATUS.index("VmPTE")
        assert parse_rollup(rollup[:end]) in (None, whole[2])
        parse_stat(stat[:end])
    assert parse_stat("") is None


@linux
def test_this_process_reads_as_the_kernel_shows_it():
    reader = ProcReader()
    stat, status, rollup = reader.stat(os.getpid()), reader.status(os.getpid()), reader.rollup(os.getpid())
    assert stat is not None
    assert (stat.pid, stat.parent, stat.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert stat.image > 0
    assert status is not None
    assert 4 * MIB < status.anonymous < status.high_water
    assert rollup is not None
    assert rollup.held + rollup.shared_memory + rollup.file == pytest.approx(rollup.pss, abs=64 << 10)
    assert os.getpid() in reader.pids()


@linux
def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (Path("/proc") / str(child.pid)).exists()
    assert ProcReader().stat(child.pid) is None
    child.wait()


@pytest.mark.parametrize(
    ("processes", "scan", "found"),
    [
        ({10: {"children": "11 12 "}, 11: {"parent": 10, "children": "13 "}, 12: {"parent": 10}, 13: {"parent": 11}, 99: {}},
         False, {10, 11, 12, 13}),
        ({10: {}, 12: {"parent": 11}, 11: {"parent": 10}}, False, {10}),  # a thread forked it
        ({10: {}, 12: {"parent": 11}, 11: {"parent": 10}}, True, {10, 11, 12}),
        ({10: {"session": 10}, 15: {"session": 10}, 16: {}}, True, {10, 15}),  # an orphan of its session
        ({10: {"session": 7}, 7: {"session": 7}, 15: {"parent": 7, "session": 7}}, True, {10}),  # it does not lead it
    ],
)  # fmt: skip
def test_the_walk_finds_what_descends_from_a_process(tmp_path, processes, scan, found):
    for pid, options in processes.items():
        lay(tmp_path, pid, **options)
    assert set(Tree(10, ProcReader(tmp_path)).refresh(scan=scan)) == found


def test_one_seen_once_is_kept_when_its_parents_are_gone(tmp_path):
    gone = lay(tmp_path, 10, children="11")
    lay(tmp_path, 11, parent=10)
    tree = Tree(10, ProcReader(tmp_path))
    tree.refresh(scan=False)
    (gone / "stat").unlink()
    lay(tmp_path, 11, parent=1)
    assert set(tree.refresh(scan=True)) == {11}


def test_a_number_used_again_is_another_process(tmp_path):
    lay(tmp_path, 10, children="11")
    lay(tmp_path, 11, parent=10)
    tree = Tree(10, ProcReader(tmp_path))
    tree.refresh(scan=False)
    lay(tmp_path, 10)
    lay(tmp_path, 11, parent=1, start=900)
    assert set(tree.refresh(scan=True)) == {10}


def test_half_gone_processes_are_passed_over(tmp_path):
    lay(tmp_path, 10, children="11 12 13 x")
    (lay(tmp_path, 11, parent=10) / "stat").write_text("11 (jo")
    (lay(tmp_path, 12, parent=10) / "status").write_text("Name: job\nState: S\n")
    reader = ProcReader(tmp_path)
    assert set(Tree(10, reader).refresh(scan=True)) == {10, 12}
    assert reader.status(12) is None
    assert reader.status(13) is None
    assert reader.rollup(10) is None


def test_without_any_proc_there_is_no_tree(tmp_path):
    tree = Tree(10, ProcReader(tmp_path))
    assert tree.refresh(scan=True) == {}
    assert ProcReader(tmp_path).pids() == []


def test_what_two_share_counts_once_and_what_one_writes_counts_again_at_the_next_sweep():
    sharing = Sharing()
    sharing.sweep({1: 1000, 2: 1000}, {1: 500, 2: 500})
    assert sharing.unique({1: 1000, 2: 1000}) == 1000
    assert sharing.unique({1: 1000, 2: 1300}) == 1300
    sharing.sweep({1: 1000, 2: 1300}, {1: 700, 2: 1000})
    assert sharing.unique({1: 1000, 2: 1300}) == 1700


def test_when_sharers_end_the_rest_is_not_understated():
    sharing = Sharing()
    pids = range(5)
    sharing.sweep(dict.fromkeys(pids, 1000), dict.fromkeys(pids, 200))
    assert [sharing.unique(dict.fromkeys(range(n), 1000)) for n in (5, 4, 3, 2, 1)] == [1000] * 5
    assert sharing.unique({0: 1000, 9: 500}) == 1500


def test_what_is_shared_with_processes_outside_is_not_given_away():
    sharing = Sharing()
    sharing.sweep({1: 1000}, {1: 100})
    assert sharing.unique({1: 1000}) == 1000
    sharing.sweep({1: 1000, 2: 10}, {1: 100, 2: 10})
    assert sharing.unique({1: 1000, 2: 500}) == 1490


def test_a_child_just_forked_counts_with_what_it_wrote_until_it_executes_a_program():
    sharing = Sharing()
    sharing.sweep({1: 1000}, {1: 1000})
    sharing.fork(1, 2, 990, {1: 1000, 2: 1000})
    assert sharing.unique({1: 1000, 2: 1000}) == 1010
    sharing.leave(2)
    assert sharing.unique({1: 1000, 2: 40}) == 1040
