"""Workers that hang before a first batch are explained and ended; those that die are explained."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from memfit.errors import JobFailedError, UsageError
from memfit.training import KeyedDataset, KeyedSampler, Trainer, _worker_death
from memfit.training import _worker_watch as watching
from memfit.training._loader import TrainingData
from memfit.training._worker_death import count_oom_kills, explain_death

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
        raise NotImplementedError


class Locked(InWorkers):
    def act(self, index):
        with LOCK:
            pass


def squared(model, batch):
    return (model(batch) ** 2).sum(), len(batch)


def fit(train, valid=None, *, num_epochs=1, seconds=1.0, preflight=False, evaluate=None):
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, loss=squared, first_batch_seconds=seconds, allow_inexact=True)
    return trainer.fit(train, valid, num_epochs=num_epochs, preflight=preflight, evaluate=evaluate)


def loader_of(dataset, method="fork", **settings):
    return DataLoader(dataset, 2, num_workers=2, multiprocessing_context=method, **settings)


def test_workers_forked_while_a_thread_held_a_lock_are_explained_and_ended(events, tmp_path):
    with thread_that_holds_the_lock(), pytest.raises(JobFailedError) as caught:
        fit(loader_of(Locked()))
    error = caught.value
    assert re.match(r"No first batch of epoch 1 came within 1 s, and the workers do nothing: .* lock", error.what)
    assert re.search(r"The workers were forked after \d+ threads? beside the main one had been started", error.what)
    assert len(re.findall(r"worker \d+: S \S* act \(.*test_worker_watch.py:\d+\) < __getitem__", error.what)) == 2
    assert "multiprocessing_context='forkserver'" in error.remedy
    (event,) = events("loader_stuck")
    assert event["cause"] == error.what
    report = Path(event["report"])
    assert report.parent == tmp_path / "jobs" / "fold_1"
    text = report.read_text()
    pids = [int(pid) for pid in re.findall(r"^worker (\d+): state S", text, re.MULTILINE)]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert f"the training process {os.getpid()}:" in text
    assert text.count("in act") == 2


def test_the_same_data_run_with_forkserver():
    multiprocessing.set_forkserver_preload(["torch", "memfit.training"])
    with thread_that_holds_the_lock():
        result = fit(loader_of(Locked(), "forkserver"), seconds=60)
    assert len(result.history) == 1


def test_the_preflight_and_validation_are_watched_too():
    with thread_that_holds_the_lock():
        with pytest.raises(JobFailedError, match=r"No first batch of the preflight came within 0\.6 s"):
            fit(loader_of(Locked()), seconds=0.6, preflight=True)
        with pytest.raises(JobFailedError, match=r"No first batch of validation came within 0\.6 s"):
            fit([torch.ones(2, 1)], loader_of(Locked()), seconds=0.6)


def test_outside_a_run_the_stacks_lie_among_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with thread_that_holds_the_lock(), pytest.raises(JobFailedError) as caught:
        fit(loader_of(Locked()))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("memfit_loader_stacks_epoch_1_")
    assert f"all stacks: {left}" in caught.value.what


class Busy(InWorkers):
    """Computes, by itself or in a process that it starts, until it has been looked at."""

    def __init__(self, folder, *, in_child):
        self.folder, self.in_child = folder, in_child

    def act(self, index):
        if self.in_child:
            wait = f"import pathlib\nwhile not any(pathlib.Path({self.folder!r}).glob('jobs/*/loader_stacks*')): pass"
            subprocess.run([sys.executable, "-c", wait], check=True)
        while not any(Path(self.folder).glob("jobs/*/loader_stacks*")):
            pass


@pytest.mark.parametrize("in_child", [False, True])
def test_busy_workers_are_waited_for_and_told_of_once(in_child, events, tmp_path):
    result = fit(loader_of(Busy(str(tmp_path), in_child=in_child)), seconds=0.6)
    assert len(result.history) == 1
    (event,) = events("loader_slow")
    assert event["phase"] == "epoch 1"
    assert events("loader_stuck") == []


class StuckLater(InWorkers):
    """Waits for itself from its second epoch on."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def act(self, index):
        if self.epoch == 2:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


def test_workers_that_live_on_are_watched_in_each_epoch():
    data = KeyedDataset(StuckLater())
    loader = loader_of(data, sampler=KeyedSampler(data), persistent_workers=True)
    with pytest.raises(JobFailedError, match="No first batch of epoch 2 came within 1 s"):
        fit(loader, num_epochs=3)


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
    "killed": (
        -signal.SIGKILL,
        r"was killed( by the kernel for memory| \(SIGKILL\): out of memory is to be suspected)",
    ),
    "bus error": (-signal.SIGBUS, r"bus error \(SIGBUS\).*/dev/shm has .* \(\d+ bytes\) free of"),
    "crash": (-signal.SIGSEGV, r"was ended by SIGSEGV\. It was in act \(.*test_worker_watch.py:\d+\) < __getitem__"),
    "exit": (7, r"ended by itself with exit code 7 without an exception"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_workers_death_is_named_with_its_cause(name, events):
    how, message = DEATHS[name]
    with pytest.raises(JobFailedError, match=rf"^DataLoader worker \d+ .*{message}") as caught:
        fit(loader_of(Dies(how)))
    assert caught.value.remedy
    (event,) = events("loader_worker_died")
    assert event["exit_code"] == how


@pytest.mark.parametrize("evaluate", [None, lambda model, valid: {"valid_loss": len(list(valid))}])
def test_a_death_in_validation_is_named_too(evaluate):
    with pytest.raises(JobFailedError, match=r"DataLoader worker \d+ was killed"):
        fit([torch.ones(2, 1)], loader_of(Dies(-signal.SIGKILL)), evaluate=evaluate)


def test_a_kill_that_the_kernel_counted_is_said_to_be_one(monkeypatch):
    counts = iter([{"/group": 3, "the machine": 9}, {"/group": 4, "the machine": 9}])
    monkeypatch.setattr(_worker_death, "count_oom_kills", lambda: next(counts))
    before = _worker_death.count_oom_kills()
    death = explain_death(RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. "), before, None)
    assert (
        "worker 77 was killed by the kernel for memory: its count of such kills rose in /group (3 -> 4)" in death.what
    )


def test_the_kernels_counts_can_be_read():
    assert all(number >= 0 for number in count_oom_kills().values())


class Raises(InWorkers):
    def act(self, index):
        raise RuntimeError("of the data")


def test_an_exception_of_the_data_passes_through():
    with pytest.raises(RuntimeError, match=r"Caught RuntimeError in DataLoader worker process 0"):
        fit(loader_of(Raises()))
    assert explain_death(RuntimeError("of the data"), {}, None) is None


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


class Plain(InWorkers):
    def act(self, index):
        pass


def test_a_fork_beside_threads_of_a_library_that_cannot_stand_it_is_warned_of_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "polars", types.ModuleType("polars"))
    with thread_that_holds_the_lock():
        fit(loader_of(Plain()), num_epochs=2)
        error = capsys.readouterr().err
        assert re.search(
            r"the 2 workers of a DataLoader are forked after \d+ threads? beside .*\(polars loaded\) and may hang; pass",
            error,
        )
        assert error.count("may hang") == 1
        watching.warn_of_forks(loader_of(Plain(), "forkserver"))
    assert "may hang" not in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "polars")
    fit(loader_of(Plain()))
    assert "may hang" not in capsys.readouterr().err


def test_after_the_first_batch_nothing_watches_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = TrainingData(loader_of(Plain()), 0)
    data.open(1)
    next(data)
    assert not any(thread.name == "memfit-worker-watch" for thread in threading.enumerate())
    assert len(list(data)) == 3
    data.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"memfit-stacks-{gone.pid}-abc", f"memfit-stacks-{os.getppid()}-abc", "memfit-stacks-"):
        (tmp_path / name).mkdir()
    watch = watching.WorkerWatch(loader_of(Plain()), float("inf"))
    own = Path(watch.prepare())
    kept = {f"memfit-stacks-{os.getppid()}-abc", "memfit-stacks-", own.name}
    assert {path.name for path in tmp_path.iterdir()} == kept
    with watch.waiting("epoch 1", []):
        pass
    watch.close()
    assert not own.exists()


def test_a_time_that_is_none_is_refused():
    with pytest.raises(UsageError, match="first_batch_seconds is 0"):
        fit([torch.ones(2, 1)], seconds=0)
