"""A process that does nothing is asked for its stacks, and the cause is named."""

import os
import signal
import threading
import time

import pytest

from memfit.training import Stack, likely_cause, register_stack_dump, stacks_of

LOCK = threading.Lock()


def my_wait():
    time.sleep(60)


def lock_twice():
    LOCK.acquire()
    LOCK.acquire()


def read_a_pipe():
    os.read(os.pipe()[0], 1)


def compute():
    while True:
        pass


@pytest.fixture
def start(tmp_path):
    """Forks this process; the child registers, does something and is killed at the end."""
    started = []

    def fork(act, registered=True):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if registered:
                    register_stack_dump(tmp_path)
                os.write(writer, b"x")
                act()
            finally:
                os._exit(1)
        started.append(child)
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        return child

    yield fork
    for child in started:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def settled(pid, folder, *words):
    """The cause, asked for until the process has come to where it is to stay."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        cause = likely_cause(stacks_of([pid], folder))
        if all(word in cause for word in words):
            break
    return cause


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (my_wait, "sleeps"),
        (lock_twice, "waits for a lock that no thread is left to free"),
        (read_a_pipe, "waits for data of another process"),
        (compute, "computes"),
    ],
)
def test_a_live_process_says_where_it_is_and_goes_on(start, tmp_path, act, word):
    child = start(act)
    cause = settled(child, tmp_path, f"1 of 1: {word}", place := f"It is in {act.__name__} (")
    assert word in cause and place in cause
    assert os.waitpid(child, os.WNOHANG) == (0, 0)


def test_a_process_that_registered_nothing_is_not_killed_by_the_question(start, tmp_path):
    child = start(my_wait, registered=False)
    (tmp_path / f"{child}.stack").touch()
    stack = stacks_of([child], tmp_path)[child]
    assert (stack.text, stack.state in "SR", os.waitpid(child, os.WNOHANG)) == ("", True, (0, 0))


def test_a_stopped_process_and_one_that_is_not_there_are_told_without_waiting_for_ever(start, tmp_path):
    stopped = start(my_wait)
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    stacks = stacks_of([stopped, 1 << 30], tmp_path, wait_seconds=0.1)
    assert likely_cause({stopped: stacks[stopped]}) == "1 of 1: is stopped by a signal (SIGSTOP, Ctrl-Z)."
    assert likely_cause({1: stacks[1 << 30]}) == "1 of 1: has ended."


def test_the_main_threads_frames_are_those_of_the_thread_that_answers():
    text = (
        'Thread 0x7f (most recent call first):\n  File "/a/b.py", line 3 in other\n\n'
        'Current thread 0x8f (most recent call first):\n  File "/a/c.py", line 5 in mine\n'
        '  File "<frozen importlib._bootstrap>", line 9 in _find\n'
    )
    stack = Stack(text, "S", "futex_do_wait", 2)
    assert stack.frames[0] == "mine (/a/c.py:5)"
    assert "waits for a lock while it imports a module" in likely_cause({1: stack})


def test_the_commonest_cause_is_the_one_that_is_told():
    waiting = [Stack("", "D", "folio_wait_bit_common")] * 2
    cause = likely_cause(dict(enumerate([*waiting, Stack("", "R")])))
    assert cause == "2 of 3: waits for a disk or a network file system (folio_wait_bit_common)."
