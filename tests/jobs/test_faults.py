"""Faults at the places of a training of four ranks: some of benchmarks/faults.py, forked from a process with torch."""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.contract import submit, wait_until
from memfit.jobs import ENDED, Job, LocalBackend, Parent, start_env
from memfit.rundir import RunDir, read_events

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: What the trainings import, with what an optimizer and the first sharded save import late.
LOADED = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "memfit.training",
    "transformers.trainer", "memfit.integrations.huggingface",
)  # fmt: skip


@pytest.fixture(scope="module")
def faults():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("faults")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def parent():
    env = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None), "PYTHONPATH": str(BENCHMARKS)}
    own = Parent.start("faults:train", env)
    own.load(*LOADED)  # else each rank of each generation would import them, which takes it 3 s
    assert own is not None and not own.refused, own
    yield own
    own.close()


@pytest.fixture
def ends(faults, parent, tmp_path):
    """Runs a launch, and the same training without faults; returns how each fault ended, and if both ended alike."""

    def train(launch, name):
        folder, run_dir = tmp_path / name, RunDir.create(tmp_path / f"runs_{name}", "ranks", "0" * 64)
        faults.write_plan(launch, folder)
        arguments = {"folder": str(folder), "num_epochs": launch.num_epochs, "loop": launch.loop}
        env = {"PYTHONPATH": str(BENCHMARKS)}
        if launch.hang_seconds is not None:
            env["MEMFIT_HANG_SECONDS"] = str(launch.hang_seconds)
        backend = LocalBackend(run_dir, grace_seconds=20, parent=parent)
        submit(backend, Job("j", target="faults:train", arguments=arguments, ranks=faults.RANKS, env=env))
        wait_until(lambda: backend.poll()["j"].state in ENDED, 500)
        status = backend.poll()["j"]
        assert status.state == "completed", status.cause
        return folder, read_events(run_dir.events_dir)

    def run(launch):
        whole, _ = train(launch.plain(), "whole")
        folder, events = train(launch, "faulty")
        is_same = faults.are_same(launch.loop, faults.digests(folder), faults.digests(whole))
        return faults.judge(launch, folder, events), is_same

    return run


def check(found, num_restarts):
    rows, is_same = found
    assert [f"{row.fault.name}: {row.how}" for row in rows if not row.is_ok] == []
    assert sum(row.how != "in the process" for row in rows) == num_restarts
    assert is_same


def test_out_of_memory_is_survived_in_the_process_and_an_honest_step_of_seconds_is_not_ended(faults, ends):
    places = ["forward", "loss", "backward", "trial", "update", "validation"]
    kinds = [(place, (number % 4,)) for number, place in enumerate(places)]
    launch = faults.in_the_process([*kinds, ("save", (0,)), ("update", (0, 1, 2, 3))])
    slow = faults.Fault(len(launch.faults), "forward", faults.SLOW, (3,), launch.faults[-1].at + 1, seconds=2.5)
    check(ends(replace(launch, faults=(*launch.faults, slow))), 0)


def test_an_error_and_a_kill_cost_a_restart_and_no_bytes(faults, ends):
    kinds = [
        ("reduction", faults.OUT_OF_MEMORY, 1),
        ("load", faults.ERROR, 0),
        ("backward", faults.ERROR, 2),
        ("rendezvous", faults.KILL, 3),
        ("update", faults.KILL, 1),
        ("save", faults.KILL, 0),
    ]
    check(ends(faults.with_restarts("", kinds)), len(kinds))


def test_a_hang_ends_by_its_rule_and_the_next_group_goes_on(faults, ends):
    kinds = [("forward", faults.HANG, 2), ("update", faults.HANG, 1)]
    check(ends(replace(faults.with_restarts("", kinds), hang_seconds=0.5)), len(kinds))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "out of memory, restarts",
        "error, rank 2",
        "SIGKILL, rank 2",
        "hang, rank 0",
        "FSDP2, smaller",
        "FSDP2, errors and kills",
        "FSDP2, hangs",
        "transformers, errors, kills and out of memory",
        "transformers, hangs",
    ],
)
def test_each_place_and_each_kind(faults, ends, name):
    launch = next(one for one in faults.launches() if one.name == name)
    check(ends(launch), len(launch.faults))
