"""Jobs of several ranks: real groups under the real agent. The ranks are forked from a process with torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import group
from jobs.contract import submit, wait_for_end, wait_until
from memfit.errors import UsageError
from memfit.files import read_json
from memfit.jobs import Headway, Job, LocalBackend, Parent, start_env
from memfit.rundir import Beat, RunDir, read_beats, read_events

RANKS = 3
pytestmark = pytest.mark.slow
HANG_SECONDS = 3  # three ranks may get a core between them
WEIGHT = float(sum(range(group.STEPS)) * sum(range(1, RANKS + 1)))


@pytest.fixture(scope="module")
def parent():
    env = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None)}
    own = Parent.start("jobs.group:train", env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert own is not None and not own.refused, own
    yield own
    own.close()


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "ranks", "0" * 64)


@pytest.fixture
def backend(run_dir, parent):
    return LocalBackend(run_dir, grace_seconds=20, parent=parent)


def start(backend, faults=()):
    arguments = {"folder": str(backend.run.path), "faults": list(faults)}
    env = {"MEMFIT_HANG_SECONDS": str(HANG_SECONDS), "PYTHONPATH": str(Path(__file__).parents[1])}
    submit(backend, Job("j", target="jobs.group:train", arguments=arguments, ranks=RANKS, env=env))


def fault(does, place, rank=1, generation=0, **step):
    return {"does": does, "place": place, "rank": rank, "generation": generation, **step}


def lost_in(run_dir):
    found = [one for one in read_events(run_dir.events_dir) if one["kind"] == "rank_lost"]
    return [(one["rank"], one["code"], one["place"]) for one in found]


@pytest.mark.proves("S3-36")
@pytest.mark.parametrize(
    ("faults", "lost"),
    [
        ([fault("an error", "microbatch", step=2)], [(1, 1, "microbatch")]),
        ([fault("kill", "vote", step=1), fault("kill", "save", 0, 1, step=4)], [(1, -9, "vote"), (0, -9, "save")]),
        ([fault("kill", "begin", 2)], [(2, -9, "begin")]),
        (
            [
                fault("kill", "microbatch", step=2),
                *(fault(does, "start", rank, 1) for rank, does in enumerate(["hang", "kill", "hang"])),
            ],
            [(1, -9, "microbatch"), (1, -9, "start")],
        ),
        ([fault("kill", "load", 0)], [(0, -9, "load")]),
        ([fault("hang", "microbatch", step=3)], [(1, 79, "microbatch")]),
        ([fault("stop", "microbatch", 2, step=3)], [(2, -9, "microbatch")]),
        ([fault("smaller", "microbatch", 1, one, step=0) for one in range(3)], 3 * [(1, 79, "smaller")]),
        (
            [fault("ends slowly" if rank == 1 else "smaller", "microbatch", rank, step=3) for rank in range(3)],
            [(1, 1, "end")],
        ),
        ([fault("slow", "microbatch", 0, step=3)], []),
    ],
    ids=[
        "error",
        "two kills",
        "rendezvous",
        "before any sign of life",
        "load",
        "computes for ever",
        "stopped",
        "begins again smaller",
        "an error that is slow to end",
        "slow and says so",
    ],
)
def test_a_lost_rank_costs_a_generation_and_no_result(backend, run_dir, faults, lost):
    start(backend, faults)
    assert wait_for_end(backend, "j").state == "completed"
    assert read_json(run_dir.job_dir("j") / "result.json") == {"result": {"weight": WEIGHT}}
    assert lost_in(run_dir) == lost
    ports = [one["port"] for one in read_events(run_dir.events_dir) if one["kind"] == "ranks"]
    assert len(set(ports)) == len(ports) == len(lost) + 1


@pytest.mark.parametrize(
    ("faults", "lost", "cause"),
    [
        (
            [fault("an error", "load"), fault("kill", "microbatch", 2, 1, step=0)],
            [(1, 1, "load"), (2, -9, "microbatch")],
            "rank 2 was ended by SIGKILL in microbatch of step 0",
        ),
        (
            [fault("seals an old step", "load", generation=one) for one in range(9)],
            3 * [(1, 1, "sealed")],  # the first has sealed something
            "rank 1 ended with exit code 1 in sealed",
        ),
    ],
    ids=["none", "the same at each start"],
)
def test_two_generations_without_a_new_checkpoint_end_with_the_cause(backend, run_dir, faults, lost, cause):
    start(backend, faults)
    status = wait_for_end(backend, "j")
    assert (status.state, status.exit_code) == ("failed", lost[-1][1])
    assert cause in status.cause
    assert "2 generations in a row ended without a new checkpoint" in status.cause
    assert lost_in(run_dir) == lost


@pytest.mark.core
def test_a_stop_reaches_all_ranks_and_the_next_start_goes_on(backend, run_dir):
    start(backend, [fault("slow", "microbatch", 0, step=2)])
    wait_until(lambda: "repeat" in {one.place for one in beats(run_dir)})
    backend.cancel("j")
    status = wait_for_end(backend, "j")
    assert (status.state, status.exit_code) == ("preempted", 75)
    assert lost_in(run_dir) == []
    start(backend)
    assert wait_for_end(backend, "j").state == "completed"
    assert read_json(run_dir.job_dir("j") / "result.json") == {"result": {"weight": WEIGHT}}


def beats(run_dir):
    return [one for folder in run_dir.job_dir("j").glob("ranks/*") for one in read_beats(folder).values()]


PLAIN = """
import os, sys, time
from pathlib import Path
rank, code, pid = os.environ["RANK"], int(sys.argv[1]), Path(sys.argv[2])
print("rank", rank, "of", os.environ["WORLD_SIZE"])
if rank == "1":
    pid.write_text(f"/proc/{os.getpid()}")
    raise SystemExit(code)
sys.stderr.write("Connection closed by peer")
while not code and (not pid.exists() or os.path.exists(pid.read_text() or "/")):
    time.sleep(0.01)
raise SystemExit(not code)
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (7, "rank 1 ended with exit code 7"),
        (0, "rank 0 ended with exit code 1, after rank 1 had left with exit code 0"),
    ],
)
def test_a_command_without_memfit_in_it_ends_with_the_cause_and_is_not_begun_again(run_dir, tmp_path, code, told):
    backend = LocalBackend(run_dir)
    submit(backend, Job("j", command=(sys.executable, "-c", PLAIN, str(code), str(tmp_path / "pid")), ranks=2))
    status = wait_for_end(backend, "j")
    assert (status.state, status.exit_code) == ("failed", code or 1)
    assert told in status.cause
    assert sorted((run_dir.job_dir("j") / "out.log").read_text().splitlines()) == [
        "[rank1]: rank 1 of 2",
        "rank 0 of 2",
    ]
    assert len([one for one in read_events(run_dir.events_dir) if one["kind"] == "ranks"]) == 1


@pytest.mark.parametrize(
    ("ends", "num_starts"),
    [
        ([{"sealed": step} for step in (4, 8, 8, 12, 5, 12)], 6),
        ([{"sealed": step, "training": fold} for fold, step in (("1", 90), ("2", 5), ("2", 9))], 5),
        ([{"sealed": 9, "training": str(one)} for one in range(99)], 18),
        ([{"count": 0}], 1),
    ],
    ids=["steps", "two trainings", "a new folder at each start", "no sign of life"],
)
def test_ranks_begin_again_while_a_sealed_step_grows_and_never_without_end(ends, num_starts):
    headway, start = Headway(), 0
    while headway.begins_again([Beat(0, 1, "h", "", "vote", **({"count": 9} | ends[min(start, len(ends) - 1)]))]):
        start += 1
    assert start + 1 == num_starts


def test_each_rank_has_a_gpu_or_none_has():
    with pytest.raises(UsageError, match="4 ranks and asks for 2 GPUs"):
        Job("j", command=("true",), ranks=4, num_devices=2)


@pytest.mark.long
def test_torchrun_begins_again_with_what_is_asked_of_it(tmp_path):
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--max-restarts=1", "-m", "jobs.group"]
    faults = json.dumps([fault("kill", "microbatch", 2, step=3)])
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env = os.environ | own | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run([sys.executable, *words, str(tmp_path), faults], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{{'weight': {WEIGHT}}}") == RANKS
    assert "failed (exitcode: " in done.stderr
    assert "it lacks" not in done.stderr
