"""``memfit run --canary``: a few steps of every phase before a long run."""

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.memory import Walls
from memfit.rundir import RunDir
from memfit.units import MIB, parse_bytes

#: Marks phases as ``memfit.phase`` does, without importing it: ``mark("train", rank=1)``.
MARKS = """
    import json, os, sys, time
    rank, run = int(os.environ.get("RANK", 0)), os.environ["MEMFIT_RUN_DIR"]
    events = open(f"{run}/events/own-{rank}-{os.getpid()}.jsonl", "a", buffering=1)
    def mark(phase):
        event = {"time": time.time(), "job": os.environ["MEMFIT_JOB_ID"], "kind": "phase", "phase": phase, "rank": rank}
        events.write(json.dumps(event) + "\\n")
"""


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """Runs a script in a canary, with settings; gives the result."""
    monkeypatch.chdir(tmp_path)

    def run(script, *settings, more=(), view=None):
        Path("long.py").write_text(textwrap.dedent(MARKS) + textwrap.dedent(script))
        return memfit.run([sys.executable, "long.py", *more], overrides=["canary=true", *settings], view=view)

    return run


ALL_PHASES = """
    for phase in ("train", "validate", "checkpoint"):
        mark(phase)
"""


@pytest.mark.proves("S3-30", "C-13")
def test_a_canary_of_two_ranks_that_reach_every_phase_passes_and_says_what_to_request(canary):
    result = canary(ALL_PHASES, "resources.ranks=2")
    assert (result.state, result.exit_code) == ("completed", 0)
    verdict = json.loads((result.path / "canary.json").read_text())
    assert verdict == dict(result.canary)
    assert verdict["phases"] == {"train": [0, 1], "validate": [0, 1], "checkpoint": [0, 1]}
    assert verdict["text"][-1] == f"the long run: --memory {verdict['memory']}; in Slurm: --mem=256M"
    assert 1.1 * verdict["host_peak_bytes"] <= parse_bytes(verdict["memory"]) <= 256 * MIB


@pytest.mark.parametrize(("rise", "said"), [(1 << 20, "in its 5 steps the heap grew by 1.0 MiB each: 100.0 MiB by the"),
                                            (1000, ""), (0, "")])  # fmt: skip
def test_a_heap_that_grows_at_every_step_is_named_if_the_request_has_no_room_for_it(canary, rise, said):
    step = (
        '{"time": 1e9 + n, "job": os.environ["MEMFIT_JOB_ID"], "kind": "step", "epoch": 1, "step": n, "num_steps": 100'
    )
    steps = f'for n in range(1, 6):\n    events.write(json.dumps({step}, "heap_bytes": {rise} * n}}) + "\\n")\n'
    text = canary(textwrap.dedent(ALL_PHASES) + steps).canary["text"]
    assert any(line.startswith(said or "in its") for line in text) == bool(said)


def test_a_script_that_goes_on_for_ever_is_asked_to_stop_once_all_was_seen(canary, monkeypatch):
    monkeypatch.setattr("memfit.pipeline._watchers._SETTLED_SECONDS", 0.5)
    waits = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(600)"
    result = canary(ALL_PHASES + f"    {waits}")
    assert result.exit_code == 0
    assert result.statuses["cmd_0001"].asked and result.statuses["cmd_0001"].exit_code == 75


def test_a_canary_that_its_user_stops_has_no_verdict(canary):
    def stop(run):
        return lambda: any(one["kind"] == "phase" for one in run.events()) and os.kill(os.getpid(), signal.SIGTERM)

    waits = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); mark('train'); time.sleep(600)"
    result = canary(waits, view=stop)
    assert (result.state, result.exit_code, result.canary) == ("preempted", 75, None)


@pytest.mark.slow
def test_a_phase_that_no_rank_reached_in_time_is_named(canary):
    result = canary("mark('train'); mark('checkpoint'); time.sleep(600)", "canary_seconds=1.5")
    assert (result.exit_code, result.canary["not_covered"]) == (3, ["validate"])
    what = 'canary: phase validate was not seen: not covered, name it by memfit.phase("validate")'
    assert result.canary["text"][0] == what and "canary_seconds=3" in result.canary["text"][-1]


def test_a_phase_that_one_rank_did_not_reach_is_named_with_the_others(canary):
    script = "mark('train'); mark('checkpoint') if rank == 1 else mark('validate')"
    result = canary(script, "resources.ranks=3", "canary_phases=[train, validate, checkpoint]")
    assert (result.exit_code, result.canary["not_covered"]) == (3, ["validate"])
    assert "validate was not seen on all ranks (only on 0, 2): not covered" in result.canary["text"][0]


def test_what_a_canary_must_see_can_be_chosen(canary):
    assert canary("mark('train')", "canary_phases=[train]").exit_code == 0


@pytest.mark.parametrize("ends", ["", "sys.exit(75)"])
def test_who_runs_to_the_end_has_been_covered_and_what_was_not_marked_is_said(canary, ends):
    result = canary(f"mark('train'); mark('validate'); time.sleep(0.5); {ends}")
    assert (result.state, result.exit_code, result.canary["not_covered"]) == ("completed", 0, [])
    passed, lacking, *_, long = result.canary["text"]
    assert passed.startswith("canary: passed (train on 1 rank, validate on 1 rank, it ran to its end in ")
    assert lacking == "not marked: checkpoint; if the long run does that, mark it where it begins"
    assert long.startswith("the long run: --memory ")


FOR_EVER = "import itertools\nfor n in itertools.count(): mark('train'); {}; time.sleep(0.1)"


@pytest.mark.slow
def test_a_canary_stops_by_itself_once_each_phase_of_the_script_came_twice(canary):
    result = canary(FOR_EVER.format("mark('validate')"))
    assert (result.exit_code, result.canary["phases"]["validate"]) == (0, [0])
    assert result.statuses["cmd_0001"].asked and result.canary["seconds"] < 30
    late = canary(FOR_EVER.format("mark('checkpoint')"), "canary_seconds=1.5")
    assert (late.exit_code, late.canary["not_covered"]) == (3, ["validate"])  # it comes after many saves, or never


@pytest.mark.parametrize(
    ("ends", "code", "first"),
    [
        ("", 0, r"canary: passed \(it ran to its end in [\d.]+s\)"),
        ("time.sleep(600)", 3, r"canary: it ran [\d.]+s and marked no phase: nobody knows whether it has validated"),
        ("raise MemoryError", 3, r"canary: broke after [\d.]+s, in no marked phase \(the job; out of memory\): "),
    ],
)
def test_of_a_script_without_marks_is_said_what_is_known(canary, ends, code, first):
    result = canary(f"time.sleep(0.5); {ends}", "canary_seconds=1.5")
    text = result.canary["text"]
    assert result.exit_code == code and re.match(first, text[0])
    assert result.canary["host_peak_bytes"] > 0 and any(line.startswith("peak of a node ") for line in text)
    assert not code or 'memfit.phase("train"), "validate", "checkpoint"' in text[-1]


@pytest.mark.slow
@pytest.mark.proves("S3-33")
@pytest.mark.parametrize(
    ("ends", "code", "how"),
    [
        ("sys.exit(7)", 7, "failed"),
        ("raise MemoryError", 3, "out of memory"),
        ("os.kill(os.getpid(), 9)", 3, "failed"),
        ("os.kill(os.getpid(), 15)", 3, "failed"),
    ],
)
def test_what_breaks_is_named_with_its_phase_and_rank(canary, ends, code, how):
    result = canary(
        f"mark('train'); mark('validate'); time.sleep(1) if rank == 0 else None; {ends}", "resources.ranks=2"
    )
    broke = result.canary["broke"]
    assert (result.state, result.exit_code) == ("failed", code)
    assert (broke["phase"], broke["ranks"], broke["how"]) == ("validate", [1], how)
    assert result.canary["text"][0].startswith(f"canary: broke in phase validate (rank 1; {how})")


def test_a_rank_that_is_lost_just_before_the_end_breaks_the_canary_whatever_the_others_do(canary, monkeypatch):
    monkeypatch.setattr("memfit.pipeline._watchers._SETTLED_SECONDS", 0.5)
    more = "    if rank == 1: os.kill(os.getpid(), 9)\n    time.sleep(600)"
    result = canary(ALL_PHASES + more, "resources.ranks=2")
    broke = result.canary["broke"]
    assert (result.exit_code, broke["phase"], broke["ranks"], broke["exit_code"]) == (3, "checkpoint", [1], -9)


def test_a_canary_is_a_run_of_its_own_with_words_and_a_folder_of_its_own(canary):
    script = """
        for phase in ("train", "validate", "checkpoint"):
            mark(phase)
        folder = os.environ["MEMFIT_CANARY"]
        open(f"{folder}/{sys.argv[1]}{sys.argv[2]}", "w").write("x" * 99)
        print(folder)
    """
    result = canary(textwrap.dedent(script), "canary_args=--max_steps 20", more=["--lr"])
    assert result.exit_code == 0
    run = RunDir(result.path)
    folder = Path((run.job_dir("cmd_0001") / "out.log").read_text().strip())
    assert folder == run.path / "canary" and not folder.exists()  # it held what nobody needs
    job = json.loads((run.job_dir("cmd_0001") / "job.json").read_text())
    assert job["command"][2:] == ["--lr", "--max_steps", "20"]
    assert run.path.parent.name == "long-canary"
    long = memfit.run(["true"], overrides=["experiment=long"])
    assert long.path.parent.name == "long" and "MEMFIT_CANARY" not in os.environ
    with pytest.raises(UsageError, match="is a canary"):
        memfit.pipeline.resume(run.path)


def test_of_a_sweep_the_first_command_alone_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = memfit.pipeline.run_commands(
        ["sh", "-c", "exit {n}"], params=["n=0..3"], overrides=["canary=true", "canary_phases=[train]"]
    )
    assert (list(found.statuses), found.exit_code, found.canary["not_covered"]) == (["cmd_0001"], 3, ["train"])


CONFIG = """
    experiment: two
    canary: true
    canary_phases: [train]
    params: {folds: [1, 2, 3]}
    stages:
      prepare: {run: "echo made > {dir}/made"}
      fold: {run: "python3 -c 'exec(open(\\"long.py\\").read())' {prepare}", each: fold in params.folds}
"""


@pytest.mark.slow
def test_a_config_is_tried_to_the_first_unit_that_trains(canary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("long.py").write_text(textwrap.dedent(MARKS) + "mark('train'); sys.exit(75)\n")
    Path("config.yaml").write_text(textwrap.dedent(CONFIG))
    result = memfit.run("config.yaml")
    assert (result.exit_code, result.state) == (0, "completed")
    started = {job_id for job_id, one in result.statuses.items() if one.started is not None}
    assert started == {"prepare", "fold_1"}
    with pytest.raises(UsageError, match="canary_args"):
        memfit.run("config.yaml", overrides=["canary_args=--max_steps 20"])


FOUR = Path(__file__).parents[2] / "examples" / "canary" / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code"), [(["--copy"], 3), ([], 0)], ids=["copied", "mapped"])
def test_ranks_that_copy_their_validation_data_die_and_those_that_map_it_pass(tmp_path, monkeypatch, more, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Walls, "build", lambda *_, **__: None)  # at a wall, they read torch's code again and again
    settings = ["canary=true", "canary_args=--steps 5", "resources.ranks=2", "memory.limit=750MiB"]
    result = memfit.run([sys.executable, str(FOUR), *more], overrides=settings)
    log = (RunDir(result.path).job_dir("cmd_0001") / "err.log").read_text()
    assert result.exit_code == code, f"{result.canary['text']} {log}"
    if more:
        assert (result.canary["broke"]["phase"], result.canary["broke"]["how"]) == ("validate", "out of memory")
    else:
        assert result.canary["phases"] == {"train": [0, 1], "validate": [0, 1], "checkpoint": [0]}
        Path("valid.npy").unlink()  # the long run writes it too
        long = memfit.run([sys.executable, str(FOUR), "--steps", "100"], overrides=settings[2:])
        assert long.statuses["cmd_0001"].peak_bytes == pytest.approx(result.canary["host_peak_bytes"], rel=0.25)
