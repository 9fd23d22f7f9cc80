"""The units of a workload's stages in one run: which can run now, which are valid already, and why.

A unit's key follows from the results it needs. So a stage that ran again with the same result makes nothing else run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.errors import ConfigError, UsageError
from memfit.pipeline._command import chosen_units, label_of
from memfit.pipeline._describe import StageSpec, list_units
from memfit.pipeline._manifest import find_manifest, key_of
from memfit.pipeline._order import Order
from memfit.pipeline._results import Ended, Index, Results, Unit
from memfit.rundir import RunDir

#: The states of a unit after which the units that wait for it may start.
PASSED = frozenset({"kept", "reused", "completed", "passed"})
#: The states after which they never will, in words.
_ENDED_BADLY = {
    "failed": "failed", "stopped": "stopped the run", "skipped": "was skipped", "cancelled": "was stopped"
}  # fmt: skip


class Step(NamedTuple):
    """What follows from the ends of units: which may run now, and all whose state changed."""

    ready: list[Unit]
    changed: list[Unit]


class Graph:
    """The state of a workload's stages in one run. It reads manifests, and writes nothing.

    Of several graphs of one run, as in a search, each has a ``prefix`` for the names of its jobs. ``error`` is the
    first stage that was refused while the run went on.
    """

    results: Results  # once it has looked

    def __init__(self, order: Order, *, prefix: str = "") -> None:
        self.order, self.stages, self._prefix = order, order.by_name, prefix
        self.asked, self.anew = order.chosen()
        self.error: UsageError | None = None
        self._begin()

    def _begin(self) -> None:
        self._is_looking, self.why_given_up = True, ""  # why no more units start
        self.units: dict[str, list[Unit]] = {}
        self._waiting: dict[str, list[Unit]] = {}
        self._step = Step([], [])
        for name, stage in self.stages.items():
            if name in self.asked and (stage.units is not None or not stage.each):
                self._units(name)

    def look(self, run: RunDir, index: Index | None = None) -> Graph:
        """Look at what a run has, and others that ``index`` knows, before anything runs; return this graph."""
        self.results = Results(self.order, run, index)
        self._begin()
        self._advance()
        self._is_looking = False
        return self

    def advance(self, ended: Mapping[str, Ended] | None = None) -> Step:
        """Take in how units ended, by job id; return what may run now and what changed, since the last call too."""
        for unit in [unit for unit in self.all_units if ended and unit.job_id in ended]:
            if unit.state == "waiting":  # it began anew while its job ran
                self._waiting[unit.stage.name].remove(unit)
            self._end(unit, (ended or {})[unit.job_id])
        self._advance()
        step, self._step = self._step, Step([], [])
        return step

    def _advance(self) -> None:
        """Look at all units until nothing changes: a gate that opens lets an earlier stage start."""
        changed = True
        while changed:
            changed = False
            for name in self.stages:
                if name in self.asked and self._units(name) is not None:
                    waiting = self._waiting[name]
                    self._waiting[name] = [unit for unit in waiting if not self._look(unit)]
                    changed = changed or len(self._waiting[name]) < len(waiting)

    def give_up(self, why: str) -> None:
        self.why_given_up = why
        for unit in [one for units in self._waiting.values() for one in units]:
            self._set(unit, "cancelled", why)
        self._waiting = {name: [] for name in self._waiting}

    def undo(self, unit: Unit, state: str = "waiting", why: str = "") -> None:
        """Take back that a unit has a result, and begin anew with all that reads it."""
        name = unit.stage.name
        later = self.units[name][unit.index + 1 :] if unit.stage.in_order else []
        for one in [unit, *(one for one in later if one.state in PASSED)]:
            one.state, one.made = "waiting", {}
            self._waiting[name].append(one)
        if state != "waiting":
            self._waiting[name].remove(unit)
            self._set(unit, state, why)
        for reader in self.order.readers_of(name):
            self.units.pop(reader, None)
            self._waiting.pop(reader, None)

    # Questions

    @property
    def run(self) -> RunDir:
        return self.results.run

    @property
    def all_units(self) -> list[Unit]:
        return [unit for name in self.stages for unit in self.units.get(name, ())]

    def goes_on_with(self, job_id: str) -> bool:
        """Return whether a running job of an earlier supervisor makes exactly what a unit asks for now."""
        unit = next((unit for unit in self.all_units if unit.job_id == job_id), None)
        if unit is None:
            return False
        path = unit.manifest(self.run)
        is_asked = unit.state == "kept" or (unit.state == "ready" and not path.exists())
        return is_asked and unit.stage.name not in self.anew and key_of(path) == unit.key

    def overwrites(self) -> bool:
        if not self.units.keys() >= self.asked:
            return True
        left = [unit for unit in self.all_units if unit.state in ("ready", "waiting", "reused")]
        return any(find_manifest(unit.manifest(self.run)) is not None for unit in left)

    # Units

    def _units(self, name: str) -> list[Unit] | None:
        """Return a stage's units in this run, or None while their list is not known."""
        if name not in self.units and self.why_given_up:
            return None
        if name not in self.units:
            stage = self.stages[name]
            try:
                values = self._values(stage)
                if values is None:
                    return None
                found = self.named(stage, values)
                taken = {unit.job_id: unit.stage.name for unit in self.all_units}
                if (bad := next((unit.job_id for unit in found if unit.job_id in taken), None)) is not None:
                    raise ConfigError(
                        f"stages {taken[bad]} and {name} both have a job named {bad}.",
                        rule="a job is named <stage> or <stage>_<unit>, and each has a folder of that name.",
                        remedy=f"rename stage {name}",
                    )
            except ConfigError as error:
                if self._is_looking:
                    raise
                self.error = self.error or error
                found = [Unit(stage, 0, None, f"{self._prefix}{name}", state="failed", why=error.what)]
            self.units[name] = found
            self._step.changed.extend(found)
            self._waiting[name] = [unit for unit in found if unit.state == "waiting"]
        return self.units[name]

    def _values(self, stage: StageSpec) -> list[Any] | None:
        if stage.units is not None:
            return list(stage.units)
        if stage.source is None:
            return [None]
        source = next(iter(self._units(stage.source) or ()), None)
        if source is None or source.state not in PASSED:
            return [None] if source is not None and source.state in _ENDED_BADLY else None
        return list_units(stage, source.result)

    def named(self, stage: StageSpec, values: Sequence[Any]) -> list[Unit]:
        """Return the units of this run among all values of a stage's list."""
        if values == [None]:
            return [Unit(stage, 0, None, f"{self._prefix}{stage.name}")]
        labels = [label_of(value, number, stage.variable) for number, value in enumerate(values, start=1)]
        if len(set(labels)) < len(labels):
            labels = [str(number) for number in range(1, len(values) + 1)]
        chosen = chosen_units(self.order.choice.units, labels)
        if any(one.in_order for one in self.stages.values() if one.each == stage.each):
            chosen = list(range(chosen[-1] + 1))  # each needs those before it
        last = self.stages.get(self.order.choice.until or "")
        if last is not None and last.holds and self.stages[last.holds].each == stage.each:
            chosen = chosen[:1]  # a gate looks at the first alone
        return [
            Unit(stage, place, values[number], f"{self._prefix}{stage.name}_{labels[number]}", labels[number])
            for place, number in enumerate(chosen)
        ]

    def _inputs(self, unit: Unit, others: Iterable[str]) -> dict[str, list[Unit]] | None:
        found: dict[str, list[Unit]] = {}
        for name in others:
            units, each = self._units(name), self.stages[name].each
            if units is None:
                return None
            if each and each == unit.stage.each:
                units = units[unit.index : unit.index + 1]
            elif unit.stage.holds and each == self.stages[unit.stage.holds].each:
                units = units[:1]
            found[name] = units
        return found

    def _look(self, unit: Unit) -> bool:
        """Change the state of a waiting unit if all that it waits for has ended; return whether it changed."""
        stage = unit.stage
        if stage.name in self.order.choice.skip:
            self._set(unit, "passed", "it is skipped (--skip)")
            return True
        gates = self.order.gates(stage.name) if unit.index else []
        waited = self._inputs(unit, [*stage.reads, *stage.after, *gates])
        if waited is None:
            return False
        unit.inputs = {needed: waited[needed] for needed in stage.needs}
        unit.previous = self.units[stage.name][unit.index - 1] if stage.in_order and unit.index else None
        blocking = [one for units in waited.values() for one in units] + list(filter(None, [unit.previous]))
        if bad := next((one for one in blocking if one.state in _ENDED_BADLY), None):
            why = f": {bad.why}" if bad.state == "stopped" else ""
            self._set(unit, "skipped", f"{bad.job_id} {_ENDED_BADLY[bad.state]}{why}")
            return True
        if any(one.state not in PASSED for one in blocking):
            return False
        try:
            found = self.results.find(unit)
        except OSError as error:
            self._set(unit, "failed", str(error))
            return True
        if found is not None:
            self._end(unit, found)
            return True
        asked = f"it is asked for (--from {self.order.choice.anew})" if stage.name in self.anew else ""
        unit.state, unit.why = "ready", asked or self.results.why_not(unit)
        self._step.ready.append(unit)
        return True

    def _end(self, unit: Unit, ended: Ended) -> None:
        if not ended.made:
            self._set(unit, ended.state, ended.why)
            return
        unit.made = made = ended.made
        if made["status"] == "stopped":
            self._set(unit, "stopped", made["why"])
        else:
            self._set(unit, ended.state, made["reused_from"] or "")

    def _set(self, unit: Unit, state: str, why: str = "") -> None:
        unit.state, unit.why = state, why
        self._step.changed.append(unit)
