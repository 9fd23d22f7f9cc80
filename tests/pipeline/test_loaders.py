"""Loaders that a stage names: made in a child for their numbers; what a plan says of a job that nobody measured."""

import io
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from memfit.errors import UsageError
from memfit.files import write_json
from memfit.memory import Footprint, PhasePeak
from memfit.pipeline import FirstSteps, _probe, plan_run
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
    return TensorDataset(torch.zeros(number, 1 << 12))

def make(params):
    part = 16 // int(os.environ.get("WORLD_SIZE", "2"))
    return DataLoader(data(params["rows"]), batch_size=part, num_workers=2), DataLoader(data(30), batch_size=4)

def uneven(params):
    return DataLoader(data(params["rows"]), batch_size=5, num_workers=2), DataLoader(data(30), batch_size=5)

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


def ask(name, **params):
    return _probe.loaders_in_child(f"loaders_here:{name}", "", params)


def test_the_numbers_of_loaders_are_read_off():
    found = ask("make", rows=100)
    facts = {name: found[name] for name in ("workers", "batch", "samples", "valid", "drops")}
    assert facts == {"workers": 2, "batch": 8, "samples": 100, "valid": 30, "drops": False}
    found = ask("only_training")
    assert (found["samples"], found["valid"], found["drops"]) == (30, None, True)


def test_samples_and_batch_are_those_that_a_loader_says():
    found = {name: ask(name) for name in ("by_sampler", "sequences")}
    assert [(one["samples"], one["batch"]) for one in found.values()] == [(30, 0), (25, 10)]


def test_what_returns_no_two_loaders_is_refused():
    with pytest.raises(UsageError, match="returned a DataLoader, not two loaders"):
        ask("single")


def test_a_function_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(_probe, "_SECONDS", 1)
    with pytest.raises(UsageError, match="were not made within 1 s"):
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


def test_a_plan_has_the_batch_of_loaders_and_no_request_before_first_steps(tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE.format("64GiB"))
    plan = plan_run(CONFIG, on=tmp_path / "machine.yaml")
    [stage] = plan.stages
    found = stage.forecast
    assert not (tmp_path / "runs").exists() and found.ledger.layout.tasks_per_node == 2
    assert found.batch == (
        "global batch 10 = 5 per rank x 2 ranks x 1 accumulated; 10 steps an epoch of 100 samples, 30 validated"
    )
    assert (plan.fits, stage.fits, found.fits, found.request["mem"], stage.rows) == (None, None, None, None, ())
    shown = say_plan(plan)
    assert "to request: not known, /dev/shm" in shown and "fits: not known; " in shown
    assert "plan it without --no-steps, or run one" in shown and "--mem=" not in shown and "  yes" not in shown


def test_a_stage_of_which_nothing_is_known_has_no_request(tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE.format("64GiB"))
    config = {
        "experiment": "planned",
        "stages": {"fold": {"run": "true", "each": "k in params.ks"}},
        "params": {"ks": 2},
    }
    plan = plan_run(config, on=tmp_path / "machine.yaml")
    assert (plan.fits, plan.stages[0].forecast) == (None, None)
    assert "one job: not measured yet" in say_plan(plan) and "--mem=" not in say_plan(plan)


def test_a_declared_rank_is_counted_for_each_and_what_is_not_counted_is_said(tmp_path):
    config = CONFIG | {"stages": {"train": {"run": "true"}}, "resources": {"ranks": 3, "memory": "1GiB"}}
    (tmp_path / "machine.yaml").write_text(MACHINE.format("4GiB"))
    [stage] = plan_run(config, on=tmp_path / "machine.yaml").stages
    assert stage.forecast.ledger.peak.bytes == stage.footprint.private_bytes == 2 << 30
    [here] = plan_run(config).stages
    assert (here.footprint.private_bytes, here.origin) == (3 << 30, "declared: 3 x 1.00 GiB, resources.memory")


@pytest.mark.slow
def test_what_does_not_lie_in_shm_fits_nowhere_in_a_plan(tmp_path, monkeypatch):
    rank = {"main": 0, "below": 0, "shm": 2 * MIB, "number": 0}
    took = {"private": 2 * MIB, "once": 0, "between": 0, "files": 0, "device": 0, "seconds": 1.0, "notes": []}
    steps = {"train": FirstSteps({1: took | {"phases": {}, "ranks": [rank]}})}
    monkeypatch.setattr("memfit.pipeline._plan_run.make_first_steps", lambda *words, **how: steps)
    (tmp_path / "machine.yaml").write_text(MACHINE.format("64GiB") + "shm: 1MiB\n")
    [stage] = plan_run(CONFIG, on=tmp_path / "machine.yaml").stages
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
