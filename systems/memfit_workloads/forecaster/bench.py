"""What the forecaster's options change: the effect of each over seeds, with an interval.

    make bench NAME=forecaster ARGS="--source generated --seeds 5 --epochs 2 --dates 300"

The rank IC of two folds with each option beside the plain run, for each seed; the paired differences with a 95 %
interval (`compare_seeds`), on a generated market with a planted signal and on the packaged prices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness import parser, write_json
from memfit import config
from memfit.pipeline import RunConfig, context_of
from memfit_workloads.forecaster.stages import train_fold
from memfit_workloads.seeds import compare_seeds

#: Settings of each variant, beside those of the plain one.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "rank weight 0.1": {"rank_weight": 0.1},
    "rank weight 0.2": {"rank_weight": 0.2},
    "adabelief": {"optimizer": "adabelief"},
    "regime weights 0.5": {"regime_strength": 0.5},
}
PLAIN = {"rank_weight": 0.0, "optimizer": "adamw", "regime_strength": 0.0}


def figures(source: str, seed: int, changed: Mapping[str, Any], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The mean over two folds of their rank IC, and of its ratio over the days (icir), trained in this process."""
    data: dict[str, Any] = {"source": source, "horizons": [1, 5], "main_horizon": 5, "lookback": 10}
    if source == "generated":
        data |= {"num_dates": args.dates, "num_assets": 60, "num_features": 6, "information_coefficient": 0.1}
    else:
        data |= {"start": str(np.datetime64("2022-12-28") - np.timedelta64(int(args.dates * 365.25 / 252), "D"))}
    params = {
        "data": data,
        "splits": {"n_splits": 2, "embargo_size": 5},
        "graph": {"neighbours": 4},
        "model": {"hidden_size": 32, "num_layers": 2, "dropout": 0.1},
        "train": {**PLAIN, "num_epochs": args.epochs, "batch_size": 512, "learning_rate": 2e-3, **changed},
    }
    target = "memfit_workloads.forecaster.stages:FORECASTER"
    given = {"experiment": f"effects-{source}", "target": target, "seed": seed, "params": params}
    whole = config.resolve(RunConfig, values=given | {"panels_dir": str(work / "panels")}, env={})
    found = []
    for fold in ("1", "2"):
        with tempfile.TemporaryDirectory(prefix="memfit-fold-") as folder:
            found.append(train_fold(*context_of(target, whole, "fold", Path(folder), fold)))
    return {name: sum(one[name] for one in found) / 2 for name in ("rank_ic", "icir")}


def line_of_effect(
    variant: Mapping[int, Mapping[str, float]], plain: Mapping[int, Mapping[str, float]], metric: str
) -> str:
    """The paired difference of a figure over the seeds in one line, its spread over the seeds beside it."""
    found = compare_seeds(*({seed: one[metric] for seed, one in runs.items()} for runs in (variant, plain)))
    return (
        f"{found.mean_a:+.4f} against {found.mean_b:+.4f}: {found.difference:+.4f} "
        f"({found.lower:+.4f} to {found.upper:+.4f}), sd {found.sd_a:.4f} against {found.sd_b:.4f}, {found.verdict}"
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--source", choices=("generated", "prices"), action="append")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--dates", type=int, default=600)
    args = options.parse_args()
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for source in args.source or ("generated", "prices"):
        runs = found[source] = {name: {} for name in ("plain", *VARIANTS)}
        with tempfile.TemporaryDirectory(prefix="memfit-forecaster-") as folder:
            for seed in range(args.seeds):
                for name, own in runs.items():
                    own[seed] = figures(source, seed, VARIANTS.get(name, {}), args, Path(folder))
        print(
            f"{source}, {args.seeds} seeds, {args.dates} dates, {args.epochs} epochs; A is the variant, B the plain run"
        )
        for metric in ("rank_ic", "icir"):
            for name in VARIANTS:
                print(f"  {metric:8} {name:20} {line_of_effect(runs[name], runs['plain'], metric)}")
    write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
