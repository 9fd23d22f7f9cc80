"""The command's own interpreter is asked, in the environment that memfit run gives it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.doctor import Setup, examine
from memfit.doctor._interpreter import ask_interpreter


def test_an_interpreter_says_what_it_sees_and_imports_only_what_it_is_asked_to():
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    asked = ask_interpreter(sys.executable, env=env, names=["OMP_NUM_THREADS", "NOT_SET"], wanted=["numpy", "no_such"])
    assert asked.env == {"OMP_NUM_THREADS": "3", "NOT_SET": None}
    assert asked.version == tuple(sys.version_info[:3])
    assert asked.num_cpus == len(os.sched_getaffinity(0))
    assert asked.start_method in ("fork", "forkserver")
    assert (asked.missing, asked.imports) == (["no_such"], {})
    assert asked.packages["torch"] and asked.packages["numpy"]


def test_a_module_is_used_once_and_its_threads_are_counted():
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    asked = ask_interpreter(sys.executable, env=env, modules=["numpy", "no_such"])
    assert asked.threads["numpy"] > asked.threads[""] >= 1
    assert asked.imports["numpy"] == ""
    assert asked.imports["no_such"].startswith("ModuleNotFoundError")


def test_a_file_of_the_users_does_not_pass_for_a_module(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert ask_interpreter(sys.executable, env=os.environ).error == ""


@pytest.mark.slow
@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 7\n", "#!/bin/sh\nsleep 60 & wait\n"])
def test_what_is_no_interpreter_is_told_and_not_waited_for(tmp_path, text):
    program = tmp_path / "python"
    program.write_text(text)
    program.chmod(0o755)
    asked = ask_interpreter(str(program), env=os.environ, timeout_seconds=1)
    assert "exit code 7" in asked.error or "no answer within 1 s" in asked.error


def test_a_variable_that_something_changes_before_the_script_is_a_problem(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '16'\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    checks = examine([sys.executable, "-c", "pass"], Setup(threads=1), env=env, cwd=tmp_path)
    [check] = [one for one in checks if one.check == "environment"]
    assert (check.verdict, "OMP_NUM_THREADS=16 and not 1" in check.finding) == ("problem", True)
    assert "sitecustomize" in check.remedy


@pytest.mark.slow
def test_threads_are_set_for_the_interpreter_that_the_command_names(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    setup = Setup(threads=1, deep=True)
    found = {one.check: one for one in examine([sys.executable, "train.py"], setup, cwd=tmp_path)}
    assert found["environment"].source == sys.executable
    assert "variables as set" in found["environment"].finding
    assert "torch computes with 1" in found["threads alive"].finding


@pytest.mark.slow
def test_it_is_true_that_a_fork_after_torch_had_threads_hangs_and_one_without_does_not():
    code = """
import multiprocessing, torch
def work():
    torch.ones(4_000_000).sum()
work()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(3 if torch.get_num_threads() > 1 else 60)
print(child.is_alive())
child.kill()
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    for threads, hangs in (("2", "True"), ("1", "False")):
        words = [sys.executable, "-c", code]
        done = subprocess.run(
            words, env={**env, "OMP_NUM_THREADS": threads}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == hangs


def test_a_program_that_is_not_there_is_a_problem(tmp_path):
    checks = examine(["pyhton", "train.py"], cwd=tmp_path)
    assert (checks[0].check, checks[0].verdict) == ("command", "problem")


def test_segments_of_this_machine_that_a_process_maps_are_in_use(tmp_path):
    from memfit.doctor._place import REAL_ROOT, Place
    from memfit.memory import Budget

    with open(f"/dev/shm/psm_memfit{os.getpid()}", "wb+") as held:
        held.write(b"x" * 4096)
        held.flush()
        try:
            place = Place(REAL_ROOT, Budget.read())
            [one] = [one for one in place.segments if one.name.startswith(f"psm_memfit{os.getpid()}")]
        finally:
            Path(held.name).unlink()
    assert (one.in_use, one.size_bytes) == (True, 4096)
