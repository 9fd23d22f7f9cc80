"""``memfit run -- command``: its output passed on as it comes, its exit code told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import check_refused
from jobs.contract import wait_until
from memfit.config import read_file
from memfit.rundir import RunDir

RUN = [sys.executable, "-m", "memfit", "run"]


@pytest.mark.slow
def test_standard_output_is_the_commands_alone_byte_for_byte(tmp_path):
    program = "import os; os.write(1, bytes(range(256)) * 9000 + b'end'); os.write(2, b'err\\xff')"
    done = subprocess.run([*RUN, "--", sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(range(256)) * 9000 + b"end"
    assert b"err\xff" in done.stderr and b"the command ended with exit code 0" in done.stderr
    [run] = RunDir.all(tmp_path / "runs", Path(sys.executable).name)
    assert (run.job_dir("cmd_0001") / "out.log").read_bytes() == done.stdout


@pytest.mark.slow
def test_output_is_shown_while_the_command_still_runs(tmp_path):
    words = [*RUN, "--", "sh", "-c", "echo first; until test -e go; do sleep 0.05; done; echo last"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"first\n"
        (tmp_path / "go").touch()
        assert process.stdout.read() == b"last\n"
    assert process.returncode == 0


@pytest.mark.proves("C-32")
@pytest.mark.parametrize(("text", "exit_code", "told"), [("exit 7", 7, "exit code 7"), ("kill -9 $$", 137, "SIGKILL")])
def test_a_failed_command_gives_its_own_exit_code_as_a_shell_does(memfit, text, exit_code, told):
    done = memfit("run", "--", "sh", "-c", f"echo why >&2; {text}")
    assert (done.exit_code, done.out) == (exit_code, "")
    assert told in done.err and "why\n" in done.err


def test_quiet_says_nothing_of_a_success_but_the_summary(memfit):
    done = memfit("run", "-q", "--", "sh", "-c", "echo out")
    assert (done.exit_code, done.out) == (0, "out\n")
    assert "Run /" not in done.err and "the command ended" not in done.err
    assert "cmd_0001  completed" in done.err


@pytest.mark.slow
def test_a_second_attempt_shows_its_own_output_only(memfit, tmp_path):
    text = "echo attempt; echo x >> ran; test $(wc -l < ran) = 2"
    first, second = (memfit("run", "--", "sh", "-c", text) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert (first.out, second.out) == ("attempt\n", "attempt\n")


def test_with_json_standard_output_is_json_alone(memfit):
    done = memfit("run", "--json", "--", "sh", "-c", "echo out")
    assert json.loads(done.out)["state"] == "completed"
    assert "out\n" in done.err


@pytest.mark.slow
def test_a_reader_that_goes_leaves_the_command_as_it_is(tmp_path):
    words = [*RUN, "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done; touch ended"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0, err
    assert (tmp_path / "ended").exists()


def test_the_flags_say_how_the_command_is_run(memfit, tmp_path):
    flags = [
        "--name",
        "mine",
        "--runs-dir",
        "kept",
        "--set",
        "threads_per_job=3",
        "--set",
        "memory.tight_malloc=false",
        "--grace",
        5,
    ]
    done = memfit("run", *flags, "--", "sh", "-c", "echo $OMP_NUM_THREADS ${MALLOC_ARENA_MAX:-none}")
    assert (done.exit_code, done.out) == (0, "3 none\n")
    [run] = RunDir.all(tmp_path / "kept", "mine")
    assert read_file(run.path / "config.yaml")["grace_seconds"] == 5


@pytest.mark.slow
def test_ctrl_c_twice_ends_the_command_and_gives_130(tmp_path):
    words = [*RUN, "--", "sh", "-c", "trap '' TERM INT; touch on; while true; do sleep 0.1; done"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "on").exists)
        process.send_signal(2)
        [run] = RunDir.all(tmp_path / "runs", "sh")
        wait_until(lambda: any(event["kind"] == "stop" for event in run.events()))
        process.send_signal(2)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["run", "train.py"], "write: memfit run -- python train.py"),
        (["run", "train"], "memfit run config.yaml, memfit run train:train"),
        (["run", "python", "train.py"], "write: memfit run -- python train.py"),
        (
            ["run", "--param", "a=1..2", "python", "train.py", "--fold", "1"],
            "write: memfit run --param a=1..2 -- python",
        ),
    ],
)
def test_a_script_or_a_command_without_its_dashes_is_answered_with_the_right_line(memfit, tmp_path, words, remedy):
    (tmp_path / "train.py").write_text("print(1)")
    check_refused(memfit(*words), "", remedy)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_misspelt_setting_of_a_function_is_refused_and_a_unit_is_not(memfit, tmp_path):
    (tmp_path / "job.py").write_text("def train(ctx, learning_rate: float = 0.1):\n    return {'lr': learning_rate}\n")
    words = ["run", "job:train", "--plan", "--param"]
    check_refused(memfit(*words, "learnin_rate=0.1,0.2"), "", "did you mean 'learning_rate'?")
    done = memfit(*words, "fold=1..2")
    assert done.exit_code == 0, done.err
