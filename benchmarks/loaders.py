"""Day windows by memfit's loader, beside PyTorch's DataLoader over pandas, polars, HF datasets and LitData.

    python benchmarks/loaders.py [--gib 1] [--seconds 8] [--directory DIR] [--num-workers 0,1,2] [--json FILE]
    python benchmarks/loaders.py --ahead [--seconds 8]

``--ahead`` compares memfit with itself: no batches ahead and two, at 1 to 70 MiB a batch, beside np.copyto of as
many bytes and beside one line of numpy, in turns of a quarter of a second in one process. Every byte of a batch is read
once, by the thread that asks for it. A *step* is a sleep of as long as a batch takes: a device that computes; *compute*
is a step on the CPU instead, products of matrices in one thread. The ratios are medians over the turns. Exit status 1:
a target is missed.

Without it, everything is measured in this one run, on a generated panel of 4484 assets x 112 float32 features with
listings and delistings and look-back 20, each contestant in a process of its own. The batches of all are the same:
digests of the first ones are compared. *Cold* is from nothing to the 8th batch, opening included, its files dropped
from the page cache; what share was still there is measured by mincore and printed. *Warm* are quarters of a second, and
between any two of them some of np.copyto of as many bytes out of the panel, so that a busy spell of the machine meets
both. The time of a batch, copied or loaded, holds one read of every byte handed out, by the thread that asks for it.

"of memcpy" is the median of the ratios to as many threads that copy at once as there are workers, one without any;
"of one" is that to one thread. "by CPU" is the ratio of bytes per second of CPU time, all processes and threads
together, to one thread's: what a busy machine changes least. memfit's workers are threads, the peers' processes.

Peers that are not installed are named and left out: pip install 'memfit[bench]', and then pip uninstall torchvision,
which LitData pulls in and does not need. Exit status: 0 all targets met, 1 one missed, or batches differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

import loader_peers
from loader_peers import LOOKBACK, NUM_FEATURES
from memfit.data import Loader, Panel
from memfit.units import GIB, MIB
from pages import cached_share, drop_pages, warm_pages

NUM_ASSETS = 4484
NUM_COMPARED, NUM_COLD = 4, 8
SEGMENT_SECONDS = 0.25
LEAST_TIMES_BEST_PEER, LEAST_OF_MEMCPY = 10.0, 0.8
AHEAD_MIB, AHEAD_PANEL_BYTES = (1, 2, 5, 20, 70), 256 * MIB
MATRIX = np.ones((64, 64), np.float32)
LEAST_OF_NUMPY, LEAST_OF_NONE_AHEAD = 1.0, 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the panel's values in GiB (default: 1)")
    parser.add_argument("--assets", type=int, default=NUM_ASSETS, help=f"assets (default: {NUM_ASSETS})")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each warm measurement (default: 8)")
    parser.add_argument("--num-workers", default="0,1,2", help="worker counts of every contestant (default: 0,1,2)")
    parser.add_argument("--ahead", action="store_true", help="compare memfit with itself: none ahead and two")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(**json.loads(options.child))
    with tempfile.TemporaryDirectory(prefix="memfit-loaders-", dir=options.directory) as name:
        if options.ahead:
            return 0 if compare_ahead(Path(name), options) else 1
        return benchmark(Path(name), options)


def benchmark(folder: Path, options: argparse.Namespace) -> int:
    num_dates = max(3 * LOOKBACK, round(options.gib * GIB / (options.assets * NUM_FEATURES * 4)))
    in_child(folder, "data", num_dates=num_dates, num_assets=options.assets)
    panel = open_panel(folder)  # never read here: pages that a process maps cannot be dropped
    print(f"{panel}, look-back {LOOKBACK}, {len(os.sched_getaffinity(0))} cores")
    names = ["memfit", *peers_here(folder)]
    counts = [int(count) for count in options.num_workers.split(",")]
    print(f"\n{'':12}{'workers':>8}{'open s':>8}{'cold GB/s':>11}{'cached':>8}{'warm GB/s':>11}{'memcpy GB/s':>13}"
          f"{'of memcpy':>11}{'of one':>8}{'by CPU':>8}{'batches/s':>11}")  # fmt: skip
    rows = []
    for name in names:
        for count in counts:
            row = in_child(folder, "pace", name=name, num_workers=count, seconds=options.seconds)
            rows.append(row)
            print(f"{name:12}{count:8}{row['open_seconds']:8.2f}{row['cold_rate']:11.3f}{row['cached_share']:8.0%}"
                  f"{row['warm_rate']:11.3f}{row['memcpy_rate']:13.2f}{row['of_memcpy']:11.1%}{row['of_one']:8.1%}"
                  f"{row['of_one_by_cpu']:8.1%}{row['batches_per_second']:11.1f}", flush=True)  # fmt: skip
    print()
    is_same = len({row["digest"] for row in rows}) == 1
    met = [told(is_same, "batches are the same for all"), compare(rows)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(met) else 1


def told(holds: bool, text: str) -> bool:
    print(f"{'met   ' if holds else 'MISSED'} {text}", flush=True)
    return holds


def compare(rows: Sequence[dict[str, Any]]) -> bool:
    """memfit beside memcpy by as many threads and beside the best peer, each with its best count of workers."""
    memfit = [row for row in rows if row["name"] == "memfit"]
    ours = max(memfit, key=lambda row: row["of_memcpy"])
    best = max((row for row in rows if row["name"] != "memfit"), key=lambda row: row["of_one"], default=None)
    text = f"{ours['num_workers']} workers deliver {ours['of_memcpy']:.2f} of memcpy ({LEAST_OF_MEMCPY})"
    times = 0.0
    if best is not None:
        times = max(row["of_one"] for row in memfit) / best["of_one"]
        text += f"; {times:.1f} x the best peer, {best['name']} ({LEAST_TIMES_BEST_PEER:g} x); one of both is enough"
    return told(times >= LEAST_TIMES_BEST_PEER or ours["of_memcpy"] >= LEAST_OF_MEMCPY, f"warm: {text}")


class ChildFailedError(Exception):
    """A child's exit status and last words."""


def in_child(folder: Path, what: str, **arguments: Any) -> dict[str, Any]:
    """What a child found, the last line that it wrote."""
    order = json.dumps({"what": what, "folder": str(folder), **arguments})
    done = subprocess.run([sys.executable, __file__, "--child", order], capture_output=True, text=True)
    if done.returncode != 0:
        raise ChildFailedError(f"{what} {arguments} ended with {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(what: str, folder: str, **arguments: Any) -> int:
    work = {"data": loader_peers.write_data, "write": write_files, "pace": pace, "ahead": ahead}[what]
    print(json.dumps(work(Path(folder), **arguments)))  # type: ignore[operator]
    return 0


def peers_here(folder: Path) -> list[str]:
    """The peers that are installed, their files written."""
    found = []
    for name, (package, _, write, _) in loader_peers.PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed, left out")
            continue
        try:
            seconds = 0.0 if write is None else in_child(folder, "write", name=name)["seconds"]
        except ChildFailedError as error:
            print(f"{name}: left out, its files cannot be written: {error}")
            continue
        if write is not None:
            print(f"{name}: its files written in {seconds:.1f} s")
        found.append(name)
    return found


def write_files(folder: Path, name: str) -> dict[str, float]:
    write = loader_peers.PEERS[name][2]
    assert write is not None
    start = time.perf_counter()
    write(folder)
    return {"seconds": time.perf_counter() - start}


def make(folder: Path, name: str, num_workers: int) -> Iterable[Any]:
    dates = np.load(folder / "dates.npy")
    if name != "memfit":
        return loader_peers.make_peer(name, folder, dates.tolist(), num_workers)  # type: ignore[no-any-return]
    return Loader(open_panel(folder), dates, lookback=LOOKBACK, target="ret", num_workers=num_workers)


def open_panel(folder: Path) -> Panel:
    return Panel.open(next((folder / "panels").glob("*/manifest.json")).parent)


def files_of(folder: Path, name: str) -> list[Path]:
    part = {"memfit": "panels", "HF datasets": "datasets", "LitData": "litdata"}.get(name, "source.parquet")
    path = folder / part
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def arrays_of(batch: Any) -> tuple[npt.NDArray[np.float32], ...]:
    if isinstance(batch, np.ndarray):
        return (batch,)
    if isinstance(batch, dict):
        return batch["windows"].numpy(), batch["targets"].numpy()
    return np.asarray(batch.windows), np.asarray(batch.targets)


def read_every_byte(arrays: Iterable[npt.NDArray[Any]]) -> None:
    for array in arrays:
        np.maximum.reduce(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def pace(folder: Path, name: str, num_workers: int, seconds: float) -> dict[str, Any]:
    """One contestant, cold and then warm, every byte of each batch read."""
    files = files_of(folder, name)
    os.sync()  # what is not yet written cannot be dropped
    drop_pages(files)
    share = cached_share(files)
    start = time.perf_counter()
    batches = iter(endless(make(folder, name, num_workers)))
    digest = hashlib.sha256()
    cold_bytes, cold_seconds, open_seconds = 0, 0.0, 0.0
    for number in range(NUM_COLD):
        arrays = arrays_of(next(batches))
        read_every_byte(arrays)
        now = time.perf_counter()
        cold_seconds += now - start
        open_seconds = open_seconds or now - start
        cold_bytes += sum(array.nbytes for array in arrays)
        for array in arrays if number < NUM_COMPARED else ():
            digest.update(array.tobytes())
        start = time.perf_counter()
    warm_pages(files, most_seconds=60)
    values = open_panel(folder).values
    memcpy, one = (iter(loader_peers.Memcpy(values, num_threads)) for num_threads in (max(1, num_workers), 1))
    turns = Turns(batches, memcpy, one, num_workers)
    rates = turns.run(seconds)
    batch_bytes = sum(array.nbytes for array in arrays)
    return {
        "name": name,
        "num_workers": num_workers,
        "open_seconds": open_seconds,
        "cold_rate": cold_bytes / cold_seconds / 1e9,
        "cached_share": share,
        "warm_rate": statistics.median(rate for rate, _, _ in rates) / 1e9,
        "memcpy_rate": statistics.median(memcpy for _, memcpy, _ in rates) / 1e9,
        "of_memcpy": statistics.median(rate / memcpy for rate, memcpy, _ in rates),
        "of_one": statistics.median(rate / one for rate, _, one in rates),
        "of_one_by_cpu": turns.loader.rate / turns.one.rate,
        "batches_per_second": statistics.median(rate for rate, _, _ in rates) / batch_bytes,
        "digest": digest.hexdigest(),
    }


class Spent:
    """Bytes, and the CPU time that they took, of this process and of what it had started by then."""

    def __init__(self) -> None:
        here = psutil.Process()
        self.processes = [here, *here.children(recursive=True)]
        self.num_bytes, self.seconds = 0, 0.0

    def cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


class Turns:
    """A loader, memcpy by as many threads and memcpy by one, in turns."""

    def __init__(self, batches: Iterator[Any], memcpy: Iterator[Any], one: Iterator[Any], num_workers: int) -> None:
        self.batches, self.memcpy, self.single = batches, memcpy, one
        self.num_workers = num_workers
        self.loader, self.one = Spent(), Spent()

    def run(self, seconds: float) -> list[tuple[float, float, float]]:
        """Bytes per second of the loader, and of both memcpys before and after it, several times."""
        end, found = time.perf_counter() + seconds, list[tuple[float, float, float]]()
        self.copies()  # maps the pages of the panel
        before = self.copies()
        while time.perf_counter() < end or len(found) < 3:
            start = self.loader.cpu_seconds()
            ahead = sum(a.nbytes for _ in range(2 * self.num_workers + 2) for a in arrays_of(next(self.batches)))
            rate, num_bytes = bytes_per_second(self.batches)  # what had been made ahead is not counted
            if self.num_workers:
                time.sleep(1.2 * ahead / rate)  # until the workers have made ahead what they may, and rest
            self.loader.seconds += self.loader.cpu_seconds() - start
            self.loader.num_bytes += ahead + num_bytes
            after = self.copies()
            found.append((rate, (before[0] + after[0]) / 2, (before[1] + after[1]) / 2))
            before = after
        return found

    def copies(self) -> tuple[float, float]:
        start = self.one.cpu_seconds()
        one, num_bytes = bytes_per_second(self.single)
        self.one.seconds += self.one.cpu_seconds() - start
        self.one.num_bytes += num_bytes
        return (bytes_per_second(self.memcpy)[0] if self.num_workers > 1 else one), one


def seconds_of_product() -> float:
    """Of one product of two small matrices, the median of many."""
    times = []
    for _ in range(500):
        start = time.perf_counter()
        MATRIX @ MATRIX
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bytes_per_second(batches: Iterator[Any], step_seconds: float = 0.0, num_products: int = 0) -> tuple[float, int]:
    """Over a quarter of a second or two batches, whichever takes longer, and the bytes; each of them is read."""
    num_batches = num_bytes = 0
    start = now = time.perf_counter()
    while now - start < SEGMENT_SECONDS or num_batches < 2:
        arrays = arrays_of(next(batches))
        read_every_byte(arrays)
        if step_seconds:
            time.sleep(step_seconds)
        for _ in range(num_products):
            MATRIX @ MATRIX
        num_batches, num_bytes = num_batches + 1, num_bytes + sum(array.nbytes for array in arrays)
        now = time.perf_counter()
    return num_bytes / (now - start), num_bytes


def endless(loader: Any) -> Generator[Any, None, None]:
    epoch = 1
    while True:
        if (set_epoch := getattr(loader, "set_epoch", None)) is not None:
            set_epoch(epoch)
        yield from loader
        epoch += 1


def ahead(folder: Path, mib: float, seconds: float) -> dict[str, Any]:
    """memfit without and with batches ahead, memcpy and a line of numpy, in turns: bytes per second of each turn."""
    num_assets = round(mib * MIB / (LOOKBACK * NUM_FEATURES * 4))
    num_dates = max(2 * LOOKBACK, round(AHEAD_PANEL_BYTES / (num_assets * NUM_FEATURES * 4)))
    loader_peers.write_data(folder, num_dates, num_assets, listed_all=True)
    panel, dates = open_panel(folder), np.load(folder / "dates.npy")

    def line() -> Iterator[npt.NDArray[np.float32]]:
        for date in itertools.cycle(np.random.default_rng(0).permutation(dates)):  # as in a training
            yield np.ascontiguousarray(panel.values[date + 1 - LOOKBACK : date + 1].transpose(1, 0, 2))

    def loader(num_workers: int) -> Iterator[Any]:
        made = Loader(panel, dates, lookback=LOOKBACK, target=None, shuffle=0, num_workers=num_workers)
        return (batch.windows for batch in endless(made))

    batches = {"memcpy": iter(loader_peers.Memcpy(panel.values, 1)), "numpy": line(), "0": loader(0), "2": loader(2)}
    # What a loader made ahead in one way of asking is not counted in another: each has its own.
    beside = {(name, way): loader(int(name)) for name in ("0", "2") for way in ("step", "products")}
    rates: dict[str, list[float]] = {}
    sleep, product = 0.0, seconds_of_product()
    end = time.perf_counter() + 2 * seconds
    for turn in itertools.count():
        for name, made in batches.items():
            for _ in range(4):  # what had been made ahead is not counted
                read_every_byte(next(made))
            rates.setdefault(name, []).append(bytes_per_second(made)[0])
        sleep = mib * MIB / statistics.median(rates["0"])
        for name in ("0", "2"):
            rates.setdefault(f"{name} beside a step", []).append(bytes_per_second(beside[name, "step"], sleep)[0])
            rates.setdefault(f"{name} beside products", []).append(
                bytes_per_second(beside[name, "products"], num_products=round(sleep / product))[0]
            )
        if turn and time.perf_counter() > end:
            break
    ratios = {
        "of memcpy, 0": ("0", "memcpy"),
        "of memcpy, 2": ("2", "memcpy"),
        "of numpy, 0": ("0", "numpy"),
        "2 to 0": ("2", "0"),
        "2 to 0, beside a step": ("2 beside a step", "0 beside a step"),
        "2 to 0, beside products": ("2 beside products", "0 beside products"),
    }
    found = {
        text: statistics.median(x / y for x, y in zip(rates[one], rates[other], strict=True))
        for text, (one, other) in ratios.items()
    }
    return {"mib": mib, "turns": len(rates["0"]), "memcpy": statistics.median(rates["memcpy"]), **found}


def compare_ahead(folder: Path, options: argparse.Namespace) -> bool:
    print(f"{'MiB':>5}{'turns':>7}{'memcpy GB/s':>13}{'0 of memcpy':>13}{'2 of memcpy':>13}{'0 of numpy':>12}"
          f"{'2 to 0':>8}{'with a step':>13}{'with compute':>14}")  # fmt: skip
    met = []
    for mib in AHEAD_MIB:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            row = in_child(Path(name), "ahead", mib=mib, seconds=options.seconds)
        ratios = [row[text] for text in list(row)[3:]]
        print(f"{mib:5g}{row['turns']:7}{row['memcpy'] / 1e9:13.2f}{ratios[0]:13.2f}{ratios[1]:13.2f}{ratios[2]:12.2f}"
              f"{ratios[3]:8.2f}{ratios[4]:13.2f}{ratios[5]:14.2f}", flush=True)  # fmt: skip
        met += [ratios[2] >= LEAST_OF_NUMPY, min(ratios[3:]) >= LEAST_OF_NONE_AHEAD]
    return told(all(met), f"as fast as a line of numpy ({LEAST_OF_NUMPY:g}), and two ahead as none "
                f"({LEAST_OF_NONE_AHEAD:g}: 5 % of noise)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
