"""What periodic collection costs and frees, beside the same training without it.

Run ``python benchmarks/folklore.py``. One model is trained in turns: without any collection; with three full
collections and an emptied cache every 5 steps, as field report 1 has it; with one of each every 10 and every 20, as
reports 4 and 1 have them. It is done with the process as it is, with two million living containers (an index of a data
set, say), and once more after these were frozen. Each figure is the median of turns that alternate, over the turn
without collection beside it; freed are the bytes by which the heap in use and the resident memory fell. On a CUDA
device the cache is emptied for real; this has not been run on one.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit.memory import read_heap
from memfit.units import format_bytes

STEPS, TURNS, CONTAINERS, PAGE = 20, 3, 2_000_000, os.sysconf("SC_PAGE_SIZE")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: One thread's processor time does not see who else is computing; with a device, waiting for it counts.
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time
#: Name, every how many steps, collections each time.
HABITS = (
    ("none", 0, 0),
    ("3 x gc + cache every 5", 5, 3),
    ("gc + cache every 10", 10, 1),
    ("gc + cache every 20", 20, 1),
)


@dataclass
class Freed:
    """What collections freed together."""

    num_objects: int = 0
    heap_bytes: int = 0
    resident_bytes: int = 0


def training() -> Iterator[None]:
    """An endless training; each ``next`` is one step."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batch = {"x": torch.randn(8, 64, 128, device=DEVICE), "ids": list(range(8))}
        loss = model(batch["x"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        yield


def collect(times: int, freed: Freed) -> None:
    """Collect and empty the cache, and add up what that freed."""
    heap, resident = levels()
    freed.num_objects += sum(gc.collect() for _ in range(times))
    torch.cuda.empty_cache()  # does nothing without a device
    heap_after, resident_after = levels()
    freed.heap_bytes += max(0, heap - heap_after)
    freed.resident_bytes += max(0, resident - resident_after)


def levels() -> tuple[int, int]:
    """The heap's live bytes and the resident bytes."""
    with open("/proc/self/statm") as file:
        return read_heap().get("live_bytes", 0), int(file.read().split()[1]) * PAGE


def turn(step: Iterator[None], every: int, times: int, freed: Freed) -> float:
    """Train some steps with a habit; returns the seconds of one."""
    begin = CLOCK()
    for number in range(1, STEPS + 1):
        next(step)
        if every and number % every == 0:
            collect(times, freed)
    return (CLOCK() - begin) / STEPS


def compare(title: str) -> None:
    """Train with each habit in alternating turns, and print a line for each."""
    step, freed = training(), {name: Freed() for name, *_ in HABITS}
    seconds: dict[str, list[float]] = {name: [] for name, *_ in HABITS}
    turn(step, 0, 0, Freed())
    gc.collect()
    for _ in range(TURNS):
        for name, every, times in HABITS:
            seconds[name].append(turn(step, every, times, freed[name]))
    for name, *_ in HABITS:
        ratio = statistics.median(one / none for one, none in zip(seconds[name], seconds["none"], strict=True))
        one = freed[name]
        print(
            f"{title:<28} {name:<24} {statistics.median(seconds[name]) * 1e3:8.1f} ms {ratio:6.2f}"
            f" {one.num_objects:8d} {format_bytes(one.heap_bytes):>10} {format_bytes(one.resident_bytes):>10}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = f"{'step':>11} {'ratio':>6} {'objects':>8} {'heap':>10} {'resident':>10}"
    print(f"{'living containers':<28} {'habit':<24} {columns}")
    compare("the process as it is")
    held = [[number] for number in range(CONTAINERS)]
    compare(f"and {len(held):,} lists")
    gc.collect()
    gc.freeze()
    compare("the same, frozen at start")


if __name__ == "__main__":
    main()
