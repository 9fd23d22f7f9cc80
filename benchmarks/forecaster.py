"""What the forecaster's options change, over seeds with an interval; and how fast its store is read.

    python benchmarks/forecaster.py [--part effects] [--source generated] [--seeds 5] [--epochs 3] [--dates 600]
    python benchmarks/forecaster.py --part store [--rows 300000] [--seconds 3] [--step-ms 20]
    python benchmarks/forecaster.py --part sweep [--rows 300000] [--trials 4]

- *effects*: two purged folds of ``FORECASTER`` each, that differ in one setting alone, with each of the same
  seeds: the rank regulariser, the optimizer, and weights by the regime. Printed is the mean of the paired differences
  to the plain run, with a 95 % interval of Student's t, and the spread over the seeds. The generated market has a
  planted signal; the prices are real, of 20 stocks.
- *store*: rows as wide as a field report's (112 columns), read by memfit's loader from the mapped panel, and the same
  batches from Parquet with a row group for each day: samples a second, and the share of its time that a consumer waits.
  The report's store has 8.9 million rows: ``--rows 8900000``. Exit status 1 if the batches differ.
- *sweep*: ``memfit tune`` over such a store. Each trial trains a linear model on every row, two at once; the same study
  reads Parquet. Exit status 1 if their trials differ.

Times mean little on a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from memfit import config
from memfit.data import DateBatch, DateBatches, Loader, LoaderReport, Panel, measure_loader
from memfit.pipeline import RunConfig, context_of
from memfit.reports import compare_seeds
from memfit.rundir import RunDir
from memfit.tuning import Trial, read_trials
from memfit_workloads.finance.generated import Market, write_market
from memfit_workloads.forecaster.stages import train_fold

#: Settings of each variant, beside those of the plain one.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "rank weight 0.1": {"rank_weight": 0.1},
    "rank weight 0.2": {"rank_weight": 0.2},
    "adabelief": {"optimizer": "adabelief"},
    "regime weights 0.5": {"regime_strength": 0.5},
}
PLAIN = {"rank_weight": 0.0, "optimizer": "adamw", "regime_strength": 0.0}
#: Columns of the wide store: date, code, close and four labels are the others.
NUM_COLUMNS, NUM_OTHERS, HORIZONS = 112, 7, (1, 5, 10, 20)
LOOKBACK, NUM_ASSETS = 10, 1000


def config_of(source: str, num_dates: int, num_epochs: int, seed: int, work: Path) -> dict[str, Any]:
    """The plain run of a source with one seed."""
    data: dict[str, Any] = {"source": source, "horizons": [1, 5], "main_horizon": 5, "lookback": 10}
    if source == "generated":
        data |= {"num_dates": num_dates, "num_assets": 60, "num_features": 6, "information_coefficient": 0.1}
    else:
        data |= {"start": str(np.datetime64("2022-12-28") - np.timedelta64(int(num_dates * 365.25 / 252), "D"))}
    params = {
        "data": data,
        "splits": {"n_splits": 2, "embargo_size": 5},
        "graph": {"neighbours": 4},
        "model": {"hidden_size": 32, "num_layers": 2, "dropout": 0.1},
        "train": {**PLAIN, "num_epochs": num_epochs, "batch_size": 512, "learning_rate": 2e-3},
    }
    return {
        "experiment": f"effects-{source}",
        "target": "memfit_workloads.forecaster.stages:FORECASTER",
        "seed": seed,
        "panels_dir": str(work / "panels"),
        "params": params,
    }


def figures(given: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, float]:
    """The mean over two folds of their rank IC, and of its ratio over the days (icir), trained in this process."""
    params = {**given["params"], "train": {**given["params"]["train"], **changed}}
    whole = config.resolve(RunConfig, values={**given, "params": params}, env={})
    found = []
    for fold in ("1", "2"):
        with tempfile.TemporaryDirectory(prefix="memfit-fold-") as folder:
            found.append(train_fold(*context_of(given["target"], whole, "fold", Path(folder), fold)))
    return {name: sum(one[name] for one in found) / 2 for name in ("rank_ic", "icir")}


def effects(source: str, num_seeds: int, num_epochs: int, num_dates: int, work: Path) -> None:
    """Print the effect of each variant on one source."""
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in ("plain", *VARIANTS)}
    for seed in range(num_seeds):
        plain = config_of(source, num_dates, num_epochs, seed, work)
        for name, runs in found.items():
            runs[seed] = figures(plain, VARIANTS.get(name, {}))
    print(f"{source}, {num_seeds} seeds, {num_dates} dates, {num_epochs} epochs; A is the variant, B the plain run")
    for metric in ("rank_ic", "icir"):
        for name in VARIANTS:
            print(f"  {metric:8} {name:20} {line_of_effect(found[name], found['plain'], metric)}")


def line_of_effect(
    variant: Mapping[int, Mapping[str, float]], plain: Mapping[int, Mapping[str, float]], metric: str
) -> str:
    """The paired difference of a figure over the seeds in one line, its spread over the seeds beside it."""
    a, b = ({seed: one[metric] for seed, one in runs.items()} for runs in (variant, plain))
    found = compare_seeds(a, b)
    return (
        f"{found.mean_a:+.4f} against {found.mean_b:+.4f}: {found.difference:+.4f} "
        f"({found.lower:+.4f} to {found.upper:+.4f}), sd {found.sd_a:.4f} against {found.sd_b:.4f}, {found.verdict}"
    )


class ParquetDays:
    """The batches of a `Loader`, read from a Parquet file that has a row group for each date."""

    def __init__(self, path: Path, order: DateBatches, target: str | None = None) -> None:
        self._file, self._order, self._names = pq.ParquetFile(path), order, list(order.panel.feature_names)
        self._target = target

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch, as the loader does."""
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[DateBatch]:
        num_assets = len(self._order.panel.assets)
        for number in range(len(self)):
            date, assets = np.divmod(self._order.cells(number), num_assets)
            first = int(date[0]) + 1 - LOOKBACK
            groups = list(range(first, first + LOOKBACK))
            table = self._file.read_row_groups(groups, columns=self._names, use_threads=False)
            columns = [table.column(name).to_numpy().reshape(LOOKBACK, num_assets) for name in self._names]
            windows = np.stack(columns, axis=-1)[:, assets].swapaxes(0, 1)
            targets = np.full(len(assets), np.nan, np.float32)
            if self._target is not None:
                read = self._file.read_row_group(int(date[0]), columns=[self._target], use_threads=False)
                targets = read.column(0).to_numpy()[assets]
            yield DateBatch(int(date[0]), assets, np.ascontiguousarray(windows), targets)


def _write_store(num_rows: int, work: Path) -> tuple[Path, Market]:
    """Write rows as wide as the report's, with a row group for each date."""
    num_dates = max(num_rows // NUM_ASSETS, LOOKBACK + HORIZONS[-1] + 1)
    market = Market(num_dates, NUM_ASSETS, NUM_COLUMNS - NUM_OTHERS, horizons=HORIZONS, turnover=0.0)
    path = work / "wide.parquet"
    write_market(path, market, rows_per_group=NUM_ASSETS)
    size, columns = path.stat().st_size / 2**20, len(pq.read_schema(path))
    print(f"{market.num_rows:,} rows of {columns} columns, {size:,.0f} MiB of Parquet, windows of {LOOKBACK} dates")
    return path, market


def store(num_rows: int, seconds: float, step_seconds: float, work: Path) -> bool:
    """Print how fast both are read; return whether their batches are the same."""
    path, market = _write_store(num_rows, work)
    panel = Panel.build(path, work / "panels", features=market.feature_names, targets=market.label_names)
    dates = np.arange(LOOKBACK - 1, market.num_dates)
    order = DateBatches(panel, dates, lookback=LOOKBACK, target=None, shuffle_seed=0)

    def mapped(num_workers: int) -> Loader:
        return Loader(panel, dates, lookback=LOOKBACK, target=None, shuffle=0, num_workers=num_workers)

    pairs = itertools.islice(zip(mapped(0), ParquetDays(path, order), strict=True), 5)
    same = all(np.array_equal(one.windows, other.windows) for one, other in pairs)
    own = measure_loader(mapped, num_workers=[0, 2], seconds=seconds, consume=step_seconds).reports
    (peer,) = measure_loader(
        lambda _: ParquetDays(path, order), num_workers=[0], seconds=seconds, consume=step_seconds, files=[path]
    ).reports
    for name, report in (("mapped panel", own[0]), ("mapped, 2 threads", own[1]), ("Parquet row groups", peer)):
        print(f"  {name:20} {line_of(report)}")
    print(f"the same batches: {'met' if same else 'MISSED'}")
    return same


def sweep(num_rows: int, num_trials: int, work: Path) -> bool:
    """Print a study whose trials each train on the whole store, and the same on Parquet; return whether they agree."""
    path = _write_store(num_rows, work)[0]
    ended: dict[str, list[Trial]] = {}
    for source in ("panel", "parquet"):
        given = work / f"{source}.json"
        tune = {"space": [{"name": "params.learning_rate", "low": 1e-5, "high": 1e-3, "log": True}]}
        fixed = {"objective": "train.loss", "direction": "minimize", "n_trials": num_trials, "num_slots": 2, "seed": 0}
        content = {
            "experiment": f"sweep-{source}",
            "target": "wide_job:SWEPT",
            "runs_dir": str(work / "runs"),
            "panels_dir": str(work / "panels"),
            "params": {"path": str(path), "source": source},
            "tune": tune | fixed,
        }
        given.write_text(json.dumps(content))
        words = [sys.executable, "-m", "memfit", "tune", str(given), "--quiet", "--json"]
        folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        started = time.monotonic()
        env = os.environ | {"PYTHONPATH": folders}
        done = subprocess.run(words, env=env, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - started
        (run,) = (work / "runs" / f"sweep-{source}").glob("run_*")
        ended[source] = read_trials(RunDir.open(run))
        results = [json.loads(one.read_text())["result"] for one in run.glob("jobs/trial_*.train/result.json")]
        rates = [one["rows_per_second"] for one in results]
        waits = [one["wait_share"] for one in results]
        rows = {one["num_rows"] for one in results}
        print(
            f"  {source:8} {len(results)} of {num_trials} trials in {seconds:.0f} s (exit {done.returncode}), each of "
            f"{sorted(rows)} rows: {min(rates, default=0):,.0f} to {max(rates, default=0):,.0f} samples/s, waits "
            f"{min(waits, default=0):.1%} to {max(waits, default=0):.1%}",
            flush=True,
        )
    panel, parquet = ([(one.state, one.params, one.value) for one in ended[name]] for name in ("panel", "parquet"))
    same = panel == parquet and [state for state, *_ in panel] == ["completed"] * num_trials
    print(f"the same trials with the same losses: {'met' if same else 'MISSED'}")
    return same


def line_of(report: LoaderReport) -> str:
    """A loader's figures in one line."""
    cold = "-" if report.cold is None else f"{report.cold.per_second(report.cold.num_samples):,.0f}"
    warm = f"{report.warm.per_second(report.warm.num_samples):,.0f}"
    waits = report.trained.wait_share if report.trained else 0.0
    return f"{warm} samples/s warm, {cold} cold; the consumer waits {waits:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("effects", "store", "sweep", "all"), default="all")
    parser.add_argument("--source", choices=("generated", "prices", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dates", type=int, default=600)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memfit-forecaster-") as folder:
        work, same = Path(folder), True
        for source in ("generated", "prices") if options.part in ("effects", "all") else ():
            if options.source in (source, "both"):
                effects(source, options.seeds, options.epochs, options.dates, work)
        if options.part in ("store", "all"):
            same = store(options.rows, options.seconds, options.step_ms / 1000, work)
        if options.part in ("sweep", "all"):
            same &= sweep(options.rows, options.trials, work)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
