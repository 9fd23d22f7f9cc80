"""The ranker on real prices: folds in parallel give what folds in order give, and kills change nothing.

    python benchmarks/ranker.py [--part both] [--start 2017-01-01] [--epochs 2] [--kills 10] [--seed 0]

Both parts take ``src/memfit_workloads/ranker/config.yaml``, with fewer dates and epochs unless asked otherwise:

- *folds*: its five folds side by side, and again one after the other (``--max-parallel 1``): the ratio of the wall
  clocks, the memory of all jobs together at its peak, and whether all metrics, scores and tensors of all checkpoints
  are the same bit for bit.
- *kills*: all stages once without a disturbance, and again killed with SIGKILL at random moments and started
  anew with the same command. Every second kill takes its jobs along; the others leave them running. Tables, figures and
  tensors must be those of the first. A run that is done before it was killed often enough is followed by another.

Each line ends in ``met`` or ``MISSED``; exit status 0 when all are met. Times mean little on a machine that others use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from memfit.files import read_json
from memfit.memory import read_series
from memfit.pipeline import Output
from memfit.training import load_checkpoint
from memfit.units import format_bytes, format_duration

CONFIG = Path(__file__).resolve().parents[1] / "src" / "memfit_workloads" / "ranker" / "config.yaml"
FOLDS = tuple(f"fold_{fold}" for fold in range(1, 6))
STAGES = ("stage_health", "stage_backtest", "stage_decision")
#: What differs between two runs that did the same: names, and how many comparisons are on record.
OWN = ("a", "b", "num_comparisons", "adjusted_p_value", "report")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    part: str
    start: str
    epochs: int
    kills: int
    seed: int
    seconds: float
    max_ratio: float


def command(folder: Path, options: Options, *more: str) -> list[str]:
    """The config with fewer dates and epochs, its runs and panels in a folder."""
    epochs = [epoch for epoch in (options.epochs - 1, options.epochs) if epoch >= 1]
    settings = {
        "params.data.start": options.start,
        "params.train.num_epochs": options.epochs,
        "params.train.ema_epochs": json.dumps(epochs),
        "runs_dir": folder / "runs",
        "panels_dir": folder / "panels",
    }
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "memfit", "run", str(CONFIG), "--json", *chosen, *more]


def run(words: Sequence[str]) -> dict[str, Any]:
    """The summary of a command that is left alone, and its seconds."""
    started = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary | {"seconds": time.monotonic() - started}


def tell(what: str, is_met: bool) -> bool:
    """Print a line."""
    print(f"{what:<100} {'met' if is_met else 'MISSED'}", flush=True)
    return is_met


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by where it stands."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors(item, f"{name}.{number}")


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are of one type and shape, and every byte is the same; a NaN equals itself."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return bool(torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (first, second))))


def differing_checkpoints(first: Path, second: Path) -> tuple[int, list[str]]:
    """How many tensors of the folds' checkpoints were compared, and those that differ or are not in both runs."""
    num, found = 0, []
    for fold in FOLDS:
        folders = [one / "checkpoints" / fold for one in (first, second)]
        files = [{path.name for path in folder.glob("*.pt")} for folder in folders]
        found += [f"{fold}/{name} is in one run only" for name in sorted(files[0] ^ files[1])]
        for name in sorted(files[0] & files[1]):
            ours, theirs = (dict(tensors(load_checkpoint(folder / name))) for folder in folders)
            num += len(ours)
            names = sorted(ours.keys() | theirs.keys())
            found += [
                f"{fold}/{name}: {key}"
                for key in names
                if not (key in ours and key in theirs and same_bits(ours[key], theirs[key]))
            ]
    return num, found


def differing_results(first: Path, second: Path, jobs: Sequence[str]) -> list[str]:
    """Figures and tables of some jobs that differ."""
    found = []
    for job in jobs:
        ours, theirs = (Output(one / "checkpoints" / f"{job}.json") for one in (first, second))
        names = sorted(ours.result.keys() | theirs.result.keys())
        found += [
            f"{job}: {name}" for name in names if name not in OWN and ours.result.get(name) != theirs.result.get(name)
        ]
        tables = [one["name"] for one in ours.facts["outputs"] if one["kind"] == "table"]
        found += [f"{job}: {name}" for name in tables if not ours.table(name).equals(theirs.table(name))]
    return found


def peak_of_all(run_dir: Path) -> int:
    """The most private bytes that all jobs of a run held together, by their samples.

    Each job counts with what it held at its last sample, from its first one to its last.
    """
    changes: list[tuple[float, int, int]] = []
    for number, path in enumerate(sorted(run_dir.glob("jobs/*/memory.jsonl"))):
        samples = read_series(path)
        changes += [(sample.time, number, sample.private_bytes) for sample in samples]
        changes += [(samples[-1].time, number, 0)] if samples else []
    held: dict[int, int] = {}
    most = 0
    for _, number, private in sorted(changes, key=lambda change: change[0]):
        held[number] = private
        most = max(most, sum(held.values()))
    return most


def span(summary: Mapping[str, Any]) -> float:
    """Seconds from the start of the first fold to the end of the last."""
    outcomes = [read_json(Path(summary["run"]) / "jobs" / fold / "outcome.json") or {} for fold in FOLDS]
    return float(max(one["ended"] for one in outcomes) - min(one["started"] for one in outcomes))


def compare_folds(parent: Path, options: Options) -> bool:
    """Five folds side by side against one after the other."""
    side_by_side = run(command(parent / "parallel", options))
    in_order = run(command(parent / "in_order", options, "--max-parallel", "1"))
    first, second = (Path(one["run"]) for one in (side_by_side, in_order))
    for name, one in (("side by side", side_by_side), ("one after the other", in_order)):
        print(
            f"{name:<20} {one['most_at_once']} at once, {format_duration(one['seconds'])} in all, folds alone "
            f"{format_duration(span(one))}, peak of all jobs {format_bytes(peak_of_all(Path(one['run'])))} private"
        )
    ratio, folds_alone = side_by_side["seconds"] / in_order["seconds"], span(side_by_side) / span(in_order)
    lent, peak = side_by_side["budget"]["lendable_bytes"], peak_of_all(first)
    num, tensors_differ = differing_checkpoints(first, second)
    others_differ = differing_results(first, second, FOLDS)
    good = [
        tell(
            f"wall clock {ratio:.2f} of one after the other (folds alone {folds_alone:.2f}); at most "
            f"{options.max_ratio:g} on {os.cpu_count()} cores",
            ratio <= options.max_ratio,
        ),
        tell(f"memory of all jobs {format_bytes(peak)}, lent {format_bytes(lent)}", 0 < peak <= lent),
        tell(f"metrics and scores of {len(FOLDS)} folds, differing: {others_differ[:3] or 'none'}", not others_differ),
        tell(
            f"{num} tensors of checkpoints, differing: {tensors_differ[:3] or 'none'}", bool(num and not tensors_differ)
        ),
    ]
    return all(good)


def kill(process: subprocess.Popen[bytes], with_jobs: bool) -> None:
    """SIGKILL a supervisor, and what it has started where that is asked for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True) if with_jobs else []
        process.kill()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def run_killed(folder: Path, options: Options, moments: Sequence[float], until: float) -> tuple[Path, int]:
    """A run that is killed so many seconds after each start, and ends; its run, and how often it was killed."""
    num = 0
    while True:
        process = subprocess.Popen(command(folder, options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        is_last = num >= len(moments) or time.monotonic() > until
        try:
            _, errors = process.communicate(timeout=None if is_last else moments[num])
        except subprocess.TimeoutExpired:
            kill(process, with_jobs=num % 2 == 1)
            num += 1
            continue
        except BaseException:
            kill(process, with_jobs=True)
            raise
        if process.returncode != 0:
            raise SystemExit(f"after {num} kills the run ended with {process.returncode}:\n{errors.decode()}")
        runs = list((folder / "runs").glob("*/run_*"))
        if len(runs) != 1:
            raise SystemExit(f"the same command began {len(runs)} runs: code or data changed meanwhile")
        return runs[0], num


def compare_killed(parent: Path, options: Options) -> bool:
    """Killed runs against one that was left alone."""
    calm = run(command(parent / "calm", options))
    first = Path(calm["run"])
    print(f"left alone           {format_duration(calm['seconds'])}", flush=True)
    drawn = random.Random(options.seed)
    # From a supervisor that has hardly begun to a fold or two in one go, and so that all kills fit into the time.
    longest = max(1.0, min(calm["seconds"] / 4, 1.3 * options.seconds / max(options.kills, 1)))
    moments = [drawn.uniform(0.5, longest) for _ in range(options.kills)]
    started, killed, runs = time.monotonic(), 0, 0
    differ: list[str] = []
    num_tensors = 0
    while killed < options.kills and time.monotonic() < started + options.seconds:
        folder = parent / f"killed_{runs}"
        second, num = run_killed(folder, options, moments[killed:], started + options.seconds)
        killed, runs = killed + num, runs + 1
        num_tensors, tensors_differ = differing_checkpoints(first, second)
        differ += [*differing_results(first, second, (*FOLDS, *STAGES)), *tensors_differ]
    after = ", ".join(f"{moment:.1f}" for moment in moments[:killed])
    print(f"killed               {format_duration(time.monotonic() - started)}, seconds after each start: {after}")
    good = [
        tell(f"{killed} kills in {runs} runs; {options.kills} asked for", killed >= options.kills),
        tell(f"tables, figures and {num_tensors} tensors, differing: {differ[:3] or 'none'}", runs > 0 and not differ),
    ]
    return all(good)


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("folds", "kills", "both"), default="both")
    parser.add_argument("--start", default="2017-01-01", help="the first date of the prices")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a fold")
    parser.add_argument("--kills", type=int, default=10, help="how often the run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--seconds", type=float, default=300, help="no kill later than this; what runs then may end")
    parser.add_argument("--max-ratio", type=float, default=0.8, help="of the two wall clocks")
    return Options(**vars(parser.parse_args()))


def main() -> int:
    options = read_options()
    good = True
    with tempfile.TemporaryDirectory(prefix="memfit-ranker-") as name:
        os.environ["XDG_STATE_HOME"] = name  # not the user's record of comparisons
        for part, compare in (("folds", compare_folds), ("kills", compare_killed)):
            if options.part in (part, "both"):
                print(f"{part}: prices from {options.start}, {options.epochs} epochs, {os.cpu_count()} cores")
                good = compare(Path(name).resolve() / part, options) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
