"""Which jobs of a workload can run now, which are valid already, and why: a source of jobs for the scheduler.

Everything here is plain data. A unit of a stage is looked at when all that it waits for is there; its key then follows
from the digests of what it needs, so that a stage that ran again and left the same result makes nothing else run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MemfitError, UsageError, nearest
from memfit.jobs import JobStatus, name_jobs, read_status
from memfit.pipeline._describe import units_of
from memfit.pipeline._results import NOT_MADE, Results, Unit
from memfit.rundir import RunDir
from memfit.units import format_duration

if TYPE_CHECKING:
    from memfit.pipeline._order import Order

#: The states of a unit in which what waits for it may go on.
PASSED = frozenset({"kept", "reused", "completed", "passed"})
#: Those in which it never will, in words.
_ENDED_BADLY = {
    "failed": "failed", "stopped": "stopped the run", "skipped": "was skipped", "cancelled": "was stopped"
}  # fmt: skip
#: The manifest of a command with small outputs is awaited that long; of others it is written meanwhile.
_SOON_SECONDS = 0.2
#: What can name a unit in the name of its job.
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Choice:
    """What of a workload a command asks for.

    Attributes:
        until: The last stage; None for all.
        only: The one stage to run, of which all that it needs must be valid.
        anew: The stage that runs again, with all that reads it, valid or not.
        skip: Stages that count as passed.
        units: Which units, such as ``2-5`` or ``1,3``; ``all``.
        combinations: The units of a plain function: the values of its parameters, one mapping for each job.
    """

    until: str | None = None
    only: str | None = None
    anew: str | None = None
    skip: tuple[str, ...] = ()
    units: str = "all"
    combinations: tuple[Mapping[str, str], ...] = ()


ALL = Choice()


class Graph:
    """The state of a workload's stages in one run.

    Args:
        order: The stages as ``describe`` gives them, what every key depends on beside them, and what is asked for.
        run: The run.
        make_job: Makes the job of a unit; without it the graph only looks: nothing is written, linked or removed.
        earlier: Runs in which a valid result may lie, newest first.
        say: Takes an event's kind and fields.

    Attributes:
        error: The first refusal of a stage while the run goes on: the stage has failed, the others go on.

    Raises:
        UsageError: If the choice names no stage or unit, or two jobs would have one name.
    """

    def __init__(
        self,
        order: Order,
        run: RunDir,
        *,
        make_job: Callable[[Unit], Any] | None = None,
        earlier: Sequence[RunDir] = (),
        say: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.run, self.choice, self._is_plan = run, order.choice, make_job is None
        self.stages = {stage["name"]: stage for stage in order.stages}
        self._make_job, self._say = make_job, say
        self.error: UsageError | None = None
        self.units: dict[str, list[Unit]] = {}
        self._waiting: dict[str, list[Unit]] = {}
        self._ready: list[Unit] = []
        self._running: dict[str, Unit] = {}
        self._sealing: dict[str, tuple[JobStatus, Future[None]]] = {}
        self._pool = ThreadPoolExecutor(1, "seal")
        self._changed: list[Unit] = []
        self._has_begun = False
        for name in filter(None, [order.choice.until, order.choice.only, order.choice.anew, *order.choice.skip]):
            self._check_stage(name)
        self.asked, self._anew = self._asked(), self._made_anew()
        self._results = Results(run, earlier, order.common, self._anew, self._is_plan)
        self._check_skipped()
        for name, stage in self.stages.items():
            if name in self.asked and (stage["units"] is not None or not stage["each"]):
                self._units(name)

    # What is asked for

    def _check_stage(self, name: str) -> None:
        if name not in self.stages:
            raise UsageError(
                f"there is no stage '{name}'.",
                rule=f"the stages are {', '.join(self.stages)}.",
                remedy=nearest(name, list(self.stages)),
            )

    def _asked(self) -> set[str]:
        last = self.choice.only or self.choice.until
        return {last, *self.before(last)} if last else set(self.stages)

    def _made_anew(self) -> frozenset[str]:
        """The stage that is asked for anew, and all that follow from its result."""
        found = {self.choice.anew}
        for name, stage in self.stages.items():  # each comes after what it reads
            if found.intersection([*stage["needs"], *_source(stage)]):
                found.add(name)
        return frozenset(filter(None, found))

    def waits_for(self, name: str) -> list[str]:
        """The stages that one waits for directly: what it needs, what holds it, and where its units come from."""
        stage = self.stages[name]
        return [*stage["needs"], *stage["after"], *_source(stage), *self._gates(name)]

    def _gates(self, name: str) -> list[str]:
        skipped = self.choice.skip
        return [gate for gate, stage in self.stages.items() if stage["holds"] == name and gate not in skipped]

    def before(self, name: str) -> set[str]:
        """All stages that come before one."""
        found, left = set[str](), self.waits_for(name)
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left += self.waits_for(one)
        return found - {name}

    def _check_skipped(self) -> None:
        for name in self.choice.skip:
            users = [other for other, stage in self.stages.items() if name in stage["needs"] and other in self.asked]
            if users:
                raise UsageError(
                    f"stage {name} cannot be skipped: {', '.join(users)} read{'s' if len(users) == 1 else ''} it.",
                    rule="a stage can be skipped when others only wait for it, as for a gate.",
                    remedy=f"run up to it: --until {name}",
                )

    # The scheduler's side

    def next(self, num_free: int) -> list[Any]:
        """The jobs that may start now."""
        for job_id, (status, sealing) in list(self._sealing.items()):
            if sealing.done():
                self._conclude(job_id, status, sealing.exception())
        self.advance()
        found, self._ready = self._ready, []
        for unit in found:
            self._running[unit.job_id] = unit
            self._set(unit, "running", unit.why)
        self._tell()
        assert self._make_job is not None
        return [self._make_job(unit) for unit in found]

    def ended(self, status: JobStatus) -> None:
        """Take in how a job ended for good."""
        unit = self._running[status.job_id]
        if status.state != "completed" or not unit.stage["keyed"] or unit.stage["command"] is None:
            self._conclude(status.job_id, status)
            return
        # Large outputs take a while to hash: not here, where other jobs wait for their walls to be moved.
        sealing = self._pool.submit(self._results.seal, unit, status)
        self._sealing[status.job_id] = status, sealing
        wait([sealing], _SOON_SECONDS)
        if sealing.done():
            self._conclude(status.job_id, status, sealing.exception())

    def close(self) -> None:
        """Wait for the manifests that are being written."""
        for job_id, (status, sealing) in list(self._sealing.items()):
            self._conclude(job_id, status, sealing.exception())
        self._pool.shutdown()

    def _conclude(self, job_id: str, status: JobStatus, error: BaseException | None = None) -> None:
        """Move a unit on whose job has ended."""
        unit = self._running.pop(job_id)
        self._sealing.pop(job_id, None)
        if error is not None:
            self._fail(unit, error)
        elif status.state == "completed" and not unit.stage["keyed"]:
            self._set(unit, "completed")
        elif status.state == "completed":
            if (made := self._results.made(unit)) is not None:
                self._take(unit, made, "completed")
            else:
                self._set(unit, "failed", "its result is not there")
        elif status.state in ("preempted", "cancelled", "pending"):
            self._set(unit, "cancelled", status.cause or "it was stopped")
        else:
            self._set(unit, "failed", status.cause)
        self.advance()

    @property
    def is_done(self) -> bool:
        """Whether no unit will ever become ready."""
        return self._has_begun and not self._running and not self._ready

    # What others ask

    def num_like(self, job_id: str) -> int:
        """How many units the stage of a job has."""
        unit = self._running.get(job_id)
        return len(self.units[unit.stage["name"]]) if unit else 1

    @property
    def proven(self) -> frozenset[str]:
        """The stages of which a unit is done."""
        return frozenset(name for name, units in self.units.items() if any(unit.state in PASSED for unit in units))

    def goes_on_with(self, job_id: str) -> bool:
        """Whether a job that an earlier supervisor started makes exactly what a unit asks for now."""
        unit = next((one for units in self.units.values() for one in units if one.job_id == job_id), None)
        return unit is not None and self._results.is_being_made(unit)

    def overwrites(self) -> bool:
        """Whether going on would write over a result that is there, or may do so."""
        if not self.units.keys() >= self.asked:
            return True
        states = ("ready", "waiting", "reused")
        left = [unit for units in self.units.values() for unit in units if unit.state in states]
        return any(map(self._results.is_there, left))

    def stopped(self) -> Unit | None:
        """The unit that stopped the run, if one did."""
        return next((one for units in self.units.values() for one in units if one.state == "stopped"), None)

    def _set(self, unit: Unit, state: str, why: str = "") -> None:
        unit.state, unit.why = state, why
        self._changed.append(unit)

    def _fail(self, unit: Unit, error: BaseException) -> None:
        """Let a unit fail by an error that was met here, where other jobs go on."""
        if not isinstance(error, MemfitError | OSError):
            raise error
        self._set(unit, "failed", error.what if isinstance(error, MemfitError) else str(error))

    # Units

    def advance(self) -> None:
        """Look at all units until nothing changes: a gate that opens lets an earlier stage go on."""
        self._has_begun = changed = True
        while changed:
            changed = False
            for name in self.stages:
                if name in self.asked and self._units(name) is not None:
                    waiting = self._waiting[name]
                    self._waiting[name] = [unit for unit in waiting if not self._look(unit)]
                    changed = changed or len(self._waiting[name]) < len(waiting)
        self._tell()

    def _units(self, name: str) -> list[Unit] | None:
        """A stage's units in this run, or None while the list of them is not known."""
        if name not in self.units:
            stage = self.stages[name]
            try:
                values = self._values(stage)
                if values is None:
                    return None
                found = self.named(stage, values)
                self._check_names(found)
            except ConfigError as error:
                if self._is_plan or not self._has_begun:
                    raise
                self.error = self.error or error
                found = [Unit(stage, 0, None, name, state="failed", why=error.what)]
            self.units[name], self._changed = found, self._changed + found
            self._waiting[name] = [unit for unit in found if unit.state == "waiting"]
        return self.units[name]

    def _values(self, stage: Mapping[str, Any]) -> list[Any] | None:
        if stage["units"] is not None:
            return list(stage["units"])
        if not stage["each"]:
            return [None]
        source = next(iter(self._units(stage["source"]["stage"]) or ()), None)
        if source is None or source.state not in PASSED:
            return [None] if source is not None and source.state in _ENDED_BADLY else None
        return listed(stage, source.result)

    def named(self, stage: Mapping[str, Any], values: Sequence[Any]) -> list[Unit]:
        """The units of this run among all values of a stage's list."""
        name, variable = stage["name"], (stage["source"] or {}).get("variable")
        if values == [None]:
            return [Unit(stage, 0, None, name)]
        labels = [label_of(value, number, variable) for number, value in enumerate(values, start=1)]
        if len(set(labels)) < len(labels):
            labels = [str(number) for number in range(1, len(values) + 1)]
        chosen = chosen_units(self.choice.units, labels)
        if any(one["in_order"] for one in self.stages.values() if one["each"] == stage["each"]):
            chosen = list(range(chosen[-1] + 1))  # each needs those before it
        return [
            Unit(stage, place, values[number], f"{name}_{labels[number]}", labels[number])
            for place, number in enumerate(chosen)
        ]

    def _check_names(self, found: Sequence[Unit]) -> None:
        """Refuse a second job of one name: both would write into one folder."""
        taken = {unit.job_id: name for name, units in self.units.items() for unit in units}
        for unit in found:
            if (other := taken.get(unit.job_id)) is not None:
                raise ConfigError(
                    f"stages {other} and {unit.stage['name']} both have a job named {unit.job_id}.",
                    rule="a job is named <stage> or <stage>_<unit>, and each has a folder of that name.",
                    remedy=f"rename stage {unit.stage['name']}",
                )

    def _inputs(self, unit: Unit, others: Iterable[str]) -> dict[str, list[Unit]] | None:
        """The units of other stages that a unit waits for; None while they are not known."""
        found: dict[str, list[Unit]] = {}
        for name in others:
            units = self._units(name)
            if units is None:
                return None
            if unit.stage["each"] and self.stages[name]["each"] == unit.stage["each"]:
                units = units[unit.index : unit.index + 1]
            elif unit.stage["holds"] and self.stages[name]["each"] == self.stages[unit.stage["holds"]]["each"]:
                units = units[:1]
            found[name] = units
        return found

    def _look(self, unit: Unit) -> bool:
        """Move a waiting unit on, if what it waits for has come to an end; whether it moved."""
        name = unit.stage["name"]
        if name in self.choice.skip:
            self._set(unit, "passed", "it is skipped (--skip)")
            return True
        gates = self._gates(name) if unit.index else []
        waited = self._inputs(unit, [*unit.stage["needs"], *unit.stage["after"], *_source(unit.stage), *gates])
        if waited is None:
            return False
        unit.inputs = {needed: waited[needed] for needed in unit.stage["needs"]}
        unit.previous = self.units[name][unit.index - 1] if unit.stage["in_order"] and unit.index else None
        blocking = [one for units in waited.values() for one in units] + list(filter(None, [unit.previous]))
        for one in blocking:
            if one.state in _ENDED_BADLY:
                why = f": {one.why}" if one.state == "stopped" else ""
                self._set(unit, "skipped", f"{one.job_id} {_ENDED_BADLY[one.state]}{why}")
                return True
        if any(one.state not in PASSED for one in blocking):
            return False
        if unit.stage["keyed"]:
            try:
                self._check(unit)
            except OSError as error:
                self._fail(unit, error)
        elif read_status(self.run, unit.job_id).state == "completed":
            self._set(unit, "kept")
        else:
            unit.state = "ready"
            self._ready.append(unit)
        return True

    def _check(self, unit: Unit) -> None:
        """Take a valid result of a unit whose inputs are all there, or make it ready to run."""
        name = unit.stage["name"]
        if (found := self._results.find(unit)) is not None:
            self._take(unit, found[1], found[0])
            return
        again = f"it is asked for (--from {self.choice.anew})" if name in self._anew else self._results.why_not(unit)
        unit.state, unit.why = "ready", again
        if self.choice.only and name != self.choice.only:
            error = UsageError(
                f"stage {name} is not valid: {unit.why}.",
                rule=f"--stage {self.choice.only} runs that stage alone, on valid results of those before it.",
                remedy=f"run them too: --until {self.choice.only}",
            )
            if self._is_plan:
                raise error
            self.error = self.error or error
            self._fail(unit, error)
            return
        if not self._is_plan:
            self._results.clear(unit)
        self._ready.append(unit)

    def _take(self, unit: Unit, made: Mapping[str, Any], state: str) -> None:
        unit.made = made
        if made["status"] == "stopped":
            self._set(unit, "stopped", made["why"])
        else:
            self._set(unit, state, made["reused_from"] or "")

    def _tell(self) -> None:
        """Say each change of a state: one event for all units of a stage that changed alike."""
        groups: dict[tuple[str, str, str], list[Unit]] = {}
        for unit in {unit.job_id: unit for unit in self._changed}.values():
            state, why = ("waiting", "") if unit.state == "ready" else (unit.state, unit.why)
            groups.setdefault((unit.stage["name"], state, why), []).append(unit)
        self._changed = []
        for (name, state, why), units in groups.items():
            told = {"stage": name, "state": state, "why": why, "jobs": [unit.job_id for unit in units]}
            seconds = round(sum(unit.seconds for unit in units), 3)
            self._say("stage", **told, seconds=seconds, text=self._text(units, state, why, seconds))

    def _text(self, units: Sequence[Unit], state: str, why: str, seconds: float) -> str:
        """What became of some units of a stage, in words; empty where the events of their jobs say it."""
        names, is_one, stage = name_jobs([unit.job_id for unit in units]), len(units) == 1, units[0].stage
        are = f"{names} {'is' if is_one else 'are'} {state}"
        if not stage["keyed"] and state == "kept":
            num = len(self.units[stage["name"]])
            text = "the command was" if num == 1 else f"{len(units)} of {num} commands were"
            return f"{text} done already; --new starts over"
        if state in ("kept", "reused"):
            source = f" from {Path(why).parent.parent.name}" if state == "reused" else ""
            return f"{are}{source}" + (f", which saves {format_duration(seconds)}" if seconds else "")
        if state == "running" and why not in ("", NOT_MADE):
            return f"{names} {'runs' if is_one else 'run'} again: {why}"
        if state == "stopped":
            return f"{names} stops the run here: {why}"
        return f"{are}: {why}" if state in ("skipped", "passed") else ""


def _source(stage: Mapping[str, Any]) -> list[str]:
    """The stage that lists a stage's units, if one does."""
    return [stage["source"]["stage"]] if stage["source"] and stage["source"]["stage"] else []


def listed(stage: Mapping[str, Any], result: Mapping[str, Any]) -> list[Any]:
    """The units of a stage that a result of its source names.

    Raises:
        ConfigError: If there is no such list in it.
    """
    found: Any = result
    for part in stage["source"]["path"]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return units_of(found, stage["name"], stage["each"])


def label_of(value: Any, number: int, variable: str | None) -> str:
    """What a unit is called in its job's name: its number or text, or that under the variable's name.

    >>> label_of({"fold": 3, "first": "2020"}, 1, "fold"), label_of("small", 1, "size"), label_of([1], 4, "pair")
    ('3', 'small', '4')
    >>> label_of({"fold": 3, "lr": 0.1}, 7, None)
    '0007'
    """
    if isinstance(value, Mapping):
        if variable is None:
            return f"{number:04d}"
        value = value.get(variable)
    text = str(value) if isinstance(value, int | str) else ""
    return text if _LABEL.fullmatch(text) else str(number)


def chosen_units(text: str, labels: Sequence[str] | None) -> list[int]:
    """The places of the units that a choice names: by number from 1, by range, or by name.

    Args:
        text: The choice.
        labels: What the units are called; None while that is not known: then nothing but the form is looked at.

    Raises:
        ConfigError: If a part of it names no unit.

    >>> chosen_units("all", ["1", "2"]), chosen_units("2-3", ["1", "2", "3"]), chosen_units("small", ["big", "small"])
    ([0, 1], [1, 2], [1])
    """
    if text == "all":
        return list(range(len(labels or ())))
    chosen: set[int] = set()
    for part in map(str.strip, text.split(",")):
        numbers = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
        if labels is not None and part in labels:
            chosen.add(labels.index(part))
        elif numbers and 1 <= first <= last <= (last if labels is None else len(labels)):
            chosen |= set(range(first - 1, last))
        elif numbers or labels is not None or not _LABEL.fullmatch(part):
            known = "units are named or numbered from 1, and a range runs upward"
            if labels is not None:
                known = f"there are {len(labels)} units: {', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}"
            raise ConfigError(
                f"'{part}' names no unit.", rule=f"{known}.", remedy="write for example --units 1, 2-5 or all"
            )
    return sorted(chosen)
