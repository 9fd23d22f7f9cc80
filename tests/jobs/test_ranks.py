"""Jobs of several ranks: real groups under the real agent. The ranks are forked from a process with torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import group
from jobs.contract import submit, wait_for_end, wait_until
from memfit.files import read_json, write_json
from memfit.jobs import Headway, Job, LocalBackend, Parent, start_env
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, Beat, RunDir, read_beats, read_events

RANKS = 3
HANG_SECONDS = 3  # of ranks that hang; the others may get a core between them for a while
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


def start(backend, faults=(), stops=("hang", "stop", "slow")):
    arguments = {"folder": str(backend.run.path), "faults": list(faults)}
    seconds = HANG_SECONDS if any(one["does"] in stops for one in faults) else 60
    env = {"MEMFIT_HANG_SECONDS": str(seconds), "PYTHONPATH": str(Path(__file__).parents[1])}
    submit(backend, Job("j", target="jobs.group:train", arguments=arguments, ranks=RANKS, env=env))


def fault(does, place, rank=1, generation=0, **step):
    return {"does": does, "place": place, "rank": rank, "generation": generation, **step}


def lost_in(run_dir):
    found = [one for one in read_events(run_dir.events_dir) if one["kind"] == "rank_lost"]
    return [(one["rank"], one["code"], one["place"]) for one in found]


LOSSES = {
    "error": ([fault("an error", "microbatch", step=2)], [(1, 1, "microbatch")]),
    "two kills": (
        [fault("kill", "vote", step=1), fault("kill", "save", 0, 1, step=4)], [(1, -9, "vote"), (0, -9, "save")],
    ),
    "rendezvous": ([fault("kill", "begin", 2)], [(2, -9, "begin")]),
    "before any sign of life": (
        [
            fault("kill", "microbatch", step=2),
            *(fault(does, "start", rank, 1) for rank, does in enumerate(["hang", "kill", "hang"])),
        ],
        [(1, -9, "microbatch"), (1, -9, "start")],
    ),
    "load": ([fault("kill", "load", 0)], [(0, -9, "load")]),
    "computes for ever": ([fault("hang", "microbatch", step=3)], [(1, 79, "microbatch")]),
    "stopped": ([fault("stop", "microbatch", 2, step=3)], [(2, -9, "microbatch")]),
    "begins again smaller": (
        [fault("smaller", "microbatch", 1, one, step=0) for one in range(3)], 3 * [(1, 79, "smaller")],
    ),
    "an error that is slow to end": (
        [fault("ends slowly" if rank == 1 else "smaller", "microbatch", rank, step=3) for rank in range(3)],
        [(1, 1, "end")],
    ),
    "slow and says so": ([fault("slow", "microbatch", 0, step=3)], []),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.proves("S3-36")
@pytest.mark.parametrize(("faults", "lost"), LOSSES.values(), ids=LOSSES)
def test_a_lost_rank_costs_a_generation_and_no_result(backend, run_dir, faults, lost):
    start(backend, faults)
    assert wait_for_end(backend, "j").state == "completed"
    assert read_json(run_dir.job_dir("j") / "result.json") == {"result": {"weight": WEIGHT}}
    assert lost_in(run_dir) == lost
    ports = [one["port"] for one in read_events(run_dir.events_dir) if one["kind"] == "ranks"]
    assert len(set(ports)) == len(ports) == len(lost) + 1


@pytest.mark.slow
def test_two_generations_without_a_new_checkpoint_end_with_the_cause(backend, run_dir):
    start(backend, [fault("seals an old step", "load", generation=one) for one in range(9)])
    assert ((status := wait_for_end(backend, "j")).state, status.exit_code) == ("failed", 1)
    assert "rank 1 ended with exit code 1 in sealed" in status.cause
    assert "2 generations in a row ended without a new checkpoint" in status.cause
    assert lost_in(run_dir) == 3 * [(1, 1, "sealed")]  # the first has sealed something


@pytest.mark.core
def test_a_stop_reaches_all_ranks_and_the_next_start_goes_on(backend, run_dir):
    start(backend, [fault("slow", "microbatch", 0, step=2)], stops=())
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


@pytest.fixture
def agent(run_dir):
    """Runs the agent of a job whose ranks are a shell's lines; returns its process, and the rank that was lost."""
    folder, env = run_dir.job_dir("j"), os.environ | {RUN_DIR_VARIABLE: str(run_dir.path), JOB_ID_VARIABLE: "j"}

    def run(lines, own=None, **more):
        job = {"id": "j", "command": ["sh", "-c", lines], "target": None, "ranks": 2, "env": own or {}, "group": None}
        write_json(folder / "job.json", job | {"attempt": 3, "threads": 6, "node": 0})
        words = [sys.executable, "-m", "memfit.jobs", "ranks", str(folder)]
        done = subprocess.run(words, env=env | job["env"], capture_output=True, text=True, timeout=60, **more)
        return done, read_json(folder / "ranks/end.json")

    folder.mkdir()
    return run


def test_each_rank_has_what_torchrun_gives_and_only_the_first_has_the_input(agent, run_dir):
    names = "$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $OMP_NUM_THREADS"
    leaves = "[ $RANK = 0 ] || { (sleep 30; echo late) & exit 75; }"  # it ends with its rank
    done, lost = agent(f"read line; echo {names} $line; printf 'no end' >&2; {leaves}", input="given\n")
    assert (done.returncode, lost) == (75, None)
    assert sorted(done.stdout.splitlines()) == ["0 0 0 2 2 0 3 given", "[rank1]: 1 1 0 2 2 0 3"]
    assert done.stderr.count("no end") == 2 and "[rank1]: no end\n" in done.stderr
    beats = read_beats(run_dir.job_dir("j") / "ranks/3_0")
    assert [(one.rank, one.place, one.count) for one in beats.values()] == [(0, "start", 0), (1, "start", 0)]


SECOND_ENDS = "[ $RANK = 1 ] && { echo $$ >own; mv own gone; exit; }; "
AWAIT_IT = "until [ -e gone ] && ! kill -0 $(cat gone); do sleep 0.01; done 2>/dev/null; "
AWAIT_WORDS = "[ $RANK = 1 ] && { until [ -e said ]; do sleep 0.01; done; exit 5; }; "
LOST_PEER = "echo Connection closed by peer >&2; >said; exit 6"


@pytest.mark.parametrize(
    ("lines", "code", "lost"),
    [
        ("[ $RANK = 0 ] || { echo why >&2; exit 7; }", 7, "rank 1 ended with exit code 7"),
        ("[ $RANK = 1 ] || kill -HUP $$", -1, "rank 0 was ended by SIGHUP"),
        ("[ $RANK = 0 ] || kill -40 $$", -40, "rank 1 was ended by signal 40"),
        (AWAIT_WORDS + LOST_PEER, 5, "rank 1 ended with exit code 5"),  # the other only noticed that
        (
            SECOND_ENDS + AWAIT_IT + LOST_PEER, 6,
            "rank 0 ended with exit code 6, after rank 1 had left with exit code 0",
        ),
        (SECOND_ENDS + AWAIT_IT + "exit 79", 79, "rank 1 ended with exit code 0"),  # the other waited for it in vain
    ],
)  # fmt: skip
def test_the_agent_ends_as_the_rank_that_was_lost_first_and_names_it(agent, run_dir, tmp_path, lines, code, lost):
    done, end = agent(lines, cwd=tmp_path)
    assert (done.returncode, f"memfit: {lost}" in done.stderr) == (code, True)
    rank = int(lost.split()[1])
    assert end == {"rank": rank, "generation": 0, "text": lost}
    assert lost_in(run_dir) == [(rank, 0 if code == 79 else code, "start")]
    assert "why" not in lines or done.stderr == f"[rank1]: why\nmemfit: {lost}\nwhy\n"
    [port] = [one["port"] for one in read_events(run_dir.events_dir) if one["kind"] == "ranks"]  # begun once
    assert 20_000 <= port < 32_000


@pytest.mark.parametrize(
    ("place", "elsewhere", "text"),
    [
        ("vote", "microbatch", "rank 0 left: a rank of another node was lost"),
        ("microbatch", "vote", "rank 0 hung in microbatch of step 5"),
    ],
)
def test_of_several_nodes_only_the_one_names_a_rank_whose_rank_was_lost(agent, run_dir, place, elsewhere, text):
    (beats := run_dir.path / "ranks/3_0").mkdir(parents=True)
    (beats / "rank_1").write_bytes(Beat(1, 7, "other", "", elsewhere, step=5, count=9).to_line())
    (run_dir.path / "own").write_bytes(Beat(0, 8, "here", "", place, step=5, count=9).to_line())
    nodes = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "other:20001"}
    done, lost = agent("cp own $MEMFIT_RANKS/rank_0; exit 79", nodes, cwd=run_dir.path)
    assert (done.returncode, lost["text"]) == (79, text)


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


@pytest.mark.long
def test_torchrun_begins_again_with_what_is_asked_of_it(tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", "jobs.group"]
    faults = json.dumps([fault("kill", "microbatch", step=3)])
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env = os.environ | own | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run([sys.executable, *words, str(tmp_path), faults], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{{'weight': {WEIGHT / 2}}}") == 2  # of 1 + 2, where three ranks have 1 + 2 + 3
    assert "failed (exitcode: " in done.stderr
    assert "it lacks" not in done.stderr
