"""Threads make batches ahead: in order, no more than asked for, and nothing is left of them at the end."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data.conftest import generate_table
from memfit.data import Buffers, Loader, Panel
from memfit.errors import MissingExtraError


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    table = generate_table(16, 20, missing=0.1)
    return Panel.build(table, tmp_path_factory.mktemp("panel"), features=["f0", "f1"], targets=["ret"])


def make(panel: Panel, num_workers: int, **changes: Any) -> Loader:
    arguments = {"date_indices": range(4, 16), "lookback": 3, "target": "ret", "shuffle": 5, **changes}
    return Loader(panel, num_workers=num_workers, **arguments)


def windows(loader: Any) -> list[bytes]:
    return [batch.windows.tobytes() for batch in loader]


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def loader_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("memfit-loader")]


def no_threads_left() -> bool:
    return wait_until(lambda: not loader_threads())


# --- what a transform draws


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_transform_draws_what_its_seed_epoch_and_number_say(panel: Panel, num_workers: int) -> None:
    def draw(windows: Any, targets: Any, generator: np.random.Generator) -> None:
        time.sleep(0.003)
        targets[:] = generator.random()

    loader = make(panel, num_workers, transform=draw)
    loader.set_epoch(2)
    drawn = {number: float(batch.targets[0]) for number, batch in enumerate(loader)}
    for number, value in drawn.items():
        assert value == np.float32(np.random.default_rng((5, 2, number)).random())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("draw", [lambda *_: random.seed(), lambda *_: np.random.seed()])
def test_a_transform_that_draws_from_what_all_code_shares_is_warned_of(
    panel: Panel, draw: Any, num_workers: int
) -> None:
    with pytest.warns(RuntimeWarning, match="Draw from the generator that it is given"):
        next(iter(make(panel, num_workers, transform=draw)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(make(panel, num_workers, transform=lambda *_: None)))


# --- threads


@pytest.mark.proves("S4-02")
@pytest.mark.slow
def test_no_more_is_made_ahead_than_the_bound_and_all_of_it(panel: Panel) -> None:
    made: list[int] = []

    def slow(windows: Any, targets: Any, generator: np.random.Generator) -> None:
        time.sleep(0.003)  # what is made in no time is not made ahead
        made.append(1)

    loader = make(panel, 3, batch=6, transform=slow)
    assert len(loader) > 20
    for delivered, _ in enumerate(loader, start=1):
        expected = min(delivered + 3, len(loader))
        assert wait_until(lambda: len(made) == expected)  # noqa: B023 - asked at once
        time.sleep(0.005)
        assert len(made) == expected
    assert no_threads_left()


@pytest.mark.proves("S4-40")
def test_what_is_made_in_no_time_is_made_when_it_is_asked_for(panel: Panel) -> None:
    here: list[str] = []
    loader = make(panel, 2, batch=2, transform=lambda *_: here.append(threading.current_thread().name))
    assert windows(loader) == windows(make(panel, 0, batch=2, transform=lambda *_: None))
    assert len(here) > 60 and here.count("MainThread") > 30 and here[0] == "MainThread"


def test_an_error_in_a_thread_is_raised_at_its_batch_with_its_traceback_and_the_rest_can_be_had(panel: Panel) -> None:
    expected, armed = windows(make(panel, 0)), [True]

    def fail(windows: Any, targets: Any, generator: np.random.Generator) -> None:
        time.sleep(0.003)
        if armed and generator.random() == third:
            armed.clear()
            raise ValueError("no such thing")

    third = np.random.default_rng((5, 0, 2)).random()
    loader, found = make(panel, 2, transform=fail), []
    with pytest.raises(ValueError, match="no such thing") as raised:
        for batch in loader:
            found.append(batch.windows.tobytes())
    assert "in fail" in "".join(traceback.format_exception(raised.value))
    assert found == expected[:2] and no_threads_left()
    assert found + windows(loader) == expected, "the position is that of the batch that failed"


def test_a_transform_that_exits_ends_the_program_as_it_does_without_threads(panel: Panel) -> None:
    def leave(windows: Any, targets: Any, generator: np.random.Generator) -> None:
        time.sleep(0.003)
        if next(calls) > 0:
            sys.exit(3)

    for num_workers in (0, 2):
        calls = itertools.count()
        with pytest.raises(SystemExit):
            windows(make(panel, num_workers, transform=leave))
    assert no_threads_left()


@pytest.mark.parametrize("how", ["close", "break", "drop", "with", "set_epoch", "load_state_dict", "iter"])
def test_an_iteration_that_is_left_stops_its_threads(panel: Panel, how: str) -> None:
    loader = make(panel, 2, batch=6, transform=lambda *_: time.sleep(0.003))
    iterator = iter(loader)
    next(iterator)
    assert loader_threads()
    if how == "close":
        loader.close()
    elif how == "break":
        for _ in iterator:
            break
    elif how == "with":
        with loader:
            pass
    elif how == "set_epoch":
        loader.set_epoch(3)
    elif how == "load_state_dict":
        loader.load_state_dict(loader.state_dict())
    elif how == "iter":
        iter(loader)
    del iterator
    assert no_threads_left()


def test_closing_does_not_wait_for_a_transform_that_hangs(panel: Panel) -> None:
    release, hanging, calls = threading.Event(), threading.Event(), itertools.count()

    def hang(windows: Any, targets: Any, generator: np.random.Generator) -> None:
        time.sleep(0.003)  # what is made in no time is not made ahead
        if next(calls) > 0:
            hanging.set()
            release.wait(60)

    loader = make(panel, 2, batch=6, transform=hang)
    iterator = iter(loader)
    next(iterator)
    assert hanging.wait(20)
    loader.close()
    assert loader_threads(), "it still hangs, and nobody waited for it"
    release.set()
    assert no_threads_left()


SCRIPT = """
import sys, time
from memfit.data import Loader, Panel
def slow(windows, targets, generator):
    time.sleep(float(sys.argv[2]))
loader = Loader(Panel.open(sys.argv[1]), range(4, 16), lookback=3, target="ret", shuffle=1, num_workers=2, transform=slow)
try:
    for epoch in range(10**6):
        loader.set_epoch(epoch)
        for batch in loader:
            print("batch", flush=True)
            if len(sys.argv) > 3:
                sys.exit(0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def run(panel: Panel, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(panel.path), *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "batch\n"
    return child


@pytest.mark.slow
def test_ctrl_c_ends_the_program_and_nothing_is_printed_by_its_threads(panel: Panel) -> None:
    child = run(panel, "0.3")
    try:
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert output.splitlines()[-1] == "interrupted" and (errors, child.returncode) == ("", 0)


def test_a_program_ends_by_itself_with_an_iteration_that_is_not_closed(panel: Panel) -> None:
    child = run(panel, "0.003", "leave")
    try:
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (errors, child.returncode) == ("", 0)


def test_a_loader_may_be_used_in_one_thread_and_then_in_another(panel: Panel) -> None:
    expected, loader, found = windows(make(panel, 0)), make(panel, 2), list[bytes]()
    thread = threading.Thread(target=lambda: found.extend(windows(itertools.islice(loader, 3))))
    thread.start()
    thread.join()
    assert found + windows(loader) == expected


def test_two_loaders_go_on_side_by_side(panel: Panel) -> None:
    train, valid = make(panel, 2), make(panel, 1, lookback=4, shuffle=None)
    expected = [windows(make(panel, 0)), windows(make(panel, 0, lookback=4, shuffle=None))]
    found = []
    for number, batch in enumerate(train):
        found.append(batch.windows.tobytes())
        if number in (3, 9):  # validation in the midst of training
            assert windows(valid) == expected[1]
    assert found == expected[0]


# --- memory


def test_a_buffer_is_free_again_when_the_last_view_of_it_is_gone() -> None:
    buffers = Buffers(4096, most=2)
    view = buffers.take()[:16].view(np.int64)
    place = view.ctypes.data
    view[:] = 7
    assert buffers.take().ctypes.data != place
    del view
    assert place in {one.ctypes.data for one in [buffers.take(), buffers.take()]}


def test_batches_that_are_kept_stay_and_no_more_are_watched_than_asked_for() -> None:
    buffers = Buffers(64, most=3)
    kept = [buffers.take() for _ in range(50)]
    for number, one in enumerate(kept):
        one[:] = number
    assert [int(one[0]) for one in kept] == list(range(50)) and len(buffers._watched) == 3


class _FakeCuda:
    """Stands in for torch with a device: what is locked, and copies that are done when ``is_done`` says so."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.is_done = True
        self.num_waits = 0
        self.cuda = self

    def is_available(self) -> bool:
        return True

    def cudart(self) -> _FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked.update(range(address, address + size, 64))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.clear()

    def synchronize(self) -> None:
        self.num_waits += 1

    def Event(self) -> _FakeCuda:
        return self

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pinned_buffer_is_not_filled_while_a_device_reads_it(
    panel: Panel, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    fake = _FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", fake)
    with make(panel, num_workers, pin_memory=True) as loader:
        fake.is_done = False
        places = [batch.windows.ctypes.data for batch in loader]
        assert len(places) == 12 and len(set(places)) == 6 + num_workers, "as many as are watched"
        assert fake.num_waits == 12 - len(set(places)), "then the device is waited for"
        fake.is_done = True
        assert {batch.windows.ctypes.data for batch in loader} <= set(places)
        assert fake.locked
    del loader
    assert not fake.locked


def test_pinning_without_torch_is_refused(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError):
        make(panel, 0, pin_memory=True)
