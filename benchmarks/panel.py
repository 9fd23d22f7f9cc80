"""How fast a panel is built, mapped and read, cold and warm, beside reading the Parquet file again.

    python benchmarks/panel.py [--gib 1] [--directory DIR]

Everything is measured in this one run, on a generated panel, and set against this machine's memory bandwidth (one
``np.copyto`` between two warm buffers, bytes copied per second). Mapping a file moves no bytes, so the time to map is
given in milliseconds and never as a rate; reading counts every byte, copied out of the map. *Cold* means that the
kernel was told to drop the file from its page cache; what share was still there is measured and printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memfit.data import DateBatches, Panel
from memfit.units import GIB, format_bytes

NUM_ASSETS, NUM_FEATURES, LOOKBACK, NUM_ROWS_DRAWN = 4096, 32, 20, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the panel's values in GiB")
    parser.add_argument("--directory", type=Path, default=None, help="where to write, default: the temporary folder")
    options = parser.parse_args()
    num_dates = max(2 * LOOKBACK, round(options.gib * GIB / (NUM_ASSETS * NUM_FEATURES * 4)))
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        bandwidth = memory_bandwidth()
        print(f"memory bandwidth (np.copyto, one thread): {bandwidth:.2f} GB/s = 100 %\n")
        source = Path(folder) / "source.parquet"
        write_source(source, num_dates)
        features = [f"f{j}" for j in range(NUM_FEATURES)]
        seconds, panel = timed(lambda: Panel.build(source, Path(folder) / "panels", features=features, targets=["ret"]))
        print(f"panel: {panel.shape[0]} dates x {panel.shape[1]} assets x {panel.shape[2]} features, "
              f"{format_bytes(panel.nbytes)}; source: {format_bytes(source.stat().st_size)} of Parquet, "
              f"{panel.num_rows:,} rows\n")  # fmt: skip
        report = Report(bandwidth)
        report.rate("build, hash and fsync", seconds, panel.nbytes, f"{panel.num_rows / seconds / 1e6:.2f} M rows/s")
        seconds, _ = timed(lambda: Panel.build(source, panel.path.parent, features=features, targets=["ret"]))
        report.rate("find again (hashes the source)", seconds, source.stat().st_size, "bytes of the source")
        measure_reads(panel.path, report)
        measure_rereading(source, features, report)


class Report:
    """Prints one measurement a line, with its ratio to the memory bandwidth."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        print(f"{'':36}{'seconds':>10}{'GB/s':>9}{'of memcpy':>11}")

    def rate(self, name: str, seconds: float, num_bytes: int, note: str = "") -> None:
        rate = num_bytes / seconds / 1e9
        print(f"{name:36}{seconds:10.3f}{rate:9.2f}{rate / self.bandwidth:10.1%}   {note}")

    def latency(self, name: str, seconds: float, note: str) -> None:
        print(f"{name:36}{seconds:10.3f}{'':20}   {note}")


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


def memory_bandwidth() -> float:
    """GB copied per second between two warm buffers of 256 MiB, the best of five."""
    source, target = np.ones(1 << 26, np.float32), np.zeros(1 << 26, np.float32)
    return source.nbytes / min(timed(np.copyto, target, source)[0] for _ in range(5)) / 1e9


def write_source(path: Path, num_dates: int) -> None:
    """Random values, a row group per 16 dates."""
    rng = np.random.default_rng(0)
    names = [*(f"f{j}" for j in range(NUM_FEATURES)), "ret"]
    schema = pa.schema([("date", pa.date32()), ("code", pa.string()), *((name, pa.float32()) for name in names)])
    codes = [f"A{code:05d}" for code in range(NUM_ASSETS)]
    with pq.ParquetWriter(path, schema, use_dictionary=["code"], compression="snappy") as writer:
        for start in range(0, num_dates, 16):
            days = np.datetime64("2000-01-01") + np.arange(start, min(start + 16, num_dates))
            columns = rng.random((len(names), len(days) * NUM_ASSETS), np.float32)
            arrays = [pa.array(np.repeat(days, NUM_ASSETS)), pa.array(codes * len(days)), *map(pa.array, columns)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def drop_from_cache(path: Path) -> None:
    """Have the kernel drop a file's pages; nobody may have it mapped."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(path: Path) -> float:
    """The share of 200 pages, spread over a file, that the page cache holds; a read that may not wait tells."""
    size, found = path.stat().st_size, 0
    with open(path, "rb") as file:
        for offset in np.linspace(0, size - 4096, 200, dtype=np.int64):
            try:
                os.preadv(file.fileno(), [bytearray(1)], int(offset), os.RWF_NOWAIT)
                found += 1
            except BlockingIOError:
                pass
    return found / 200


def measure_reads(path: Path, report: Report) -> None:
    """Touch, read, draw batches and rows, cold and warm; each in a map of its own."""
    works: dict[str, tuple[Callable[[Panel], int], str]] = {
        "touch a byte of every page": (touch_pages, "bytes of the pages"),
        "read every byte": (read_bytes, "copied out of the map"),
        f"batches of dates, look-back {LOOKBACK}": (read_batches, "bytes handed out"),
    }
    for name, (work, note) in works.items():
        for state in ("cold", "warm"):
            resident, panel = prepare(path, state)
            seconds, num_bytes = timed(work, panel)
            report.rate(f"{name}, {state}", seconds, num_bytes, f"{note} [{resident:.0%} cached before]")
            del panel
    for state in ("cold", "warm"):
        if state == "cold":
            drop_from_cache(path / "values.npy")
        seconds, _ = timed(opened, path)
        report.latency(f"map, {state}", seconds, f"{seconds * 1e3:.1f} ms, no value read")
    for checks, note in (("sample", "64 blocks against their checksums"), ("full", "every byte")):
        seconds, panel = timed(lambda how: Panel.open(path, verify=how), checks)
        report.latency(f"open, verify='{checks}', warm", seconds, f"{seconds * 1e3:.1f} ms, {note}")
        del panel
    for state in ("cold", "warm"):
        resident, panel = prepare(path, state)
        seconds, _ = timed(read_rows, panel)
        note = f"{seconds / NUM_ROWS_DRAWN * 1e6:.1f} us a row [{resident:.0%} cached before]"
        report.latency(f"{NUM_ROWS_DRAWN:,} random rows, {state}", seconds, note)
        del panel


def prepare(path: Path, state: str) -> tuple[float, Panel]:
    """The share of the values that the page cache holds, and a panel mapped anew."""
    if state == "cold":
        drop_from_cache(path / "values.npy")
    return resident_share(path / "values.npy"), opened(path)


def opened(path: Path) -> Panel:
    panel = Panel.open(path, verify="sizes")  # a sample would bring pages into the cache
    assert panel.values.nbytes
    return panel


def touch_pages(panel: Panel) -> int:
    panel.values.reshape(-1).view(np.uint8)[::4096].max()
    return panel.values.nbytes


def read_bytes(panel: Panel) -> int:
    buffer = np.empty(panel.shape[1:], panel.values.dtype)
    for day in panel.values:
        np.copyto(buffer, day)
    return panel.values.nbytes


def read_rows(panel: Panel) -> int:
    rows = panel.values.reshape(-1, NUM_FEATURES)
    drawn = np.random.default_rng(1).integers(0, len(rows), NUM_ROWS_DRAWN)
    return sum(rows[row].copy().nbytes for row in drawn)


def read_batches(panel: Panel) -> int:
    dates = np.arange(LOOKBACK, panel.shape[0], 10)
    batches = DateBatches(panel, dates, lookback=LOOKBACK, target="ret", shuffle_seed=0)
    return sum(batch.windows.nbytes for batch in batches)


def measure_rereading(source: Path, features: list[str], report: Report) -> None:
    """What a process pays that reads the Parquet file itself, the file being warm."""
    source.read_bytes()
    if importlib.util.find_spec("pandas") is not None:
        import pandas as pd

        seconds, frame = timed(lambda: pd.read_parquet(source, columns=["date", "code", *features]))
        num_bytes = int(frame[features].memory_usage(index=False).sum())
        report.rate("pandas.read_parquet, warm", seconds, num_bytes, "in every process, private memory")
    else:
        seconds, table = timed(lambda: pq.read_table(source, columns=["date", "code", *features]))
        report.rate("pyarrow read_table, warm", seconds, table.select(features).nbytes, "in every process")


if __name__ == "__main__":
    main()
