"""Day windows by memfit's loader, beside PyTorch's DataLoader over pandas, polars, HF datasets and LitData.

    python benchmarks/loaders.py [--gib 1] [--seconds 8] [--directory DIR] [--num-workers 0,1,2] [--json FILE]

Everything is measured in this one run, on a generated panel of 4484 assets x 112 float32 features with listings and
delistings and look-back 20, each contestant in a process of its own. The batches of all are the same: digests of the
first ones are compared. *Cold* is from nothing to the 8th batch, opening included, its files dropped from the page
cache; what share was still there is measured by mincore and printed. *Warm* are quarters of a second, and between any
two of them some of np.copyto of as many bytes out of the panel, so that a busy spell of the machine meets both. The
time of a batch, copied or loaded, holds one read of every byte handed out, by the one thread that asks for it.

"of memcpy" is the median of the ratios to as many threads that copy at once as there are workers, one without any;
"of one" is that to one thread. "by CPU" is the ratio of bytes per second of CPU time, all processes and threads
together, to one thread's: what a busy machine changes least, and what workers cannot make better.

Then eight workers under spawn and forkserver, with batches of 256 windows: their PSS against the data plus eight empty
workers, the start beyond that of empty ones, and what is left in /dev/shm after the group is killed.

Peers that are not installed are named and left out: pip install 'memfit[bench]', and then pip uninstall torchvision,
which LitData pulls in and does not need. Exit status: 0 all targets met, 1 one missed, or batches differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
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
import pyarrow as pa

import loader_peers
from loader_peers import LOOKBACK, NUM_FEATURES
from memfit.data import Loader, Panel, WorkerPool
from memfit.data._measure import _read as read_every_byte
from memfit.data._pages import cached_share, drop_pages, warm_pages
from memfit.memory import ProcReader
from memfit.units import GIB, format_bytes

NUM_ASSETS = 4484
NUM_COMPARED, NUM_COLD = 4, 8
SEGMENT_SECONDS = 0.25
PSS_BATCH = 256
LEAST_TIMES_BEST_PEER, LEAST_OF_MEMCPY = 10.0, 0.8
MOST_PSS, MOST_START_PER_GIB = 1.05, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the panel's values in GiB (default: 1)")
    parser.add_argument("--assets", type=int, default=NUM_ASSETS, help=f"assets (default: {NUM_ASSETS})")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each warm measurement (default: 8)")
    parser.add_argument("--num-workers", default="0,1,2", help="worker counts of every contestant (default: 0,1,2)")
    parser.add_argument("--pss-workers", type=int, default=8, help="workers whose PSS is measured (default: 8)")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(**json.loads(options.child))
    with tempfile.TemporaryDirectory(prefix="memfit-loaders-", dir=options.directory) as name:
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
    figures: dict[str, Any] = {"pace": rows, "workers": {}}
    for method in ("spawn", "forkserver"):
        found = figures["workers"][method] = in_child(folder, "workers", method=method, number=options.pss_workers)
        met += judge_workers(method, found, panel)
        left = killed_group_leaves(folder, method)
        met.append(told(not left, f"{method}: nothing in /dev/shm after the group was killed {left or ''}"))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
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


def judge_workers(method: str, found: dict[str, Any], panel: Panel) -> list[bool]:
    number = found["number"]
    allowed = MOST_PSS * (panel.nbytes + found["empty_bytes"])
    start, gib = found["full_start_seconds"], panel.nbytes / GIB
    more = start - found["empty_start_seconds"]
    return [
        told(
            found["full_bytes"] <= allowed,
            f"{method}: {number} workers take {format_bytes(found['full_bytes'])} of PSS, "
            f"{format_bytes(found['full_slot_bytes'])} of it batches made ahead; data {format_bytes(panel.nbytes)} "
            f"+ {number} empty workers of {format_bytes(found['empty_bytes'] // number)} + 5 % are "
            f"{format_bytes(int(allowed))}",
        ),
        told(
            more <= MOST_START_PER_GIB * gib,
            f"{method}: {number} workers give their first batch after {start:.2f} s, {more / gib:+.2f} s "
            f"per GiB ({MOST_START_PER_GIB:g}) beyond the {found['empty_start_seconds']:.2f} s of empty ones",
        ),
    ]


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
    work = {"data": loader_peers.write_data, "write": write_files, "pace": pace, "workers": workers, "hang": hang}[what]
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


def bytes_per_second(batches: Iterator[Any]) -> tuple[float, int]:
    """Over a quarter of a second or two batches, whichever takes longer, and the bytes; each of them is read."""
    num_batches = num_bytes = 0
    start = now = time.perf_counter()
    while now - start < SEGMENT_SECONDS or num_batches < 2:
        arrays = arrays_of(next(batches))
        read_every_byte(arrays)
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


def workers(folder: Path, method: Any, number: int = 8) -> dict[str, float]:
    """The PSS of workers that have read the whole panel, and of as many beside a panel of next to nothing."""
    codes = [f"{code:02d}" for code in range(4 * number)]  # batches for every worker in each epoch
    source = pa.table({"date": ["2024-01-01"] * len(codes), "code": codes, "f": [1.0] * len(codes)})
    source = source.append_column("ret", source["f"])
    tiny = Panel.build(source, folder / "empty", features=["f"], targets=["ret"])
    dates, found = np.load(folder / "dates.npy"), {}
    for kind in ("empty", "full"):
        pool = WorkerPool(number, start_method=method)
        start = time.perf_counter()
        if kind == "empty":
            loader = Loader(tiny, [0], lookback=1, target="ret", batch=1, pool=pool)
        else:
            loader = Loader(open_panel(folder), dates, lookback=LOOKBACK, target="ret", batch=PSS_BATCH, pool=pool)
        batches = endless(loader)
        read_every_byte(next(batches))
        found[f"{kind}_start_seconds"] = time.perf_counter() - start
        for _ in range(max(len(loader), 4 * number)):
            next(batches)
        rollups = [ProcReader().rollup(pid) for pid in loader.worker_pids()]
        assert len(rollups) == number
        found[f"{kind}_bytes"] = sum(rollup.pss for rollup in rollups if rollup is not None)
        found[f"{kind}_slot_bytes"] = sum(rollup.shared_memory for rollup in rollups if rollup is not None)
        batches.close()
        pool.close()
    return {**found, "number": number}


def hang(folder: Path, method: Any) -> dict[str, Any]:
    """Deliver a batch, say so, and go on for ever: to be killed."""
    dates, pool = np.load(folder / "dates.npy"), WorkerPool(2, start_method=method)
    batches = endless(Loader(open_panel(folder), dates, lookback=LOOKBACK, target="ret", pool=pool))
    next(batches)
    print("running", flush=True)
    for _ in batches:
        time.sleep(0.01)
    return {}


def killed_group_leaves(folder: Path, method: str) -> list[str]:
    """What is new in /dev/shm after a process group with a loader was killed."""
    shm = Path("/dev/shm")
    before = {path.name for path in shm.iterdir()}
    order = json.dumps({"what": "hang", "folder": str(folder), "method": method})
    command = [sys.executable, __file__, "--child", order]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        os.killpg(process.pid, signal.SIGKILL)
    assert line.strip() == "running", f"a loader under {method} gave no batch"
    new = {path.name for path in shm.iterdir()} - before
    time.sleep(1.0)
    used = "".join(text_of(path) for path in Path("/proc").glob("[0-9]*/maps"))  # other programs come and go here too
    return sorted(name for name in new if (shm / name).exists() and f"/dev/shm/{name}" not in used)


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # ended meanwhile
        return ""


if __name__ == "__main__":
    sys.exit(main())
