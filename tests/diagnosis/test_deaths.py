"""Deaths made here for real and told apart blind: only what each left is handed over, never how it was made.

The programs in ``deaths/`` train, or seem to, and end in a way of their own. Those of Slurm's jobs are in
``tests/slurm/``.
"""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from memfit.diagnosis import diagnose, list_remedies
from memfit.rundir import RunDir

HERE = Path(__file__).parent / "deaths"
MIB = 1 << 20
SMALL_DISK = "mount -t tmpfs -o size=8m tmpfs {}"


def words(program, *how):
    return shlex.join([sys.executable, str(HERE / f"{program}.py"), *how])


@pytest.fixture
def die(tmp_path):
    """Runs a shell script to its end, after other lines of it; gives the log of all that it wrote.

    A child that outlives the script, as one that waits for a lock does, ends with it.
    """

    def run(line, *before, group=None, apart=False, env=None, seconds=60):
        script, log = tmp_path / "train.sh", tmp_path / "train.log"
        joins = [f"echo $$ > {group}/cgroup.procs"] if group else []
        script.write_text("\n".join([*joins, *before, line, "exit $?", ""]))
        start = [*(["unshare", "--mount"] if apart else []), "bash", str(script)]
        with open(log, "wb") as out:
            script = subprocess.Popen(
                start,
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CHECKPOINTS": str(tmp_path), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                script.wait(seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(script.pid, signal.SIGKILL)
                script.wait()
        return log

    return run


def needs_mounts():
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root and the right to unshare: a small tmpfs is mounted for one process alone")


@contextmanager
def kernel_log(path):
    """Writes what the kernel says meanwhile to a file."""

    def read():
        found = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            pytest.skip("needs the right to read the kernel's log")
        return found.stdout.splitlines(keepends=True)

    last = read()[-1:]
    yield path
    lines = read()
    since = lines.index(last[0]) + 1 if last and last[0] in lines else 0
    path.write_text("".join(lines[since:]))


def verdict(found):
    return found.oom, found.kind, found.cause


def said(found):
    return "\n".join(line.text for line in found.evidence)


@pytest.mark.core
@pytest.mark.root
def test_a_kill_at_the_jobs_own_limit_is_told_by_the_kernels_log(die, memory_group, tmp_path):
    group = memory_group(100 * MIB)
    with kernel_log(tmp_path / "kernel") as kernel:
        log = die(words("training", "hog"), group=group)
    found = diagnose(log, kernel_log=kernel)
    assert (*verdict(found), found.phase, found.recovered) == (True, "host_cgroup", "out_of_memory", "train", False)
    assert found.confidence == "proved" and f"oom_memcg=/{group.name},task_memcg=/{group.name}" in said(found)
    assert "(per group)" in "".join(found.arithmetic)
    assert found.where["pid"] == int(log.read_text().partition(" Killed")[0].split()[-1])


@pytest.mark.root
def test_a_kill_at_a_limit_above_the_jobs_own_is_told_as_such(die, memory_group, tmp_path):
    above = memory_group(100 * MIB)
    with kernel_log(tmp_path / "kernel") as kernel:
        log = die(words("training", "hog"), group=memory_group(1024 * MIB, above))
    found = diagnose(log, kernel_log=kernel)
    assert verdict(found) == (True, "host_cgroup", "out_of_memory")
    assert "(per group above it)" in "".join(found.arithmetic)
    assert f"oom_memcg=/{above.name},task_memcg=/{above.name}/" in said(found)


@pytest.mark.root
def test_of_a_kill_that_only_the_shell_saw_memory_is_no_more_than_probable(die, memory_group):
    found = diagnose(die(words("training", "hog"), group=memory_group(100 * MIB)))
    assert (found.cause, found.phase) == ("killed", "train") and found.confidence == "not shown"
    assert "journalctl -k" in str(list_remedies(found))


@pytest.mark.slow
@pytest.mark.root
def test_a_leak_in_a_loaders_worker_is_told_by_its_process_in_the_kernels_log(die, memory_group, tmp_path):
    with kernel_log(tmp_path / "kernel") as kernel:
        log = die(words("torch_training", "leak"), group=memory_group(300 * MIB))
    found = diagnose(log, kernel_log=kernel)
    assert (*verdict(found), found.phase) == (True, "host_cgroup", "out_of_memory", "load")
    assert f"worker (pid {found.where['pid']}) is killed" in log.read_text()
    alone = diagnose(log)
    assert alone.cause == "killed" and alone.confidence == "not shown" and alone.where["pid"] == found.where["pid"]


@pytest.mark.root
def test_a_strangers_kill_is_not_blamed_on_memory_because_another_was_killed_for_it_then(die, memory_group, tmp_path):
    with kernel_log(tmp_path / "kernel") as kernel:
        die(words("training", "hog"), group=memory_group(100 * MIB))
        log = die("wait $victim", f"{words('training', 'wait')} & victim=$!", "sleep 0.7; kill -9 $victim")
    assert "Killed process" in kernel.read_text()
    found = diagnose(log, kernel_log=kernel)
    assert found.cause == "killed" and found.confidence == "not shown"
    assert "Memory cgroup" not in said(found)


@pytest.mark.slow
@pytest.mark.root
def test_a_small_dev_shm_under_a_loader_is_told_from_a_full_disk(die):
    needs_mounts()
    found = diagnose(die(words("torch_training", "shm"), SMALL_DISK.format("/dev/shm"), apart=True))
    assert (*verdict(found), found.phase) == (True, "shm", "out_of_memory", "load")
    assert found.confidence == "likely"


@pytest.mark.core
@pytest.mark.root
@pytest.mark.parametrize("program", ["training", "torch_training"])
def test_a_full_disk_under_a_checkpoint_is_no_shortage_of_memory(die, tmp_path, program):
    needs_mounts()
    (tmp_path / "disk").mkdir()
    env = {"CHECKPOINTS": str(tmp_path / "disk")}
    found = diagnose(die(words(program, "disk"), SMALL_DISK.format("disk"), apart=True, env=env))
    assert (*verdict(found), found.phase) == (False, "none", "disk_full", "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("how", [["training", "refused"], ["torch_training", "refused"]])
def test_an_allocation_that_a_limit_of_the_process_refused_is_the_hosts(die, how):
    found = diagnose(die(words(*how)))
    assert (*verdict(found), found.phase) == (True, "host_alloc", "out_of_memory", "train")
    if "torch_training" in how:
        assert found.to_dict()["tried_gib"] == 1.0


@pytest.mark.parametrize(("how", "cause"), [("files", "open_files"), ("segfault", "segfault")])
def test_other_ends_are_named_and_not_blamed_on_memory(die, how, cause):
    found = diagnose(die(words("training", how)))
    assert verdict(found) == (False, "none", cause) and found.confidence == "proved"


@pytest.mark.slow
@pytest.mark.parametrize("how", [["training", "deadlock", "watched"], ["torch_training", "deadlock"]])
def test_a_deadlock_after_a_fork_is_a_hang_where_somebody_watched(die, how):
    found = diagnose(die(words(*how)))
    assert verdict(found) == (False, "none", "hang")


def test_of_a_deadlock_that_nobody_watched_the_cause_is_unknown_and_the_phase_is_not(die):
    found = diagnose(die(f"timeout 1.5 {words('training', 'deadlock')}"))
    assert (*verdict(found), found.phase) == (False, "none", "unknown", "train")
    assert "step" in found.evidence[-1].text  # the nearest lines


@pytest.fixture
def supervised(tmp_path):
    """Starts a program under memfit; gives its process and the folder of its runs."""
    started = []

    def start(verb, options, *command):
        full = [sys.executable, "-m", "memfit", verb, "-q", "--new", "--name", "x", "--runs-dir", "runs"]
        child = subprocess.Popen(
            [*full, *shlex.split(options), "--", *command],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(child)
        return child, tmp_path / "runs"

    yield start
    for child in started:
        if child.poll() is None:
            child.terminate()
            child.wait(20)


def run_of(runs):
    return RunDir.all(runs, "x")[0]


@pytest.mark.slow
@pytest.mark.root
def test_a_job_that_memfit_ended_at_its_wall_was_short_of_memory(supervised, memory_group):
    child, runs = supervised("run", "--limit 150MiB --memory 60MiB --retries 0", *shlex.split(words("training", "hog")))
    child.wait(60)
    found = diagnose(run_of(runs).path)
    assert (*verdict(found), found.phase) == (True, "host_cgroup", "out_of_memory", "train")
    assert found.evidence[0].file.endswith("outcome.json") and found.arithmetic[0].startswith("memfit: ")
    assert 0.9 * found.figures["limit"] < found.figures["used"] <= found.figures["limit"]


@pytest.mark.slow
@pytest.mark.root
def test_a_strangers_kill_is_no_shortage_of_memory_where_the_groups_count_says_so(supervised, memory_group):
    child, runs = supervised(
        "run", "--limit 150MiB --memory 60MiB --retries 0", *shlex.split(words("training", "wait"))
    )
    log = "jobs/cmd_0001/out.log"
    until(
        lambda: any(
            "step 6" in (run.path / log).read_text() for run in RunDir.all(runs, "x") if (run.path / log).exists()
        )
    )
    below = psutil.Process(child.pid).children(recursive=True)
    [job] = [one for one in below if one.cmdline() == shlex.split(words("training", "wait"))]
    job.kill()
    child.wait(30)
    found = diagnose(run_of(runs).path)
    assert (*verdict(found), found.phase) == (False, "none", "killed", "train")
    assert "by somebody else" in said(found)


@pytest.mark.slow
@pytest.mark.root
def test_a_job_that_stepped_aside_and_came_again_recovered_and_was_not_out_of_memory(supervised, memory_group):
    options = "--limit 260MiB --max-parallel 2 --memory 40MiB --param seed=1,2"
    child, runs = supervised("run", options, *shlex.split(words("training", "grow", "{seed}")))
    assert child.wait(60) == 0
    assert [event["job"] for event in run_of(runs).events() if event["kind"] == "aside"]
    found = diagnose(run_of(runs).path)
    assert (found.oom, found.kind, found.recovered) == (False, "none", True)


def until(is_so, seconds=30.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")


def test_a_worker_that_dasks_nanny_killed_met_its_limit(die):
    needs("distributed")
    found = diagnose(die(words("in_cluster", "dask"), seconds=90))
    assert verdict(found) == (True, "host_cgroup", "out_of_memory")
    assert "Dask's nanny" in "".join(found.arithmetic)


def test_a_task_that_rays_monitor_killed_met_the_nodes_limit(die, tmp_path):
    needs("ray")
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_usage_threshold": "0.01",
        "RAY_memory_monitor_refresh_ms": "100",
        "RAY_task_oom_retries": "0",
    }
    found = diagnose(die(words("in_cluster", "ray"), env=env, seconds=90))
    assert verdict(found) == (True, "host_kernel", "out_of_memory")
    assert "Ray's memory monitor" in "".join(found.arithmetic)
    assert 0 < found.figures["used"] < found.figures["limit"]
