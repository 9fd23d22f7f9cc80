"""What is found in a place and in a command: recorded trees, with one thing changed each."""

import dataclasses
import os

import pytest

from memfit.doctor import Interpreter, Setup

GIB, MIB = 1 << 30, 1 << 20
#: Threads are limited before torch is imported, and the environment says how many workers there are.
DEADLOCK = """
import os
if os.getenv("FORCE_SINGLE_PROCESS", "0") == "1":
    os.environ["OMP_NUM_THREADS"] = "1"
import polars as pl
import torch
from torch.utils.data import DataLoader

def main():
    return DataLoader(pl.read_parquet("panel.parquet"), batch_size=512, num_workers=int(os.environ["NUM_WORKERS"]))

if __name__ == "__main__":
    main()
"""
EIGHT = Setup(threads=1, num_workers=8)
ASKED = Interpreter("/python", version=(3, 11, 7), start_method="fork")


def verdicts(found, name):
    return [check.verdict for check in found.get(name, [])]


def test_polars_and_forked_workers_are_a_problem_named_by_their_lines(diagnose):
    [check] = diagnose(DEADLOCK, setup=EIGHT)["fork"]
    assert check.verdict == "problem"
    assert "DataLoader(num_workers=8) at train.py:10" in check.finding
    assert "polars (train.py:5)" in check.finding
    assert "Python 3.11" in check.source
    for word in ("spawn", "memfit.data.Loader", "num_workers=0 is a fallback"):
        assert word in check.remedy


def test_without_workers_or_with_another_start_method_the_same_script_is_well(diagnose):
    newer = dataclasses.replace(ASKED, version=(3, 14, 0), start_method="forkserver")
    spawned = DEADLOCK.replace("batch_size=512", "multiprocessing_context='spawn'")
    chosen = DEADLOCK.replace("    main()\n", "    torch.multiprocessing.set_start_method('forkserver')\n    main()\n")
    for script, setup, asked in [
        (DEADLOCK, Setup(threads=1, num_workers=0), ASKED),
        (DEADLOCK, EIGHT, newer),
        (spawned, EIGHT, ASKED),
        (chosen, EIGHT, ASKED),
    ]:
        found = diagnose(script, setup=setup, asked=asked)
        assert verdicts(found, "fork") == ["ok"]
        assert "main guard" not in found


def test_workers_of_unknown_number_are_a_warning_that_says_so(diagnose):
    [check] = diagnose(DEADLOCK)["fork"]
    assert (check.verdict, "not known here: --workers gives it" in check.finding) == ("warning", True)


def test_what_env_assigns_in_the_command_counts_before_the_shell(diagnose):
    found = diagnose(DEADLOCK, words=["env", "OMP_NUM_THREADS=6", "python", "train.py"], setup=EIGHT)
    assert "6 threads + 8 workers" in found["threads"][0].finding


def test_a_start_method_that_cannot_be_told_is_a_warning(diagnose):
    loader = DEADLOCK.replace("batch_size=512", "multiprocessing_context=sys.argv[1]")
    for_all = DEADLOCK.replace("    main()\n", "    torch.multiprocessing.set_start_method(how)\n    main()\n")
    for script in (loader, for_all):
        [check] = diagnose(script, setup=EIGHT)["fork"]
        assert (check.verdict, "can be told of its start method" in check.finding) == ("warning", True)


def test_a_fork_after_torch_has_threads_is_a_warning_and_with_one_thread_it_is_well(diagnose):
    script = "import torch, multiprocessing\nif __name__ == '__main__':\n    multiprocessing.Pool(2)\n"
    assert verdicts(diagnose(script, setup=Setup(threads=4)), "fork") == ["warning"]
    assert verdicts(diagnose(script, setup=Setup(threads=1)), "fork") == ["ok"]


@pytest.mark.proves("C-36")
def test_a_spawning_script_without_a_main_guard_is_a_problem(diagnose):
    script = "from torch.utils.data import DataLoader\nDataLoader(d, num_workers=1, multiprocessing_context='spawn')\n"
    [check] = diagnose(script)["main guard"]
    assert (check.verdict, "train.py:2" in check.finding) == ("problem", True)
    [check] = diagnose(script + f"{script.splitlines()[1]}\n" * 3)["main guard"]
    assert "train.py:2, train.py:3, train.py:4 and 1 more" in check.finding


@pytest.mark.proves("S2-06")
def test_threads_times_processes_are_counted_against_the_cores_of_the_quota(diagnose, tree):
    root = tree(**{"sys/devices/system/cpu/online": "0-63\n"})  # its group has a CPU quota of 1.5
    script = "import numpy, torch\nfrom torch.utils.data import DataLoader\nDataLoader(d, num_workers=4)\n"
    check = diagnose(script, root=root, setup=Setup(threads=2))["threads"][0]
    assert check.verdict == "warning"
    assert check.finding.startswith("2 threads + 4 workers x 2 = 10 threads on 1 core (CPU quota 1.5")
    assert "would take 64" in check.finding
    assert "num_workers=1" in check.remedy
    [alone] = diagnose("import torch\ntorch.set_num_threads(8)\n", root=root)["threads"]
    assert (alone.verdict, "torch.set_num_threads at train.py:2" in alone.finding) == ("ok", True)


def test_what_comes_too_late_is_told(diagnose):
    script = "import torch, os\nos.environ['OMP_NUM_THREADS'] = '1'\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'\n"
    found = diagnose(script)
    assert any("train.py:2, after import torch" in check.finding for check in found["threads"])
    assert any("train.py:3, after import torch" in check.finding for check in found["torch allocator"])


def test_batches_that_workers_have_ready_are_held_against_shm_and_against_the_budget(diagnose, tree):
    mount = "42 41 0:28 / /dev/shm rw,relatime - tmpfs tmpfs rw,size={}\n40 39 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    loader = "from torch.utils.data import DataLoader\nDataLoader(d, num_workers=4, prefetch_factor=3)\n"

    def check(size, batch, script=loader):
        root = tree(**{"proc/self/mountinfo": mount.format(size)})
        return diagnose(script, root=root, setup=Setup(threads=1, batch_bytes=batch))["/dev/shm"][0]

    assert check("65536k", None).verdict == "problem"
    assert check("65536k", None, script="").verdict == "warning"
    assert check("1g", None).verdict == "ok"
    full = check("64m", 8 * MIB)
    assert (full.verdict, "4 workers x 3 batches x 8.0 MiB = 96.0 MiB" in full.finding) == ("problem", True)
    assert "num_workers=2 fits" in full.remedy and "--shm-size" in full.remedy
    beyond_the_group = check("100g", 100 * MIB)  # fits /dev/shm, and not the group of 512 MiB that is charged for it
    assert beyond_the_group.verdict == "problem"
    assert "--shm-size" not in beyond_the_group.remedy
    assert check("64m", MIB).verdict == "ok"


def test_segments_of_dead_processes_are_told_apart_from_those_in_use(diagnose, tree):
    root = tree(**{"proc/77/maps": "7f00-7f10 rw-s 0 00:1c 5  /dev/shm/sem.mp-used\n", "proc/78/maps": ""})
    shm = root / "dev/shm"
    shm.mkdir(parents=True)
    for name in ("torch_4242_1_0", "torch_78_1_0", "sem.mp-used", "other"):
        with open(shm / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 20 * MIB)
    [check] = diagnose(root=root)["leftovers"]
    assert check.verdict == "warning"
    assert check.finding == "20.0 MiB in 1 segments that no process seen here uses: torch_4242_1_0 (20.0 MiB)"
    assert check.remedy.startswith("rm /dev/shm/torch_4242_1_0 ")
    (shm / "torch_4242_1_0").unlink()
    assert verdicts(diagnose(root=root), "leftovers") == ["ok"]


LIMITS = "Max open files            {nofile}                4096                 files\n" \
         "Max processes             {nproc}                5000                 processes\n" \
         "Max address space         {space}            unlimited            bytes\n"  # fmt: skip


def limits(nofile=1024, nproc="unlimited", space="unlimited"):
    return {"proc/self/limits": LIMITS.format(nofile=nofile, nproc=nproc, space=space)}


WORKERS = Setup(threads=8, num_workers=8)


@pytest.mark.parametrize(
    ("files", "setup", "name", "verdict", "said"),
    [
        (limits(), WORKERS, "open files", "warning", "1024 open files"),
        (limits(), Setup(threads=1), "open files", "ok", "1024 open files"),
        (limits(nofile=65536), WORKERS, "open files", "ok", "65536"),
        (limits(nproc=100), WORKERS, "processes", "problem", "100 allowed"),
        (limits(nproc=200), WORKERS, "processes", "warning", "200 allowed"),
        ({"sys/fs/cgroup/pids.max": "64\n"}, WORKERS, "processes", "problem", "64 allowed"),
        ({"sys/fs/cgroup/pids.max": "max\n", **limits(nproc=4000)}, WORKERS, "processes", "ok", "4000 allowed"),
        (limits(space=4 * GIB), WORKERS, "address space", "warning", "RLIMIT_AS (ulimit -v) is 4.00 GiB"),
        (limits(), WORKERS, "address space", "ok", "no limit"),
        ({"sys/fs/cgroup/memory.oom.group": "1\n"}, WORKERS, "job limits", "warning", "memory.oom.group is 1"),
    ],
)  # fmt: skip
def test_a_limit_or_a_setting_of_the_kernel_gets_its_verdict(diagnose, tree, files, setup, name, verdict, said):
    found = diagnose(root=tree(**files), setup=setup)[name]
    assert [check.verdict for check in found if said in check.finding] == [verdict]
    assert all(check.reason and check.source and bool(check.remedy) == (check.verdict != "ok") for check in found)


def test_a_folder_in_memory_is_a_warning_for_it_is_charged(diagnose, tree):
    mounts = "30 1 0:9 / / rw - ext4 /dev/a rw\n31 30 0:27 / /r\\040m rw - tmpfs tmpfs rw\n"
    root = tree(**{"proc/self/mountinfo": mounts})

    def temp(folder):
        [check] = diagnose(root=root, env={"TMPDIR": folder})["temp folder"]
        return check.verdict, check.finding

    assert temp("/r m/x") == ("warning", "/r m/x is on tmpfs")
    assert temp("/var/tmp") == ("ok", "/var/tmp is on ext4")


def test_two_names_of_the_allocators_settings_that_differ_are_a_problem(diagnose):
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}
    finding = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 and PYTORCH_ALLOC_CONF=max_split_size_mb:32"
    found = [(check.verdict, check.finding) for check in diagnose(env=both)["torch allocator"]]
    assert ("problem", finding) in found


@pytest.mark.parametrize("name", ["hybrid_v1_nested", "kubernetes_v2", "bare_host_v2", "slurm_v1", "lxc_v2"])
def test_every_recorded_place_is_examined_and_the_worst_comes_first(tree, name):
    from memfit.checks import VERDICTS
    from memfit.doctor import examine

    checks = examine(root=tree(name), env={}, cwd=tree(name))
    ranks = [VERDICTS.index(check.verdict) for check in checks]
    assert ranks == sorted(ranks, reverse=True)
    assert {"budget", "job limits", "/dev/shm", "threads", "torch allocator"} <= {check.check for check in checks}
    assert all(check.finding and check.reason for check in checks)


def test_a_library_that_is_not_installed_is_a_warning_that_says_so(diagnose):
    absent = dataclasses.replace(ASKED, missing=["polars"])
    [check] = diagnose(DEADLOCK, setup=EIGHT, asked=absent)["fork"]
    assert check.verdict == "warning"
    assert "not installed for this interpreter: the import fails first" in check.finding
    both = diagnose(DEADLOCK.replace("import torch", "import torch, jax"), setup=EIGHT, asked=absent)
    assert [(one.verdict, "jax" in one.finding) for one in both["fork"]] == [("problem", True), ("warning", False)]


def test_the_source_of_a_start_method_is_the_call_that_names_it(diagnose):
    loader = DEADLOCK.replace("batch_size=512", "multiprocessing_context='fork'")
    pool = "import polars, multiprocessing as mp\nmp.get_context('fork').Pool(2)\n"
    for script, site in ((loader, "train.py:10"), (pool, "train.py:2")):
        [check] = diagnose(script, setup=EIGHT)["fork"]
        assert check.verdict == "problem"
        assert check.source.startswith(f"fork is named at {site}; ")
        assert "the default of Python" not in check.source


@pytest.mark.parametrize(
    ("words", "told"),
    [(["nothere.py"], "there is no file 'nothere.py'"), (["-m", "nopkg"], "there is no module 'nopkg'")],
)  # fmt: skip
def test_what_python_is_to_run_and_is_not_there_is_a_problem(diagnose, words, told):
    asked = dataclasses.replace(ASKED, missing=["nopkg"])
    found = diagnose(words=["python", *words], asked=asked)
    [check] = found["script"]
    assert check.verdict == "problem"
    assert told in check.finding
    assert check.remedy


def test_a_script_that_is_no_python_is_a_problem_unless_its_python_is_a_newer_one(diagnose):
    script = "x = 1\ndef f(:\n"
    [check] = diagnose(script)["script"]
    assert (check.verdict, check.source) == ("problem", "train.py:2")
    assert "train.py:2 is no Python" in check.finding
    assert "train.py:2" in check.remedy
    newer = dataclasses.replace(ASKED, version=(99, 0, 0))
    assert verdicts(diagnose(script, asked=newer), "script") == ["warning"]
