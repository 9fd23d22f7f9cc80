"""Which runs there are, and which one a word of the user's means."""

import fcntl
import shutil
from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.files import write_json
from memfit.memory import Claims
from memfit.reports import find_run, find_target, list_runs
from memfit.rundir import RunDir, liveness


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with its list of runs, its folder of runs, and a maker of runs by name."""
    monkeypatch.chdir(tmp_path)

    def make(experiment, name, *jobs):
        path = tmp_path / "runs" / experiment / name
        for job in ("", *jobs):
            (path / "jobs" / job).mkdir(parents=True)
        (path / "events").mkdir()
        write_json(path / "run.json", {"schema_version": 2, "kind": "commands", "combinations": [{}] * len(jobs)})
        return RunDir(path)

    return make


def find(tmp_path, name, **more):
    return find_target(name, claims=tmp_path / "claims", **more)


def test_a_run_is_meant_by_its_folder_its_name_or_its_experiment_and_nothing_shorter(host, tmp_path):
    old = host("first", "run_20261120_090000_aaaaaaaa")
    new = host("first", "run_20261121_090000_bbbbbbbb")
    other = host("second", "run_20261122_090000_cccccccc")
    for name, run in (
        (str(old.path), old), ("runs/first/run_20261120_090000_aaaaaaaa/", old), (old.path.name, old),
        ("first", new), ("runs/first", new), ("second", other),
    ):  # fmt: skip
        found = find(tmp_path, name)
        assert (found.run.path, found.job_id) == (run.path, None), name
    for name in ("run_20261120", "fir"):
        with pytest.raises(UsageError, match="names no run"):
            find(tmp_path, name)


def test_a_live_run_is_meant_before_those_that_ended(host, tmp_path):
    live = host("first", "run_20261120_090000_aaaaaaaa")
    host("first", "run_20261121_090000_bbbbbbbb")
    claims = Claims(live.path, folder=tmp_path / "claims")
    assert find(tmp_path, "first").run.path == live.path
    assert find_run(claims=tmp_path / "claims").path == live.path
    here = find_run(claims=tmp_path / "claims", root=tmp_path / "runs", writes=True)
    assert here.path.name == "run_20261121_090000_bbbbbbbb"
    with pytest.raises(UsageError, match="there is no run below here"):  # it would write into a run of another folder
        find_run(claims=tmp_path / "claims", root=Path("here"), writes=True)
    abroad = RunDir(tmp_path / "other" / "runs" / "x" / "run_20261123_090000_dddddddd")
    shutil.copytree(live.path, abroad.path)
    away = Claims(abroad.path, folder=tmp_path / "claims")
    assert find_run(claims=tmp_path / "claims", root=tmp_path / "runs").path == live.path, "this folder's first"
    assert find_run(claims=tmp_path / "claims", root=tmp_path / "other" / "runs").path == abroad.path
    claims.close()
    away.close()
    assert find_run(claims=tmp_path / "claims").path.name == "run_20261121_090000_bbbbbbbb"


def test_a_job_is_meant_by_its_run_and_id_or_its_folder(host, tmp_path):
    run = host("first", "run_20261120_090000_aaaaaaaa", "cmd_0001", "cmd_0002")
    for name in ("first/cmd_0002", f"{run.path.name}/cmd_0002", f"{run.path}/cmd_0002", f"{run.path}/jobs/cmd_0002"):
        found = find(tmp_path, name)
        assert (found.run.path, found.job_id) == (run.path, "cmd_0002"), name
    claims = Claims(run.path, folder=tmp_path / "claims")
    with pytest.raises(UsageError, match="names no run"):
        find(tmp_path, "cmd_0002")
    claims.close()


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("name", ["frst", "first/cmd_0003", "", "/", ".", "..", "first/..", "first/."])
def test_an_unknown_name_is_refused_with_the_nearest_known(host, tmp_path, name, is_live):
    run = host("first", "run_20261120_090000_aaaaaaaa", "cmd_0001")
    if is_live:  # the only one: an empty word, as of a shell variable that is not set, does not stop it
        Claims(run.path, folder=tmp_path / "claims")
    with pytest.raises(UsageError, match="names no run") as caught:
        find(tmp_path, name)
    if name in ("frst", "first/cmd_0003"):
        assert {"frst": "'first'", "first/cmd_0003": "'first/cmd_0001'"}[name] in caught.value.remedy


def test_without_any_run_there_is_none_to_find(tmp_path):
    with pytest.raises(UsageError, match="no run of yours is alive"):
        find_run(claims=tmp_path / "claims", root=tmp_path / "runs")


def test_a_run_lives_while_a_watcher_holds_a_jobs_lock(host, tmp_path):
    run = host("first", "run_20261120_090000_aaaaaaaa", "cmd_0001", "cmd_0002")
    for job, used in (("cmd_0001", 7), ("cmd_0002", 9)):
        write_json(run.job_dir(job) / "status.json", {"state": "running", "used_bytes": used, "peak_bytes": used})
    Claims(run.path, folder=tmp_path / "claims").close(keep=True)
    with open(run.job_dir("cmd_0001") / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = list_runs(claims=tmp_path / "claims")
        # The other says that it runs, but its watcher is dead.
        assert [row.id for row in found.running] == ["cmd_0001"]
        told = found.to_dict()
        assert (found.supervisor, told["used_bytes"], told["reserved_bytes"]) == (None, 7, 7)
        assert (liveness(run).is_live, liveness(run).is_supervised) == (True, False)
    assert list_runs(claims=tmp_path / "claims") == []
    assert not liveness(run).is_live
    assert [one.run.path for one in list_runs(claims=tmp_path / "claims", root=tmp_path / "runs")] == [run.path]


def test_an_entry_whose_folder_is_gone_is_shown_while_its_supervisor_lives(tmp_path):
    claims = Claims(tmp_path / "gone", folder=tmp_path / "claims")
    (found,) = list_runs(claims=tmp_path / "claims")
    assert (found.run.path, found.counts, found.running) == (tmp_path / "gone", {}, [])
    claims.close()
