"""Workers that hang before a first batch are explained and ended; those that die are explained."""

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from memfit.errors import JobFailedError, UsageError
from memfit.training import Trainer, _workers

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)


@contextlib.contextmanager
def thread_that_holds_the_lock():
    """As a library's thread pool does now and then: at a fork, the child gets the lock without the thread."""
    held, enough = threading.Event(), threading.Event()

    def hold():
        with LOCK:
            held.set()
            enough.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        enough.set()
        thread.join()


class InWorkers(torch.utils.data.Dataset):
    """Does something before each item that a worker makes."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if get_worker_info() is not None:
            self.act(index)
        return torch.ones(1)

    def act(self, index):
        """Nothing, here."""


class Locked(InWorkers):
    def act(self, index):
        with LOCK:
            pass


def squared(model, batch):
    return (model(batch) ** 2).sum(), len(batch)


def fit(train, valid=None, *, num_epochs=1, seconds=0.4, preflight=False, evaluate=None):
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, loss=squared, first_batch_seconds=seconds, allow_inexact=True)
    return trainer.fit(train, valid, num_epochs=num_epochs, preflight=preflight, evaluate=evaluate)


def loader_of(dataset, method="fork", **settings):
    return DataLoader(dataset, 2, num_workers=2, multiprocessing_context=method, **settings)


@pytest.mark.proves("S2-04", "C-36")
@pytest.mark.slow
def test_workers_forked_while_a_thread_held_a_lock_are_explained_and_ended(events, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with thread_that_holds_the_lock(), pytest.raises(JobFailedError) as caught:
        fit(loader_of(Locked()))
    error = caught.value
    assert re.match(
        r"No first batch of epoch 1 came within 0\.4 s, and the workers do nothing: 2 of 2: .* lock", error.what
    )
    assert re.search(r"It is in act \(.*test_workers.py:\d+\)", error.what)
    assert "multiprocessing_context='forkserver'" in error.remedy
    assert [event["cause"] for event in events("loader_stuck")] == [error.what]
    text = capfd.readouterr().err
    pids = [int(pid) for pid in re.findall(r"^worker (\d+), state S", text, re.MULTILINE)]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))
    assert text.count("in act") == 2 and not [*tmp_path.glob("memfit-*")]


@pytest.mark.slow
def test_the_same_data_run_with_forkserver():
    multiprocessing.set_forkserver_preload(["torch", "memfit.training"])
    with thread_that_holds_the_lock():
        result = fit(loader_of(Locked(), "forkserver"), seconds=60)
    assert len(result.history) == 1


@pytest.mark.slow
def test_the_preflight_and_validation_are_watched_too():
    with thread_that_holds_the_lock():
        with pytest.raises(JobFailedError, match=r"No first batch of the preflight came within 0\.4 s"):
            fit(loader_of(Locked()), preflight=True)
        with pytest.raises(JobFailedError, match=r"No first batch of validation came within 0\.4 s"):
            fit([torch.ones(2, 1)], loader_of(Locked()))


def compute(order, done, in_child):
    """Compute a tenth of a second at each order, in this process or in one that it starts; read nothing."""
    if in_child:
        child = multiprocessing.Process(target=compute, args=(order, done, False))
        child.start()
        child.join()
    for _ in () if in_child else range(Busy.waits):
        order.acquire(timeout=60)
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        done.release()
    _ = in_child or order.acquire(timeout=60)  # it is looked at once more


class Busy:
    """Its one batch does not come in time, three times: no clock runs, and its worker has computed meanwhile."""

    _timeout, waits = 0, 3

    def __init__(self, *, in_child):
        self.order, self.done = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
        self._workers = [multiprocessing.Process(target=compute, args=(self.order, self.done, in_child))]

    def __len__(self):
        return 1

    def __iter__(self):
        self._workers[0].start()
        return self

    def __next__(self):
        self.waits -= 1
        if self.waits == -1:
            return torch.ones(2, 1)
        self.order.release()
        if self.waits < 0:
            self._workers[0].join()
            raise StopIteration
        self.done.acquire()
        raise RuntimeError("DataLoader timed out after 0.4 seconds")


@pytest.mark.slow
@pytest.mark.parametrize("in_child", [False, True])
def test_busy_workers_are_waited_for(in_child, events):
    assert len(fit(Busy(in_child=in_child)).history) == 1
    assert events("loader_stuck") == []


class Dies(InWorkers):
    def __init__(self, how):
        self.how = how

    def act(self, index):
        if index == 3:
            if self.how > 0:
                os._exit(self.how)
            os.kill(os.getpid(), -self.how)
            time.sleep(60)


DEATHS = {
    "killed": (-signal.SIGKILL, r"was killed( by the kernel for memory| \(SIGKILL\), perhaps for memory)"),
    "bus error": (-signal.SIGBUS, r"bus error \(SIGBUS\).*/dev/shm has .* \(\d+ bytes\) free of"),
    "crash": (-signal.SIGSEGV, "was ended by SIGSEGV; its stack is on standard error"),
    "exit": (7, r"ended by itself with exit code 7 without an exception"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_workers_death_is_named_with_its_cause(name, events, capfd):
    how, message = DEATHS[name]
    with pytest.raises(JobFailedError, match=rf"^DataLoader worker \d+ .*{message}") as caught:
        fit(loader_of(Dies(how)))
    assert caught.value.remedy
    (event,) = events("loader_worker_died")
    assert event["exit_code"] == how
    assert ("in act" in capfd.readouterr().err) == (name in ("crash", "bus error"))


def test_a_kill_that_the_kernel_counted_is_said_to_be_one(monkeypatch):
    counts = iter([{7: 3}, {7: 4}])
    monkeypatch.setattr(_workers, "memory_group", lambda: 7)
    monkeypatch.setattr(_workers, "oom_kills_above", lambda group: next(counts))
    with pytest.raises(JobFailedError, match=r"was killed by the kernel for memory: its count .* rose in 7 \(3 -> 4\)"):
        fit(loader_of(Dies(-signal.SIGKILL)))


@pytest.mark.parametrize("evaluate", [None, lambda model, valid: {"valid_loss": len(list(valid))}])
def test_a_death_in_validation_is_named_too(evaluate):
    with pytest.raises(JobFailedError, match=r"DataLoader worker \d+ was killed"):
        fit([torch.ones(2, 1)], loader_of(Dies(-signal.SIGKILL)), evaluate=evaluate)


class Raises(InWorkers):
    def act(self, index):
        raise RuntimeError("of the data")


def test_an_exception_of_the_data_passes_through():
    with pytest.raises(RuntimeError, match=r"Caught RuntimeError in DataLoader worker process 0"):
        fit(loader_of(Raises()))


class FindsNoRoom(InWorkers):
    """Raises what torch does when /dev/shm is full."""

    def act(self, index):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_7965_2673892714_0>: No space left on device (28)"
        )


def test_a_full_dev_shm_is_named_with_the_bytes_that_are_free():
    with pytest.raises(
        JobFailedError, match=r"no room in shared memory: /dev/shm has .* \(\d+ bytes\) free of"
    ) as caught:
        fit(loader_of(FindsNoRoom()))
    assert "--shm-size" in caught.value.remedy


def test_a_time_that_is_none_is_refused():
    with pytest.raises(UsageError, match="first_batch_seconds is 0"):
        fit([torch.ones(2, 1)], seconds=0)
