"""The peak memory that was measured and published, beside the estimator's value and bound for the same step.

    python benchmarks/ground_truth.py --table FILE [--rows TT-02,LGT-01] [--grade A] [--json FILE]

FILE is the project's ``peak-memory.csv``, which is handed out beside the repository as
``../shared/ground-truth/peak-memory.csv``. Each row that can be rebuilt becomes the training step of the framework that
was measured (benchmarks/_ground_truth_programs), is traced on fake tensors in a process of its own, and compared in the
metric that was published; a compiled one is traced without ``torch.compile``, and only its bound is a target. The exit
status is 1 if a target is missed, a row fails, or none was rebuilt.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import parser, told, write_json

GIB = 1 << 30
#: The most that the median absolute error of grade A rows may be, by metric.
TARGETS = {"allocated": 0.03, "active": 0.03, "reserved": 0.07, "device": 0.10}
MOST_SLACK = 0.15
MODULES = ("llamas", "litgpt", "vision", "losses")


@dataclass(frozen=True)
class Row:
    id: str
    grade: str
    metric: str
    measured_gib: float


@dataclass
class Outcome:
    """A row with what was found for it; sizes in GiB, shares of the measured size."""

    row: Row
    value: float | None = None
    upper: float | None = None
    failure: str = ""
    assumed: str = ""
    compiled: bool = False
    seconds: float = 0.0

    @property
    def error(self) -> float | None:
        """The value's distance from what was measured, as a share of it."""
        return None if self.value is None else self.value / self.row.measured_gib - 1

    @property
    def slack(self) -> float | None:
        """How far the bound lies above what was measured, as a share of it."""
        return None if self.upper is None else self.upper / self.row.measured_gib - 1


def read_table(path: Path) -> list[Row]:
    """The rows of a table, with grade and metric out of their notes."""
    rows = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            grade = re.search(r"grade=(\w)", line["notes"])
            metric = re.search(r"metric=(allocated|active|reserved|device)", line["notes"])
            texts = (grade[1] if grade else "C", metric[1] if metric else "allocated")
            rows.append(Row(line["id"], *texts, float(line["peak_gib"])))
    return rows


def find_specs() -> dict[str, Any]:
    specs: dict[str, Any] = {}
    for name in MODULES:
        specs.update(importlib.import_module(f"_ground_truth_programs.{name}").SPECS)
    return specs


def estimate_one(name: str) -> dict[str, Any]:
    from memfit.estimation import AllocatorSettings, Interval, estimate_step, find_gpu

    spec = find_specs()[name]
    gpu = find_gpu(spec.gpu) if spec.gpu else None
    if gpu is not None and spec.memory_gib is not None:
        gpu = replace(gpu, total_bytes=int(spec.memory_gib * GIB))
    if gpu is not None and spec.context_gib is not None:
        gpu = replace(gpu, context_bytes=Interval(int(spec.context_gib * GIB), int(spec.context_gib * GIB)))
    if gpu is not None and spec.cudnn_gib is not None:
        gpu = replace(gpu, cudnn_bytes=Interval(int(spec.cudnn_gib * GIB), gpu.cudnn_bytes.upper))
    settings = AllocatorSettings(expandable_segments=True) if spec.expandable_segments else None
    estimate = estimate_step(spec.make, gpu=gpu, world_size=spec.world_size, allocator=settings, real_data=False)
    figures: dict[str, Interval] = {str(name): interval for name, interval in estimate.device.items()}
    found = figures[f"{spec.metric}_bytes"]
    if gpu is not None:  # a run that was measured did fit: no more of the bound counts as slack
        found = Interval(found.value, max(found.value, min(found.upper, gpu.total_bytes)))
    before = estimate.by_phase["build"].value if spec.minus_inputs else 0
    return {
        "value": (found.value - before) / GIB,
        "upper": (found.upper - before) / GIB,
        "assumed": spec.assumed,
        "compiled": spec.compiled,
    }


def run_row(row: Row, timeout: float) -> Outcome:
    """The outcome of a row, found in a process of its own."""
    command, env = [sys.executable, __file__, "--one", row.id], os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired:
        return Outcome(row, failure=f"not done after {timeout:.0f} s")
    if done.returncode:
        return Outcome(row, failure=(done.stderr.strip().splitlines() or ["no output"])[-1][:200])
    return Outcome(row, **json.loads(done.stdout.strip().splitlines()[-1]), seconds=time.monotonic() - began)


def print_outcome(outcome: Outcome) -> None:
    row = outcome.row
    start = f"{row.id:8} {row.grade:2} {row.metric:9} {row.measured_gib:8.2f}"
    if outcome.value is None or outcome.upper is None or outcome.error is None or outcome.slack is None:
        print(f"{start} failed: {outcome.failure}", flush=True)
        return
    held = "yes" if outcome.slack >= 0 else "NO"
    print(
        f"{start} {outcome.value:8.2f} {outcome.error:+7.1%} {outcome.upper:8.2f} {held:4} {outcome.slack:6.1%}"
        f"  {outcome.seconds:.0f} s",
        flush=True,
    )


def print_summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Medians by grade and metric; the targets that were missed."""
    missed = []
    done = [outcome for outcome in outcomes if outcome.value is not None]
    groups: dict[tuple[bool, str, str], list[Outcome]] = {}
    for one in done:
        groups.setdefault((one.compiled, one.row.grade, one.row.metric), []).append(one)
    for (compiled, grade, metric), chosen in sorted(groups.items()):
        error = statistics.median(abs(outcome.error or 0.0) for outcome in chosen)
        slack = statistics.median(outcome.slack or 0.0 for outcome in chosen)
        over = sum((outcome.slack or 0.0) < 0 for outcome in chosen)
        text = f"median |error| {error:.1%}, over the bound {over}, median slack {slack:.1%}"
        print(f"grade {grade}, {metric}{', compiled' * compiled}: n {len(chosen)}, {text}")
        if grade == "A" and not compiled:
            if error > TARGETS[metric]:
                missed.append(f"median |error| of {metric}: {error:.1%} > {TARGETS[metric]:.0%}")
            if slack > MOST_SLACK:
                missed.append(f"median slack of {metric}: {slack:.1%} > {MOST_SLACK:.0%}")
    over = sum((outcome.slack or 0.0) < 0 for outcome in done)
    print(f"all: n {len(done)}, over the bound {over}")
    if over:
        missed.append(f"{over} rows over their bound")
    return missed


def main() -> int:
    given = parser(__doc__)
    given.add_argument("--table", type=Path, help="the measured rows: ../shared/ground-truth/peak-memory.csv")
    given.add_argument("--rows", default="", help="names, with commas; or beginnings of names")
    given.add_argument("--grade", choices=("A", "B", "C"))
    given.add_argument("--timeout", type=float, default=600.0, help="seconds for a row")
    given.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="rows at a time")
    given.add_argument("--one", help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.one:
        print(json.dumps(estimate_one(options.one)))
        return 0
    if options.table is None:
        print("no table: pass --table ../shared/ground-truth/peak-memory.csv", file=sys.stderr)
        return 2
    specs, names = find_specs(), tuple(options.rows.split(","))
    rows = [row for row in read_table(options.table) if row.grade == (options.grade or row.grade)]
    rows = [row for row in rows if row.id.startswith(names)]
    outcomes = []
    print("row      gr metric    measured    value   error    upper held  slack")
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda row: run_row(row, options.timeout), [row for row in rows if row.id in specs]):
            print_outcome(outcome)
            outcomes.append(outcome)
    if left_out := [row.id for row in rows if row.id not in specs]:
        print(f"not rebuilt ({len(left_out)}): {', '.join(left_out)}")
    missed = print_summary(outcomes)
    if not any(outcome.value is not None for outcome in outcomes):
        missed.append("no row was rebuilt")
    missed += [f"{outcome.row.id} failed: {outcome.failure}" for outcome in outcomes if outcome.value is None]
    for line in missed:
        told(False, line)
    if not missed:
        told(True, "every target")
    write_json(options.json, [asdict(outcome) for outcome in outcomes])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
