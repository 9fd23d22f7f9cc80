"""What is found in a place and in a command: recorded trees, with one thing changed each."""

import pytest

from memfit.doctor import Interpreter, Setup

MIB = 1 << 20
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
    newer = Interpreter("3.14", "forkserver")
    spawned = DEADLOCK.replace("batch_size=512", "multiprocessing_context='spawn'")
    chosen = DEADLOCK.replace("    main()\n", "    torch.multiprocessing.set_start_method('forkserver')\n    main()\n")
    for script, setup, asked in [
        (DEADLOCK, Setup(threads=1, num_workers=0), None),
        (DEADLOCK, EIGHT, newer),
        (spawned, EIGHT, None),
        (chosen, EIGHT, None),
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
def test_threads_times_processes_are_counted_against_the_cores_of_the_quota(diagnose):
    script = "import numpy, torch\nfrom torch.utils.data import DataLoader\nDataLoader(d, num_workers=4)\n"
    check = diagnose(script, setup=Setup(threads=2))["threads"][0]  # its group has a CPU quota of 1.5
    assert check.verdict == "warning"
    assert check.finding.startswith("2 threads + 4 workers x 2 = 10 threads on 1 core (CPU quota 1.5")
    assert "num_workers=1" in check.remedy


def test_what_comes_too_late_is_told(diagnose):
    script = "import torch, os\nos.environ['OMP_NUM_THREADS'] = '1'\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'\n"
    found = diagnose(script)
    assert any("train.py:2, after import torch" in check.finding for check in found["threads"])
    assert any("train.py:3, after import torch" in check.finding for check in found["torch allocator"])


LIMITS = "Max open files            {}                4096                 files\n" \
         "Max processes             {}                5000                 processes\n"  # fmt: skip


def limits(nofile=1024, nproc="unlimited"):
    return {"proc/self/limits": LIMITS.format(nofile, nproc)}


MOUNTS = {"proc/self/mountinfo": "30 1 0:9 / / rw - ext4 /dev/a rw\n31 30 0:27 / /tmp rw - tmpfs tmpfs rw\n"}
WORKERS = Setup(threads=8, num_workers=8)


def test_two_names_of_the_allocators_settings_that_differ_are_a_problem(diagnose):
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}
    finding = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 and PYTORCH_ALLOC_CONF=max_split_size_mb:32"
    found = [(check.verdict, check.finding) for check in diagnose(env=both)["torch allocator"]]
    assert ("problem", finding) in found
