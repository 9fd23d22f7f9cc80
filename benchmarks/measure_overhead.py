"""What measuring costs: the sampler's share of one core at 10 Hz, sweeps included, on a tree that holds 1 GiB.

Run ``python benchmarks/measure_overhead.py``. Two child processes hold 512 MiB each; a meter samples them for twenty
seconds as the process that watches a job does. It prints the CPU time of the sampling thread over the time that passed,
from the end of the first sweep on, so that each sweep counts with the wait before it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from memfit.memory._meter import TreeMeter
from memfit.memory._process import ProcReader, Rollup
from memfit.units import format_bytes

SECONDS, INTERVAL, CHILDREN = 20.0, 0.1, 2
HOLD = "import sys; b = bytearray(512 << 20); print('up', flush=True); sys.stdin.read()"


class TimedReader(ProcReader):
    """Adds up the CPU time of the sweeps."""

    def __init__(self) -> None:
        super().__init__()
        self.sweep_seconds, self.num_rollups = 0.0, 0

    def rollup(self, pid: int) -> Rollup | None:
        begin = time.thread_time()
        found = super().rollup(pid)
        self.sweep_seconds += time.thread_time() - begin
        self.num_rollups += 1
        return found


def main() -> None:
    """Hold a tree, sample it, print the shares."""
    command = [sys.executable, "-c", HOLD]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(CHILDREN)]
    try:
        for child in children:
            assert child.stdout
            child.stdout.readline()
        report()
    finally:
        for child in children:
            child.communicate()


def report() -> None:
    """Sample this process and its children, and print what it took."""
    reader = TimedReader()
    meter = TreeMeter(os.getpid(), reader=reader)
    sample = meter.sample()
    reader.sweep_seconds, reader.num_rollups, num_samples = 0.0, 0, 0
    begin, begin_cpu = time.monotonic(), time.thread_time()
    while time.monotonic() < begin + SECONDS:
        sample = meter.sample()
        num_samples += 1
        time.sleep(max(0.0, begin + num_samples * INTERVAL - time.monotonic()))
    assert sample
    wall, cpu = time.monotonic() - begin, time.thread_time() - begin_cpu
    num_sweeps = reader.num_rollups // (CHILDREN + 1)
    print(f"tree: {sample.num_processes} processes, {format_bytes(sample.rss_bytes)} resident; {num_samples} samples")
    print(f"sampler: {cpu / wall:.2%} of one core at {num_samples / wall:.1f} Hz")
    print(f"  of it {num_sweeps} sweeps of PSS: {reader.sweep_seconds / wall:.2%}")
    print(f"  a sweep: {reader.sweep_seconds / num_sweeps * 1e3:.1f} ms; a sample: {cpu / num_samples * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
