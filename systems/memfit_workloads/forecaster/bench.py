"""What the forecaster's options change: the effect of each over seeds, with an interval.

    make bench NAME=forecaster ARGS="--source generated --seeds 5 --epochs 2 --dates 300"

The rank IC of two folds with each option beside the plain run, for each seed; the paired differences with a 95 %
interval (`compare_seeds`), on a generated market with a planted signal and on the packaged prices.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import parser, write_json
from memfit import config
from memfit.pipeline import RunConfig, context_of
from memfit_workloads.forecaster.stages import train_fold
from memfit_workloads.seeds import compare_seeds

#: Settings of each variant, beside those of the plain one.
VARIANTS: dict[str, dict[str, Any]] = {
    "rank weight 0.1": {"rank_weight": 0.1},
    "rank weight 0.2": {"rank_weight": 0.2},
    "adabelief": {"optimizer": "adabelief"},
    "regime weights 0.5": {"regime_strength": 0.5},
}


def rank_ic(source: str, seed: int, changed: dict[str, Any], args: argparse.Namespace, work: Path) -> float:
    """The mean over two folds of their rank IC, trained in this process."""
    data: dict[str, Any] = {"source": source, "horizons": [1, 5], "main_horizon": 5, "lookback": 10}
    if source == "generated":
        data |= {"num_dates": args.dates, "num_assets": 60, "num_features": 6, "information_coefficient": 0.1}
    else:
        data |= {"start": str(np.datetime64("2022-12-28") - np.timedelta64(int(args.dates * 365.25 / 252), "D"))}
    train = {"rank_weight": 0.0, "num_epochs": args.epochs, "batch_size": 512, "learning_rate": 2e-3, **changed}
    model, target = {"hidden_size": 32, "dropout": 0.1}, "memfit_workloads.forecaster.stages:FORECASTER"
    params = {"data": data, "splits": {"n_splits": 2}, "graph": {"neighbours": 4}, "model": model, "train": train}
    given = {"experiment": f"effects-{source}", "target": target, "seed": seed, "params": params}
    whole, found = config.resolve(RunConfig, values=given | {"panels_dir": str(work / "panels")}, env={}), []
    for fold in ("1", "2"):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            found.append(train_fold(*context_of(target, whole, "fold", Path(folder), fold))["rank_ic"])
    return statistics.fmean(found)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--source", choices=("generated", "prices"), action="append")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--dates", type=int, default=600)
    args, effects = options.parse_args(), {}
    for source in args.source or ("generated", "prices"):
        with tempfile.TemporaryDirectory(prefix="memfit-forecaster-") as folder:
            runs = {
                name: {seed: rank_ic(source, seed, changed, args, Path(folder)) for seed in range(args.seeds)}
                for name, changed in {"plain": {}, **VARIANTS}.items()
            }
        for name in VARIANTS:
            found = compare_seeds(runs[name], runs["plain"])
            interval = f"{found.difference:+.4f} ({found.lower:+.4f} to {found.upper:+.4f})"
            print(f"{source:9} {name:20} {interval}, sd {found.sd_a:.4f} and {found.sd_b:.4f}: {found.verdict}")
            effects[f"{source} {name}"] = asdict(found)
    write_json(args.json, effects)
    return 0


if __name__ == "__main__":
    sys.exit(main())
