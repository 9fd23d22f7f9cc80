"""How loaders are measured, what is said of them, and which number of workers is chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memfit.data import DateBatches, LoaderReport, MeasuredLoader, Pace, Panel, measure_loader, pack
from memfit.data import _measure as measuring
from memfit.errors import DataError, DoesNotFitError, UsageError


def report(
    num_workers: int, *, load: float, wait: float | None = None, compute: float = 1.0, private: int = 0
) -> LoaderReport:
    """A report of 100 batches: seconds that each took to load alone; beside a trainer, to wait for and to train on."""
    trained = None if wait is None else Pace(100, 3200, 0, wait_seconds=100 * wait, compute_seconds=100 * compute)
    return LoaderReport(num_workers, 0.1, Pace(100, 3200, 0, 100 * load), None, trained, private)


def test_a_loader_faster_than_its_trainer_is_enough_and_the_sentence_says_so() -> None:
    found = MeasuredLoader([report(2, load=0.0001, wait=0.0002, compute=0.05)])
    assert found.text == (
        "2 workers are enough: a batch every 0.1 ms, a step takes 50.0 ms; the trainer waits 0.4 % of its time"
    )


def test_a_loader_slower_than_its_trainer_is_the_bottleneck() -> None:
    found = MeasuredLoader([report(1, load=0.08, wait=0.03, compute=0.05)])
    assert found.text == (
        "the loader is the bottleneck: with 1 worker a batch every 80.0 ms, a step takes 50.0 ms; "
        "the trainer waits 37.5 % of its time (2 % at most)"
    )


@pytest.mark.parametrize(("wait", "is_enough"), [(0.02, True), (0.0201, False)])
def test_a_trainer_may_wait_two_per_cent_of_its_time(wait: float, is_enough: bool) -> None:
    assert ("enough" in MeasuredLoader([report(0, load=0.1, wait=wait, compute=0.98)]).text) is is_enough


WAITS = [(0, 0.3, 0), (1, 0.1, 100), (2, 0.015, 200), (4, 0.001, 400)]


@pytest.mark.parametrize(("budget", "chosen"), [(None, 2), (200, 2), (199, 1), (0, 0)])
def test_the_fewest_workers_are_chosen_that_keep_the_trainer_from_waiting_within_the_budget(
    budget: int | None, chosen: int
) -> None:
    reports = [report(number, load=0.1, wait=wait, compute=1 - wait, private=size) for number, wait, size in WAITS]
    assert MeasuredLoader(reports[::-1], budget).best.num_workers == chosen


def test_without_a_trainer_the_fewest_workers_near_the_best_rate_are_chosen() -> None:
    found = MeasuredLoader([report(n, load=load) for n, load in [(0, 0.1), (1, 0.0104), (2, 0.01), (4, 0.02)]])
    assert found.best.num_workers == 1
    assert "no trainer was measured" in found.text


def test_when_no_count_fits_the_budget_the_refusal_names_what_the_smallest_takes() -> None:
    with pytest.raises(DoesNotFitError, match=r"2 workers took 2\.0 MiB"):
        _ = MeasuredLoader([report(2, load=0.1, private=2 << 20)], budget_bytes=1 << 20).best


class Clock:
    """A clock that only its users advance, in the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(measuring, "time", found)
    return found


class Timed:
    """A loader of three batches of 8 samples and 48 bytes each, of which each takes so long."""

    def __init__(self, clock: Clock, load: float) -> None:
        self.clock, self.load = clock, load
        self.epochs: list[int] = []
        self.closed = False

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            self.clock.now += self.load
            yield {"x": np.zeros((8, 2), np.int16), "y": np.zeros(8, np.float16)}

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_waiting_and_computing_are_told_apart_to_the_second(clock: Clock) -> None:
    loaders: list[Timed] = []

    def make(num_workers: int) -> Timed:
        loaders.append(Timed(clock, load=1.0))
        return loaders[-1]

    measured = measure_loader(make, num_workers=[0], seconds=40.0, consume=lambda batch: clock.sleep(9.0))
    (found,) = measured.reports
    assert found.start_seconds == 1.0
    assert found.warm == Pace(40, 320, 1920, wait_seconds=40.0)
    assert found.trained == Pace(4, 32, 192, wait_seconds=4.0, compute_seconds=36.0)
    assert found.trained.wait_share == 0.1
    assert "bottleneck" in measured.text
    assert (found.warm.per_second(found.warm.num_batches), found.cold) == (1.0, None)
    assert loaders[-1].epochs == [*range(1, 15), 1, 2]
    assert all(loader.closed for loader in loaders)


@pytest.mark.slow
def test_a_trainer_given_by_its_step_sleeps_the_rest_of_it(clock: Clock) -> None:
    measured = measure_loader(lambda number: Timed(clock, 0.01), num_workers=[0], seconds=5.0, consume=0.99)
    (found,) = measured.reports
    assert found.trained is not None
    assert found.trained.compute_seconds / found.trained.num_batches == pytest.approx(0.99)
    assert found.trained.wait_share == pytest.approx(0.01)
    assert "enough" in measured.text


@pytest.mark.parametrize("more", [{"num_workers": []}, {"num_workers": [-1]}, {"seconds": 0.0}, {"consume": -1.0}])
def test_what_cannot_be_measured_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        measure_loader(lambda number: [np.zeros(1)], **more)


@pytest.mark.slow
def test_a_loader_without_batches_and_one_that_is_used_up_are_refused() -> None:
    with pytest.raises(DataError, match="epoch 1"):
        measure_loader(lambda number: [], num_workers=[0], seconds=0.01)
    with pytest.raises(DataError, match="epoch 2"):
        measure_loader(lambda number: iter([np.zeros(2), np.zeros(2)]), num_workers=[0], seconds=0.01)


@pytest.fixture
def panel(make_table: Callable[..., pa.Table], tmp_path: Path) -> Panel:
    return Panel.build(make_table(60, 500, 16, missing=0), tmp_path, features=["f0", "f1"], targets=["ret"])


on_disk = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux's page cache")


@pytest.mark.slow
@on_disk
def test_a_panel_is_measured_cold_and_warm_and_every_byte_handed_out_is_counted(panel: Panel) -> None:
    dates = range(20, 60)
    measured = measure_loader(
        lambda number: DateBatches(panel, dates, lookback=5, target="ret"), num_workers=[0], seconds=0.05
    )
    (found,) = measured.reports
    assert found.cold is not None
    assert found.cold.num_batches <= len(dates) - 1
    one = next(iter(DateBatches(panel, dates, lookback=5, target="ret")))
    assert one.windows.nbytes > 0
    size = measuring.size_of(one)
    assert size == (
        len(one.asset_indices),
        one.windows.nbytes + one.targets.nbytes + one.asset_indices.nbytes,
    )


@on_disk
def test_pages_are_dropped_though_the_loader_maps_them(panel: Panel, tmp_path: Path) -> None:
    packed = pack([np.zeros(1 << 18)] * 2, tmp_path / "packed")
    float(packed[1].sum()), float(np.nansum(panel.values))

    def mapped_bytes() -> int:
        """What of these files is in this process's page tables."""
        text, total, counts = Path("/proc/self/smaps").read_text().splitlines(), 0, False
        for line in text:
            if "-" in line.split()[0]:
                counts = str(tmp_path) in line and line.endswith(("values.npy", "data.bin"))
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
        return total

    before = mapped_bytes()
    measuring._drop_pages(SimpleNamespace(panel=panel, packed=packed), [])
    assert mapped_bytes() == 0 < before


class Counted:
    """Items that note in a file that they were made."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)
        return np.full(4, index, np.int64)


class Logged:
    """A PyTorch loader over ``Counted`` whose log begins anew with each epoch."""

    def __init__(self, log: Path, num_workers: int) -> None:
        torch = pytest.importorskip("torch")
        self.log = log
        more = {"prefetch_factor": 2, "multiprocessing_context": "fork"} if num_workers else {}
        self.batches = torch.utils.data.DataLoader(
            Counted(log), batch_size=2, collate_fn=np.stack, num_workers=num_workers, **more
        )

    def set_epoch(self, epoch: int) -> None:
        self.log.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.slow
def test_beside_a_slow_trainer_a_pytorch_loader_stays_within_its_queue_and_its_workers_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.3)  # how long it waits for a worker's end
    log = tmp_path / "made"
    ahead: list[int] = []

    def slow(batch: Any) -> None:
        ahead.append(log.stat().st_size - int(batch[-1, 0]) - 1)
        time.sleep(0.005)

    measured = measure_loader(lambda number: Logged(log, number), num_workers=[0, 2], seconds=0.1, consume=slow)
    alone, two = measured.reports
    assert alone.worker_private_bytes == 0 < two.worker_private_bytes
    assert 0 <= max(ahead) <= 2 * 2 * 2, "two workers with two batches each of two items"
    assert alone.warm.num_samples == 2 * alone.warm.num_batches
    assert alone.warm.num_bytes == 32 * alone.warm.num_samples


def test_the_files_of_a_pytorch_loader_are_those_of_its_data_sets_panel(panel: Panel) -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(DateBatches(panel, [30], lookback=5, target="ret"), batch_size=None)
    assert {path.name for path in measuring.files_of(loader)} >= {"values.npy", "history.npy"}
    assert measuring.files_of([1, 2]) == []


def test_tensors_are_sized_and_read_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    batch = (torch.ones(4, 3, dtype=torch.bfloat16), [torch.zeros(4), "ab"], torch.ones(6, 4).t(), torch.empty(0))
    assert measuring.size_of(batch) == (4, 24 + 16 + 2 + 96)
    measured = measure_loader(
        lambda number: [batch, np.array([None]), np.zeros((4, 6))[::2]], num_workers=[0], seconds=0.01
    )
    assert measured.reports[0].warm.num_samples > 0
