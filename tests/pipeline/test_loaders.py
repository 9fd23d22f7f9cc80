"""Loaders that a stage names: made in a child, counted for one rank, and with fewer workers."""

import io
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from memfit.data import _loader_footprint
from memfit.errors import UsageError
from memfit.files import write_json
from memfit.memory import Footprint, PhasePeak
from memfit.pipeline import _probe, plan_run
from memfit.reports import to_text, view_run_plan
from memfit.rundir import RunDir
from memfit.units import MIB

MODULE = """
import os
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

from memfit.data import Padding, SequenceLoader

def data(number):
    return TensorDataset(torch.zeros(number, 1 << 13))

def make(params):
    part = 16 // int(os.environ.get("WORLD_SIZE", "2"))
    return DataLoader(data(params["rows"]), batch_size=part, num_workers=2), DataLoader(data(30), batch_size=4)

def uneven(params):
    return DataLoader(data(params["rows"]), batch_size=5, num_workers=2), DataLoader(data(30), batch_size=5)

def later(params):
    return make(params)[0], lambda: make(params)[1]
def only_training(params):
    return DataLoader(data(30), batch_size=3, drop_last=True), None

def by_sampler(params):
    batches = [[0, 1, 2], [3, 4]]
    return DataLoader(data(30), batch_sampler=batches), None

def sequences(params):
    return SequenceLoader([{"input_ids": [one, 1]} for one in range(25)], Padding(0), batch=10), None

def single(params):
    return DataLoader(data(30), batch_size=3)

def slow(params):
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "loaders_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def empty(monkeypatch):
    """What a training of one small layer takes is not measured: each loader would start processes that import torch."""
    found = _loader_footprint.EmptyTraining(200 << 20, 90 << 20, 10 << 20, 0, 8 << 20)
    monkeypatch.setattr(_loader_footprint, "_measure", lambda *words: found)


def ask(name, **params):
    return _probe.loaders_in_child(f"loaders_here:{name}", "", params, 1)


@pytest.mark.usefixtures("empty")
def test_loaders_are_counted_as_they_are_and_with_fewer_workers():
    found = ask("make", rows=100)
    late, (train, both) = ask("later", rows=100)["loaders"][0]["both"], map(found["loaders"][0].get, ("train", "both"))
    alone = {"parts": both["parts"] | {"data": train["parts"]["data"]}, "phases": both["phases"] | train["phases"]}
    assert late == both | alone != both
    facts = {name: found[name] for name in ("workers", "batch", "samples", "valid", "drops")}
    assert facts == {"workers": 2, "batch": 8, "samples": 100, "valid": 30, "drops": False}
    parts = {one["workers"]: one["train"]["parts"] for one in found["loaders"]}
    assert parts[2]["workers"] > parts[1]["workers"] > parts[0]["workers"] == 0
    assert parts[2]["batches"] > parts[1]["batches"] >= parts[0]["batches"] > 0


@pytest.mark.usefixtures("empty")
def test_samples_and_batch_are_those_that_a_loader_says():
    found = {name: ask(name) for name in ("by_sampler", "sequences", "only_training")}
    assert {name: (one["samples"], one["batch"], len(one["loaders"])) for name, one in found.items()} == {
        "by_sampler": (30, 0, 1), "sequences": (25, 10, 1), "only_training": (30, 3, 1),
    }  # fmt: skip
    alone = found["only_training"]
    assert (alone["valid"], alone["drops"], set(alone["loaders"][0]["both"]["phases"])) == (None, True, {"train"})


def test_what_returns_no_two_loaders_is_refused():
    with pytest.raises(UsageError, match="returned a DataLoader, not two loaders"):
        ask("single")


def test_a_function_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(_probe, "_SECONDS", 1)
    with pytest.raises(UsageError, match="were not made and looked at within 1 s"):
        ask("slow")


def say_plan(plan):
    """What people read of a plan."""
    console = Console(width=200, file=io.StringIO())
    to_text(view_run_plan(plan), console)
    return console.file.getvalue()


CONFIG = {
    "experiment": "planned",
    "stages": {"train": {"run": "true", "loaders": "loaders_here:uneven"}},
    "params": {"rows": 100},
    "resources": {"ranks": 2},
}
MACHINE = "nodes: 2\ntasks_per_node: 2\nnode_memory: {}\n"


@pytest.mark.slow
def test_a_plan_has_the_loaders_of_each_rank_and_refuses_what_a_node_has_no_room_for(tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE.format("64GiB"))
    [stage] = (plan := plan_run(CONFIG, on=tmp_path / "machine.yaml")).stages
    found = stage.forecast
    assert not (tmp_path / "runs").exists()
    assert {line.name for line in found.ledger.lines} >= {"interpreter", "data", "training workers", "training batches"}
    assert found.ledger.layout.tasks_per_node == 2 and found.batch == (
        "global batch 10 = 5 per rank x 2 ranks x 1 accumulated; 10 steps an epoch of 100 samples, 30 validated"
    )
    # Nobody has counted what is trained: neither the rows nor the node say that it fits, nor what to request.
    assert (plan.fits, stage.fits, found.fits, found.request["mem"], stage.rows) == (None, None, None, None, ())
    assert found.uncounted == ("weights, gradients, optimizer, activations, checkpoints",)
    assert not any(mode.fits for mode in found.list_modes()) and plan.to_dict()["stages"][0]["fits"] is None
    shown = say_plan(plan)
    assert "to request: not known, /dev/shm" in shown and "fits: not known; " in shown
    assert "measure one: memfit run CONFIG --until train" in shown and "--mem=" not in shown and "  yes" not in shown
    (tmp_path / "machine.yaml").write_text(MACHINE.format(found.ledger.peak.bytes * 9 // 10))
    small = plan_run(CONFIG, on=tmp_path / "machine.yaml")
    assert small.fits is False  # what is counted is too much already
    small_modes = small.stages[0].forecast.list_modes()
    assert small.stages[0].forecast.change.startswith(next(one.name for one in small_modes if one.fits is not False))
    assert "smallest change after which what is counted fits: " in say_plan(small)


@pytest.mark.slow
def test_what_does_not_lie_in_shm_fits_nowhere_in_a_plan(tmp_path):
    config = CONFIG | {"resources": {"ranks": 2, "memory": "4GiB"}}
    (tmp_path / "machine.yaml").write_text(MACHINE.format("64GiB") + "shm: 1MiB\n")
    [stage] = plan_run(config, on=tmp_path / "machine.yaml").stages
    assert (stage.fits, stage.forecast.fits, stage.rows[0].fits) == (False, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("on", [Path("machine.yaml"), None])
@pytest.mark.parametrize("measured", range(5))
def test_the_rows_and_the_node_of_a_plan_are_one_sum_whatever_the_ranks(tmp_path, measured, on):
    """Ranks of 100 MiB, on a described machine with a GPU each: measured with so many, or declared, or neither."""
    Path("machine.yaml").write_text("nodes: 4\ntasks_per_node: 4\ngpus_per_task: 1\ngpu: 8GiB\nnode_memory: 350MiB")
    job, size = RunDir.create(tmp_path / "runs", "planned", "0" * 64).path / "jobs" / "train", 100 * measured * MIB
    found = Footprint(size, 0, dict.fromkeys(map(str, range(measured if on else 0)), 1), phases={"x": PhasePeak(size)})
    ranks = [{"rank": one, "place": "", "pss_bytes": 0, "device_bytes": 0, "peak_bytes": 0} for one in range(measured)]
    job.mkdir()
    write_json(job / "status.json", {"state": "completed", "footprint": found.to_dict(), "ranks": ranks})
    write_json(job / "job.json", {"stage": "train" if measured else ""})
    for number, memory, first in product(range(1, 17), ("100MiB", None), ({}, {"first": {"run": "true"}})):
        stages = first | {"train": {"run": "true", "resources": {"ranks": number, "memory": memory}}}
        config = {"experiment": "planned", "stages": stages, "memory": {"limit": "700MiB", "reserve": 0}}
        stage = (plan := plan_run(config | {"accept_tight": True}, on=on)).stages[-1]
        if not (measured or memory):
            assert (stage.footprint, stage.forecast, stage.rows, stage.fits) == (None, None, (), None)
            assert "one job: not measured yet" in say_plan(plan) and "--mem=" not in say_plan(plan)
            continue
        tasks = min(number, 4) if on else number
        assert stage.footprint.private_bytes == pytest.approx(100 * MIB * tasks, abs=tasks)
        assert stage.fits == stage.rows[0].fits == (100 * tasks <= (350 if on else 700))
        if (forecast := stage.forecast) is not None:
            assert (forecast.ledger.peak.bytes, forecast.fits) == (stage.footprint.private_bytes, stage.fits)
        assert not on or len(stage.footprint.device_bytes) in (0, tasks)
