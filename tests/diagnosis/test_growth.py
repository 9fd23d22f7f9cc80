"""Memory that grew until a job died of it, by its run and by its log; and the tensors that held it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.diagnosis import diagnose, list_remedies
from memfit.memory import Growth, Level, find_growth
from memfit.rundir import RunDir

MIB = 1 << 20
RECORDED = json.loads(Path(__file__).with_name("epochs_of_workloads.json").read_text())
LEAK = """\
import os, time
kept = []
for step in range(1000):
    if os.environ["RANK"] == "1":
        kept.append(bytearray(b"x" * (1 << 20)))
    print(f"step {step} loss 1.0", flush=True)
    time.sleep(0.05)
"""
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 8.00 GiB."
)
KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed."


PUT_OFF = "until it met its limit. More memory puts that off, it does not mend it."
GREW = f"rank 1 grew by 8.0 MiB a step in train (7.9 MiB to 8.1 MiB) {PUT_OFF}"
TOLD = Growth(
    "growth", 8.0 * MIB, 7.9 * MIB, 8.1 * MIB, who="rank 1", phase="train", limit_bytes=600 * MIB, at=40.0, is_sure=True
)
BY_TIME = replace(TOLD, unit="second", is_sure=False)
COPIES = replace(TOLD, kind="copies", more_bytes=900 * MIB)


def make_run(tmp_path, growth=None, *, state="completed", by="", place="host", log="hello\n"):
    """A run of one job, of whose end its watcher said what it came from."""
    run = RunDir.create(tmp_path / "runs", "made", "0123abcd" * 8)
    folder = run.job_dir("fold_1")
    folder.mkdir(parents=True)
    kills = {"before": {"own": 0}, "after": {"own": 1}}
    evidence = {"wall_bytes": 600 * MIB, "place": place, "oom_kills": kills, "ran_out_by": by}
    known = {"state": state, "exit_code": -9 * (state != "completed"), "phase": None, "cause": "", "attempt": 3}
    known |= {"peak_bytes": 598 * MIB, "evidence": evidence, "growth": growth.to_dict() if growth else {}}
    (folder / "outcome.json").write_text(json.dumps(known))
    (folder / "out.log").write_text(log)
    return run


@pytest.mark.proves("S1-06")
@pytest.mark.parametrize(
    ("growth", "by", "more", "is_growth", "said"),
    [
        (TOLD, "growth", {}, True, GREW),
        (None, "growth", {}, True, f"its memory grew evenly {PUT_OFF}"),
        (TOLD, "growth", {"place": "device"}, True, GREW),
        (TOLD, "", {}, True, GREW),  # its watcher died with it, as under Slurm
        (TOLD, "size", {}, False, None),
        (TOLD, "open", {}, False, None),
        (BY_TIME, "open", {}, False, None),  # it may be data that it loaded
        (
            BY_TIME,
            "open",
            {"log": "step 1 loss 2\nstep 2 loss 1\n"},
            True,
            GREW.replace("step in train", "second in train"),
        ),
        (None, "open", {"log": "step 1 loss 2\nstep 2 loss 1\n"}, False, None),
        (COPIES, "copies", {}, False, COPIES.past),
    ],
)
def test_a_job_that_grew_until_it_died_gets_the_cause_and_not_more_memory(tmp_path, growth, by, more, is_growth, said):
    found = diagnose(make_run(tmp_path, growth, state="out_of_memory", by=by, **more).path)
    assert (found.oom, found.cause) == (True, "growth" if is_growth else "out_of_memory")
    facts = "fold_1: attempt 3, a peak of 598.0 MiB, a limit of 600.0 MiB."
    assert sorted(found.notes) == sorted(filter(None, (facts, said and f"fold_1: {said}")))
    titles = [one.title for one in list_remedies(found)]
    assert any(title.startswith("give the job ") for title in titles) != is_growth
    assert titles[0].startswith("go on from its newest checkpoint") == is_growth
    assert found.where.get("rank") == (1 if is_growth and growth else None)
    assert found.confidence == ("likely" if is_growth else "proved")


@pytest.mark.parametrize(("growth", "state", "said"), [
    (None, "completed", ""), (BY_TIME, "completed", ""), (TOLD, "completed", TOLD.past),
])  # fmt: skip
def test_growth_that_was_told_of_a_job_that_lived_is_a_note_if_it_was_sure(tmp_path, growth, state, said):
    assert diagnose(make_run(tmp_path, growth, state=state).path).notes == ((f"fold_1: {said}",) if said else ())


@pytest.mark.parametrize("name", RECORDED)
def test_the_workloads_own_runs_raise_no_alarm(name):
    """Runs of the workloads' own configs: the samples of each job and the ends of its epochs, as they were measured."""
    samples, ends = RECORDED[name]["samples"], RECORDED[name]["ends"]
    begin, seconds = samples[0][0], (ends[-1] - samples[0][0]) / len(ends)
    levels = [Level(time, time - begin, size, size) for time, size in samples]
    for seen in range(16, len(levels) + 1):
        assert find_growth(levels[:seen], 4096 * MIB, epoch_steps=round(seconds), steps=round(ends[-1] - begin)) is None


def lines(text, number=35):
    places = ({"at": at, "step": 10 * at, "epoch": at // 30, "part": 10 * (at % 30)} for at in range(1, number + 1))
    return [text.format(size=3 + 0.12 * one["at"], mib=3000 + 123 * one["at"], **one) for one in places]


STEP, BAR = "step {step} loss 0.1 memory {size:.2f} GiB", "Epoch {epoch}:  5%|# | {part}/300 [00:10<01:00, mem={mib}M]"
RISE = "grew by 12.3 MiB a step, up to"


@pytest.mark.parametrize(
    ("log", "cause", "said"),
    [
        ([*lines(STEP.replace("memory", "gpu memory")), OOM], "growth", f"gpu memory {RISE} 7.20 GiB. More memory puts"),
        ([*lines(STEP, 20), KILL], "growth", f"memory {RISE} 5.40 GiB"),
        ([*lines(" {at}%|# | {step}/1000 [00:10<1:00, 2it/s]\n{{'loss': 0.5, 'cpu_mem': '{mib} MB'}}"), KILL], "growth",
         f"cpu_mem {RISE} 7.13 GiB"),
        ([*lines(BAR, 29), KILL], "out_of_memory", ""),  # a cache of its data may fill in the first epoch
        ([*lines(BAR, 59), KILL], "growth", f"mem {RISE} 10.02 GiB"),
        (lines(STEP), "unknown", f"memory {RISE} 7.20 GiB so far; it may level off."),
        (lines(STEP, 20), "unknown", ""),
        ([*lines(STEP.replace("memory", "max memory")), OOM], "out_of_memory", ""),
        ([*lines(STEP.replace("memory", "params:")), KILL], "out_of_memory", ""),
        ([*lines("step {step} memory 7.2 GiB"), KILL], "out_of_memory", ""),
        ([*lines(STEP.replace("memory", "rss")), OOM], "out_of_memory", f"rss {RISE} 7.20 GiB so far"),
        ([*lines(f"step {{at}} {'lr 0.001 ' * 10} memory {{mib}}MB", 4000), KILL], "growth", "memory grew by 123.0 MiB a step"),
    ],
)  # fmt: skip
def test_a_log_that_shows_its_memory_by_the_step_tells_growth(tmp_path, log, cause, said):
    (tmp_path / "job.log").write_text("\n".join(log) + "\n")
    found = diagnose(tmp_path / "job.log")
    assert found.cause == cause and len(found.notes) == bool(said)
    assert found.notes[0].startswith(f"the log's {said}") if said else True


@pytest.mark.proves("C-02")
def test_the_owners_of_the_largest_tensors_are_named_from_the_flight_record(tmp_path):
    run = make_run(tmp_path)
    large = {
        "owner": "optimizer exp_avg fc.weight",
        "device": "cuda:0",
        "shape": [64, 2],
        "dtype": "float32",
        "count": 1,
    }
    tensors = {"num_tensors": 3, "tensors_bytes": {"cuda:0": 5 * MIB}, "largest": [large | {"bytes": 4 * MIB}]}
    path = run.job_dir("fold_1") / "oom_1.json"
    path.write_text(json.dumps({"kind": "device", "error": "CUDA out of memory", "tensors": tensors}))
    assert diagnose(run.path).notes == (
        "fold_1, when an allocation failed (oom_1.json): tensors held 5.0 MiB on cuda:0; the largest: 4.0 MiB optimizer "
        "exp_avg fc.weight [64, 2] float32 x 1.",
    )
    path.write_text(json.dumps({"tensors": "not read: RuntimeError: gone"}))
    assert diagnose(run.path).notes == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"tensors": {"largest": [1]}}', b'{"tensors": {"tensors_bytes": {"a": "b"}, "largest": []}}',
     b'{"tensors": "' + b"x" * (17 << 20) + b'"}'],
)  # fmt: skip
def test_a_flight_record_of_another_shape_or_size_is_passed_over_with_a_word(tmp_path, capsys, content):
    run = make_run(tmp_path)
    (run.job_dir("fold_1") / "oom_1.json").write_bytes(content)
    assert diagnose(run.path).notes == ()
    assert "passed over: " in capsys.readouterr().err


@pytest.mark.long
def test_a_rank_that_keeps_what_it_allocates_is_named_while_it_runs_and_when_it_is_dead(tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    words = ["run", "--limit", "700MiB", "--nproc", "2", "--", sys.executable, "leak.py"]
    command = [sys.executable, "-m", "memfit", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    said = re.findall("cmd_0001: .* (grows so far|grew) by .*", done.stdout + done.stderr)
    assert said == ["grows so far", "grew"], "while it ran, and in its summary"
    found = diagnose(RunDir.all(tmp_path / "runs", "leak")[0].path)
    assert found.cause == "growth" and re.match(r"cmd_0001: .* grew by .* a second \(", found.notes[0])
