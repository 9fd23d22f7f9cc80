"""The command's own interpreter is asked, in the environment that memfit run gives it."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from memfit.doctor import Interpreter, ask_interpreter, examine


def test_an_interpreter_says_how_it_starts_processes(tmp_path, monkeypatch):
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit(9)\n")  # a file of the user's passes for no module
    monkeypatch.chdir(tmp_path)
    version = "{}.{}".format(*sys.version_info)
    assert ask_interpreter(sys.executable, env=os.environ) == Interpreter(version, multiprocessing.get_start_method())


@pytest.mark.parametrize(("text", "said"), [("exit 7", "exit code 7"), ("echo no >&2", "exit code 0: no")])
def test_what_is_no_interpreter_is_told(tmp_path, text, said):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "python").chmod(0o755)
    [check] = [one for one in examine(["./python", "-c", "pass"], cwd=tmp_path) if one.check == "command"]
    assert (check.verdict, said in check.finding) == ("problem", True)


@pytest.mark.slow
def test_an_interpreter_that_gives_no_answer_is_ended(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 60 & wait\n")
    (tmp_path / "python").chmod(0o755)
    assert ask_interpreter(str(tmp_path / "python"), env=os.environ, timeout_seconds=1).error == "no answer within 1 s"


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
