"""Results that were damaged in place: found before a job reads them, once on each host, and made again."""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

import kills
import memfit
from memfit.pipeline import Choice
from memfit.rundir import RunDir
from stages_here import runs_here

pytestmark = pytest.mark.usefixtures("here")

STAGES = {
    "prepare": {"run": "echo 'one 1' > {dir}/rows.txt; echo prepare >>ran"},
    "fold": {"each": "fold in params.folds", "run": "cp {prepare}/rows.txt {dir}/own; echo fold_{unit} >>ran"},
    "join": {"run": "for one in {fold}; do cat $one/own; done > {dir}/all; echo join >>ran"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which the stages have run once."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder), runs_here():
        assert sorted(run()[2]) == ["fold_1", "fold_2", "join", "prepare"]
    return folder


@pytest.fixture
def first(finished, folder):
    """The finished run in the current folder; its files are copies, which this host has not read yet."""
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    return RunDir(next(folder.glob("runs/demo/run_*")))


def run(stages=None, choice=None, **params):
    config = {"experiment": "demo", "stages": stages or STAGES, "params": {"folds": [1, 2], **params}}
    Path("ran").write_text("")
    result = memfit.run(config, choice=choice or Choice())
    return RunDir(result.path), result, Path("ran").read_text().split()


def forget(run, *jobs):
    """Remove results, so that their jobs run again."""
    for job in jobs:
        (run.path / f"checkpoints/{job}.json").unlink()
        shutil.rmtree(run.path / "checkpoints" / job)


def damage(path, *, keep_time=False):
    """Change a byte in place."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if keep_time else 1)))


def made_elsewhere(run, job):
    """Let a result be one that another host made."""
    path = run.path / f"checkpoints/{job}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))


def texts(run):
    return [str(event.get("text")) for event in run.events()]


def rows(run):
    return (run.path / "checkpoints/stage_prepare/rows.txt").read_text()


@pytest.mark.core
def test_a_damaged_output_is_named_and_made_again_before_a_job_reads_it(first):
    forget(first, "fold_2", "stage_join")
    damage(first.path / "checkpoints/stage_prepare/rows.txt")
    again, result, ran = run()
    assert (again.path, result.exit_code, ran) == (first.path, 0, ["prepare", "fold_2", "join"])
    assert (again.path / "checkpoints/stage_join/all").read_text() == "one 1\none 1\n"
    path = again.path / "checkpoints/stage_prepare/rows.txt"
    assert f"{path} is damaged: it is not what prepare saved. prepare runs again" in texts(again)


def test_a_damaged_result_that_no_job_reads_is_found_when_all_files_are_to_be_read(first):
    damage(first.path / "checkpoints/fold_2/own", keep_time=True)
    assert run()[2] == []
    again, result, ran = run(choice=Choice(check_files=True))
    assert (again.path, result.exit_code, ran) == (first.path, 0, ["fold_2"])
    assert (again.path / "checkpoints/fold_2/own").read_text() == "one 1\n"
    assert run(choice=Choice(check_files=True))[2] == []


@pytest.mark.core
def test_a_host_reads_a_result_of_another_host_once_and_again_when_its_file_changed():
    first, _, _ = run()
    made_elsewhere(first, "stage_prepare")
    record = first.path / "verified" / f"{socket.gethostname()}.jsonl"
    forget(first, "fold_1", "stage_join")
    assert run()[2] == ["fold_1", "join"]
    assert len(record.read_text().splitlines()) == 1
    forget(first, "fold_1", "stage_join")
    path = first.path / "checkpoints/stage_prepare/rows.txt"
    damage(path, keep_time=True)
    assert run()[2] == ["fold_1", "join"]  # by inode, size and time it is the file that was read
    os.utime(path)
    forget(first, "fold_1", "stage_join")
    assert run()[2] == ["prepare", "fold_1", "join"]
    assert rows(first) == "one 1\n"


@pytest.mark.slow
def test_a_damaged_result_of_an_earlier_run_is_not_taken_over(first):
    damage(first.path / "checkpoints/stage_prepare/rows.txt")
    second, result, ran = run(folds=[1, 2, 3])
    assert second.path != first.path and result.exit_code == 0
    assert ran == ["prepare", "fold_3", "join"]  # what the others read was whole
    assert rows(second) == "one 1\n" and rows(first) == "Xne 1\n"


@pytest.mark.slow
def test_what_another_run_read_is_not_read_again_by_the_run_that_links_it():
    first, _, _ = run()
    made_elsewhere(first, "stage_prepare")
    forget(first, "fold_1", "stage_join")
    run()
    second, _, ran = run(folds=[1, 2, 3])
    assert ran == ["fold_3", "join"]
    assert not (second.path / "verified").exists()


@pytest.mark.core
def test_what_is_damaged_during_a_run_is_made_again_before_a_later_stage_reads_it():
    stages = {
        "prepare": STAGES["prepare"],
        "vandal": {"run": "printf X | dd of={prepare}/rows.txt conv=notrunc status=none; echo vandal >>ran"},
        "user": {"run": "cp {prepare}/rows.txt {dir}/own", "after": ["vandal"]},
    }
    first, result, ran = run(stages)
    assert (result.exit_code, ran) == (0, ["prepare", "vandal", "prepare"])
    assert (first.path / "checkpoints/stage_user/own").read_text() == "one 1\n"


@pytest.mark.core
def test_a_kill_between_damage_and_repair_leaves_a_right_result(folder):
    slow = STAGES | {"prepare": {"run": "sleep 1; echo 'one 1' > {dir}/rows.txt"}}
    (folder / "config.yaml").write_text(json.dumps({"experiment": "demo", "stages": slow, "params": {"folds": [1, 2]}}))
    first = kills.run(folder)
    forget(first, "fold_2", "stage_join")
    damage(first.path / "checkpoints/stage_prepare/rows.txt")

    def runs_again(run):
        return any("prepare runs again" in text for text in texts(run))

    again = kills.run(folder, kill_at=[kills.Kill(runs_again), kills.Kill(kills.later(runs_again, 0.7), "supervisor")])
    assert (again.path / "checkpoints/stage_join/all").read_text() == "one 1\none 1\n"
    assert rows(again) == "one 1\n"


@pytest.mark.slow
def test_a_damaged_array_of_a_function_is_made_again_and_a_damaged_panel_is_named_with_what_to_remove(tiny):
    path = tiny(n_splits=2)
    first = memfit.run(path)
    forget(RunDir(first.path), "fold_2")
    damage(first.path / "checkpoints/stage_prepare/splits.arrays/test_1.npy")
    again = memfit.run(path)
    assert (again.path, again.exit_code) == (first.path, 0)
    assert [one.attempt for one in again.statuses.values()] == [2, 1, 2]
    forget(RunDir(first.path), "fold_2")
    (values,) = Path("panels").glob("*/values*.npy")
    values.chmod(0o644)
    with open(values, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"X")
    with pytest.raises(memfit.errors.DamagedError, match="was changed between bytes") as caught:
        memfit.run(path)
    assert f"rm -r {values.parent.absolute()}" in caught.value.remedy
    shutil.rmtree(values.parent)
    assert memfit.run(path).exit_code == 0


@pytest.mark.slow
@pytest.mark.proves("S1-16")
def test_a_manifest_that_was_changed_by_hand_does_not_count(finished):
    for change in ({"result": {"n": 2}}, {"digest": "0" * 64}, {"unforeseen": {"a": ["x"]}}, {"seconds": 10**400}):
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(finished / "runs", "runs")
        (path,) = Path("runs").glob("demo/*/checkpoints/stage_join.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        _, result, ran = run()
        assert (result.exit_code, ran) == (0, ["join"]), change


def test_a_key_that_is_no_text_is_another_key(first):
    (first.path / "checkpoints/stage_join.json").unlink()
    (first.path / "checkpoints/stage_join/.key").write_bytes(b"\xff\xfe\x00")
    assert run()[2] == ["join"]


@pytest.mark.slow
def test_a_result_with_integers_that_no_table_holds_is_a_result():
    for name, number in (("1", "9" * 400), ("2", "1152921504606846977")):
        Path(name).write_text(f'{{"n": {number}}}')
    assert run({"count": {"each": "n in params.folds", "run": "cp {n} {dir}/result.json"}})[1].exit_code == 0
