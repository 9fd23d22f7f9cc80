"""The peak memory that was measured and published, beside the estimator's value and bound for the same step.

Run ``python benchmarks/ground_truth.py --table FILE``, FILE being the project's ``peak-memory.csv``, which is handed
out beside the repository as ``../shared/ground-truth/peak-memory.csv``. Each row that can be rebuilt becomes the
training step of the framework that was measured (benchmarks/_ground_truth_programs), is traced on fake tensors in a
process of its own, and compared in the metric that was published. ``--rows TT-02,LGT-01``, ``--grade A``, ``--peers``
for other estimators beside it, ``--json FILE`` for all figures. The exit status is 1 if a target is missed, a row
fails, or none was rebuilt.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scipy.stats import beta

GIB = 1 << 30
#: The most that the median absolute error of grade A rows may be, by metric.
TARGETS = {"allocated": 0.03, "active": 0.03, "reserved": 0.07, "device": 0.10}
MOST_SLACK, MOST_STEP_ERROR_GIB = 0.15, 1.0
MODULES = ("torchtune", "torchtitan", "litgpt", "huggingface", "convolutions", "vision_transformers", "losses")


@dataclass(frozen=True)
class Row:
    """A published measurement."""

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
    seconds: float = 0.0
    resident_gib: float = 0.0
    peers: dict[str, Any] = field(default_factory=dict)

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
            rows.append(
                Row(
                    line["id"],
                    grade[1] if grade else "C",
                    metric[1] if metric else "allocated",
                    float(line["peak_gib"]),
                )
            )
    return rows


def find_specs() -> dict[str, Any]:
    """What can be rebuilt, by the row's name."""
    import importlib

    specs: dict[str, Any] = {}
    for name in MODULES:
        specs.update(importlib.import_module(f"_ground_truth_programs.{name}").SPECS)
    return specs


def estimate_one(name: str, *, with_peers: bool) -> dict[str, Any]:
    """The figures of one row, in this process."""
    from memfit.estimation import AllocatorSettings, Interval, estimate_step, find_gpu

    spec = find_specs()[name]
    gpu = find_gpu(spec.gpu) if spec.gpu else None
    if gpu is not None and spec.memory_gib is not None:
        gpu = replace(gpu, total_bytes=int(spec.memory_gib * GIB))
    if gpu is not None and spec.context_gib is not None:
        gpu = replace(gpu, context_bytes=Interval(int(spec.context_gib * GIB), int(spec.context_gib * GIB)))
    if gpu is not None and spec.cudnn_gib is not None:
        gpu = replace(gpu, cudnn_bytes=Interval(int(spec.cudnn_gib * GIB), gpu.cudnn_bytes.upper))
    estimate = estimate_step(
        spec.make,
        gpu=gpu,
        world_size=spec.world_size,
        allocator=AllocatorSettings(expandable_segments=True) if spec.expandable_segments else None,
        real_data=False,
    )
    figures: dict[str, Interval] = {str(name): interval for name, interval in estimate.device.items()}
    found = figures[f"{spec.metric}_bytes"]
    if gpu is not None:  # a run that was measured did fit: no more of the bound counts as slack
        found = Interval(found.value, max(found.value, min(found.upper, gpu.total_bytes)))
    before = estimate.by_phase["build"].value if spec.minus_inputs else 0
    result = {
        "value": (found.value - before) / GIB,
        "upper": (found.upper - before) / GIB,
        "assumed": spec.assumed,
        "by_phase": {phase: interval.value / GIB for phase, interval in estimate.by_phase.items()},
        "parts": {part: interval.value / GIB for part, interval in estimate.parts.items()},
        "notes": list(estimate.notes),
    }
    if with_peers:
        from _ground_truth_programs._peers import ask_peers

        result["peers"] = ask_peers(spec)
    result["resident_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return result


def run_row(row: Row, timeout: float, *, with_peers: bool) -> Outcome:
    """The outcome of a row, found in a process of its own."""
    command = [sys.executable, __file__, "--one", row.id, *(["--peers"] if with_peers else [])]
    outcome, began = Outcome(row), time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        outcome.failure = f"not done after {timeout:.0f} s"
        return outcome
    outcome.seconds = time.monotonic() - began
    if done.returncode:
        outcome.failure = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        return outcome
    found = json.loads(done.stdout.strip().splitlines()[-1])
    outcome.value, outcome.upper, outcome.assumed = found["value"], found["upper"], found["assumed"]
    outcome.resident_gib, outcome.peers = found["resident_gib"], found.get("peers", {})
    return outcome


def print_outcome(outcome: Outcome) -> None:
    """One line, and one for each peer."""
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
    for name, peer in outcome.peers.items():
        text = peer if isinstance(peer, str) else f"{peer:.2f} ({peer / row.measured_gib - 1:+.1%})"
        print(f"{'':8}    {name}: {text}", flush=True)


def find_interval(successes: int, number: int) -> tuple[float, float]:
    """The Clopper-Pearson 95 % interval of a share.

    >>> find_interval(0, 10)[1] < 0.31
    True
    """
    low = beta.ppf(0.025, successes, number - successes + 1) if successes else 0.0
    high = beta.ppf(0.975, successes + 1, number - successes) if successes < number else 1.0
    return float(low), float(high)


def print_summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Medians by grade and metric; the targets that were missed."""
    missed = []
    done = [outcome for outcome in outcomes if outcome.value is not None]
    for grade in sorted({outcome.row.grade for outcome in done}):
        for metric in TARGETS:
            chosen = [outcome for outcome in done if (outcome.row.grade, outcome.row.metric) == (grade, metric)]
            if not chosen:
                continue
            error = statistics.median(abs(outcome.error or 0.0) for outcome in chosen)
            slack = statistics.median(outcome.slack or 0.0 for outcome in chosen)
            over = sum((outcome.slack or 0.0) < 0 for outcome in chosen)
            low, high = find_interval(over, len(chosen))
            line = (
                f"grade {grade}, {metric}: n {len(chosen)}, median |error| {error:.1%}, over the bound {over}"
                f" ({over / len(chosen):.0%}, 95 % interval {low:.0%} to {high:.0%}), median slack {slack:.1%}"
            )
            print(line)
            if grade == "A":
                if error > TARGETS[metric]:
                    missed.append(f"median |error| of {metric}: {error:.1%} > {TARGETS[metric]:.0%}")
                if slack > MOST_SLACK:
                    missed.append(f"median slack of {metric}: {slack:.1%} > {MOST_SLACK:.0%}")
    over = sum((outcome.slack or 0.0) < 0 for outcome in done)
    if done:
        low, high = find_interval(over, len(done))
        print(f"all: n {len(done)}, over the bound {over} ({over / len(done):.1%}, 95 % {low:.1%} to {high:.1%})")
        print(f"largest process: {max(outcome.resident_gib for outcome in done):.2f} GiB resident")
    if over:
        missed.append(f"{over} rows over their bound")
    return missed


def print_ladder(outcomes: Sequence[Outcome]) -> list[str]:
    """The steps between neighbouring rows of torchtune's table; those that are off by more than a GiB."""
    by_name = {outcome.row.id: outcome for outcome in outcomes if outcome.value is not None}
    missed = []
    for number in range(1, 10):
        one, two = by_name.get(f"TT-{number:02}"), by_name.get(f"TT-{number + 1:02}")
        if one is None or two is None or one.value is None or two.value is None:
            continue
        measured, found = two.row.measured_gib - one.row.measured_gib, two.value - one.value
        verdict = "met" if abs(found - measured) <= MOST_STEP_ERROR_GIB else "MISSED"
        print(f"{one.row.id} -> {two.row.id}: measured {measured:+.2f} GiB, estimated {found:+.2f}: {verdict}")
        if verdict == "MISSED":
            missed.append(f"step {one.row.id} -> {two.row.id}: off by {found - measured:+.2f} GiB")
    return missed


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, help="the measured rows: ../shared/ground-truth/peak-memory.csv")
    parser.add_argument("--rows", help="names, with commas; or beginnings of names")
    parser.add_argument("--grade", choices=("A", "B", "C"))
    parser.add_argument("--json", type=Path, help="where all figures are written")
    parser.add_argument("--peers", action="store_true", help="ask other estimators too")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a row")
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="rows at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs what the command line asks for."""
    options = _parse()
    if options.one:
        print(json.dumps(estimate_one(options.one, with_peers=options.peers)))
        return 0
    if options.table is None:
        print("no table: pass --table ../shared/ground-truth/peak-memory.csv", file=sys.stderr)
        return 2
    rows, specs = read_table(options.table), find_specs()
    if options.grade:
        rows = [row for row in rows if row.grade == options.grade]
    if options.rows:
        rows = [row for row in rows if row.id.startswith(tuple(options.rows.split(",")))]
    left_out = [row.id for row in rows if row.id not in specs]
    chosen = [row for row in rows if row.id in specs]
    print("row      gr metric    measured    value   error    upper held  slack")
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda row: run_row(row, options.timeout, with_peers=options.peers), chosen):
            print_outcome(outcome)
            outcomes.append(outcome)
    if left_out:
        print(f"not rebuilt ({len(left_out)}): {', '.join(left_out)}")
    missed = print_summary(outcomes) + print_ladder(outcomes)
    if not any(outcome.value is not None for outcome in outcomes):
        missed.append("no row was rebuilt")
    missed += [f"{outcome.row.id} failed: {outcome.failure}" for outcome in outcomes if outcome.value is None]
    for line in missed:
        print(f"MISSED: {line}")
    if not missed:
        print("met: every target")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
