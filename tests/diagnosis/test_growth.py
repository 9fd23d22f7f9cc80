"""Memory that grows from epoch to epoch, and the tensors that held it, as a run directory shows them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.diagnosis import diagnose, explain_growth
from memfit.memory import Sample, SeriesWriter
from memfit.rundir import RunDir

MIB = 1 << 20
RECORDED = json.loads(Path(__file__).with_name("epochs_of_workloads.json").read_text())
LEAK = """\
import sys, time
kept = []
for step in range(1000):
    kept.append(bytearray(b"x" * (2 << 20)))
    print(f"epoch 1/1 step {step}/1000 loss {1 / (step + 1):.4f}", flush=True)
    time.sleep(0.05)
"""


def write_series(folder, sizes, *, device=0, begin=1000.0, seconds=10.0):
    """One job's memory: for each epoch a sample in its middle, and the times at which epochs ended."""
    folder.mkdir(parents=True, exist_ok=True)
    series = SeriesWriter(folder / "memory.jsonl")
    for at, size in enumerate(sizes):
        held = {"GPU-1": device * at} if device else {}
        series.append(Sample(begin + seconds * (at + 0.5), 1, size, 0, size, size, "train", held, size))
    series.close()
    return [begin + seconds * (at + 1) for at in range(len(sizes))]


def rising(step, noise=0, num=8, base=1000):
    drawn = random.Random(1)
    return [int((base + step * at + drawn.uniform(-noise, noise)) * MIB) for at in range(num)]


@pytest.mark.proves("S1-06")
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            rising(50),
            "host memory grows by 50.0 MiB an epoch, up to 1.32 GiB; it meets the limit of 2.00 GiB in 14 epochs",
        ),
        (rising(50, num=6), "host memory grows by 50.0 MiB an epoch"),
        (rising(50, num=5), ""),  # four epochs behind the first
        (rising(5), ""),  # less than 1 % of the peak
        (rising(12, noise=60), ""),  # not beyond three times its error
        ([size * MIB for size in (900, 1000, 1000, 1000, 1000, 1100, 1400, 1200)], ""),  # a slope within that error
        (rising(0, noise=5), ""),
        ([100 * MIB, *rising(0)], ""),  # the first epoch brings optimizer states and caches
        ([*rising(100, num=6), *[1600 * MIB] * 8], ""),  # it grew, and stands still since
        (rising(-50), ""),
    ],
)
def test_growth_from_epoch_to_epoch_is_named_if_it_is_sure(tmp_path, sizes, said):
    ends = write_series(tmp_path, sizes)
    found = explain_growth(tmp_path, ends, 2048 * MIB)
    assert found.startswith(said) and bool(found) == bool(said)
    assert "loss.item()" in found if said else True


def test_growth_of_a_device_is_named_and_a_limit_that_is_not_known_is_not(tmp_path):
    ends = write_series(tmp_path, rising(0), device=300 * MIB)
    assert explain_growth(tmp_path, ends, 0).startswith(
        "memory of GPU-1 grows by 300.0 MiB an epoch, up to 2.05 GiB; more"
    )


@pytest.mark.parametrize("name", RECORDED)
def test_the_workloads_own_runs_raise_no_alarm(tmp_path, name):
    """Runs of the workloads' own configs: the samples of each job and the ends of its epochs, as they were measured."""
    series = SeriesWriter(tmp_path / "memory.jsonl")
    for time, size in RECORDED[name]["samples"]:
        series.append(Sample(time, 1, size, 0, size, size, "train", {}, size))
    series.close()
    ends = RECORDED[name]["ends"]
    assert len(ends) >= 6
    for seen in range(6, len(ends) + 1):
        assert explain_growth(tmp_path, ends[:seen], 4096 * MIB) == ""


def make_run(tmp_path, sizes, *, state="completed"):
    run = RunDir.create(tmp_path / "runs", "made", "0123abcd" * 8)
    folder = run.job_dir("fold_1")
    ends = write_series(folder, sizes)
    record = {"state": state, "exit_code": 0, "phase": "train", "cause": "", "attempt": 1, "peak_bytes": MIB}
    (folder / "outcome.json").write_text(json.dumps(record))
    (folder / "out.log").write_text("hello\n")
    limit = {"name": "cap", "source": "--limit", "limit_bytes": 2048 * MIB}
    budget = {"binding": limit, "limits": [limit], "headroom_bytes": 0, "reserve_bytes": 0, "promise": "none"}
    lines = [{"time": 1.0, "kind": "budget", **budget}]
    lines += [{"time": end, "job": "fold_1", "kind": "epoch", "epoch": at} for at, end in enumerate(ends, 1)]
    (run.events_dir / "host-1-1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_diagnose_names_growth_although_the_job_completed(tmp_path):
    run = make_run(tmp_path, rising(50))
    notes = diagnose(run.path).notes
    assert len(notes) == 1 and notes[0].startswith("fold_1: host memory grows by 50.0 MiB an epoch")
    assert "in 14 epochs, about 2m" in notes[0]
    assert diagnose(make_run(tmp_path, rising(0)).path).notes == ()


@pytest.mark.proves("C-02")
def test_the_owners_of_the_largest_tensors_are_named_from_the_flight_record(tmp_path):
    run = make_run(tmp_path, rising(0))
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
    run = make_run(tmp_path, rising(0))
    (run.job_dir("fold_1") / "oom_1.json").write_bytes(content)
    assert diagnose(run.path).notes == ()
    assert "passed over: " in capsys.readouterr().err


def test_samples_of_other_types_are_left_out_of_a_series(tmp_path):
    ends = write_series(tmp_path, rising(50))
    path = tmp_path / "memory.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(
        json.dumps(line | {"time": "noon"}) + "\n" + json.dumps(line | {"peak_bytes": None}) + "\n" + path.read_text()
    )
    assert explain_growth(tmp_path, ends, 0).startswith("host memory grows by 50.0 MiB an epoch")


@pytest.mark.slow
def test_a_training_that_keeps_its_graphs_is_named_without_recorded_epochs(tmp_path):
    script = tmp_path / "leak.py"
    script.write_text(LEAK)
    words = ["run", "--quiet", "--limit", "450MiB", "--runs-dir", "runs", "--", sys.executable, "leak.py"]
    subprocess.run(
        [sys.executable, "-m", "memfit", *words], cwd=tmp_path, capture_output=True, timeout=120, check=False
    )
    *_, note = diagnose(RunDir.all(tmp_path / "runs", "leak")[0].path).notes
    assert note.startswith("cmd_0001: host memory grows by") and "a loss summed with its graph" in note
