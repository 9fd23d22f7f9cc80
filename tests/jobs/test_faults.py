"""Faults at the places of a training of four ranks (``rank_faults.py``), forked from a process with torch."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import rank_faults
from jobs.contract import submit, wait_until
from jobs.rank_loops import SLOW
from memfit.jobs import ENDED, Job, LocalBackend, Parent, start_env
from memfit.rundir import RunDir, read_events

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
#: What the trainings import, with what an optimizer and the first sharded save import late.
LOADED = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "memfit.training",
    "transformers.trainer", "memfit.integrations.huggingface",
)  # fmt: skip


@pytest.fixture(scope="module")
def parent():
    env = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None), "PYTHONPATH": str(TESTS)}
    own = Parent.start("jobs.rank_loops:train", env)
    own.load(*LOADED)  # else each rank of each generation would import them, which takes it 3 s
    assert own is not None and not own.refused, own
    yield own
    own.close()


@pytest.fixture
def ends(parent, tmp_path):
    """Runs a launch, and the same training without faults; returns how each fault ended, and if both ended alike."""

    def train(launch, name):
        folder, run_dir = tmp_path / name, RunDir.create(tmp_path / f"runs_{name}", "ranks", "0" * 64)
        rank_faults.write_plan(launch, folder)
        arguments = {"folder": str(folder), "num_epochs": launch.num_epochs, "loop": launch.loop}
        env = {"PYTHONPATH": str(TESTS)}
        if launch.hang_seconds is not None:
            env["MEMFIT_HANG_SECONDS"] = str(launch.hang_seconds)
        backend = LocalBackend(run_dir, grace_seconds=20, parent=parent)
        submit(backend, Job("j", target="jobs.rank_loops:train", arguments=arguments, ranks=rank_faults.RANKS, env=env))
        wait_until(lambda: backend.poll()["j"].state in ENDED, 500)
        status = backend.poll()["j"]
        assert status.state == "completed", status.cause
        return folder, read_events(run_dir.events_dir)

    def run(launch):
        whole, _ = train(launch.plain(), "whole")
        folder, events = train(launch, "faulty")
        is_same = rank_faults.are_same(launch.loop, rank_faults.digests(folder), rank_faults.digests(whole))
        return rank_faults.judge(launch, folder, events), is_same

    return run


def check(found, num_restarts):
    rows, is_same = found
    assert [f"{row.fault.name}: {row.how}" for row in rows if not row.is_ok] == []
    assert sum(row.how != "in the process" for row in rows) == num_restarts
    assert is_same


def test_out_of_memory_is_survived_in_the_process_and_an_honest_step_of_seconds_is_not_ended(ends):
    places = ["forward", "loss", "backward", "trial", "update", "validation"]
    kinds = [(place, (number % 4,)) for number, place in enumerate(places)]
    launch = rank_faults.in_the_process([*kinds, ("save", (0,)), ("save", (2,)), ("update", (0, 1, 2, 3))])
    slow = rank_faults.Fault(len(launch.faults), "forward", SLOW, (3,), launch.faults[-1].at + 1, seconds=2.5)
    check(ends(replace(launch, faults=(*launch.faults, slow))), 0)


def test_an_error_and_a_kill_cost_a_restart_and_no_bytes(ends):
    kinds = [
        ("reduction", rank_faults.OUT_OF_MEMORY, 1),
        ("load", rank_faults.ERROR, 0),
        ("backward", rank_faults.ERROR, 2),
        ("rendezvous", rank_faults.KILL, 3),
        ("update", rank_faults.KILL, 1),
        ("save", rank_faults.KILL, 0),
    ]
    check(ends(rank_faults.with_restarts("", kinds)), len(kinds))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "out of memory, restarts",
        "FSDP2, smaller",
        "FSDP2, errors and kills",
        "FSDP2, hangs",
        "transformers, errors, kills and out of memory",
        "transformers, hangs",
    ],
)
def test_each_place_and_each_kind(ends, name):
    launch = next(one for one in rank_faults.launches() if one.name == name)
    check(ends(launch), len(launch.faults))
