"""The run directory survives kills, torn records and second starts."""

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import DamagedError, UsageError
from memfit.files import read_json, read_masked, read_whole, write_masked
from memfit.rundir import EventTail, EventWriter, RunDir, phase, read_devices, read_events, record


def test_a_json_file_that_was_changed_from_outside_is_refused_by_name(tmp_path):
    path = tmp_path / "outcome.json"
    path.write_text('{"state": "comp')
    with pytest.raises(DamagedError, match=r"outcome\.json is not a JSON object"):
        read_json(path)
    assert read_json(tmp_path / "absent.json") is None


@given(cut=st.integers(min_value=0))
def test_a_torn_last_record_is_passed_over_wherever_it_was_cut(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("events")
    writer = EventWriter(folder, "fold_1")
    for epoch in range(3):
        writer.write("epoch", epoch=epoch, note="grüße")
    writer.close()
    whole = writer.path.read_bytes()
    cut %= len(whole) + 1
    writer.path.write_bytes(whole[:cut])
    epochs = [event["epoch"] for event in read_events(folder)]
    assert epochs == list(range(whole[:cut].count(b"\n")))


def test_a_tail_reads_each_record_once_and_waits_for_the_rest_of_a_torn_one(tmp_path):
    path = tmp_path / "e.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"n": 1}\n{"n":')
    assert tail.read() == [{"n": 1}]
    with open(path, "ab") as file:
        file.write(b' 2}\n{"n": 3}\n')
    assert tail.read() == [{"n": 2}, {"n": 3}]
    assert tail.read() == []


def test_a_record_written_before_a_kill_is_there(tmp_path):
    code = (
        "import os, pathlib, signal; from memfit.rundir import EventWriter\n"
        f"EventWriter(pathlib.Path({str(tmp_path)!r}), 'j').write('phase', phase='train')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [(e["kind"], e["phase"], e["job"]) for e in read_events(tmp_path)] == [("phase", "train", "j")]


def test_marks_go_to_the_run_that_the_environment_names_and_nowhere_outside_one(tmp_path):
    run = RunDir.create(tmp_path, "x", "ab" * 32)
    code = "from memfit.rundir import phase; phase('train')"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MEMFIT_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=bare)
    assert run.events() == []
    env = bare | {"MEMFIT_RUN_DIR": str(run.path), "MEMFIT_JOB_ID": "fold_2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert [(e["job"], e["phase"]) for e in run.events()] == [("fold_2", "train")]
    phase("ignored")
    assert len(run.events()) == 1


def test_no_field_can_overwrite_an_events_own_time_job_or_kind(tmp_path):
    EventWriter(tmp_path, "fold_1").write("epoch", time=0.0, job="fold_9", loss=1.0)
    (event,) = read_events(tmp_path)
    assert (event["job"], event["kind"], event["loss"]) == ("fold_1", "epoch", 1.0)
    assert event["time"] > 0


def test_a_forked_child_writes_a_file_of_its_own_and_closes_no_other(tmp_path):
    run, other = RunDir.create(tmp_path, "x", "ab" * 32), tmp_path / "other"
    code = (
        "import os, sys; from memfit.rundir import phase\n"
        "phase('parent')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.closerange(3, 64); other = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "    phase('child'); os.write(other, b'whole'); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    env = os.environ | {"MEMFIT_RUN_DIR": str(run.path), "MEMFIT_JOB_ID": "fold_2"}
    subprocess.run([sys.executable, "-c", code, str(other)], check=True, env=env)
    assert other.read_bytes() == b"whole"
    assert len(list(run.events_dir.iterdir())) == 2
    assert {e["phase"] for e in run.events()} == {"parent", "child"}


@pytest.mark.proves("S1-49")
@pytest.mark.slow
def test_two_runs_in_one_second_get_two_folders(tmp_path):
    first = RunDir.create(tmp_path, "x", "ab" * 32)
    second = RunDir.create(tmp_path, "x", "ab" * 32)
    assert first.path != second.path
    assert RunDir.all(tmp_path, "x") == [second, first]


@pytest.mark.proves("C-29")
def test_the_newest_run_sorts_last_whatever_the_clock_and_the_time_zone_say(tmp_path, monkeypatch):
    first = RunDir.create(tmp_path, "x", "ab" * 32)
    monkeypatch.setenv("TZ", "XXX+11")
    time.tzset()
    try:
        second = RunDir.create(tmp_path, "x", "cd" * 32)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert second.path.name[:16] >= first.path.name[:16]  # both in UTC
    ahead = tmp_path / "x" / "run_21000101_235959_abababab"
    first.path.rename(ahead)  # made before the clock was set back
    (tmp_path / "x" / "run_99999999_999999_abababab").mkdir()
    third = RunDir.create(tmp_path, "x", "ab" * 32)
    assert third.path.name == "run_21000102_000000_abababab"
    assert [run.path for run in RunDir.all(tmp_path, "x")] == [third.path, ahead, second.path]
    assert RunDir.newest(tmp_path, "x", "ab" * 32) == third
    assert third.header["created"] < time.time() + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not"),
        ("[]", "is not"),
        ("{}", "has no"),
        ('{"schema_version": 99, "fingerprint": 7}', "schema version 99"),
    ],
)
def test_a_run_that_cannot_be_read_or_is_of_a_newer_version_is_named_and_passed_over(tmp_path, capsys, text, why):
    good = RunDir.create(tmp_path, "x", "ab" * 32)
    bad = RunDir.create(tmp_path, "x", "ab" * 32)
    (bad.path / "run.json").write_text(text)
    assert RunDir.newest(tmp_path, "x", "ab" * 32) == good
    assert str(bad.path) in capsys.readouterr().err
    with pytest.raises(UsageError, match=rf"run_\d+_\d+_abababab.* {why}"):
        RunDir.open(bad.path)


@pytest.mark.parametrize("name", ["../up", "", "a b", ".x"])
def test_an_experiment_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot name an experiment"):
        RunDir.create(tmp_path, name, "ab" * 32)


def test_a_folder_without_its_record_as_after_a_kill_at_birth_is_no_run(tmp_path):
    folder = tmp_path / "x" / "run_20260101_000000_abababab"
    folder.mkdir(parents=True)
    assert RunDir.all(tmp_path, "x") == []
    with pytest.raises(UsageError, match="no run directory"):
        RunDir.open(folder)


def test_a_phase_as_a_block_gives_way_to_the_phase_before_it(tmp_path):
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    code = "import memfit\nmemfit.phase('train')\nwith memfit.phase('validate'): pass\n"
    env = os.environ | {"MEMFIT_RUN_DIR": str(run.path), "MEMFIT_JOB_ID": "fold_1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert [event["phase"] for event in run.events()] == ["train", "validate", "train"]


def test_a_process_that_changes_its_run_records_in_the_new_one(tmp_path, monkeypatch):
    for name in ("first", "second"):
        run = RunDir.create(tmp_path, name, "0123abcd" * 8)
        monkeypatch.setenv("MEMFIT_RUN_DIR", str(run.path))
        monkeypatch.setenv("MEMFIT_JOB_ID", "job")
        record("seen", name=name)
        assert [event["name"] for event in run.events() if event["kind"] == "seen"] == [name]


def test_a_phase_tells_what_torch_holds_of_each_device_once_it_uses_any(tmp_path, monkeypatch):
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda n: 10 + n,
        max_memory_reserved=lambda n: 20 + n,
        memory_allocated=lambda n: 5 + n,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    devices = [{"bytes": 10 + n, "peak_bytes": 20 + n, "allocated_bytes": 5 + n} for n in range(2)]
    assert read_devices() == {"devices": devices}
    cuda.is_initialized = lambda: False
    assert read_devices() == {}


def test_an_integer_that_no_float_holds_is_read_as_infinite_and_a_record_with_it_is_there(tmp_path):
    path = tmp_path / "value.json"
    path.write_text('{"small": -4611686018427387904, "large": 9223372036854775808, "huge": ' + "9" * 400 + "}")
    assert read_json(path) == {"small": -(2**62), "large": 2.0**63, "huge": math.inf}
    (tmp_path / "a.jsonl").write_text('{"time": 1, "value": -' + "9" * 5000 + "}\n")
    assert read_events(tmp_path) == [{"time": 1, "value": -math.inf}]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "9" * 400])
def test_a_field_that_must_be_a_number_must_be_finite(tmp_path, number):
    path = tmp_path / "value.json"
    path.write_text(f'{{"seconds": {number}}}')
    with pytest.raises(DamagedError, match="has seconds"):
        read_json(path, {"seconds": (int, float)})


def test_a_file_whose_secrets_were_taken_out_can_be_shown_and_starts_nothing(tmp_path):
    path = tmp_path / "job.json"
    write_masked(path, {"command": ["train.py", "--token", "abcdef123456"], "name": "job"})
    assert path.stat().st_mode & 0o777 == 0o600
    shown = {"command": ["train.py", "--token", "***"], "name": "job"}
    assert read_masked(path) == shown
    assert read_whole(path) == {"command": ["train.py", "--token", "abcdef123456"], "name": "job"}
    record = json.loads(path.read_text())
    del record["secrets"]
    path.write_text(json.dumps(record))
    assert read_masked(path) == shown
    with pytest.raises(DamagedError, match="command masked only"):
        read_whole(path)
    write_masked(path, {"command": ["train.py", "***"]})  # typed so: no secret is known
    assert read_whole(path) == {"command": ["train.py", "***"]}
