"""How often a search runs out of memory: by what it is told of such a trial, and by what it refuses before it starts.

`tune.py --part told` uses it. Nothing is trained: the loss and the memory of a draw are formulas. The searched settings
are those of a forecaster on graphs; eleven of the 27 sizes do not fit, and the best ones lie at the border.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import optuna

from memfit.pipeline import Order, StageSpec
from memfit.tuning import Trial, TuneSettings, distributions, draw, why_infeasible
from memfit.units import GIB

BATCH_SIZES, HIDDEN_SIZES, NUM_LAYERS = (2048, 4096, 8192), (256, 384, 512), (2, 3, 4)
SPACE = [
    {"name": "params.lr", "low": 1e-5, "high": 1e-3, "log": True},
    {"name": "params.batch_size", "choices": list(BATCH_SIZES)},
    {"name": "params.hidden_size", "choices": list(HIDDEN_SIZES)},
    {"name": "params.gat_dropout", "low": 0.1, "high": 0.4},
    {"name": "params.gat_layers", "choices": list(NUM_LAYERS)},
]
LIMIT_BYTES = 5 * GIB // 2
_BASE_BYTES, _TENSORS_A_LAYER = GIB // 2, 100
NUM_TRIALS = 60
#: Draws of one trial before it is given up, as in a study.
_MOST_DRAWS = 25
Params = Mapping[str, Any]


def peak_bytes(params: Params) -> int:
    """Return what a trial takes: tensors of batch x hidden for each layer, on top of a base."""
    batch, hidden, layers = (params[f"params.{name}"] for name in ("batch_size", "hidden_size", "gat_layers"))
    return int(_BASE_BYTES + 4 * batch * hidden * layers * _TENSORS_A_LAYER)


def loss_of(params: Params) -> float:
    """Return the loss of a trial: more capacity is better, and so is a learning rate near 2e-4."""
    batch, hidden, layers = (params[f"params.{name}"] for name in ("batch_size", "hidden_size", "gat_layers"))
    rate = (math.log10(params["params.lr"]) + 3.7) ** 2 + (params["params.gat_dropout"] - 0.2) ** 2
    return float(0.2 * rate - 0.10 * math.log2(hidden / 256) - 0.05 * (layers - 2) - 0.05 * math.log2(batch / 2048))


def share_too_large() -> float:
    """Return the share of uniform draws that do not fit."""
    names = ("params.batch_size", "params.hidden_size", "params.gat_layers")
    sizes = [
        peak_bytes(dict(zip(names, one, strict=True)))
        for one in itertools.product(BATCH_SIZES, HIDDEN_SIZES, NUM_LAYERS)
    ]
    return fmean(size > LIMIT_BYTES for size in sizes)


@dataclass(frozen=True)
class Told:
    """One study: its trials that ran out of memory, its refused draws, and its best loss."""

    num_out_of_memory: int
    num_refused: int
    best: float


def plain(state: str, sampler: str, seed: int, num_trials: int) -> Told:
    """Run a study of Optuna's that tells an out-of-memory as FAIL or as PRUNED."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    of = {"TPE": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}[sampler]
    study, found = optuna.create_study(sampler=of(seed=seed), direction="minimize"), []
    space = distributions(settings_of(seed, num_trials))
    for _ in range(num_trials):
        trial = study.ask(fixed_distributions=space)
        if peak_bytes(trial.params) > LIMIT_BYTES:
            study.tell(trial, state=optuna.trial.TrialState[state])
        else:
            found.append(loss_of(trial.params))
            study.tell(trial, found[-1])
    return Told(num_trials - len(found), 0, min(found, default=math.inf))


def settings_of(seed: int, num_trials: int) -> TuneSettings:
    """Return the settings of a study of memfit's over the same space."""
    fixed = {"objective": "train.loss", "direction": "minimize", "num_slots": 1}
    return TuneSettings.model_validate({**fixed, "space": SPACE, "seed": seed, "n_trials": num_trials})


def by_memfit(share: float | None, seed: int, num_trials: int) -> Told:
    """Run a study by memfit's draws and refusals, one trial after the other.

    Args:
        share: What the workload's estimate says, as a share of the true peak; None if it gives none, which refuses no
            draw.
        seed: The study's seed.
        num_trials: How many trials.
    """
    settings, seen = settings_of(seed, num_trials), list[Trial]()
    for number in range(num_trials):
        trial = Trial(f"trial_{number:04d}", number, num_seen=number)
        while len(trial.refused) < _MOST_DRAWS:
            params = draw(settings, seen, trial.refused, number)
            estimate = None if share is None else round(share * peak_bytes(params))
            why = why_infeasible(_order(estimate), seen, {"host": LIMIT_BYTES, "device": None})
            if not why:
                seen.append(_ended(replace(trial, params=params), estimate))
                break
            trial = replace(trial, refused=[*trial.refused, {"params": params, "why": why}])
        else:
            seen.append(replace(trial, state="infeasible"))
    states = [one.state for one in seen]
    best = min((one.value for one in seen if one.value is not None), default=math.inf)
    return Told(states.count("out_of_memory"), sum(len(one.refused) for one in seen), best)


def _order(estimate: int | None) -> Order:
    """Return an order of one stage on the host, with an estimate."""
    stage = SimpleNamespace(num_gpus=0)
    settings = SimpleNamespace(memory=SimpleNamespace(num_gpus=0))
    stages = [StageSpec("train", memory_bytes=estimate)]
    return cast(Order, SimpleNamespace(stages=stages, settings=settings, topology=lambda name: stage))


def _ended(trial: Trial, estimate: int | None) -> Trial:
    """Return a trial as its record says it ended; one that ran out of memory was measured up to the limit."""
    peak = peak_bytes(trial.params)
    measured: dict[str, Any] = {"peaks": {"train": min(peak, LIMIT_BYTES)}}
    if estimate is not None:
        measured["estimates"] = {"train": estimate}
    if peak > LIMIT_BYTES:
        return replace(trial, state="out_of_memory", measured=measured | {"failed_stage": "train"})
    return replace(trial, state="completed", value=loss_of(trial.params), measured=measured)


WAYS: Mapping[str, Callable[[int, int], Told]] = {
    "random draws": lambda seed, num: plain("FAIL", "random", seed, num),
    "told as FAIL": lambda seed, num: plain("FAIL", "TPE", seed, num),
    "told as PRUNED": lambda seed, num: plain("PRUNED", "TPE", seed, num),
    "memfit, told as PRUNED": lambda seed, num: by_memfit(None, seed, num),
    "memfit, arithmetic a fifth too low": lambda seed, num: by_memfit(0.8, seed, num),
    "memfit, refused by arithmetic": lambda seed, num: by_memfit(1.0, seed, num),
}


def compare(num_seeds: int, num_trials: int = NUM_TRIALS) -> dict[str, Sequence[Told]]:
    """Run each way with the same seeds."""
    return {name: [way(seed, num_trials) for seed in range(num_seeds)] for name, way in WAYS.items()}


def rows(table: Mapping[str, Sequence[Told]], num_trials: int = NUM_TRIALS) -> Sequence[tuple[str, ...]]:
    """Return the table's lines: means over the seeds."""
    found = [("of a trial without memory", f"out of memory, of {num_trials}", "refused draws", "best loss")]
    for name, studies in table.items():
        oom, refused = (fmean(getattr(one, key) for one in studies) for key in ("num_out_of_memory", "num_refused"))
        found.append((name, f"{oom:.1f}", f"{refused:.1f}", f"{fmean(one.best for one in studies):.3f}"))
    return found
