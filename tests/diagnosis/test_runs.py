"""Records of jobs that died in different ways, with the kernel's counts; ``test_deaths.py`` has real ones."""

import json

import pytest

from memfit.diagnosis import Job, diagnose, list_remedies
from memfit.rundir import RunDir
from memfit.units import format_bytes

MIB = 1 << 20


def recorded(tmp_path, before, after, *, state="out_of_memory", code=-9, place="host", **more):
    """A run directory with one job's record."""
    run = RunDir.create(tmp_path / "runs", "made", "0123abcd" * 8)
    folder = run.job_dir("fold_1")
    folder.mkdir(parents=True)
    evidence = {"wall_bytes": 100 * MIB, "place": place, "oom_kills": {"before": before, "after": after}}
    record = {"state": state, "exit_code": code, "phase": "validate", "cause": "words", "attempt": 1, "peak_bytes": MIB}
    (folder / "outcome.json").write_text(json.dumps(record | {"evidence": evidence} | more))
    (folder / "out.log").write_text("hello\n")
    return run


def counters(own=None, above=None, host=None):
    return {"own": own, "above": above or {}, "host": host}


@pytest.mark.proves("S0-01")
@pytest.mark.parametrize(
    ("before", "after", "more", "kind", "cause", "killer"),
    [
        (counters(0), counters(1), {}, "host_cgroup", "out_of_memory", "the kernel"),
        (counters(0), counters(1), {"code": 1}, "host_cgroup", "out_of_memory", "The limit"),  # a worker was killed
        (counters(above={"/jobs": 3}, host=7), counters(above={"/jobs": 4}, host=8), {}, "host_cgroup", "out_of_memory",
         "the kernel"),
        (counters(above={"/jobs": 3}, host=7), counters(above={"/jobs": 3}, host=8), {}, "host_kernel", "out_of_memory",
         "the kernel"),
        (counters(2), counters(2), {}, "host_cgroup", "out_of_memory", "memfit"),
        (counters(0), counters(0), {"code": 1, "place": "device"}, "gpu", "out_of_memory", ""),
        (counters(0), counters(0), {"code": 1}, "host_alloc", "out_of_memory", ""),
        (counters(0), counters(0), {"state": "failed"}, "none", "killed", ""),
        (counters(), counters(), {"state": "failed"}, "none", "killed", ""),
        (counters(0), counters(0), {"state": "cancelled"}, "none", "cancelled", "memfit"),
        (counters(0), counters(0), {"state": "preempted", "code": 75}, "none", "preempted", ""),
    ],
)  # fmt: skip
def test_the_counters_tell_whose_memory_ran_out_and_who_killed(tmp_path, before, after, more, kind, cause, killer):
    found = diagnose(recorded(tmp_path, before, after, **more).path)
    assert (found.kind, found.cause, found.phase) == (kind, cause, "validate")
    assert found.arithmetic[0].startswith(killer) if killer else True


def test_an_attempt_that_a_later_one_made_good_is_recovered(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0), code=1)
    folder = run.job_dir("fold_1")
    (folder / "outcome.json").rename(folder / "outcome_1.json")
    (folder / "outcome.json").write_text(json.dumps({"state": "completed", "exit_code": 0, "attempt": 2}))
    found = diagnose(run.path)
    assert (found.kind, found.recovered) == ("host_alloc", True)


def test_a_job_that_was_killed_or_failed_is_named_before_one_that_was_stopped_for_it(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0), state="failed", code=1, cause="exit code 1: ValueError: bad")
    (run.path / "jobs/fold_0").mkdir()
    (run.path / "jobs/fold_0/outcome.json").write_text('{"state": "preempted", "exit_code": 75, "asked": true}')
    assert diagnose(run.job_dir("fold_0")).cause == "cancelled"
    found = diagnose(run.path)
    assert (found.cause, found.oom) == ("own_exception", False) and "ValueError: bad" in found.evidence[0].text
    (run.job_dir("fold_1") / "outcome.json").write_text('{"state": "failed", "exit_code": -9}')
    assert diagnose(run.path).cause == "killed"


def test_a_command_that_failed_without_a_traceback_has_no_phase_and_no_traceback_to_read(tmp_path):
    cause = "exit code 1: cat: /data/train/epoch_1/score.txt: Is a directory"
    run = recorded(tmp_path, counters(0), counters(0), state="failed", code=1, cause=cause, phase=None)
    (run.job_dir("fold_1") / "err.log").write_text("cat: /data/train/epoch_1/score.txt: Is a directory\n")
    found = diagnose(run.path)
    assert (found.cause, found.phase, found.oom) == ("exit_status", "unknown", False)
    assert not any("traceback" in one.title for one in list_remedies(found, Job()))


def test_a_tool_that_misses_a_file_says_nothing_of_a_training(tmp_path):
    (tmp_path / "job.log").write_text("cat: /runs/train/epoch_1/rows.txt: No such file or directory\n")
    found = diagnose(tmp_path / "job.log")
    assert (found.cause, found.phase) == ("missing_file", "unknown")


def test_only_counters_that_stood_still_prove_that_a_kill_was_not_for_memory(tmp_path):
    known = recorded(tmp_path / "a", counters(0), counters(0), state="failed")
    unknown = recorded(tmp_path / "b", counters(), counters(), state="failed")
    assert [diagnose(run.path).confidence for run in (known, unknown)] == ["proved", "not shown"]


def test_a_job_without_a_record_of_its_end_gives_no_fact(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0))
    folder = run.job_dir("fold_1")
    (folder / "outcome.json").rename(folder / "status.json")
    status = json.loads((folder / "status.json").read_text()) | {"state": "running", "exit_code": None}
    (folder / "status.json").write_text(json.dumps(status))
    assert diagnose(run.path).cause == "unknown"


def test_what_a_training_met_and_survived_is_told_with_its_line_among_damaged_ones(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0), state="completed", code=0)
    events = [
        {"time": 1.0, "job": "fold_1", "kind": "phase", "phase": "train"},
        {"time": 2.0, "job": "fold_1", "kind": "oom", "memory": "device", "error": "CUDA out of memory"},
        {"time": 3.0, "job": "fold_1", "kind": "loader_worker_died", "pids": [8], "exit_code": 1},
        {"time": 4.0, "job": "fold_2", "kind": "shm_full", "room": 0},
    ]
    path = run.events_dir / "host-1-1.jsonl"
    whole = "".join(f"{json.dumps(event)}\n" for event in events)
    path.write_bytes(b'\xff\x00{\n[1]\n{"kind": \n' + whole.encode() + b'{"time": 6.0, "kind": "oo')
    found = diagnose(run.job_dir("fold_1"))
    assert (found.kind, found.recovered) == ("gpu", True)
    assert [(one.file, one.line) for one in found.evidence] == [(str(path), 5)]
    assert diagnose(run.path).kind == "shm"  # the other job's event


LOST = {
    "job": "fold_1",
    "kind": "rank_lost",
    "rank": 1,
    "generation": 0,
    "place": "save",
    "text": "fold_1 rank 1 hung in save",
}
AGAIN = {
    "job": "fold_1",
    "kind": "ranks_again",
    "generation": 1,
    "text": "fold_1 n1: rank 1 hung. All 2 ranks begin again",
}


@pytest.mark.parametrize(
    ("state", "events", "cause", "rank", "told"),
    [
        ("completed", [LOST, AGAIN], "rank_lost", 1, "rank 1 hung in save; errors of other ranks follow from that. The "
         "group began again once, and the job completed."),
        ("completed", [LOST, AGAIN, LOST, AGAIN], "rank_lost", 1, "The group began again 2 times, and the job completed."),
        ("completed", [AGAIN], "rank_lost", None, "n1: rank 1 hung. All 2 ranks begin again"),
        ("running", [LOST, AGAIN], "rank_lost", 1, "The group began again once."),
        ("failed", [LOST, AGAIN, LOST], "own_exception", 1, "The group began again once."),
        ("failed", [LOST], "exit_status", None, None),
    ],
    ids=["once", "twice", "several nodes", "still runs", "then failed", "never began again"],
)  # fmt: skip
def test_a_rank_that_was_lost_is_what_happened_to_a_job_whose_group_began_again(
    tmp_path, state, events, cause, rank, told
):
    code = {"completed": 0, "running": None, "failed": 1}[state]
    run = recorded(tmp_path, counters(0), counters(0), state=state, code=code, cause="")
    lines = "".join(f"{json.dumps(one | {'time': float(at)})}\n" for at, one in enumerate(events))
    (run.events_dir / "host-1-1.jsonl").write_text(lines)
    left = "memfit: rank 0 leaves with exit code 79: it lost its peers: Connection closed by peer [127.0.0.1]:9"
    (run.job_dir("fold_1") / "err.log").write_text(f"[rank1]: ValueError: bad\n{left}\n" if told else "")
    found = diagnose(run.path)
    assert (found.cause, found.where.get("rank"), found.recovered) == (cause, rank, state != "failed")
    if told is not None:
        assert told in found.notes[-1]
    if cause == "rank_lost":
        assert [one.line for one in found.evidence] == [1 + 2 * (len(events) == 4), 1]
        assert "ValueError: bad" in found.evidence[1].text
        assert found.phase == ("unknown" if rank is None else "checkpoint")


ADMIT = {"kind": "admit", "job": "fold_1", "num_running": 1, "why": "", "reservation_bytes": 200 * MIB}
LIMIT = {"name": "slurm", "source": "slurm", "limit_bytes": 1}
BUDGET = {"kind": "budget", "job": None, "binding": LIMIT, "limits": [LIMIT], "headroom_bytes": 0, "reserve_bytes": 0,
          "promise": "", "backend": "slurm"}  # fmt: skip
BY_SLURM = {"witness": "slurm", "state": "OUT_OF_MEMORY"}
KILLS = {"oom_kills": {"before": counters(0), "after": counters(1)}, "place": "host"}
RANKS = [{"rank": rank, "place": "", "pss_bytes": 0, "device_bytes": 0, "peak_bytes": (60 + rank) * MIB, "node": f"n{rank}"}
         for rank in (0, 1)]  # fmt: skip
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@pytest.mark.parametrize(
    ("record", "log", "kind", "where", "said"),
    [
        # Slurm ended it before its watcher could write: what Slurm was asked for is the limit
        ({"evidence": BY_SLURM, "exit_code": None, "node": "n7"}, "", "host_cgroup", (None, "n7"),
         ["Slurm: 100.0 MiB used of 200.0 MiB", "attempt 3, a peak of 100.0 MiB, a limit of 200.0 MiB"]),
        # a job on two nodes: srun's exit code, the rank that was lost, and its node
        ({"evidence": KILLS | {"rank": 1}, "exit_code": 137, "node": "2 nodes", "ranks": RANKS, "cause": "n1: killed"}, "",
         "host_cgroup", (1, "n1"), ["the kernel: 100.0 MiB used of 200.0 MiB", "peaks of its 2 ranks: 60.0 MiB, 61.0 MiB"]),
        # one that memfit ended at its wall
        ({"evidence": KILLS | {"oom_kills": {"before": counters(2), "after": counters(2)}, "wall_bytes": 90 * MIB},
          "exit_code": 137, "node": "2 nodes", "cause": "n2: killed"}, "", "host_cgroup", (None, "n2"),
         ["memfit: 100.0 MiB used of 90.0 MiB", "a limit of 90.0 MiB"]),
        # the log's own message decides, and the record still tells the rank, the attempt and the peak
        ({"evidence": KILLS | {"rank": 1, "place": "device"}, "exit_code": 1, "ranks": RANKS, "node": "n0"}, CUDA, "gpu",
         (1, "n1"), ["fold_1: attempt 3, a peak of 100.0 MiB, a limit of 200.0 MiB, peaks of its 2 ranks"]),
    ],
    ids=["Slurm", "nodes", "a wall", "a log"],
)  # fmt: skip
def test_a_run_is_told_of_as_its_summary_tells_it(tmp_path, record, log, kind, where, said):
    run = recorded(tmp_path, counters(0), counters(0), attempt=3, peak_bytes=100 * MIB, **record)
    lines = [json.dumps(one | {"time": 1.0}) for one in (BUDGET, ADMIT)]
    (run.events_dir / "host-1-1.jsonl").write_text("\n".join(lines) + "\n")
    (run.job_dir("fold_1") / "err.log").write_text(log)
    found = diagnose(run.path)
    assert (found.kind, found.cause, "memfit" in found.whom) == (kind, "out_of_memory", True)
    assert (found.where["rank"], found.where["node"]) == where
    told = " ".join([*found.arithmetic, *found.notes])
    assert all(text in told for text in said), told
    if kind == "host_cgroup":
        assert format_bytes(found.figures["limit"]) in told
        assert list_remedies(found)[0].setting.startswith("--memory ")


def test_of_two_runs_each_tells_of_its_own_job(tmp_path):
    ours = recorded(tmp_path / "a", counters(0), counters(1), attempt=2)
    other = recorded(tmp_path / "b", counters(0), counters(0), state="completed", code=0, attempt=9)
    assert [note for note in diagnose([other.path, ours.path]).notes if "attempt" in note] == [
        "fold_1: attempt 2, a peak of 1.0 MiB, a limit of 100.0 MiB."
    ]


def test_evidence_of_other_types_and_a_damaged_record_are_passed_over(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0), evidence={"oom_kills": 3, "rank": "one"})
    assert diagnose(run.path).kind == "host_kernel"
    (run.job_dir("fold_1") / "outcome.json").write_text("{torn")
    assert diagnose(run.path).cause == "unknown"
