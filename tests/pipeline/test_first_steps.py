"""First steps of a job that nobody has measured: as one rank and as two, carried to any number."""

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from memfit.amounts import Layout
from memfit.errors import InterruptedRunError
from memfit.pipeline import Choice, FirstSteps, plan_run
from memfit.planning import Ledger
from memfit.reports import to_text, view_run_plan


def took(private, *ranks, once=0, phases=None, device=0, notes=()):
    """What first steps took, each rank as (main, below, shm, number)."""
    of_ranks = [dict(zip(("main", "below", "shm", "number"), one, strict=True)) for one in ranks]
    own = {
        "private": private,
        "once": once,
        "between": 0,
        "files": 7,
        "device": device,
        "seconds": 1.0,
        "notes": list(notes),
    }
    return own | {"phases": phases or {}, "ranks": of_ranks}


ALIKE = {1: took(100, (60, 30, 10, 2)), 2: took(230, (60, 30, 20, 2), (60, 30, 20, 2), once=10, phases={"train": 230})}
HEAVY = {1: took(150, (150, 0, 0, 0)), 2: took(250, (150, 0, 0, 0), (100, 0, 0, 0))}
NOISE = {1: took(109, (109, 0, 0, 0)), 2: took(200, (100, 0, 0, 0), (100, 0, 0, 0))}
SPLIT = {1: took(500, (500, 0, 0, 0)), 2: took(600, (300, 0, 0, 0), (300, 0, 0, 0))}


@pytest.mark.parametrize(
    ("found", "ranks", "tasks", "node"),
    [
        (ALIKE, 1, 1, 100),
        (ALIKE, 2, 2, 230),
        (ALIKE, 16, 4, 10 + 4 * 110),
        (HEAVY, 8, 8, 150 + 7 * 100),
        (NOISE, 8, 8, 8 * 100),
        (SPLIT, 4, 4, 4 * (100 + 400 // 4)),
        (SPLIT, 8, 4, 4 * (100 + 400 // 8)),
        ({1: ALIKE[1]}, 4, 4, 400),
    ],
)
def test_one_rank_and_two_are_carried_to_a_node_of_any_number(found, ranks, tasks, node):
    ledger = Ledger(Layout(1, tasks), tuple(FirstSteps(found).lines(ranks, tasks)))
    assert node <= ledger.peak.bytes <= node + 3 * tasks and ledger.mapped.bytes == 7


def test_the_lines_are_parts_of_a_rank_and_each_phase_has_its_peak():
    phases = {"train": 180, "validate": 230}
    found = FirstSteps({1: took(100, (60, 30, 10, 2), device=9), 2: ALIKE[2] | {"phases": phases}})
    lines = {(line.name, *line.phases): line for line in found.lines(4, 4)}
    assert lines["rank", "validate"].amount.bytes == 60
    assert (lines["workers", "validate"].amount.bytes, lines["workers", "validate"].number) == (15, 2)
    assert lines["batches", "validate"].in_shm and lines[("GPU",)].amount.bytes == 9
    sums = Ledger(Layout(1, 4), tuple(found.lines(4, 4))).by_phase()
    assert sums["train"].bytes == pytest.approx(sums["validate"].bytes * 180 / 230, rel=0.02)
    fewer = {line.name for line in found.lines(4, 4, workers=0)}
    assert "workers" not in fewer


def test_what_one_and_two_cannot_show_is_said():
    notes = list(FirstSteps(SPLIT, "as 2 ranks: x").notes(8, 1000))
    assert (
        notes[0] == "first steps: 1 rank 500 B in 1.0s, 2 ranks 600 B in 1.0s; a node takes at most 1.2 KiB, 20% more"
    )
    assert (
        notes[-1]
        == "the ranks split 400 B; not seen with two ranks: buffers that grow with their number, as of all_gather"
    )


#: Each rank waits for the others, and then for the meter.
MEET = """
import glob, os, sys, time
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
def meet():
    open(f"met_{world}_{rank}", "w").close()
    while len(glob.glob(f"met_{world}_*")) < world:
        time.sleep(0.05)
    time.sleep(4)
"""
HOLD = f"""{MEET}
assert os.environ["MEMFIT_CANARY"]
open(f"ran_{{world}}_{{rank}}", "w").close()
block = bytearray(90 << 20)
if world > 1 and "fails" in sys.argv:
    sys.exit("no second rank")
if os.fork() == 0:
    more = bytearray(40 << 20)
    meet()
    os._exit(0)
os.wait()
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plans a command with first steps; gives the stage's plan and what is told before."""
    monkeypatch.chdir(tmp_path)
    Path("hold.py").write_text(HOLD)

    def make(*words, ranks=4, **how):
        told = []
        command = [sys.executable, "hold.py", *words]
        return plan_run(command, overrides=[f"resources.ranks={ranks}"], steps=told.append, **how), told

    return make


@pytest.mark.core
@pytest.mark.proves("S3-11", "S3-32")
def test_a_plan_of_a_script_that_never_ran_makes_its_first_steps_once(plan, tmp_path):
    made, told = plan()
    [stage] = made.stages
    assert [one.split(":")[0] for one in told] == ["first steps of cmd as 1 rank", "first steps of cmd as 2 ranks"]
    assert sorted(one.name for one in tmp_path.glob("ran_*")) == ["ran_1_0", "ran_2_0", "ran_2_1"]
    peak = stage.forecast.ledger.peak.bytes / (1 << 20)
    assert 4 * 130 < peak < 4 * 250 and stage.origin == "first steps of 1 and 2 ranks"
    assert stage.footprint.private_bytes == stage.forecast.needs(stage.forecast.ledger).bytes and stage.fits
    assert {"rank", "workers", "once"} <= {line.name for line in stage.forecast.ledger.lines}
    assert stage.forecast.list_modes()[0].peak.bytes == pytest.approx(1.2 * (peak * (1 << 20)), abs=8)
    assert [path.name for path in Path("runs").rglob("*") if path.is_file()] == ["first_steps.json"]
    again, told = plan(ranks=8)
    assert not told and again.stages[0].forecast.ledger.peak.bytes / (1 << 20) == pytest.approx(2 * peak, rel=0.05)
    console = Console(width=200, file=io.StringIO())
    to_text(view_run_plan(again), console)
    assert "Only first steps were run." in console.file.getvalue()
    os.utime("hold.py", ns=(1, 1))
    assert plan()[1]  # another script


SHARED = f"""{MEET}
import mmap
with open("/dev/shm/" + os.environ["SHARED_FILE"], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
sum(shared[:: 4096])
block = bytearray(80 << 20)
meet()
"""


@pytest.mark.slow
def test_what_the_ranks_share_is_there_once_and_torchrun_is_started_with_one_and_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARED_FILE", name := f"memfit-test-{os.getpid()}")
    Path("shared.py").write_text(SHARED)
    Path("torchrun").write_text("""#!/bin/sh
number=${1#--nproc-per-node=}
echo $number >> started
for rank in $(seq 0 $((number - 1))); do RANK=$rank WORLD_SIZE=$number "$PYTHON" "$2" & done
wait
""")
    Path("torchrun").chmod(0o700)
    monkeypatch.setenv("PYTHON", sys.executable)
    file = Path("/dev/shm", name)
    try:
        file.write_bytes(bytes(100 << 20))
        [stage] = plan_run(["./torchrun", "--nproc-per-node=8", "shared.py"], steps=lambda text: None).stages
    finally:
        file.unlink()
    assert Path("started").read_text().split() == ["1", "2"]
    assert 100 + 8 * 80 < stage.forecast.ledger.peak.bytes >> 20 < 1.15 * (100 + 8 * 85)


@pytest.mark.slow
def test_first_steps_that_fail_leave_what_they_showed_and_say_why(plan):
    made, _ = plan("fails")
    [stage] = made.stages
    assert stage.origin == "first steps of 1 rank" and stage.forecast.ledger.peak.bytes > (4 * 130) << 20
    assert any("first steps as 2 ranks: " in note for note in stage.forecast.notes)
    unknown = plan_run(["false"], steps=lambda text: None)
    assert unknown.stages[0].footprint is None and "first steps as 1 rank: " in unknown.stages[0].origin
    assert list(view_run_plan(unknown))[-1] == "\nOnly first steps were run."


@pytest.mark.slow
def test_first_steps_of_a_short_job_have_the_peak_that_the_meter_saw_and_are_those_of_one_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, jobs = (
        [sys.executable, "-c", "len(bytearray({size} << 20))"],
        Choice(combinations=({"size": "300"}, {"size": "9"})),
    )
    [stage] = plan_run(command, choice=jobs, steps=lambda text: None).stages
    assert stage.footprint.private_bytes > 300 << 20
    assert "the first of 2 jobs made them: another may take more" in stage.forecast.notes


@pytest.mark.slow
def test_first_steps_that_are_interrupted_end_the_plan_and_leave_nothing(plan, monkeypatch):
    hit = "import os, signal, time; time.sleep(1); os.kill(int(os.environ['SUPERVISOR']), signal.SIGINT); time.sleep(9)"
    monkeypatch.setenv("SUPERVISOR", str(os.getpid()))
    with pytest.raises(InterruptedRunError, match="were stopped"):
        plan_run([sys.executable, "-c", hit], steps=lambda text: None)
    assert not Path("runs").exists() or not any(Path("runs").rglob("*.json"))
