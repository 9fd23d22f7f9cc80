"""Workers that die, hang, fail or are killed are told of by name; what they leave behind is nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data import transforms
from data.conftest import generate_table
from memfit.data import Loader, Panel, WorkerPool
from memfit.errors import JobFailedError, UsageError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    table = generate_table(16, 20, missing=0.1)
    return Panel.build(table, tmp_path_factory.mktemp("panel"), features=["f0", "f1"], targets=["ret"])


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that arms a transform, in the environment that workers get."""
    monkeypatch.setenv("LOADER_TEST_FOLDER", str(tmp_path))
    return tmp_path / "armed"


def make(panel: Panel, pool: WorkerPool | None, **changes: Any) -> Loader:
    arguments = {"date_indices": range(4, 16), "lookback": 3, "target": "ret", "shuffle": 5, **changes}
    return Loader(panel, pool=pool, **arguments)


def windows(loader: Loader) -> list[bytes]:
    return [batch.windows.tobytes() for batch in loader]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize(
    ("method", "transform", "how", "rule"),
    [
        ("forkserver", transforms.kill, "was killed by SIGKILL", "when memory runs out"),
        ("forkserver", transforms.leave, "ended with exit code 3", "a worker ends only when"),
        ("spawn", transforms.kill, "was killed by SIGKILL", "when memory runs out"),
    ],
)
def test_a_workers_death_is_named_and_the_loader_can_go_on(
    panel: Panel, armed: Path, method: Any, transform: Any, how: str, rule: str
) -> None:
    expected = windows(make(panel, None))
    with WorkerPool(2, start_method=method) as pool:
        loader = make(panel, pool, transform=transform)
        iterator = iter(loader)
        found = [next(iterator).windows.tobytes()]
        pids = pool.worker_pids()
        armed.touch()
        pattern = rf"worker [01] of 2 \(pid (\d+)\) {how} while it made batch \d+ of epoch 0\."
        with pytest.raises(JobFailedError, match=pattern) as raised:
            for batch in iterator:
                found.append(batch.windows.tobytes())
        match = re.search(pattern, str(raised.value))
        assert match is not None and int(match[1]) in pids
        assert rule in raised.value.rule and "iterate again" in raised.value.remedy
        assert wait_until(lambda: not any(map(is_alive, pids)))
        assert found + windows(loader) == expected
        assert set(pool.worker_pids()).isdisjoint(pids)


def test_an_error_in_a_worker_is_raised_with_its_traceback(panel: Panel) -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(JobFailedError, match="ValueError: no such thing") as raised:
            windows(make(panel, pool, transform=transforms.fail))
        assert "in fail" in raised.value.what
        assert len(windows(make(panel, pool))) == 12  # the worker lives on


@pytest.mark.parametrize(
    ("transform", "text"), [(transforms.exit, "SystemExit: exit code 3"), (transforms.interrupt, "KeyboardInterrupt")]
)
def test_a_transform_that_exits_is_named_without_a_traceback_beside(
    panel: Panel, transform: Any, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerPool(1) as pool:
        with pytest.raises(JobFailedError, match=f"a loader's worker failed: {text}") as raised:
            windows(make(panel, pool, transform=transform))
        assert f"in {transform.__name__}" in raised.value.what
        assert len(windows(make(panel, pool))) == 12  # the worker lives on
    assert capfd.readouterr() == ("", "")


@linux_only
@pytest.mark.parametrize(("transform", "cause"), [(transforms.sleep, "sleeps"), (transforms.lock, "waits for a lock")])
def test_silent_workers_are_asked_where_they_are_and_ended(
    panel: Panel, armed: Path, transform: Any, cause: str
) -> None:
    with WorkerPool(1) as pool:
        loader = make(panel, pool, transform=transform)
        next(iter(loader))
        pool.start_timeout = 1.0
        armed.touch()
        with pytest.raises(JobFailedError) as raised:
            windows(loader)
        text = raised.value.what
        assert f"1 worker gave no batch within 1 s; 1 of 1: {cause}" in text
        assert f"It is in {transform.__name__} (" in text and "in _run_forked" in text
        pid = int(re.findall(r"process (\d+):", text)[0])
        assert wait_until(lambda: not is_alive(pid))


def test_a_pool_may_fall_back_to_no_workers(panel: Panel, armed: Path) -> None:
    with WorkerPool(1, fallback=True) as pool:
        loader = make(panel, pool, transform=transforms.sleep)
        iterator = iter(loader)
        found = [next(iterator).windows.tobytes()]
        pool.start_timeout = 1.0
        armed.touch()
        with pytest.warns(RuntimeWarning, match="goes on without workers"):
            found += [batch.windows.tobytes() for batch in iterator]
        assert (found, loader.num_workers) == (windows(make(panel, None)), 0)


@linux_only
def test_the_watchdog_tells_of_an_interpreter_that_does_not_come_up(
    panel: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerPool(2, start_timeout=5.0) as pool:
        with pytest.raises(JobFailedError, match=r"1 of 1: (still imports modules|sleeps)") as raised:
            windows(make(panel, pool))
        assert "numpy.py" in raised.value.what


def test_no_more_is_made_ahead_than_the_bound_and_all_of_it(panel: Panel, armed: Path) -> None:
    made = armed.with_name("made")
    made.touch()

    def num_made() -> int:
        return len(made.read_text().splitlines())

    with WorkerPool(2, prefetch=3) as pool:
        loader = make(panel, pool, transform=transforms.count, batch=6)
        assert len(loader) > 20
        for delivered, batch in enumerate(loader, start=1):
            assert wait_until(lambda: num_made() == min(delivered + 6, len(loader)))  # noqa: B023 - asked at once
            time.sleep(0.01)
            assert num_made() <= delivered + 6
            assert len(batch.targets) > 0
        kept = list(loader)  # more than there are slots: copies take their place
        assert len(kept) == len(loader) and pool._slots.num_made <= 6 + 4
        assert wait_until(lambda: num_made() == 2 * len(loader))


@linux_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_have_one_thread_and_block_ctrl_c(panel: Panel, method: Any) -> None:
    with WorkerPool(2, start_method=method) as pool:
        assert len(windows(make(panel, pool, transform=transforms.check_environment))) == 12
        assert os.environ.get("RAYON_NUM_THREADS") is None


SCRIPT = """
import sys, time
import numpy as np
from memfit.data import Loader, Panel, WorkerPool
panel = Panel.open(sys.argv[1])
with WorkerPool(2, start_method=sys.argv[2]) as pool:
    loader = Loader(panel, range(4, 16), lookback=3, target="ret", shuffle=1, pool=pool)
    try:
        for epoch in range(10**6):
            loader.set_epoch(epoch)
            for number, batch in enumerate(loader):
                if epoch == number == 0:
                    print(*pool.worker_pids(), pool._launcher.server_pid or "", flush=True)
                time.sleep(0.001)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@linux_only
@pytest.mark.parametrize(
    ("method", "whom"),
    [("forkserver", "parent"), ("spawn", "parent"), ("forkserver", "all"), ("forkserver", "interrupt")],
)
def test_nothing_is_left_when_the_parent_or_all_are_killed(
    panel: Panel, tmp_path: Path, method: str, whom: str
) -> None:
    before = set(Path("/dev/shm").iterdir())
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(panel.path), method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    assert child.stdout is not None
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == (3 if method == "forkserver" else 2) and all(map(is_alive, pids))
    maps = Path(f"/proc/{pids[0]}/maps").read_text()
    assert "memfd:memfit-batch (deleted)" in maps
    if whom == "parent":
        child.kill()
    else:
        os.killpg(child.pid, signal.SIGKILL if whom == "all" else signal.SIGINT)
    try:
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("mem")} == set()
    assert errors == ""
    if whom == "interrupt":
        assert (output, child.returncode) == ("interrupted\n", 0)
    if whom != "all" and method == "forkserver":
        assert wait_until(lambda: not list(tmp_path.glob("memfit-workers-*")))


def pss_bytes(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {name: int(size) << 10 for name, size in re.findall(r"^(Pss\w*|Private_Dirty):\s+(\d+) kB", text, re.M)}


@linux_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_many_workers_hold_the_data_once(tmp_path_factory: pytest.TempPathFactory, method: Any) -> None:
    panel = _large_panel(tmp_path_factory)
    small = make_small(tmp_path_factory)

    def measured(panel: Panel, lookback: int) -> tuple[int, float]:
        with WorkerPool(4, start_method=method) as pool:
            start = time.monotonic()
            loader = Loader(panel, range(lookback, panel.shape[0]), lookback=lookback, target=None, pool=pool)
            for _ in range(2):
                for batch in loader:
                    assert batch.windows.size
            seconds = time.monotonic() - start
            del batch
            slots = pool._slots.num_made * pool._slots.nbytes
            pids = [*pool.worker_pids(), *filter(None, [pool._launcher.server_pid if pool._launcher else None])]
            return sum(pss_bytes(pid)["Pss"] for pid in pids) - slots, seconds

    empty, _ = measured(small, 1)
    total, _ = measured(panel, 2)
    data = panel.values.nbytes + panel.history.nbytes
    assert data > 64 << 20
    assert total <= (data + empty) * 1.05


_panels: dict[str, Panel] = {}


def _large_panel(factory: pytest.TempPathFactory) -> Panel:
    """64 MiB and some."""
    if "large" not in _panels:
        rng = np.random.default_rng(0)
        dates, assets = (axis.ravel() for axis in np.indices((40, 1000)))
        columns: dict[str, Any] = {
            "date": np.datetime64("2020-01-01") + dates,
            "code": pa.array([f"A{asset:04d}" for asset in range(1000)]).take(pa.array(assets)),
        }
        names = [f"f{j}" for j in range(420)]
        columns |= {name: rng.random(len(dates), np.float32) for name in names}
        _panels["large"] = Panel.build(pa.table(columns), factory.mktemp("large"), features=names)
    return _panels["large"]


def make_small(factory: pytest.TempPathFactory) -> Panel:
    return Panel.build(generate_table(20, 4, missing=0), factory.mktemp("small"), features=["f0"])


class _FakeCuda:
    """Stands in for torch with a device: what is locked, and copies that are done when ``is_done`` says so."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.is_done = True
        self.cuda = self

    def is_available(self) -> bool:
        return True

    def cudart(self) -> _FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)

    def Event(self) -> _FakeCuda:
        return self

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pinned_slot_is_not_filled_while_a_device_reads_it(
    panel: Panel, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    fake = _FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", fake)
    with Loader(panel, range(4, 16), lookback=3, target="ret", num_workers=num_workers, pin_memory=True) as loader:
        fake.is_done = False
        places = []
        for batch in loader:
            assert batch.windows.ctypes.data in fake.locked
            places.append(batch.windows.ctypes.data)
        busy = set(places)
        assert len(busy) > (1 if num_workers == 0 else 4)
        fake.is_done = True
        places = [batch.windows.ctypes.data for batch in loader]
        assert set(places) <= fake.locked
        del batch
    del loader
    assert not fake.locked


def test_a_pool_holds_in_a_busy_parent_and_survives_its_forks(panel: Panel) -> None:
    stop = threading.Event()
    expected = windows(make(panel, None))

    def busy() -> None:
        while not stop.is_set():
            np.random.default_rng().random(1000).sort()

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with WorkerPool(2) as pool:
            loader = make(panel, pool)
            iterator = iter(loader)
            found = [next(iterator).windows.tobytes()]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 on warns of a fork beside threads, and rightly
                child = os.fork()
            if child == 0:
                pool.close()
                os._exit(0)
            os.waitpid(child, 0)
            assert found + [batch.windows.tobytes() for batch in iterator] == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_server_that_cannot_start_is_named(panel: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerPool(2) as pool, pytest.raises(JobFailedError, match="the workers' fork server ended with exit code 7"):
        windows(make(panel, pool))


def test_a_program_ends_by_itself_with_a_pool_that_is_not_closed(panel: Panel) -> None:
    program = """
import sys
from memfit.data import Loader, Panel
loader = Loader(Panel.open(sys.argv[1]), range(4, 16), lookback=3, target="ret", num_workers=1)
batch = next(iter(loader))
print(*loader.worker_pids())
"""
    command = [sys.executable, "-c", program, str(panel.path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert child.stderr == ""
    assert not is_alive(int(child.stdout))


def test_a_loader_may_live_in_a_thread_that_ends(panel: Panel) -> None:
    expected = windows(make(panel, None))
    with WorkerPool(1, start_method="spawn") as pool:
        loader = make(panel, pool)
        found: list[bytes] = []
        thread = threading.Thread(
            target=lambda: found.extend(batch.windows.tobytes() for batch in itertools.islice(loader, 3))
        )
        thread.start()
        thread.join()
        assert found + windows(loader) == expected


@pytest.mark.parametrize(
    "changes", [{"num_workers": 0}, {"prefetch": 0}, {"start_timeout": 0}, {"start_method": "fork"}]
)
def test_a_pool_refuses_what_cannot_work(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="at least one worker"):
        WorkerPool(**{"num_workers": 1, **changes})
