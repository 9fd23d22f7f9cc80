"""The command's own interpreter is asked, in the environment that memfit run gives it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.doctor import Place, Setup, ask_interpreter, examine
from memfit.memory import Budget


def environment(*words, **given):
    [check] = [one for one in examine(list(words), Setup(threads=3), **given) if one.check == "environment"]
    return check


def test_an_interpreter_says_what_it_sees_and_what_it_cannot_find(tmp_path):
    (tmp_path / "train.py").write_text("import torch, numpy, no_such\n")
    found = {one.check: one for one in examine([sys.executable, "train.py"], Setup(threads=3), cwd=tmp_path)}
    assert found["environment"].verdict == "ok"
    assert found["environment"].source == sys.executable
    version = ".".join(map(str, sys.version_info[:3]))
    assert found["environment"].finding.startswith(f"Python {version} sees all ")
    assert found["environment"].finding.endswith("variables as set")
    assert found["packages"].finding == "not to be found: no_such (train.py:1)"


def test_a_file_of_the_users_does_not_pass_for_a_module(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert environment(sys.executable, "-c", "pass").verdict == "ok"


@pytest.mark.parametrize(("text", "said"), [("exit 7", "exit code 7"), ("echo no >&2", "exit code 0: no")])
def test_what_is_no_interpreter_is_told(tmp_path, text, said):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "python").chmod(0o755)
    check = environment("./python", "-c", "pass", cwd=tmp_path)
    assert (check.verdict, said in check.finding) == ("problem", True)


@pytest.mark.slow
def test_an_interpreter_that_gives_no_answer_is_ended(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 60 & wait\n")
    (tmp_path / "python").chmod(0o755)
    assert ask_interpreter(str(tmp_path / "python"), env=os.environ, timeout_seconds=1).error == "no answer within 1 s"


def test_a_variable_that_something_changes_before_the_script_is_a_problem(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '16'\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    checks = examine([sys.executable, "-c", "pass"], Setup(threads=1), env=env, cwd=tmp_path)
    [check] = [one for one in checks if one.check == "environment"]
    assert (check.verdict, "OMP_NUM_THREADS=16 and not 1" in check.finding) == ("problem", True)
    assert "sitecustomize" in check.remedy


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
    with open(f"/dev/shm/psm_memfit{os.getpid()}", "wb+") as held:
        held.write(b"x" * 4096)
        held.flush()
        try:
            place = Place(Path("/"), Budget.read())
            [one] = [one for one in place.segments if one.name.startswith(f"psm_memfit{os.getpid()}")]
        finally:
            Path(held.name).unlink()
    assert (one.in_use, one.size_bytes) == (True, 4096)
