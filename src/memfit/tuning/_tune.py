"""Run a study: find or make its run directory, search under one budget, and write the best config."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memfit import config
from memfit.errors import ConfigError, UsageError
from memfit.files import damaged, read_json, write_json
from memfit.jobs import JobStatus
from memfit.memory import HOST, Footprint
from memfit.pipeline import (
    Choice,
    Order,
    RunConfig,
    Supervisor,
    View,
    Warm,
    newest_run,
    order_of_config,
    read_budget,
    start_folder,
    supervised,
    take_up,
    write_config,
    write_order,
)
from memfit.rundir import RunDir
from memfit.tuning import _optuna
from memfit.tuning._feasible import params_of
from memfit.tuning._record import Trial, folder_of, read_trials
from memfit.tuning._settings import TuneSettings
from memfit.tuning._sweep import Sweep, check_names

_FREE = ("n_trials", "final_epochs")  # settings of a study that change no trial
_STUDY = {"schema_version": int, "name": str, "settings": dict, "limits": dict, "basis": str}


@dataclass(frozen=True)
class Study:
    """A study as its run directory holds it.

    Attributes:
        run: The run directory.
        name: Its name: the experiment's.
        settings: How it searches.
        limits: The memory that one job may have, in bytes, as it was when the study began: ``host`` and ``device``.
    """

    run: RunDir
    name: str
    settings: TuneSettings
    limits: Mapping[str, int | None]

    @classmethod
    def open(cls, run: RunDir) -> Study:
        """Return the study of a run directory."""
        found = read_json(run.path / "study.json", _STUDY)
        if found is None:
            raise UsageError(
                f"{run.path} is no study.",
                rule="memfit tune makes a run directory with a study.json.",
                remedy="name a folder that memfit tune made, or its study's name",
            )
        try:
            return cls(run, found["name"], TuneSettings.model_validate(found["settings"]), found["limits"])
        except ValidationError as error:
            raise damaged(run.path / "study.json", f"has settings of no study: {error.errors()[0]['msg']}") from None

    @property
    def trials(self) -> list[Trial]:
        """The records of its trials, in order."""
        return read_trials(self.run)

    @property
    def best(self) -> Trial | None:
        """The best trial that completed; of equal ones the first."""
        sign = 1 if self.settings.direction == "maximize" else -1
        done = [one for one in self.trials if one.state == "completed" and one.value is not None]
        return max(done, key=lambda one: (sign * (one.value or 0.0), -(one.number or 0)), default=None)


@dataclass(frozen=True)
class TuneResult:
    """How a study ended: ``state`` and ``exit_code`` as of a run, and the best trial."""

    path: Path
    state: str
    exit_code: int
    best: Trial | None
    statuses: Mapping[str, JobStatus]


def tune(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    max_epochs: int | None = None,
    new: bool = False,
    force: bool = False,
    view: View | None = None,
) -> TuneResult:
    """Search the settings of a config's workload under one memory budget, or go on with the study.

    The section ``tune`` says what is searched: see `TuneSettings`. Trials that cannot fit are refused before they
    start, a trial that does worse than earlier ones is ended early, and the same study results after any kill.

    Args:
        source: The config, a YAML file or its content.
        overrides: Settings such as ``"tune.n_trials=40"``.
        env: Where ``MEMFIT_…`` variables are read; ``os.environ`` when None.
        max_epochs: The value of the setting that ``tune.epochs`` names.
        new: Start over in a new run directory.
        force: Run also what does not fit the budget.
        view: As in `memfit.run`.

    Raises:
        UsageError: If the config or the space is bad, or another process runs the study.
        JobFailedError: If a short trial of the config's own settings fails, before the search.
        MissingExtraError: If Optuna is not installed.
    """
    find = (lambda order: None) if new else newest_run
    env = os.environ if env is None else env
    return _tune(source, overrides, env, max_epochs, find=find, force=force, view=view)


def resume_study(run: RunDir, *, view: View | None = None) -> TuneResult:
    folders = [*(run.header.get("folders") or ()), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    with start_folder(run):
        env["PYTHONPATH"] = os.pathsep.join(folders)
        return _tune(run.path / "config.yaml", (), env, None, find=lambda order: run, force=False, view=view)


def _tune(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[config.Override],
    env: Mapping[str, str],
    max_epochs: int | None,
    *,
    find: Callable[[Order], RunDir | None],
    force: bool,
    view: View | None,
) -> TuneResult:
    _optuna.load_optuna()
    settings = _read_settings(source, overrides, env)
    if max_epochs is not None:
        if settings.epochs is None:
            raise ConfigError(
                "--max-epochs was given, and tune.epochs names no setting.",
                rule="--max-epochs sets the setting that tune.epochs names.",
                remedy="name it: --set tune.epochs=params.NAME",
            )
        overrides = [*overrides, ("--max-epochs", f"{settings.epochs}={max_epochs}")]
    with Warm() as warm:
        how: dict[str, Any] = {"env": env, "choice": Choice(until=settings.stage), "warm": warm}
        base = order_of_config(source, overrides=overrides, **how)
        check_names(base, settings)
        fixed = settings.model_dump(mode="json", exclude=set(_FREE))
        fingerprint = config.fingerprint({"order": base.fingerprint, "tune": fixed})
        facts = {**base.facts, "kind": "tune"}
        order = dataclasses.replace(base, kind="tune", fingerprint=fingerprint, facts=facts)
        run, state = take_up(order, find=find)
        made: dict[str, Order] = {}

        def order_of(values: Mapping[str, Any]) -> Order:
            own = [("the trial", f"{name}={json.dumps(value)}") for name, value in values.items()]
            if (key := repr(own)) not in made:  # a child process imports the code
                made[key] = order_of_config(source, overrides=[*overrides, *own], with_memory=True, **how)
            return made[key]

        folder_of(run).mkdir(exist_ok=True)
        own = base.settings.model_copy(update={"on_failure": "continue"})
        facts = {"state": state, "fingerprint": fingerprint}
        with supervised(run, own, force=force, view=view, facts=facts, parent=warm.parent) as supervisor:
            return _search(order, settings, supervisor, order_of)


def _read_settings(
    source: Path | str | Mapping[str, Any], overrides: Sequence[config.Override], env: Mapping[str, str]
) -> TuneSettings:
    given: dict[str, Any] = {"values": source} if isinstance(source, Mapping) else {"file": Path(source)}
    whole = config.resolve(RunConfig, **given, env=env, overrides=overrides)
    if not whole.value.tune:
        raise ConfigError(
            f"{'the config' if isinstance(source, Mapping) else source} has no section tune.",
            rule="memfit tune searches what that section names.",
            remedy="add tune: with space, objective and direction; memfit tune --help shows one",
        )
    if of_run := [name for name in ("planned", "canary") if getattr(whole.value, name)]:
        raise ConfigError(
            f"memfit tune was given {' and '.join(of_run)}.",
            rule="a plan and a canary are of one run, and a study makes a run of each trial.",
            remedy=f"remove it (--set {of_run[0]}={'null' if of_run[0] == 'planned' else 'false'}), and give it to "
            "memfit run with the study's best.yaml",
        )
    return config.resolve_nested(whole, "tune", TuneSettings).value


def _search(
    order: Order, settings: TuneSettings, one: Supervisor, order_of: Callable[[Mapping[str, Any]], Order]
) -> TuneResult:
    run = one.run
    limits = _write_study(order, settings, run)
    study = Study(run, order.settings.experiment, settings, limits)

    def keep_best(trial: Trial) -> None:
        if (best := study.best) is not None and best.name == trial.name:
            _write_best(run, settings, order_of, best)

    sweep = Sweep(one, settings, order, order_of, limits, keep_best)
    one.adopt(sweep.goes_on_with)
    write_order(order, run)
    statuses = one.schedule(sweep, _known(sweep), largest_first=True)
    sweep.close()
    if (best := study.best) is not None:  # its process may have been killed before it wrote that
        _write_best(run, settings, order_of, best)
    if sweep.error is not None:
        end = "failed", sweep.error.exit_code
    elif not sweep.has_all:
        end = one.interrupted
    else:  # failed trials are part of a study; one without a completed trial has failed
        end = ("completed", 0) if best is not None else ("failed", 4)
    result = one.settle(statuses, {}, end=end)
    if sweep.error is not None:
        raise sweep.error
    return TuneResult(run.path, result.state, result.exit_code, best, statuses)


def _write_study(order: Order, settings: TuneSettings, run: RunDir) -> Mapping[str, int | None]:
    """Write ``study.json``, and return the study's own limits: those of its first start."""
    path = run.path / "study.json"
    before = read_json(path, _STUDY)
    basis = config.fingerprint([[stage.name, dict(stage.code), stage.data] for stage in order.stages])
    if before is not None and before["basis"] != basis:
        raise UsageError(
            f"the code or the data of the study in {run.path} changed since it began.",
            rule="all trials of a study train with the same code on the same data, or they cannot be compared.",
            remedy="start a new study: the same command with --new",
        )
    if before is None:
        budget = read_budget(order.settings)
        devices = [device.total_bytes - device.foreign_bytes for device in budget.devices]
        limits: Mapping[str, int | None] = {HOST: max(1, budget.lendable_bytes), "device": max(devices, default=None)}
    else:
        limits = before["limits"]
    found = {"schema_version": 1, "name": order.settings.experiment, "settings": settings.model_dump(mode="json")}
    write_json(path, found | {"limits": dict(limits), "basis": basis})
    return limits


def _known(sweep: Sweep) -> list[tuple[str, Mapping[str, str], Footprint]]:
    """Return what the ended trials took, as forecasts for the others."""
    return [
        (stage, params_of(trial.params), Footprint(private_bytes=peak, method="measured"))
        for trial in sweep.trials.values()
        for stage, peak in trial.measured.get("peaks", {}).items()
        if peak
    ]


def _write_best(
    run: RunDir, settings: TuneSettings, order_of: Callable[[Mapping[str, Any]], Order], best: Trial
) -> None:
    values = dict(best.params)
    if settings.epochs is not None and settings.final_epochs is not None:
        values[settings.epochs] = settings.final_epochs
    comment = f"# {best.name} of the study in this folder: {settings.objective} {best.value:.6g}.\n"
    write_config(order_of(values), run.path / "best.yaml", comment)
