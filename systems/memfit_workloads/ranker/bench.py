"""The ranker on real prices: folds side by side give what folds in order give, in how much of the time.

    make bench NAME=ranker ARGS="--start 2017-01-01 --epochs 2"

The five folds of ``config.yaml`` run side by side, and again one after the other (``--max-parallel 1``): the ratio of
the wall clocks, the memory of all jobs together at its peak, and whether all metrics, scores and tensors of all
checkpoints are the same bit for bit. That a killed run comes to the same is a test (``test_ranker_killed.py``). Exit
status 0: all as asked.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from harness import parser, told, write_json
from memfit.files import read_json
from memfit.memory import read_series
from memfit.units import format_bytes, format_duration
from memfit_workloads.benches import contents, differing, run

MOST_RATIO = 0.8


def peak_of_all(run_dir: Path) -> int:
    """The most private bytes that all jobs of a run held together, each from its first sample to its last."""
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


def span(run_dir: Path) -> float:
    """Seconds from the start of the first fold to the end of the last."""
    outcomes = [read_json(path) or {} for path in run_dir.glob("jobs/fold_*/outcome.json")]
    return float(max(one["ended"] for one in outcomes) - min(one["started"] for one in outcomes))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--start", default="2017-01-01", help="the first date of the prices")
    options.add_argument("--epochs", type=int, default=2, help="epochs of a fold")
    args = options.parse_args()
    epochs = [epoch for epoch in (args.epochs - 1, args.epochs) if epoch >= 1]
    given = {"data.start": args.start, "train.num_epochs": args.epochs, "train.ema_epochs": epochs}
    with tempfile.TemporaryDirectory(prefix="memfit-ranker-") as name:
        os.environ["XDG_STATE_HOME"] = name  # not the user's record of comparisons
        seconds, alone, peaks, left = [], [], [], []
        for way, more in (("side by side", ()), ("one after the other", ("--max-parallel", "1"))):
            folder, started = Path(name).resolve() / way, time.monotonic()
            places = {"runs_dir": folder / "runs", "panels_dir": folder / "panels"}
            summary = run(Path(__file__).with_name("config.yaml"), given | places, *more)
            path = Path(summary["run"])
            seconds.append(time.monotonic() - started)
            alone.append(span(path))
            peaks.append(peak_of_all(path))
            left.append({key: one for key, one in contents(path).items() if key.startswith("fold_")})
            lent = summary["budget"]["lendable_bytes"]
            print(
                f"{way:<20} {summary['most_at_once']} at once, {format_duration(seconds[-1])} in all, folds alone "
                f"{format_duration(alone[-1])}, peak of all jobs {format_bytes(peaks[-1])} private",
                flush=True,
            )
    ratio, differ = seconds[0] / seconds[1], differing(*left)
    write_json(args.json, {"ratio": ratio, "folds_alone": alone[0] / alone[1], "differ": differ})
    text = (
        f"wall clock {ratio:.2f} of one after the other (folds alone {alone[0] / alone[1]:.2f}); at most {MOST_RATIO:g}"
    )
    good = [
        told(ratio <= MOST_RATIO, f"{text} on {os.cpu_count()} cores"),
        told(0 < peaks[0] <= lent, f"all jobs within {format_bytes(lent)}"),
        told(
            bool(left[0] and not differ),
            f"{len(left[0])} figures, tables and tensors, differing: {differ[:3] or 'none'}",
        ),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
