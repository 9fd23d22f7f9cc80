"""The units of a workload's stages in one run: which can run now, which are valid already, and why.

A unit's key follows from the results it needs. So a stage that ran again with the same result makes nothing else run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, MemfitError, UsageError
from memfit.files import refresh
from memfit.jobs import JobStatus, name_jobs, read_status
from memfit.pipeline._describe import StageSpec, list_units
from memfit.pipeline._grid import chosen_units, label_of
from memfit.pipeline._manifest import find_manifest, key_of, remove_result
from memfit.pipeline._order import Order
from memfit.pipeline._proofs import HOST, Proofs
from memfit.pipeline._results import NOT_MADE, Index, Results, Unit
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

#: The states of a unit after which the units that wait for it may start.
PASSED = frozenset({"kept", "reused", "completed", "passed"})
#: The states after which they never will, in words.
_ENDED_BADLY = {
    "failed": "failed", "stopped": "stopped the run", "skipped": "was skipped", "cancelled": "was stopped"
}  # fmt: skip
_WORD_SECONDS = 5.0


class Graph:
    """The state of a workload's stages in one run: a source of jobs for the scheduler.

    Without ``make_job`` it writes, links and removes nothing. ``index`` knows the results of other runs that it may
    link. Of several graphs of one run, as in a search, each has a ``prefix`` for the names of its jobs; a unit whose
    key another graph is making waits for that. ``error`` is the first stage that was refused while the run went on.
    """

    def __init__(
        self,
        order: Order,
        run: RunDir,
        *,
        make_job: Callable[[Unit], Any] | None = None,
        index: Index | None = None,
        prefix: str = "",
        say: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.run, self.choice, self._is_plan = run, order.choice, make_job is None
        self.waits_for, self._gates = order.waits_for, order.gates
        self.stages = {stage.name: stage for stage in order.stages}
        self._make_job, self._say, self._prefix = make_job, say, prefix
        self._index = index or Index()
        self.error: UsageError | None = None
        self.units: dict[str, list[Unit]] = {}
        self._waiting: dict[str, list[Unit]] = {}
        self._ready: list[Unit] = []
        self._running: dict[str, Unit] = {}
        self._sealing: dict[str, tuple[JobStatus, Future[None]]] = {}
        self._reading: dict[str, tuple[Unit, Future[str | None]]] = {}
        self._num_read, self._next_word, self._is_closed = 0, 0.0, False
        self._pool = ThreadPoolExecutor(2, "hash")
        if not self._is_plan and self._index.proofs is None:
            self._index.proofs = Proofs(run, self._index.runs, anew=self.choice.check_files)
        self._changed: list[Unit] = []
        self._has_begun, self._why_given_up = False, ""
        self.asked, self._anew = order.chosen()
        self._results = Results(run, self._index, order.common, self._anew, self._is_plan)
        for name, stage in self.stages.items():
            if name in self.asked and (stage.units is not None or not stage.each):
                self._units(name)

    # The scheduler's side

    def next(self, num_free: int) -> list[Any]:
        """Return the jobs that may start now."""
        for status, sealing in [one for one in self._sealing.values() if one[1].done()]:
            self._conclude(status, sealing.exception())
        self.advance()
        found, self._ready = self._ready, []
        for unit in found:
            self._running[unit.job_id] = unit
            self._set(unit, "running", unit.why)
        self._say_changes()
        assert self._make_job is not None
        return [self._make_job(unit) for unit in found]

    def ended(self, status: JobStatus) -> None:
        """Take note of a job's last end."""
        unit = self._running[status.job_id]
        refresh(unit.manifest(self.run).with_suffix(""))  # another host may have filled it
        if status.state == "completed" and unit.stage.keyed and unit.stage.command is not None:
            # Large outputs take long to hash. Meanwhile the scheduler must watch the other jobs.
            self._sealing[status.job_id] = status, self._pool.submit(self._results.seal, unit, status)
        else:
            self._conclude(status)

    def close(self) -> None:
        """Wait until all manifests are written."""
        self._is_closed = True
        for status, sealing in list(self._sealing.values()):
            self._conclude(status, sealing.exception())
        self._pool.shutdown(cancel_futures=True)

    def _conclude(self, status: JobStatus, error: BaseException | None = None) -> None:
        """Set the state of a unit whose job has ended; ``error`` comes from writing its manifest."""
        unit = self._running.pop(status.job_id)
        self._sealing.pop(status.job_id, None)
        self._index.making.pop((unit.stage.name, unit.key), None)
        if error is not None:
            self._fail(unit, error)
        elif status.state == "completed" and not unit.stage.keyed:
            self._set(unit, "completed")
        elif status.state == "completed":
            if (made := self._results.made(unit)) is not None:
                self._index.add(unit.stage.name, unit.key, unit.manifest(self.run))
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
        """True if no unit will ever become ready."""
        return self._has_begun and not (self._running or self._ready or self._reading or self._is_held())

    def _is_held(self) -> bool:
        """Return whether a unit waits for another graph that makes its result."""
        making = self._index.making
        return any((one.stage.name, one.key) in making for units in self._waiting.values() for one in units if one.key)

    def give_up(self, why: str) -> list[str]:
        """Start no more units, and return the jobs that were handed over and have not ended."""
        self._why_given_up = why
        for unit in [*self._ready, *(one for units in self._waiting.values() for one in units)]:
            self._index.making.pop((unit.stage.name, unit.key), None)
            self._set(unit, "cancelled", why)
        self._ready, self._waiting, self._reading = [], {name: [] for name in self._waiting}, {}
        return list(self._running)

    def given_up(self, job_id: str) -> str:
        """Return why a job of this graph that has not started yet must not start any more; empty if it may."""
        return self._why_given_up

    # Questions

    @property
    def all_units(self) -> list[Unit]:
        """All units that are known, stage by stage."""
        return [unit for name in self.stages for unit in self.units.get(name, ())]

    def num_like(self, job_id: str) -> int:
        """Return how many units the stage of a job has."""
        unit = self._running.get(job_id)
        return len(self.units[unit.stage.name]) if unit else 1

    def goes_on_with(self, job_id: str) -> bool:
        """Return whether a running job of an earlier supervisor makes exactly what a unit asks for now."""
        unit = next((unit for unit in self.all_units if unit.job_id == job_id), None)
        if unit is None or not unit.stage.keyed:
            return unit is not None
        path = unit.manifest(self.run)
        is_asked = unit.state == "kept" or (unit.state == "ready" and not path.exists())
        return is_asked and unit.stage.name not in self._anew and key_of(path) == unit.key

    def overwrites(self) -> bool:
        """Return whether going on may write over a result."""
        if not self.units.keys() >= self.asked:
            return True
        left = [unit for unit in self.all_units if unit.state in ("ready", "waiting", "reused")]
        return any(find_manifest(unit.manifest(self.run)) is not None for unit in left)

    # Units

    def advance(self) -> None:
        """Look at all units until nothing changes: a gate that opens lets an earlier stage start."""
        self._has_begun = changed = True
        if self._index.proofs:
            self._index.proofs.looked.clear()
        for unit, proof in [one for one in self._reading.values() if one[1].done()]:
            self._conclude_reading(unit, proof)
        while changed:
            changed = False
            for name in self.stages:
                if name in self.asked and self._units(name) is not None:
                    waiting = self._waiting[name]
                    self._waiting[name] = [unit for unit in waiting if not self._look(unit)]
                    changed = changed or len(self._waiting[name]) < len(waiting)
        self._say_changes()

    def _units(self, name: str) -> list[Unit] | None:
        """Return a stage's units in this run, or None while their list is not known."""
        if name not in self.units and self._why_given_up:
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
                if self._is_plan or not self._has_begun:
                    raise
                self.error = self.error or error
                found = [Unit(stage, 0, None, f"{self._prefix}{name}", state="failed", why=error.what)]
            self.units[name], self._changed = found, self._changed + found
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
        chosen = chosen_units(self.choice.units, labels)
        if any(one.in_order for one in self.stages.values() if one.each == stage.each):
            chosen = list(range(chosen[-1] + 1))  # each needs those before it
        last = self.stages.get(self.choice.until or "")
        if last is not None and last.holds and self.stages[last.holds].each == stage.each:
            chosen = chosen[:1]  # a gate looks at the first alone
        return [
            Unit(stage, place, values[number], f"{self._prefix}{stage.name}_{labels[number]}", labels[number])
            for place, number in enumerate(chosen)
        ]

    def _inputs(self, unit: Unit, others: Iterable[str]) -> dict[str, list[Unit]] | None:
        """Return the units of other stages that a unit waits for; None while they are not known."""
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
        if stage.name in self.choice.skip:
            self._set(unit, "passed", "it is skipped (--skip)")
            return True
        gates = self._gates(stage.name) if unit.index else []
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
        if stage.keyed:
            if unit.key and (stage.name, unit.key) in self._index.making:
                return False
            if any(one.job_id in self._reading for one in unit.read):
                return False
            try:
                return self._check(unit)
            except OSError as error:
                self._fail(unit, error)
        elif read_status(self.run, unit.job_id).state == "completed":
            self._set(unit, "kept")
        else:
            unit.state = "ready"
            self._ready.append(unit)
        return True

    def _check(self, unit: Unit) -> bool:
        """Take a unit's valid result, or make it ready to run; return False if another graph is making it."""
        name = unit.stage.name
        if (found := self._results.find(unit)) is not None:
            self._take(unit, found[1], found[0])
            return True
        if (name, unit.key) in self._index.making or any([self._may_be_damaged(one) for one in unit.read]):  # noqa: C419
            return False
        again = f"it is asked for (--from {self.choice.anew})" if name in self._anew else self._results.why_not(unit)
        unit.state, unit.why = "ready", again
        path = unit.manifest(self.run)
        if not self._is_plan and (path.exists() or name in self._anew):
            remove_result(path)  # or a training would continue from checkpoints of another key
        self._ready.append(unit)
        if not self._is_plan:
            self._index.making[name, unit.key] = unit.job_id
        return True

    def _set(self, unit: Unit, state: str, why: str = "") -> None:
        unit.state, unit.why = state, why
        self._changed.append(unit)

    def _take(self, unit: Unit, made: Mapping[str, Any], state: str) -> None:
        unit.made = made
        if made["status"] == "stopped":
            self._set(unit, "stopped", made["why"])
        else:
            self._set(unit, state, made["reused_from"] or "")
            if self.choice.check_files and state != "completed":
                self._may_be_damaged(unit)

    # Damage

    def _may_be_damaged(self, unit: Unit) -> bool:
        """Return whether a result may differ from what was saved; if so, another thread begins to read it."""
        if self._is_plan or (unit.state == "completed" and unit.made.get("host") != HOST):
            return False  # hashed elsewhere in this very run
        assert self._index.proofs is not None
        look = partial(self._index.proofs.why_damaged, unit.manifest(self.run), unit.made)
        if unit.job_id not in self._reading and look() != "":
            self._reading[unit.job_id] = unit, self._pool.submit(look, self._count)
        return unit.job_id in self._reading

    def _count(self, num: int) -> None:
        """Say how much was read, from time to time."""
        if self._is_closed:
            raise InterruptedError
        self._num_read, now = self._num_read + num, time.monotonic()
        if now > self._next_word:
            if self._next_word:
                self._say("plan", text=f"Checking files before jobs read them: {format_bytes(self._num_read)} read")
            self._next_word = now + _WORD_SECONDS

    def _conclude_reading(self, unit: Unit, proof: Future[str | None]) -> None:
        """Let a unit run again whose result is damaged, and look anew at all that reads it."""
        name, readers = unit.stage.name, [unit.stage.name]
        for other, stage in self.stages.items():  # each comes after what it reads
            readers += [other] if set(readers).intersection(stage.reads) else []
        error = proof.exception()
        if error is None and proof.result():
            if any(one.stage.name in readers[1:] for one in [*self._running.values(), *self._ready]):
                return  # not while they read it
            remove_result(unit.manifest(self.run))
            self._index.forget(name, unit.key)
            self._say("plan", text=f"{proof.result()}. {unit.job_id} runs again")
            later = self.units[name][unit.index + 1 :] if unit.stage.in_order else []
            for one in [unit, *(one for one in later if one.state in PASSED)]:
                one.state, one.made = "waiting", {}
                self._waiting[name].append(one)
            for reader in readers[1:]:
                self.units.pop(reader, None)
                self._waiting.pop(reader, None)
        del self._reading[unit.job_id]
        if error is not None:  # of the disk or the network: nothing is removed
            self._fail(unit, error)

    def _fail(self, unit: Unit, error: BaseException) -> None:
        """Let one unit fail by an error of its files; the others continue."""
        if not isinstance(error, MemfitError | OSError):
            raise error
        self._set(unit, "failed", error.what if isinstance(error, MemfitError) else str(error))

    def _say_changes(self) -> None:
        """Write one event for all units of a stage that changed alike."""
        groups: dict[tuple[str, str, str], list[Unit]] = {}
        for unit in {unit.job_id: unit for unit in self._changed}.values():
            state, why = ("waiting", "") if unit.state == "ready" else (unit.state, unit.why)
            groups.setdefault((unit.stage.name, state, why), []).append(unit)
        self._changed = []
        for (name, state, why), units in groups.items():
            seconds = round(sum(unit.seconds for unit in units), 3)
            text = self._text(units, state, why, seconds)
            jobs = [unit.job_id for unit in units]
            self._say("stage", stage=name, state=state, why=why, jobs=jobs, seconds=seconds, text=text)

    def _text(self, units: Sequence[Unit], state: str, why: str, seconds: float) -> str:
        """Say what became of some units of a stage; empty where the events of their jobs say it."""
        names, is_one, stage = name_jobs([unit.job_id for unit in units]), len(units) == 1, units[0].stage
        are = f"{names} {'is' if is_one else 'are'} {state}"
        if not stage.keyed and state == "kept":
            num = len(self.units[stage.name])
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
