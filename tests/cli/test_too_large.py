"""A job that is too large ends with the arithmetic, whoever else runs on the host; one that fits the budget completes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.contract import wait_until
from memfit.memory import Walls, list_entries, why_no_walls
from memfit.units import MIB

pytestmark = pytest.mark.slow

HOG = "import sys; blocks = [bytearray(b'x') * (10 << 20) for _ in range(int(sys.argv[1]) // 10)]"
#: Takes so many MiB for a file in memory at once, and leaves nothing there.
WRITE = (
    "import os, sys, tempfile\n"
    "with tempfile.TemporaryFile(dir=sys.argv[2]) as file: os.posix_fallocate(file.fileno(), 0, int(sys.argv[1]) << 20)"
)
LIMIT = ["--limit", "300MiB", "--reserve", "20MiB"]


@pytest.fixture(params=["walls", "no walls"])
def walls(request, monkeypatch):
    if request.param == "walls" and (os.geteuid() != 0 or why_no_walls()):
        pytest.skip(f"needs root and groups that can be made: {why_no_walls()}")
    if request.param == "no walls":
        monkeypatch.setattr(Walls, "build", lambda *_, **__: None)


@pytest.fixture
def other_run(tmp_path):
    """Another run of this user's that lives as long as the test."""
    folder = tmp_path / "other"
    folder.mkdir()
    words = [sys.executable, "-m", "memfit", "run", "--quiet", "--", "sleep", "600"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any(entry.alive and any(entry.used.values()) for entry in list_entries()))
        yield
        assert process.poll() is None
        process.terminate()


def python(code, *words):
    return [sys.executable, "-c", code, *map(str, words)]


def check_all_say_so(memfit, run, job):
    """The job's record, the run's, ``ps`` and ``diagnose``; gives the cause."""
    record = json.loads((run / "jobs" / job / "outcome.json").read_text())
    assert json.loads((run / "outcome.json").read_text())["jobs"][job] == {
        "state": "out_of_memory",
        "cause": record["cause"],
    }
    assert record["state"] == "out_of_memory" and "280.0 MiB" in record["cause"]
    (listed,) = [one for one in json.loads(memfit("ps", "--all", "--json").out) if one["run"] == str(run)]
    assert (listed["state"], listed["counts"]["out_of_memory"]) == ("failed", 1)
    diagnosed = json.loads(memfit("diagnose", "--json", run).out)
    assert "out_of_memory" in json.dumps(diagnosed) and "cancelled" not in json.dumps(diagnosed)
    return record["cause"]


@pytest.mark.usefixtures("walls", "other_run")
def test_one_of_many_that_is_larger_than_the_limit_ends_so_and_the_others_complete(memfit):
    done = memfit("run", "--name", "hog", "--json", *LIMIT, "--param", "mib=20,400,40", "--", *python(HOG, "{mib}"))
    found = json.loads(done.out)
    assert (done.exit_code, found["state"]) == (4, "failed")
    assert [job["state"] for job in found["jobs"]] == ["completed", "out_of_memory", "completed"]
    assert (found["kills"]["num_killed"], found["counts"]) == (1, {"completed": 2, "out_of_memory": 1})
    cause = check_all_say_so(memfit, Path(found["run"]), "cmd_0002")
    assert found["jobs"][1]["cause"] == cause and cause in done.err and "another run" not in done.err


@pytest.mark.usefixtures("walls")
def test_what_fits_the_budget_completes_however_small_its_hint_was(memfit):
    words = ["--memory", "16MiB", "--limit", "500MiB", "--reserve", "20MiB", "--param", "mib=20,350,60,280"]
    done = memfit("run", "--json", *words, "--", *python(HOG, "{mib}"))
    assert {job["state"] for job in json.loads(done.out)["jobs"]} == {"completed"}, done.err


@pytest.fixture(params=["/dev/shm", "another tmpfs"])
def in_memory(request, tmp_path):
    """A folder whose files lie in memory."""
    if request.param == "/dev/shm":
        yield request.param
        return
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.usefixtures("walls")
def test_files_in_memory_get_the_whole_budget_before_they_are_called_too_large(memfit, in_memory):
    words = ["--memory", "16MiB", "--limit", "500MiB", "--reserve", "20MiB", "--param", "mib=20,400"]
    done = memfit("run", "--json", *words, "--", *python(WRITE, "{mib}", in_memory))
    assert {job["state"] for job in json.loads(done.out)["jobs"]} == {"completed"}, done.err
    assert json.loads(done.out)["jobs"][1]["peak_bytes"] < 500 * MIB
