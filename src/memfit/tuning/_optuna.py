"""Optuna by ask and tell: a study is made in memory from records, so that the same records give the same answer.

A seeded sampler of Optuna's does not go on where it was. So each draw has a generator of its own, seeded by the study,
the trial and the number of the draw.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.errors import MissingExtraError
from memfit.tuning._record import Trial
from memfit.tuning._settings import TuneSettings

if TYPE_CHECKING:
    import optuna


def load_optuna() -> Any:
    """Return the package, which then logs no trials."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError.of("optuna", "hpo", "a search") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def distributions(settings: TuneSettings) -> dict[str, Any]:
    of = load_optuna().distributions
    found: dict[str, Any] = {}
    for one in settings.space:
        if one.choices is not None:
            found[one.name] = of.CategoricalDistribution(one.choices)
        elif isinstance(one.low, int) and isinstance(one.high, int):
            found[one.name] = of.IntDistribution(one.low, one.high, log=one.log)
        else:
            found[one.name] = of.FloatDistribution(one.low, one.high, log=one.log)
    return found


def make_study(settings: TuneSettings, trials: Iterable[Trial], *key: int) -> optuna.Study:
    """Return a study in memory that has seen some trials, with a sampler seeded by the study's seed and a key.

    An out-of-memory and a refused draw are told as pruned: told as failed, the sampler would walk back to them.
    """
    optuna = load_optuna()
    samplers, pruners = optuna.samplers, optuna.pruners
    digest = hashlib.sha256(repr((settings.seed, *key)).encode()).digest()
    sampler = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}[settings.sampler]
    pruner = pruners.NopPruner()
    if settings.pruner == "median":
        pruner = pruners.MedianPruner(settings.pruner_startup, settings.pruner_warmup + 1)  # its steps begin at 0
    study = optuna.create_study(
        sampler=sampler(seed=int.from_bytes(digest[:4], "big")), pruner=pruner, direction=settings.direction
    )
    study.add_trials(_told(settings, trials))
    return study  # type: ignore[no-any-return]


def draw(
    settings: TuneSettings, seen: Sequence[Trial], refused: Sequence[Mapping[str, Any]], number: int
) -> dict[str, Any]:
    """Return the settings of trial ``number``, drawn after the trials that it may see and its own refused draws."""
    own = [Trial("", number, "infeasible", one["params"]) for one in refused]
    study = make_study(settings, [*seen, *own], number, len(refused))
    return dict(study.ask(fixed_distributions=distributions(settings)).params)


def is_to_prune(study: optuna.Study, reported: Mapping[int, float]) -> bool:
    """Return whether the study's pruner ends a trial after what it has reported so far; a NaN is the worst."""
    optuna = load_optuna()
    worst = math.inf if study.direction == optuna.study.StudyDirection.MINIMIZE else -math.inf
    steps = {step: worst if math.isnan(value) else value for step, value in reported.items()}
    frozen = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, intermediate_values=steps)
    return bool(study.pruner.prune(study, frozen))


def _told(settings: TuneSettings, trials: Iterable[Trial]) -> list[Any]:
    optuna = load_optuna()
    states = optuna.trial.TrialState
    space = distributions(settings)
    found = []
    for trial in trials:
        draws: list[tuple[Mapping[str, Any], Any, float | None, Mapping[int, float], str]] = []
        draws += [(one["params"], states.PRUNED, None, {}, "infeasible") for one in trial.refused]
        own = {"completed": states.COMPLETE, "failed": states.FAIL}.get(trial.state, states.PRUNED)
        if trial.params or own != states.PRUNED:
            value = trial.value if trial.state == "completed" else None
            draws.append((trial.params, own, value, trial.intermediate, trial.state))
        for params, state, value, reported, word in draws:
            known = {name: one for name, one in params.items() if name in space}
            steps = {int(step): one for step, one in reported.items() if math.isfinite(one)}
            found.append(
                optuna.trial.create_trial(
                    params=known,
                    distributions={name: space[name] for name in known},
                    state=state,
                    value=value,
                    intermediate_values=steps,
                    user_attrs={"memfit_state": word, "memfit_trial": trial.name},
                )
            )
    return found
