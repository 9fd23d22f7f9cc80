"""Which jobs of a workload can run now, which are valid already, and why: a source of jobs for the scheduler.

Everything here is plain data. A unit of a stage is looked at when all that it waits for is there; its key then follows
from the digests of what it needs, so that a stage that ran again and left the same result makes nothing else run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MemfitError, UsageError, nearest
from memfit.jobs import JobStatus, read_status
from memfit.masking import mask
from memfit.pipeline._code import changed_code
from memfit.pipeline._describe import units_of
from memfit.pipeline._manifest import (
    KEY_FILE,
    digest,
    find_manifest,
    is_foreseen,
    is_made_for,
    link_result,
    remove_result,
    seal_command,
)
from memfit.rundir import RunDir, read_whole

if TYPE_CHECKING:
    from memfit.pipeline._order import Order

#: The states of a unit in which what waits for it may go on.
PASSED = frozenset({"kept", "reused", "completed", "passed"})
#: Those in which it never will, in words.
_ENDED_BADLY = {
    "failed": "failed", "stopped": "stopped the run", "skipped": "was skipped", "cancelled": "was stopped"
}  # fmt: skip
_MOST_RUNS = 20
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


@dataclass
class Unit:
    """One unit of a stage: one job.

    Attributes:
        stage: The stage as plain data.
        index: Its place among the units of the run, from 0.
        value: The unit as the stage gets it; None for a stage that runs once.
        job_id: Its job's name.
        label: What it is called in that name; None for a stage that runs once.
        state: ``waiting``, ``ready`` (may run), ``running``, ``kept``, ``reused``, ``completed``, ``stopped``,
            ``passed``, ``skipped``, ``failed``, ``cancelled``.
        why: Why it is in that state, or runs.
        key, parts: What its result depends on, whole and by ingredient.
        made: Its manifest; empty before there is one.
    """

    stage: Mapping[str, Any]
    index: int
    value: Any
    job_id: str
    label: str | None = None
    state: str = "waiting"
    why: str = ""
    key: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What its result is to others."""
        return str(self.made.get("digest", ""))

    @property
    def seconds(self) -> float:
        """What making it took."""
        return float(self.made.get("seconds", 0.0))

    @property
    def result(self) -> dict[str, Any]:
        """What the stage returned for it; empty for a command that leaves no result."""
        found: dict[str, Any] = self.made.get("result", {})
        return found

    def manifest(self, run: RunDir) -> Path:
        """Where its manifest lies."""
        return run.manifest_path(self.stage["name"], self.job_id)


class Graph:
    """The state of a workload's stages in one run.

    Args:
        order: The stages as ``describe`` gives them, what every key depends on beside them, and what is asked for.
        run: The run.
        make_job: Makes the job of a unit, with the units that it needs by stage, and the one before in order.
        earlier: Runs in which a valid result may lie, newest first.
        say: Takes an event's kind and fields.
        is_plan: Only look: nothing is written, linked or removed.

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
        make_job: Callable[[Graph, Unit], Any] | None = None,
        earlier: Sequence[RunDir] = (),
        say: Callable[..., None] = lambda kind, **fields: None,
        is_plan: bool = False,
    ) -> None:
        self.run, self.choice, self._is_plan = run, order.choice, is_plan
        self.stages = {stage["name"]: stage for stage in order.stages}
        self._common, self._make_job, self._say = order.common, make_job, say
        self._earlier = list(earlier[:_MOST_RUNS])
        self._index: dict[tuple[str, str], Path] | None = None
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
        return [self._make_job(self, unit) for unit in found]

    def ended(self, status: JobStatus) -> None:
        """Take in how a job ended for good."""
        unit = self._running[status.job_id]
        if status.state != "completed" or not unit.stage["keyed"] or unit.stage["command"] is None:
            self._conclude(status.job_id, status)
            return
        # Large outputs take a while to hash: not here, where other jobs wait for their walls to be moved.
        sealing = self._pool.submit(self._seal, unit, status)
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
            made = find_manifest(unit.manifest(self.run))
            if made is not None and made["key"] == unit.key:
                self._take(unit, made, "completed")
            else:
                self._set(unit, "failed", "its result is not there")
        elif status.state in ("preempted", "cancelled", "pending"):
            self._set(unit, "cancelled", status.cause or "it was stopped")
        else:
            self._set(unit, "failed", status.cause)
        self.advance()

    def _seal(self, unit: Unit, status: JobStatus) -> None:
        """Write the manifest of a command: it ended well, and what lies in its folder is what it made."""
        facts = {
            "stage": unit.stage["name"],
            "unit": unit.value,
            "job": unit.job_id,
            "key": unit.key,
            "parts": dict(unit.parts),
            "settings": mask(unit.stage["settings"]),
            "code": unit.stage["code"],
        }
        seconds = (status.ended or 0.0) - (status.started or 0.0)
        seal_command(unit.manifest(self.run), facts, seconds=round(seconds, 3))

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
        if unit is None or not unit.stage["keyed"]:
            return unit is not None
        is_new = unit.state == "ready" and not unit.manifest(self.run).exists()
        is_as_asked = (is_new or unit.state == "kept") and unit.stage["name"] not in self._anew
        return is_as_asked and started_key(self.run, unit) == unit.key

    def overwrites(self) -> bool:
        """Whether going on would write over a result that is there, or may do so."""
        if not self.units.keys() >= self.asked:
            return True
        states = ("ready", "waiting", "reused")
        left = [unit for units in self.units.values() for unit in units if unit.state in states]
        return any(find_manifest(unit.manifest(self.run)) is not None for unit in left)

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

    def inputs(self, unit: Unit, others: Iterable[str] | None = None) -> dict[str, list[Unit]] | None:
        """The units of each stage that a unit waits for or, by ``needs``, reads; None while they are not known."""
        found: dict[str, list[Unit]] = {}
        for name in unit.stage["needs"] if others is None else others:
            units = self._units(name)
            if units is None:
                return None
            if unit.stage["each"] and self.stages[name]["each"] == unit.stage["each"]:
                units = units[unit.index : unit.index + 1]
            elif unit.stage["holds"] and self.stages[name]["each"] == self.stages[unit.stage["holds"]]["each"]:
                units = units[:1]
            found[name] = units
        return found

    def previous(self, unit: Unit) -> Unit | None:
        """The unit before, in a stage whose units go in order."""
        return self.units[unit.stage["name"]][unit.index - 1] if unit.stage["in_order"] and unit.index else None

    def _look(self, unit: Unit) -> bool:
        """Move a waiting unit on, if what it waits for has come to an end; whether it moved."""
        name = unit.stage["name"]
        if name in self.choice.skip:
            self._set(unit, "passed", "it is skipped (--skip)")
            return True
        gates = self._gates(name) if unit.index else []
        waited = self.inputs(unit, [*unit.stage["needs"], *unit.stage["after"], *_source(unit.stage), *gates])
        if waited is None:
            return False
        blocking = [one for units in waited.values() for one in units] + list(filter(None, [self.previous(unit)]))
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

    def _key(self, unit: Unit) -> None:
        stage, previous = unit.stage, self.previous(unit)
        needs = {name: [one.digest for one in units] for name, units in (self.inputs(unit) or {}).items()}
        unit.parts = {
            "settings": digest(stage["settings"]),
            "code": digest([stage["command"], stage["code"]]),
            "data": stage["data"],
            "unit": digest(unit.value),
            "needs": digest(needs),
            "previous": previous.digest if previous else "",
            "seed": str(self._common["seed"]) if stage["seed"] else "",
            "threads": str(self._common["threads"]),
        }
        unit.key = digest([stage["name"], unit.parts])

    def _check(self, unit: Unit) -> None:
        """Find a valid result of a unit whose inputs are all there, or make it ready to run."""
        self._key(unit)
        path, name = unit.manifest(self.run), unit.stage["name"]
        if name not in self._anew:
            self._seal_left(unit, path)
            if (found := _valid(path, unit.key)) is not None:
                self._take(unit, found, "kept")
                return
            elsewhere = self._elsewhere().get((name, unit.key))
            if elsewhere is not None and (found := _valid(elsewhere, unit.key)) is not None:
                planned = found | {"reused_from": str(elsewhere)}
                self._take(unit, planned if self._is_plan else link_result(elsewhere, path, found), "reused")
                return
        unit.state, unit.why = "ready", self._reason(unit, path)
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
        if not self._is_plan and (path.exists() or name in self._anew):
            remove_result(path)  # or a training would go on from the checkpoints of what is not valid
        self._ready.append(unit)

    def _seal_left(self, unit: Unit, path: Path) -> None:
        """Write the manifest of a command that ended well while no supervisor was there to do so."""
        if self._is_plan or unit.stage["command"] is None or path.exists() or not is_made_for(path, unit.key):
            return
        status = read_status(self.run, unit.job_id)
        if status.state == "completed":
            with suppress(MemfitError):  # a bad result file: it runs again
                self._seal(unit, status)

    def _take(self, unit: Unit, made: dict[str, Any], state: str) -> None:
        unit.made = made
        if made["status"] == "stopped":
            self._set(unit, "stopped", made["why"])
        else:
            self._set(unit, state, made["reused_from"] or "")

    def _elsewhere(self) -> dict[tuple[str, str], Path]:
        """Where results of earlier runs lie, by stage and key."""
        if self._index is None:
            self._index = {}
            for run in reversed(self._earlier):
                for path in (run.path / "checkpoints").glob("*.json"):
                    if (found := find_manifest(path)) is not None:
                        self._index[found["stage"], found["key"]] = path
        return self._index

    def _reason(self, unit: Unit, path: Path) -> str:
        """Why a unit runs, from the newest result of the same name."""
        if unit.stage["name"] in self._anew:
            return f"it is asked for (--from {self.choice.anew})"
        for run in [self.run, *self._earlier]:
            before = find_manifest(unit.manifest(run))
            if before is not None:
                return reason_of(before, unit)
        return "it was not made yet" if not path.exists() else f"{path.name} is damaged, or an output is gone"

    def _tell(self) -> None:
        """Say each change of a state: one event for all units of a stage that changed alike."""
        groups: dict[tuple[str, str, str], list[Unit]] = {}
        for unit in {unit.job_id: unit for unit in self._changed}.values():
            state, why = ("waiting", "") if unit.state == "ready" else (unit.state, unit.why)
            groups.setdefault((unit.stage["name"], state, why), []).append(unit)
        self._changed = []
        for (name, state, why), units in groups.items():
            told = {"stage": name, "state": state, "why": why, "jobs": [unit.job_id for unit in units]}
            self._say("stage", **told, seconds=round(sum(unit.seconds for unit in units), 3))


def _source(stage: Mapping[str, Any]) -> list[str]:
    """The stage that lists a stage's units, if one does."""
    return [stage["source"]["stage"]] if stage["source"] and stage["source"]["stage"] else []


def _valid(path: Path, key: str) -> dict[str, Any] | None:
    """A result that was made for this key, with all its outputs, by code that is still the same."""
    found = find_manifest(path)
    return found if found is not None and found["key"] == key and is_foreseen(found) else None


def started_key(run: RunDir, unit: Unit) -> str:
    """The key that a unit's job was started with; empty when that is not known."""
    if unit.stage["command"] is not None:
        path = unit.manifest(run).with_suffix("") / KEY_FILE
        return path.read_text() if path.exists() else ""
    with suppress(UsageError):  # what is damaged is known by nobody
        arguments = (read_whole(run.job_dir(unit.job_id) / "job.json") or {}).get("arguments", {})
        return str(arguments.get("order", {}).get("key", ""))
    return ""


def listed(stage: Mapping[str, Any], result: Mapping[str, Any]) -> list[Any]:
    """The units of a stage that a result of its source names.

    Raises:
        ConfigError: If there is no such list in it.
    """
    found: Any = result
    for part in stage["source"]["path"]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return units_of(found, stage["name"], stage["each"])


def reason_of(before: Mapping[str, Any], unit: Unit) -> str:
    """Why a result is not valid any more: what it was made of, and what it would be made of now."""
    parts = [name for name in unit.parts if before["parts"].get(name) != unit.parts[name]]
    found = []
    for name in parts:
        old, new = before["parts"].get(name), unit.parts[name]
        if name == "settings":
            found += list(_differences(before["settings"], mask(unit.stage["settings"]))) or ["a secret changed"]
        elif name == "code":
            found.append(changed_code(before.get("code") or {}, unit.stage["code"]) or "the command changed")
        elif name in ("seed", "threads"):
            found.append(f"{'threads_per_job' if name == 'threads' else name} {old} -> {new}")
        else:
            results = {"needs": " and ".join(unit.stage["needs"]), "previous": "the unit before"}
            found.append(f"{results[name]} gave another result" if name in results else f"the {name} changed")
    return "; ".join(found[:4]) if found else "an output is gone, or code that it loaded changed"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} {old!r:.40} -> {new!r:.40}"


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
