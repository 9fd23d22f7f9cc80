"""Five folds in the space of one panel: naive copies are killed, memfit's folds all run at once.

    python benchmarks/folds.py [--gib 1] [--repeat 1] [--work DIR] [--json FILE]

What it does, in one run, on a generated market whose panel takes at least ``--gib``:

1. Measures one fold alone, without a limit: its private memory P. From it follows one real limit for steps 2 and 3:
   L = one panel + 5 x P + 5 %. The kernel kills what exceeds it.
2. *Naive*: five processes side by side that each build their own copy of the panel and train a fold.
3. *memfit*: the same five folds under the same limit, panel built anew under it too.
4. *Sequential*: the same folds one at a time, to compare every tensor and table bit for bit.

``--repeat 20`` does steps 2 and 3 twenty times; the figures are those of the worst repetition.

Needs root and a writable cgroup v1 memory hierarchy (or, not tried yet, a v2 group named by ``--cgroup``). It makes a
group and removes it; it allocates at most the limit that it prints, about 3 GiB at the default size.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from pyarrow import feather

from limited import Limited
from memfit.config import read_file, write_yaml
from memfit.data import Panel
from memfit.pipeline import Context, Output
from memfit.training import load_checkpoint
from memfit.units import format_bytes
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import train_fold

NUM_FOLDS = 5
NUM_ASSETS, NUM_FEATURES = 2048, 512
#: No step may allocate more than this.
MOST_BYTES = 12 << 30


def write_config(work: Path, gib: float) -> Path:
    """The config of a ranker on a generated market of at least ``gib``."""
    row_bytes = NUM_ASSETS * (NUM_FEATURES + 3) * 4  # the features, two targets and the close
    num_dates = int(gib * 2**30 / row_bytes) + 1
    config = {
        "schema_version": 1,
        "experiment": "bench-folds",
        "target": "memfit_workloads.ranker.stages:RANKER",
        "seed": 7,
        "runs_dir": str(work / "runs"),
        "panels_dir": str(work / "panels"),
        "params": {
            "data": {
                "source": "generated",
                "num_dates": num_dates,
                "num_assets": NUM_ASSETS,
                "num_features": NUM_FEATURES,
                "information_coefficient": 0.1,
                "horizons": [5],
                "main_horizon": 5,
                "lookback": 4,
            },
            "splits": {"n_splits": NUM_FOLDS, "embargo_size": 5},
            "model": {"patch_size": 2, "width": 16, "num_heads": 2, "num_layers": 1},
            "train": {"num_epochs": 2, "dates_per_batch": 1},
        },
    }
    path = work / "config.yaml"
    path.write_text(write_yaml(config))
    return path


def memfit(config: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "memfit",
        "run",
        str(config),
        "--json",
        "--until",
        "fold",
        "--skip",
        "health",
        *options,
    ]


def drop_panels(work: Path) -> None:
    """Forget panels, so that the next run builds them again; the generated source stays."""
    for path in (work / "panels").glob("*/manifest.json"):
        shutil.rmtree(path.parent)


class OwnCopy:
    """A panel in this process's own memory, as every fold of the naive way builds it."""

    def __init__(self, source: Path, like: Panel) -> None:
        table = pq.read_table(source)
        dates = np.searchsorted(like.dates, table["date"].to_numpy().astype("datetime64[D]"))
        assets = np.searchsorted(np.array(like.assets), table["code"].to_numpy(zero_copy_only=False).astype(str))
        self.values = np.full(like.shape, np.nan, np.float32)
        self.targets = np.full((*like.shape[:2], len(like.target_names)), np.nan, np.float32)
        for number, name in enumerate(like.feature_names):
            self.values[dates, assets, number] = table[name].to_numpy()
        for number, name in enumerate(like.target_names):
            self.targets[dates, assets, number] = table[name].to_numpy()
        self.history, self.dates, self.assets, self.shape = like.history, like.dates, like.assets, like.shape
        self.feature_names, self.target_names = like.feature_names, like.target_names
        self.fingerprint = like.fingerprint

    def target(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self.targets[:, :, self.target_names.index(name)]


@dataclass(frozen=True)
class Prepared(Output):
    """What the stage prepare left, with a copy of the panel in place of the mapped one."""

    config: Path

    @functools.cached_property
    def copy(self) -> OwnCopy:
        """Made once in a process, as every fold of the naive way does."""
        source = next((self.config.parent / "panels" / "markets").glob("*.parquet"))
        return OwnCopy(source, super().panel())

    def panel(self, name: str = "panel") -> Panel:
        return cast(Panel, self.copy)


def naive_fold(config: Path, run: Path, fold: int) -> None:
    """What people do: every process builds its own copy of the panel, then trains its fold."""
    prepared = Prepared(run / "checkpoints" / "stage_prepare.json", config)
    work = config.parent / "naive" / f"fold_{fold}"
    work.mkdir(parents=True, exist_ok=True)
    needs = {"prepare": [prepared]}
    context = Context(prepared.result["folds"][fold - 1], lambda: fold, work, config.parent / "panels", needs=needs)
    train_fold(context, RankerParams.model_validate(read_file(config)["params"]))


def run_memfit(command: Sequence[str], group: Limited | None = None) -> dict[str, Any]:
    """Run ``memfit run --json`` to its end, inside a group or without a limit; its summary."""
    started = time.monotonic()
    if group is None:
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    else:
        process = group.start(command, stdout=subprocess.PIPE)
    try:
        out, _ = process.communicate()
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGINT):  # ask, then now: it leaves no job behind
            process.send_signal(number)
            time.sleep(1)
        process.wait()
        raise
    summary: dict[str, Any] = json.loads(out) if out.strip() else {}
    return summary | {"exit_code": process.returncode, "seconds": time.monotonic() - started}


def run_naive(config: Path, run: Path, group: Limited) -> list[int]:
    """Five processes side by side, each with its own copy, under one limit; their exit codes."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        group.start([sys.executable, __file__, "--naive", str(config), str(run), str(fold)], env=env)
        for fold in range(1, NUM_FOLDS + 1)
    ]
    try:
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two runs' folds: tensors and tables, not files."""
    found = []
    for fold in range(1, NUM_FOLDS + 1):
        name = f"fold_{fold}"
        a, b = (feather.read_table(run / "checkpoints" / name / "scores.feather") for run in (first, second))
        if not a.equals(b):
            found.append(f"{name}/scores.feather")
        before, after = (
            dict(_tensors(load_checkpoint(run / "checkpoints" / name / "latest_checkpoint.pt")))
            for run in (first, second)
        )
        found += [f"{name}: {key}" for key in before.keys() ^ after.keys()]
        found += [f"{name}: {key}" for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])]
    return found


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}")


def compare(work: Path, gib: float, parent: Path, repeat: int) -> dict[str, Any]:
    """All four steps; the figures, with one entry in ``tries`` for each repetition of steps 2 and 3."""
    config = write_config(work, gib)
    print("1. one fold alone, without a limit ...", flush=True)
    alone = run_memfit(memfit(config, "--units", "1"))
    private = max(job["peak_bytes"] for job in alone["jobs"] if job["stage"] == "fold")
    panel = Output(Path(alone["run"]) / "checkpoints" / "stage_prepare.json").panel().nbytes
    limit = int((panel + NUM_FOLDS * private) * 1.05)
    if limit > MOST_BYTES:
        raise SystemExit(f"the limit would be {format_bytes(limit)}, more than {format_bytes(MOST_BYTES)}: lower --gib")
    print(f"   panel {format_bytes(panel)}, one fold's private memory {format_bytes(private)}", flush=True)
    print(f"   limit for all that follows: {format_bytes(limit)} = (panel + 5 folds) + 5 %", flush=True)
    print("2. one fold after the other, without a limit ...", flush=True)
    sequential = run_memfit(memfit(config, "--new", "--max-parallel", "1"))
    tries = []
    for number in range(1, repeat + 1):
        print(f"3. under that limit, {number} of {repeat}: five plain processes, then memfit ...", flush=True)
        tries.append(_try(work, config, parent, limit, (Path(alone["run"]), Path(sequential["run"]))))
        print(f"   {tries[-1]}", flush=True)
    return {
        "panel_bytes": panel,
        "private_bytes": private,
        "limit_bytes": limit,
        "sequential_seconds": sequential["seconds"],
        "tries": tries,
    }


def _try(work: Path, config: Path, parent: Path, limit: int, runs: tuple[Path, Path]) -> dict[str, Any]:
    """Both ways once, each under a limit of its own group."""
    prepared, sequential = runs
    with Limited(parent, limit) as group:
        codes = run_naive(config, prepared, group)
        naive_kills = group.num_oom_kills
    drop_panels(work)
    with Limited(parent, limit) as group:
        parallel = run_memfit(memfit(config, "--new"), group)
        kills, peak = group.num_oom_kills, group.peak_bytes
    return {
        "naive_killed": sum(code in (-signal.SIGKILL, 128 + signal.SIGKILL) for code in codes),
        "naive_oom_kills": naive_kills,
        "memfit_exit_code": parallel["exit_code"],
        "memfit_oom_kills": kills,
        "memfit_charged_peak_bytes": peak,
        "memfit_at_once": parallel.get("most_at_once"),
        "memfit_seconds": parallel["seconds"],
        "limit_name": parallel.get("budget", {}).get("binding", {}).get("name"),
        "num_differences": len(differences(Path(parallel["run"]), sequential)),
    }


def report(figures: Mapping[str, Any]) -> bool:
    """Print the comparison; whether everything promised held."""
    tries, limit = figures["tries"], figures["limit_bytes"]
    bound = figures["panel_bytes"] + NUM_FOLDS * figures["private_bytes"]
    peak = max(one["memfit_charged_peak_bytes"] for one in tries)
    parallel = statistics.median(one["memfit_seconds"] for one in tries)
    fewest = min(one["naive_killed"] for one in tries)
    most = max(one["naive_killed"] for one in tries)
    num_finished = sum(one["memfit_exit_code"] == 0 for one in tries)
    oom_kills = sum(one["memfit_oom_kills"] for one in tries)
    different = sum(one["num_differences"] for one in tries)
    at_once = min(one["memfit_at_once"] or 0 for one in tries)
    print()
    print(f"panel                     {format_bytes(figures['panel_bytes'])}")
    print(f"one fold's private peak   {format_bytes(figures['private_bytes'])}")
    print(f"one real cgroup limit     {format_bytes(limit)} = (panel + 5 folds' private) + 5 %")
    print(f"repetitions               {len(tries)}")
    print(f"naive, 5 copies           {fewest} to {most} of 5 processes killed")
    print(f"memfit                    {num_finished} of {len(tries)} runs completed, {oom_kills} OOM kills")
    print(f"  folds at once           {at_once} of 5 at least; budget set by {tries[-1]['limit_name']}")
    print(f"  charged peak            {format_bytes(peak)}, {peak / bound:.3f} of (panel + 5 folds' private)")
    print(
        f"against one at a time     {parallel / figures['sequential_seconds']:.2f} of its time, {os.cpu_count()} cores"
    )
    print(f"differing tensors, tables {different}")
    return fewest > 0 and num_finished == len(tries) and not oom_kills and at_once == NUM_FOLDS and not different


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="the panel's size at least (default: 1)")
    parser.add_argument("--repeat", type=int, default=1, help="how often both ways are tried (default: 1)")
    parser.add_argument("--work", type=Path, help="where to work; kept afterwards (default: a temporary folder)")
    parser.add_argument("--cgroup", type=Path, default=Path("/sys/fs/cgroup/memory"), help="where to make the group")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--naive", nargs=3, metavar=("CONFIG", "RUN", "FOLD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.naive:
        return naive_fold(Path(options.naive[0]), Path(options.naive[1]), int(options.naive[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not os.access(options.cgroup, os.W_OK):
        raise SystemExit(f"{options.cgroup} cannot be written: this needs root and cgroup v1, or --cgroup for v2")
    work = options.work or Path(tempfile.mkdtemp(prefix="memfit-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        figures = compare(work.resolve(), options.gib, options.cgroup, options.repeat)
    finally:
        if options.work is None:
            shutil.rmtree(work)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if not report(figures):
        raise SystemExit("NOT as promised")
    print("as promised: the naive way is killed, memfit runs all five at once within the limit, bit for bit the same")
    return None


if __name__ == "__main__":
    main()
