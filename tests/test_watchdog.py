"""A process that does nothing is asked for its stacks, and the cause is named."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memfit.watchdog import Stack, likely_cause, stacks_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SLEEPS = "import time\ndef my_wait():\n    print('ready', flush=True)\n    time.sleep(60)\nmy_wait()"
LOCKS = "import threading\nlock = threading.Lock()\nlock.acquire()\nprint('ready', flush=True)\nlock.acquire()"
READS = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()"
COMPUTES = "print('ready', flush=True)\nwhile True:\n    pass"
FORKS = """
import os, threading, time
lock = threading.Lock()
taken = threading.Event()
def hold():
    with lock:
        taken.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
taken.wait()
child = os.fork()
if child == 0:
    register_stack_dump(FOLDER)
    print(os.getpid(), flush=True)
    with lock:
        pass
os.waitpid(child, 0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(program: str, registered: bool = True) -> tuple[subprocess.Popen[str], str]:
        head = f"from memfit.watchdog import register_stack_dump\nFOLDER = {str(tmp_path)!r}\n"
        head += "register_stack_dump(FOLDER)\n" if registered else ""
        child = subprocess.Popen(
            [sys.executable, "-c", head + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(child)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    yield start
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def settled(pid: int, folder: Path, word: str) -> str:
    """The cause, asked for until the process has come to where it is to stay."""
    deadline = time.monotonic() + 10
    while word not in (cause := likely_cause(stacks_of([pid], folder))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return cause


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (SLEEPS, "sleeps"),
        (LOCKS, "waits for a lock"),
        (READS, "waits for data of another process"),
        (COMPUTES, "computes"),
    ],
)
def test_a_live_process_says_where_it_is_and_goes_on(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path, program: str, word: str
) -> None:
    child, _ = start(program)
    cause = settled(child.pid, tmp_path, word)
    assert cause.startswith(f"1 of 1: {word}")
    if program is SLEEPS:
        assert "It is in my_wait (" in cause
    assert child.poll() is None


def test_a_lock_that_fork_copied_is_told_from_any_other(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    _, line = start(FORKS)
    assert "no thread is left to free" in settled(int(line), tmp_path, "no thread is left")
    assert stacks_of([int(line)], tmp_path)[int(line)].start == "fork"


def test_a_process_that_registered_nothing_is_not_killed_by_the_question(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    child, _ = start(SLEEPS, registered=False)
    (tmp_path / f"{child.pid}.stack").touch()
    stack = stacks_of([child.pid], tmp_path)[child.pid]
    assert (stack.text, stack.state in "SR", child.poll()) == ("", True, None)


@pytest.mark.slow
def test_stopped_and_ended_processes_are_told_without_waiting_for_ever(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    stopped, _ = start(SLEEPS)
    ended, _ = start(READS)
    stopped.send_signal(signal.SIGSTOP)
    ended.kill()
    ended.wait()
    assert "is stopped by a signal" in settled(stopped.pid, tmp_path, "stopped")
    stacks = stacks_of([stopped.pid, ended.pid], tmp_path, wait_seconds=0.1)
    assert likely_cause({ended.pid: stacks[ended.pid]}) == "1 of 1: has ended."


def test_the_main_threads_frames_are_those_of_the_thread_that_answers() -> None:
    text = (
        'Thread 0x7f (most recent call first):\n  File "/a/b.py", line 3 in other\n\n'
        'Current thread 0x8f (most recent call first):\n  File "/a/c.py", line 5 in mine\n'
        '  File "<frozen importlib._bootstrap>", line 9 in _find\n'
    )
    stack = Stack(1, text, "S", "futex_do_wait", 2, "spawn")
    assert str(stack.frames[0]) == "mine (/a/c.py:5)"
    assert "while it imports a module" in likely_cause({1: stack})
    assert likely_cause({}) == "no process was found."


def test_the_commonest_cause_is_the_one_that_is_told() -> None:
    waiting = [Stack(pid, "", "D", "folio_wait_bit_common") for pid in (1, 2)]
    cause = likely_cause({stack.pid: stack for stack in [*waiting, Stack(3, "", "R")]})
    assert cause == "2 of 3: waits for a disk or a network file system (folio_wait_bit_common)."
