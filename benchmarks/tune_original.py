"""The faults of a search that was written by hand, one by one, beside memfit in the same space.

`tune.py --part original` uses it. The search was a field report's: 45 % of its trials failed. Nothing is trained here:
an epoch is a short sleep and a formula. What the hand-written search did runs on a real study of Optuna's; memfit runs
its own, each trial in a process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from memfit.pipeline import Context
from memfit.rundir import RunDir
from memfit.tuning import Study, Trial, read_trials

BENCHMARKS = Path(__file__).resolve().parent
NUM_TRIALS, NUM_EPOCHS, EPOCH_SECONDS = 20, 6, 0.4
#: The lists that the hand-written search gave to every network, whatever its number of layers.
FIXED_WIDTHS = [256, 256]
#: The study is killed when so many trials have ended.
_KILLED_AFTER = 5
#: A loader that gives no batch for so long hangs.
_HANG_SECONDS = 8.0
SPACE = [
    {"name": "params.lr", "low": 1e-5, "high": 1e-3, "log": True},
    {"name": "params.hidden_size", "choices": [256, 384, 512]},
    {"name": "params.gat_layers", "low": 2, "high": 4},
]


def loss_of(lr: float, hidden_size: int, gat_layers: int, epoch: int) -> float:
    """Return the loss after an epoch; it is always above 0."""
    rate = (math.log10(lr) + 3.7) ** 2
    return (0.5 + 0.3 * rate - 0.05 * gat_layers - 0.1 * hidden_size / 512) * (1 + 1 / epoch)


def widths_of(hidden_size: int, gat_layers: int, *, fixed: bool) -> list[int]:
    """Return the width of each layer; from the fixed list there are only two."""
    return [FIXED_WIDTHS[layer] if fixed else hidden_size for layer in range(gat_layers)]


def train(
    context: Context, journal: str, lr: float = 1e-4, hidden_size: int = 256, gat_layers: int = 2, fixed: bool = False
) -> dict[str, float]:
    """Train a trial of memfit's; each epoch is one line of a journal."""
    widths_of(hidden_size, gat_layers, fixed=fixed)
    loss = math.inf
    for epoch in range(1, NUM_EPOCHS + 1):
        time.sleep(EPOCH_SECONDS)
        loss = loss_of(lr, hidden_size, gat_layers, epoch)
        with open(journal, "a") as lines:
            lines.write(f"{lr!r} {epoch}\n")
        context.report("loss", loss, epoch)
    return {"loss": loss}


def by_hand(seed: int = 0) -> dict[str, Any]:
    """Run the hand-written search: a failed trial is 0.0, and the pruner is asked when the process has ended."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    failed: list[int] = []
    wasted: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-5, 1e-3, log=True)
        hidden = trial.suggest_categorical("hidden_size", [256, 384, 512])
        layers = trial.suggest_int("gat_layers", 2, 4)
        try:
            widths_of(hidden, layers, fixed=True)
        except IndexError:
            failed.append(trial.number)
            return 0.0
        losses = {epoch: loss_of(lr, hidden, layers, epoch) for epoch in range(1, NUM_EPOCHS + 1)}
        for epoch, loss in losses.items():
            trial.report(loss, epoch)
            if trial.should_prune():
                wasted.append(NUM_EPOCHS - epoch)
                raise optuna.TrialPruned
        return losses[NUM_EPOCHS]

    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(4, 1))
    study.optimize(objective, NUM_TRIALS)
    return {"num_failed": len(failed), "best_failed": study.best_trial.number in failed, "wasted_epochs": sum(wasted)}


def config_of(work: Path, name: str, *, fixed: bool) -> dict[str, Any]:
    """Return the config of memfit's study over the same space."""
    return {
        "experiment": name,
        "target": "tune_original:train",
        "runs_dir": str(work / "runs"),
        "params": {"journal": str(work / f"{name}.journal"), "fixed": fixed},
        "tune": {
            "space": SPACE,
            "objective": "train.loss",
            "direction": "minimize",
            "n_trials": NUM_TRIALS,
        },
    }


def _start(path: Path) -> subprocess.Popen[bytes]:
    """Start a study of memfit's in a process of its own."""
    found = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": found, "MEMFIT_CLAIMS_DIR": str(path.parent / "claims")}
    with open(path.with_suffix(".log"), "ab") as log:
        words = [sys.executable, str(BENCHMARKS / "tune.py"), "--inside", str(path)]
        return subprocess.Popen(words, cwd=path.parent, env=env, stdout=log, stderr=log)


def _runs(work: Path, name: str) -> Iterator[RunDir]:
    for path in work.glob(f"runs/{name}/*/study.json"):
        yield RunDir.open(path.parent)


def _ended(work: Path, name: str) -> dict[str, Trial]:
    return {one.name: one for run in _runs(work, name) for one in read_trials(run) if one.is_over}


def by_memfit(work: Path, name: str, *, fixed: bool, kill: bool) -> dict[str, Any]:
    """Run memfit's study to its end, killed once on the way where asked; its figures."""
    path = work / f"{name}.json"
    path.write_text(json.dumps(config_of(work, name, fixed=fixed)))
    before: dict[str, Trial] = {}
    process = _start(path)
    while kill and process.poll() is None and len(before) < _KILLED_AFTER:
        time.sleep(0.2)
        before = _ended(work, name)
    if kill:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = _start(path)
    process.wait()
    (run,) = _runs(work, name)
    trials = read_trials(run)
    lines = (work / f"{name}.journal").read_text().splitlines()
    return figures_of(trials, lines) | {
        "best": Study.open(run).best,
        "kept": sum(one == trials[one.number or 0] for one in before.values()),
        "num_before": len(before),
    }


def figures_of(trials: Sequence[Trial], journal: Sequence[str]) -> dict[str, Any]:
    """Return what the records and the journal of epochs say.

    ``wasted_epochs`` were trained by pruned trials after the epoch that pruned them; ``twice`` were trained twice.
    """
    epochs = Counter(journal)
    trained = Counter(line.partition(" ")[0] for line in epochs)
    wasted = sum(
        trained[repr(one.params["params.lr"])] - max(one.intermediate) for one in trials if one.state == "pruned"
    )
    seconds = [one.measured["seconds"] for one in trials if one.state == "completed"]
    return {
        "states": Counter(one.state for one in trials),
        "kinds": Counter(one.kind for one in trials if one.state == "failed"),
        "wasted_epochs": wasted,
        "twice": sum(number - 1 for number in epochs.values()),
        "num_slower": sum(one > seconds[0] for one in seconds[1:]),
        "num_completed": len(seconds),
    }


@contextmanager
def _busy_lock() -> Iterator[Callable[..., Any]]:
    """Give a function that takes a lock which another thread holds nearly always, as a library's thread pool does."""
    lock, stop = threading.Lock(), threading.Event()

    def hold() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0.05)
            time.sleep(0.001)

    def read(batch: Any, *_: Any) -> Any:
        with lock:
            return batch

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield read
    finally:
        stop.set()
        thread.join()


def loader_by_hand() -> int:
    """Return how many of 8 batches PyTorch's loader gives with two forked workers before it hangs."""
    from torch.utils.data import DataLoader

    make, number = cast(Any, DataLoader), 0
    with _busy_lock() as read:
        loader = make(range(8), num_workers=2, collate_fn=read, timeout=_HANG_SECONDS, multiprocessing_context="fork")
        try:
            for _ in loader:
                number += 1
        except RuntimeError:  # it timed out
            return number
    return number


def loader_by_memfit(work: Path) -> int:
    """Return how many of 8 batches memfit's loader gives with two workers."""
    import pyarrow as pa

    from memfit.data import Loader, Panel

    dates = [f"2024-01-{day:02d}" for day in range(2, 10)]
    rows = [(day, code) for day in dates for code in ("A", "B")]
    values = [float(number) for number in range(len(rows))]
    columns = {"date": [day for day, _ in rows], "code": [code for _, code in rows], "close": values, "ret": values}
    panel = Panel.build(pa.table(columns), work / "panels", features=["close"], targets=["ret"])

    with _busy_lock() as read:

        def transform(windows: Any, targets: Any, generator: Any) -> None:
            read(windows)

        options: Mapping[str, Any] = {"lookback": 1, "target": "ret", "num_workers": 2, "transform": transform}
        return sum(1 for _ in Loader(panel, range(8), **options))


def compare(work: Path) -> list[tuple[str, ...]]:
    """Run both, and return the table's lines."""
    hand, hung = by_hand(), loader_by_hand()
    faulty = by_memfit(work, "faulty", fixed=True, kill=False)
    whole = by_memfit(work, "whole", fixed=False, kill=True)
    failed, best = faulty["states"]["failed"], faulty["best"]
    typed = ", ".join(f"{number} {kind}" for kind, number in faulty["kinds"].items())
    others = {state: number for state, number in whole["states"].items() if state not in ("completed", "pruned")}
    of = f"of {NUM_TRIALS}"
    return [
        ("fault", "by hand", "memfit"),
        (f"two widths for any number of layers: failed, {of}", str(hand["num_failed"]),
         f"{failed}, each with its kind: {typed}; widths made from the number: {whole['states']['failed']}"),
        ("the best trial is a failed one", "yes" if hand["best_failed"] else "no",
         f"no: {best.name} {best.state}" if best else "none completed"),
        ("epochs trained after the one that pruned", str(hand["wasted_epochs"]),
         f"{whole['wasted_epochs']} in {whole['states']['pruned']} pruned trials"),
        (f"killed with {whole['num_before']} trials done: kept", "0: the study was in memory",
         f"{whole['kept']}; epochs trained twice: {whole['twice']}; others at the end: {others or 'none'}"),
        ("completed trials ended by a time limit of the first one's time",
         f"{whole['num_slower']} of {whole['num_completed'] - 1}", str(whole["states"]["timeout"])),
        ("batches of 8 with two workers beside a thread that holds a lock", f"{hung}, then it hangs",
         str(loader_by_memfit(work))),
    ]  # fmt: skip
