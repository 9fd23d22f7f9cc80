"""A study while it runs: draws trials, hands their jobs to the scheduler, prunes them, and writes how they ended.

Trial k is drawn when trials 0 to k - P have ended, from their results alone, where P is ``num_slots``. So the study is
the same whichever trial ends first, and after any kill. A pruned trial's record ends at the epoch that pruned it,
however far its process got.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from memfit.errors import ConfigError, DoesNotFitError, JobFailedError, MemfitError
from memfit.files import fits, open_own, read_json
from memfit.jobs import ENDED, Job, JobStatus, Verdict, read_status
from memfit.memory import Footprint
from memfit.pipeline import Graph, Index, Order, Supervisor, Unit, UnitSource, make_job, setting_of
from memfit.rundir import RunDir
from memfit.tuning import _optuna
from memfit.tuning._feasible import params_of, why_infeasible
from memfit.tuning._record import Trial, TrialState, name_of, read_trial, read_trials, write_trial
from memfit.tuning._reports import Reports, read_number
from memfit.tuning._settings import TuneSettings

_MOST_DRAWS = 25  # how often the settings of one trial are drawn before it counts as infeasible
CANARY_EPOCHS = (1, 3)  # epochs of the canaries: short trials of the config's own settings, before the study
_LOOK_SECONDS = 0.5
_MOST_LOG_BYTES = 1 << 20  # of the end of a log, which may be larger than the memory
_PRUNED = "worse than the median of earlier trials at epoch {}"


@dataclass
class Active:
    trial: Trial
    order: Order
    source: UnitSource
    study: Any = None
    num_checked: int = 0
    pruned: str = ""  # why it is ended


class Sweep:
    """A study as a source of jobs for the scheduler.

    ``order_of`` takes settings by their dotted names, and returns the order of a trial in another thread; there too
    ``on_completed`` is called with each trial that completed. ``error`` says why the study cannot go on.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        settings: TuneSettings,
        base: Order,
        order_of: Callable[[Mapping[str, Any]], Order],
        limits: Mapping[str, int | None],
        on_completed: Callable[[Trial], None],
    ) -> None:
        self.run, self._supervisor, self._say = supervisor.run, supervisor, supervisor.events.write
        self.settings, self.base, self._order_of = settings, base, order_of
        self._limits, self._on_completed = limits, on_completed
        self._index = Index([self.run])
        self._reports = Reports(settings.report or settings.number)
        supervisor.watchers.append(self._reports)
        self._pool = ThreadPoolExecutor(1, "draw")
        self._drawing: dict[int, Future[tuple[Trial, Order | None]]] = {}
        self._active: dict[str, Active] = {}
        self._left: set[str] = set()  # trials that were stopped: a later start goes on with them
        self._taken_over: set[str] = set()  # trials whose jobs still run, and which have not begun here
        self._next_look = 0.0
        self.error: MemfitError | None = None
        self.epochs = None if settings.epochs is None else int(setting_of(base.params, settings.epochs, "tune"))
        self.trials = {trial.number: trial for trial in read_trials(self.run)}
        canaries = [number for number in CANARY_EPOCHS if self.epochs is not None and number <= self.epochs]
        self.canaries = {f"canary_{number}": number for number in canaries}
        found = [read_trial(self.run, name) for name in self.canaries]
        self._ended_canaries = {one.name: one for one in found if one is not None and not _why_bad(one)}

    # The scheduler's side

    def next(self, num_free: int) -> list[Job]:
        for number, drawing in [one for one in self._drawing.items() if one[1].done()]:
            del self._drawing[number]
            self._begin(drawing)
        if self.error is None:
            self._draw()
        jobs: list[Job] = []
        # Before these are handed over, the scheduler does not know what they take.
        names = [] if self._taken_over and self.error is None else list(self._active)
        for active in [self._active[name] for name in names]:
            if not active.pruned:
                jobs += active.source.next(num_free)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._look()
        return jobs

    def ended(self, status: JobStatus) -> None:
        active = self._active[status.job_id.partition(".")[0]]
        active.source.ended(status)
        self._next_look = 0.0

    @property
    def is_done(self) -> bool:
        if self._active or self._drawing:
            return False
        if self.error is not None or self._left.intersection(self.canaries):
            return True
        return self.canaries.keys() <= self._ended_canaries.keys() and not self._next_numbers()

    @property
    def has_all(self) -> bool:
        return all(map(self._is_over, range(self.settings.n_trials)))

    def num_like(self, job_id: str) -> int:
        active = self._active.get(job_id.partition(".")[0])
        return 1 if active is None else self.settings.num_slots * active.source.num_like(job_id)

    def given_up(self, job_id: str) -> str:
        active = self._active.get(job_id.partition(".")[0])
        return "" if active is None else active.source.given_up(job_id)

    def goes_on_with(self, job_id: str) -> bool:
        """Return whether a running job of an earlier supervisor belongs to a trial that is not over."""
        name = job_id.partition(".")[0]
        trial = read_trial(self.run, name)
        if trial is None or trial.state != "running":
            return False
        if not (name in self.canaries if trial.number is None else trial.number < self.settings.n_trials):
            return False
        self._taken_over.add(name)
        return True

    def close(self) -> None:
        """Wait for what other threads do, and write down what has ended."""
        for active in self._active.values():
            active.source.close()
        self._look()
        self._pool.shutdown(cancel_futures=True)

    # Draws

    def _is_over(self, number: int) -> bool:
        return number in self.trials and self.trials[number].is_over

    def _seen(self, number: int) -> list[Trial]:
        """Return the trials that a trial sees; all of them have ended before it begins."""
        return [self.trials[one] for one in range(number - self.settings.num_slots + 1)]

    def _next_numbers(self) -> list[int]:
        """Return the trials that may begin now: those that need no more results than are there."""
        num = self.settings.n_trials
        first = next((number for number in range(num) if not self._is_over(number)), num)
        return [
            number
            for number in range(first, min(num, first + self.settings.num_slots))
            if not self._is_over(number)
            and number not in self._drawing
            and name_of(number) not in self._left.union(self._active)
        ]

    def _draw(self) -> None:
        for name, epochs in self.canaries.items():
            if name not in self._ended_canaries:
                if name not in self._left.union(self._active) and not self._drawing:
                    self._drawing[-1] = self._pool.submit(self._make_canary, name, epochs)
                return
        for number in self._next_numbers():
            self._drawing[number] = self._pool.submit(self._make_trial, number, self._seen(number))

    def _make_canary(self, name: str, epochs: int) -> tuple[Trial, Order]:
        assert self.settings.epochs is not None
        trial = Trial(name, state="running", epochs=epochs)
        write_trial(self.run, trial)
        return trial, self._order_of({self.settings.epochs: epochs})

    def _make_trial(self, number: int, seen: Sequence[Trial]) -> tuple[Trial, Order | None]:
        """Draw the settings of a trial until they can run; each refused draw is written before the next."""
        name = name_of(number)
        trial = read_trial(self.run, name) or Trial(name, number, num_seen=len(seen), epochs=self.epochs)
        if trial.state == "running":
            return trial, self._order_of(trial.params)
        known = [*seen, *self._ended_canaries.values()]
        while len(trial.refused) < _MOST_DRAWS:
            params = _optuna.draw(self.settings, seen, trial.refused, number)
            drawn = replace(trial, params=params, state="running")
            try:
                order = self._order_of(params)
                why = why_infeasible(order, known, self._limits)
            except ConfigError as error:
                why = error.what
            if not why:
                write_trial(self.run, drawn)
                return drawn, order
            trial = replace(trial, refused=[*trial.refused, {"params": params, "why": why}])
            write_trial(self.run, trial)
        why = f"{_MOST_DRAWS} draws cannot run; the last: {trial.refused[-1]['why']}"
        return replace(trial, state="infeasible", cause=why), None

    def _begin(self, drawing: Future[tuple[Trial, Order | None]]) -> None:
        try:
            trial, order = drawing.result()
        except MemfitError as error:
            self.error = self.error or error
            return
        if order is None:
            self._end(trial)
            return
        graph = Graph(order, prefix=f"{trial.name}.").look(self.run, self._index)
        make = partial(_job, order, self.run, trial, self._limits["host"])
        if trial.number is not None:
            self.trials[trial.number] = trial
        self._active[trial.name] = Active(trial, order, UnitSource(graph, make, say=self._say))
        self._taken_over.discard(trial.name)

    # Pruning, ends

    def _look(self) -> None:
        self._supervisor.look(anew=any(active.source.is_done for active in self._active.values()))
        for active in list(self._active.values()):
            if not active.pruned:
                self._check(active)
            if active.source.is_done:
                del self._active[active.trial.name]
                self._conclude(active)

    def _first_unit(self, active: Active) -> str:
        """Return the job whose reports count for a trial: the first unit's, or the one that made its result."""
        units = active.source.graph.units.get(self.settings.stage)
        return str(units[0].made.get("job") or units[0].job_id) if units else ""

    def _check(self, active: Active) -> None:
        reported = self._reports.values.get(self._first_unit(active), {})
        pruned = None if active.trial.number is None else self._pruned_at(active, reported)
        if pruned is None:
            return
        active.pruned = _PRUNED.format(pruned)
        running = active.source.give_up(f"{active.trial.name} is pruned: {active.pruned}")
        backend = self._supervisor.backend
        statuses = backend.poll()
        for job_id in running:
            if job_id in statuses and statuses[job_id].state not in ENDED:
                backend.cancel(job_id, now=True, verdict=Verdict("cancelled", f"pruned: {active.pruned}"))

    def _pruned_at(self, active: Active, reported: Mapping[int, float]) -> int | None:
        """Return the first reported epoch at which the pruner ends a trial; None if it may go on."""
        if self.settings.pruner == "none" or not reported:
            return None
        number = active.trial.number or 0
        if active.study is None:
            active.study = _optuna.make_study(self.settings, self._seen(number), number)
        steps = sorted(reported)
        for place in range(active.num_checked, len(steps)):
            so_far = {step: reported[step] for step in steps[: place + 1]}
            if steps[place] < (active.trial.epochs or math.inf) and _optuna.is_to_prune(active.study, so_far):
                return steps[place]
            active.num_checked = place + 1
        return None

    def _conclude(self, active: Active) -> None:
        """Write how a trial ended; one whose jobs were stopped goes on at a later start."""
        trial, units = active.trial, active.source.graph.all_units
        active.source.close()
        state, cause = "pruned" if active.pruned else "", active.pruned
        reported = dict(sorted(self._reports.values.get(self._first_unit(active), {}).items()))
        found: dict[str, Any] = {"measured": self._measure(active)}
        if not state:
            bad = next((unit for unit in units if unit.state in ("failed", "stopped")), None)
            if any(unit.state in ("cancelled", "waiting", "ready") for unit in units):
                self._left.add(trial.name)
                return
            if bad is not None and not (status := read_status(self.run, bad.job_id)).attempt:
                self._left.add(trial.name)
                self.error = self.error or DoesNotFitError(
                    status.cause or bad.why,
                    rule="a trial that could not start is not over: the memory may be another program's now.",
                    remedy="free memory and give the same command again: it goes on with this trial",
                )
                return
            # It is pruned at the same epoch if its jobs ended before this process looked.
            if trial.number is not None and (at := self._pruned_at(active, reported)) is not None:
                state, cause = "pruned", _PRUNED.format(at)
            else:
                state, more = self._value(active) if bad is None else self._failure(bad)
                found |= more
        if state == "pruned":
            last = int(cause.rpartition(" ")[2])
            reported = {step: value for step, value in reported.items() if step <= last}
            found |= {"value": reported[last] if fits(float(reported[last]), float) else None}
        found = {"cause": cause} | found
        self._end(replace(trial, state=cast(TrialState, state), intermediate=reported, **found))
        self._check_effective(active, found["measured"])

    def _failure(self, unit: Unit) -> tuple[str, dict[str, Any]]:
        """Return the state of a trial one of whose jobs failed, and what is known of that."""
        status = read_status(self.run, unit.job_id)
        state = status.state if status.state in ("out_of_memory", "timeout") else "failed"
        told = read_json(self.run.job_dir(unit.job_id) / "error.json") or {}
        kind = str(told.get("type") or ("Stop" if unit.state == "stopped" else status.state))
        return state, {"cause": unit.why or status.cause, "kind": kind, "job": unit.job_id}

    def _value(self, active: Active) -> tuple[str, dict[str, Any]]:
        """Return the objective of a trial whose jobs have completed: the mean over the units."""
        found: dict[str, float] = {}
        for unit in active.source.graph.units[self.settings.stage]:
            value = self._number_of(unit)
            if value is None or not fits(value, float):
                where = "result, reports and last line" if unit.stage.command is not None else "result"
                what = f"is not in the {where}" if value is None else f"is {value} in the result"
                why = f"{self.settings.number} {what} of {unit.job_id}"
                return "failed", {"cause": why, "kind": "NoObjective", "job": unit.job_id}
            found[unit.label or unit.stage.name] = value
        return "completed", {"value": sum(found.values()) / len(found), "by_unit": found}

    def _number_of(self, unit: Unit) -> float | None:
        """Return the objective of one unit: from its result, its last report, or the last line that it printed."""
        name = self.settings.number
        value = unit.result.get(name)
        if isinstance(value, int | float):
            return float(value)
        job_id = str(unit.made.get("job") or unit.job_id)
        if self.settings.report in ("", name) and (reported := self._reports.values.get(job_id)):
            return reported[max(reported)]
        lines: list[str] = []
        if unit.stage.command is not None:
            with suppress(OSError), open_own(self.run.job_dir(job_id) / "out.log") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_LOG_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        return read_number(next((line for line in reversed(lines) if line.strip()), ""), name)

    def _measure(self, active: Active) -> dict[str, Any]:
        peaks: dict[str, int] = defaultdict(int)
        devices: dict[str, int] = defaultdict(int)
        effective: dict[str, Any] = {}
        measured: dict[str, Any] = {"seconds": 0.0, "ended": time.time()}
        for unit in active.source.graph.all_units:
            status = read_status(self.run, unit.job_id)
            # One that went on after a kill may have taken less than its first attempt.
            earlier = [read_json(one) or {} for one in self.run.job_dir(unit.job_id).glob("outcome_*.json")]
            told = [status.peak_bytes, *(one.get("peak_bytes") for one in earlier)]
            took: list[Any] = [size for size in told if fits(size, int)]
            peaks[unit.stage.name] = max(peaks[unit.stage.name], *took)
            on_device = status.footprint.bytes_per_device if status.footprint else 0
            devices[unit.stage.name] = max(devices[unit.stage.name], on_device)
            if status.started is not None:
                measured["started"] = min(status.started, measured.get("started", math.inf))
                if unit.stage.name == self.settings.stage:
                    took_seconds = round((status.ended or time.time()) - status.started, 3)
                    measured["seconds"] = max(measured["seconds"], took_seconds)
            if (said := self._reports.trainers.get(unit.job_id)) is not None:
                effective[unit.job_id] = {
                    name: one for name, one in said.items() if name not in ("time", "job", "kind")
                }
            if unit.job_id in self._reports.shrunk:
                measured["ran_out"] = self._reports.shrunk[unit.job_id]
            if unit.state == "failed":
                measured["failed_stage"] = unit.stage.name
        estimates = {stage.name: stage.memory_bytes for stage in active.order.stages if stage.memory_bytes is not None}
        sizes = {"peaks": dict(peaks), "device_peaks": {name: size for name, size in devices.items() if size}}
        return measured | sizes | {"estimates": estimates, "effective": effective}

    def _check_effective(self, active: Active, measured: Mapping[str, Any]) -> None:
        """End the study if a training ran with other threads than it was given."""
        asked = active.order.settings.threads_per_job
        for job_id, said in measured["effective"].items():
            if said.get("num_threads", asked) != asked:
                self.error = self.error or JobFailedError(
                    f"{job_id} trained with {said['num_threads']} threads, and {asked} were asked for.",
                    rule="a trial runs with the settings that its record names.",
                    remedy="remove torch.set_num_threads from the code, or set threads_per_job",
                )

    def _end(self, trial: Trial) -> None:
        write_trial(self.run, trial)
        value = "" if trial.value is None else f": {self.settings.number} {trial.value:.6g}"
        why = f": {trial.cause}" if trial.cause else value
        self._say(
            "trial", name=trial.name, state=trial.state, value=trial.value, text=f"{trial.name} {trial.state}{why}"
        )
        if trial.number is None:
            self._ended_canaries[trial.name] = trial
            if why := _why_bad(trial):
                self.error = self.error or JobFailedError(
                    f"{trial.name}, the trial before the search, {why.rstrip('.')}.",
                    rule="a search starts when the config's own settings have trained 1 and 3 epochs.",
                    remedy=f"see why: memfit diagnose {self.run.job_dir(trial.job or trial.name)}",
                )
            return
        self.trials[trial.number] = trial
        if trial.state == "completed":
            self._pool.submit(self._on_completed, trial)  # not here: meanwhile nobody would watch the jobs


def _why_bad(canary: Trial) -> str:
    """Return why no search may follow a canary; empty if one may."""
    if canary.state != "completed":
        return f"is {canary.state}: {canary.cause}"
    num = len(canary.intermediate)
    return "" if num in (0, canary.epochs) else f"reported {num} of {canary.epochs} epochs"


def check_names(order: Order, settings: TuneSettings) -> None:
    for name in (*(one.name for one in settings.space), settings.epochs):
        if name is not None:
            setting_of(order.params, name, "tune")
    if settings.epochs is not None and not isinstance(epochs := setting_of(order.params, settings.epochs, "tune"), int):
        raise ConfigError(
            f"tune.epochs names {settings.epochs}, which is {epochs!r}.",
            rule="epochs is the setting that says how many epochs a trial trains: a whole number.",
            remedy="name that setting, or leave tune.epochs out",
        )
    names = [stage.name for stage in order.stages]
    if settings.stage not in names:
        raise ConfigError(
            f"tune.objective is {settings.objective}, and there is no stage '{settings.stage}'.",
            rule=f"an objective is stage.number; the stages are {', '.join(names)}.",
            remedy=f"write for example {names[-1]}.{settings.number}",
        )


def _job(order: Order, run: RunDir, trial: Trial, limit_bytes: int | None, unit: Unit) -> Job:
    """Return a trial's job. An estimate is the least that it takes, so it reserves more, up to the study's limit."""
    job = make_job(order, run, unit)
    least = unit.stage.memory_bytes
    if least is not None and job.footprint is None and not job.num_devices:
        more = round(least * (1 + order.settings.memory.slack))
        declared = Footprint.declared(max(least, min(more, limit_bytes or more)))
        job = replace(job, footprint=declared)
    return replace(job, params=params_of(trial.params))
