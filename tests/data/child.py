"""What the tests' children do: ``child.py <verb> <JSON arguments>``."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memfit.data import DateBatches, Panel


def held_bytes() -> int:
    """The anonymous memory of this process."""
    return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def pauses(stop_at: float | None) -> Callable[[int, int], None]:
    """Progress that says so at a share of the work, and waits for a line."""
    stopped = False

    def progress(done: int, total: int) -> None:
        nonlocal stopped
        if stop_at is not None and done >= stop_at * total and not stopped:
            stopped = True
            print("stopped", flush=True)
            sys.stdin.readline()

    return progress


def build(  # noqa: PLR0913 - one argument per key of the JSON
    source: str,
    directory: str,
    features: list[str],
    targets: list[str],
    parameters: dict[str, Any] | None = None,
    go: str | None = None,
    log: str | None = None,
    stop_at: float | None = None,
    watch_memory: bool = False,
) -> None:
    """Builds a panel; ``stop_at`` is the share of rows at which it says so and waits for a line."""
    peak, pause = 0, pauses(stop_at)

    def progress(done: int, total: int) -> None:
        nonlocal peak
        if log is not None and done == 0:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
        if watch_memory:
            peak = max(peak, held_bytes())
        pause(done, total)

    print("ready", flush=True)
    while go is not None and not Path(go).exists():
        time.sleep(0.001)
    before = held_bytes()
    panel = Panel.build(
        Path(source), directory, features=features, targets=targets, parameters=parameters, progress=progress
    )
    digest = hashlib.sha256(panel.values.tobytes()).hexdigest() if panel.nbytes < 64 << 20 else ""
    report = {"path": str(panel.path), "reused": panel.reused, "digest": digest, "nbytes": panel.nbytes}
    print(json.dumps({**report, "grown_bytes": peak - before}), flush=True)


def read(path: str) -> None:
    """Maps a panel, reads every value, says so, and stays until a line comes."""
    panel = Panel.open(path)
    before = held_bytes()
    total = sum(float(day.sum(dtype=np.float64)) for day in panel.values)
    print(json.dumps({"total": total, "grown_bytes": held_bytes() - before}), flush=True)
    sys.stdin.readline()


_batches: DateBatches


def _adopt(batches: DateBatches) -> None:
    global _batches
    _batches = batches


def _digest(number: int) -> str:
    batch = _batches[number]
    parts = (np.int64(batch.date_index), batch.asset_indices, batch.windows, batch.targets)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def batches(path: str, method: str) -> None:
    """Prints the digest of each batch, drawn by two workers."""
    panel = Panel.open(path)
    drawn = DateBatches(panel, np.arange(len(panel.dates)), lookback=4, target="ret", shuffle_seed=3, max_assets=100)
    drawn.set_epoch(2)
    if method == "none":
        _adopt(drawn)
        print(json.dumps([_digest(number) for number in range(len(drawn))]))
        return
    with multiprocessing.get_context(method).Pool(2, _adopt, (drawn,)) as pool:
        print(json.dumps(pool.map(_digest, range(len(drawn)))))


if __name__ == "__main__":
    verbs = {one.__name__: one for one in (build, read, batches)}
    verbs[sys.argv[1]](**json.loads(sys.argv[2]))
