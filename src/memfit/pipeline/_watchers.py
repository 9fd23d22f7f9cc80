"""Watchers of a run: a canary, which tries every phase of a long run before it, and the comparison with a plan."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from memfit.config import differences
from memfit.errors import DoesNotFitError, JobFailedError, PeerFailedError, UsageError
from memfit.files import fits, read_json, write_json
from memfit.jobs import ENDED, JobStatus, read_status
from memfit.memory import Footprint
from memfit.pipeline._config import RunConfig
from memfit.pipeline._graph import Graph
from memfit.pipeline._order import Order
from memfit.pipeline._results import made_for
from memfit.pipeline._supervise import RunResult, Supervisor, Watcher
from memfit.rundir import CANARY_VARIABLE, Event, EventWriter, RunDir, scope_of
from memfit.units import format_bytes, format_count, format_duration, list_some, round_up_size, write_size

#: The job goes on for so long after it was last seen to enter a phase or to grow by this share.
_SETTLED_SECONDS, _GROWN = 10.0, 1.01
_VALUE = (int, bool, type(None))
_MOST = 1.1  # a job that takes more than this multiple of its plan is not as planned
_NONE = type(None)
_FORECAST = {
    "settings": {str: _VALUE},
    "phases": {str: int},
    "ranks": ([int], _NONE),
    "most": (int, float, _NONE),
    "made_for": ({str: (dict, str)}, _NONE),
}
_PLAN = {"stages": [{"name": str, "forecast": (_FORECAST, type(None))}]}
_HEAP = "in its {} steps the heap grew by {} each: {} by the end of the first epoch, if it goes on"
_BROKEN = frozenset({"failed", "out_of_memory", "timeout", "node_fail"})


def as_canary(order: Order) -> Order:
    """Return the order of a canary: a run of its own, one unit at a time, with the words that it adds to a command."""
    settings, words = order.settings, shlex.split(order.settings.canary_args)
    if words and order.kind != "commands":
        raise UsageError(
            f"canary_args are given, and {settings.experiment} is no single command.",
            rule="they are added to the one command behind --.",
            remedy=f"let the stage look at the variable: run: python train.py ${{{CANARY_VARIABLE}:+--max_steps 20}}",
        )
    own = {"retries": 0, "max_parallel": 1, "on_failure": "stop", "experiment": f"{settings.experiment}-canary"}
    stages, facts = order.stages, order.facts
    if order.kind == "commands":
        [stage] = stages
        stages = [replace(stage, command=[*(stage.command or ()), *words], units=list(stage.units or [{}])[:1])]
        facts = {**facts, "combinations": stages[0].units}
    return replace(order, settings=settings.model_copy(update=own), stages=stages, facts=facts)


class Canary(Watcher):
    """Follows a canary's jobs by the phases that their ranks mark, stops them once all were seen, and judges."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.run, self.settings, self.stop = supervisor.run, supervisor.settings, supervisor.stop
        #: By job: how often each rank has entered its phases, its last one with the newest at the end, steps of rank 0.
        self._seen: dict[str, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self._last: dict[str, dict[int, str]] = defaultdict(dict)
        self._steps: dict[str, list[tuple[float, int]]] = defaultdict(list)
        #: What its heap held after each of these, and how many steps an epoch has.
        self._heaps: dict[str, list[tuple[int, int]]] = defaultdict(list)
        #: The first rank that was lost of a job, and not since it was asked to stop.
        self._lost: dict[str, Event] = {}
        self._peak, self._changed_at, self._has_asked = 0, 0.0, False
        # Who runs to the end has been covered, whatever it marks, unless the user named the phases.
        self._is_strict = "canary_phases" in self.settings.model_fields_set
        (self.run.path / "canary").mkdir(exist_ok=True)
        phases, end = list_some(self.settings.canary_phases), "" if self._is_strict else ", or for its end"
        text = f"canary: waits up to {self.settings.canary_seconds:g} s for {phases} (canary_seconds){end}"
        supervisor.events.write("canary", text=text)

    def why_no_more(self) -> str:
        return "the canary has seen what it needs" if self._has_asked else ""

    def take(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        if self._note(events):
            self._changed_at = now
        for job_id in [path.name for path in (self.run.path / "jobs").iterdir()]:
            status = read_status(self.run, job_id)
            if status.peak_bytes > _GROWN * self._peak:
                self._peak, self._changed_at = status.peak_bytes, now
            is_over = status.started is not None and time.time() - status.started > self.settings.canary_seconds
            if job_id in self._lost:
                continue  # it ends by itself, as soon as the other ranks have left
            is_settled = not self._missing(job_id) and now - self._changed_at > _SETTLED_SECONDS
            has_begun = len(self._missing(job_id)) < len(self.settings.canary_phases)
            is_enough = is_settled or self._is_covered(job_id) or (has_begun if status.state in ENDED else is_over)
            if is_enough and not self.stop.level:  # else its user has stopped it
                self._has_asked = True
                self.stop.ask()

    def _note(self, events: Sequence[Event]) -> bool:
        """Take in events; return whether a rank entered a phase, or made a step."""
        told = [one for one in events if fits(one, {"job": str, "rank": (int, type(None))})]
        for event in told:
            job_id, rank, kind = event["job"], event.get("rank") or 0, event["kind"]
            if kind == "step" and not rank and isinstance(event.get("step"), int):
                self._steps[job_id].append((event["time"], event["step"]))
                if fits(event, {"heap_bytes": int, "num_steps": int}):
                    self._heaps[job_id].append((event["heap_bytes"], event["num_steps"]))
            elif kind == "rank_lost" and not event.get("asked") and isinstance(event.get("code"), int):
                self._lost.setdefault(job_id, event)
            elif kind == "checkpoint":
                self._seen[job_id][rank]["checkpoint"] += 1
            elif kind == "phase":
                self._seen[job_id][rank][str(event.get("phase"))] += 1
                self._last[job_id].pop(rank, None)
                self._last[job_id][rank] = str(event.get("phase"))
        return any(one["kind"] in ("step", "phase", "checkpoint") for one in told)

    def _missing(self, job_id: str) -> list[str]:
        """Return the phases that not all ranks have reached; of a checkpoint, one rank is enough."""
        told, names = self._seen.get(job_id, {}).values(), self.settings.canary_phases
        return [
            one for one in names if not told or not (any if one == "checkpoint" else all)(one in seen for seen in told)
        ]

    def _is_covered(self, job_id: str) -> bool:
        """Return whether a script has entered each phase from its first repeated one on twice, or all it was to enter.

        It may save less often than it validates. What writes steps makes a few of them and ends by itself.
        """
        if self._is_strict or job_id in self._steps or not {"checkpoint"}.issuperset(self._missing(job_id)):
            return False
        most = Counter[str]()
        for seen in self._seen[job_id].values():
            most |= seen
        return min(dropwhile(lambda number: number < 2, most.values()), default=0) > 1

    # --- the verdict

    def close(self, result: RunResult) -> RunResult:
        """Judge, and write ``canary.json``; a run that its user stopped stays as it is."""
        shutil.rmtree(self.run.path / "canary", ignore_errors=True)
        statuses = {job: self._with_lost(one) for job, one in result.statuses.items() if one.started is not None}
        broke = next((one for one in statuses.values() if _is_broken(one)), None)
        if broke is None and self.stop.level and not self._has_asked:
            return result
        job_id = broke.job_id if broke else min(self._seen, key=lambda one: len(self._missing(one)), default="")
        missing = self._missing(job_id)
        status = statuses.get(job_id) or max(statuses.values(), key=lambda one: one.peak_bytes, default=None)
        own = [statuses[job_id]] if job_id in statuses else list(statuses.values())
        ended = bool(own) and not self._is_strict and all(map(_ended_itself, own))
        lacking = [] if ended or self._is_covered(job_id) else missing
        found: dict[str, Any] = {
            "passed": not broke and not lacking,
            "exit_code": self._code_of(broke) if broke else DoesNotFitError.exit_code if lacking else 0,
            "ended_itself": ended,
            "seconds": (status.ended or time.time()) - status.started if status and status.started else 0.0,
            "phases": {
                phase: sorted(rank for rank, seen in self._seen[job_id].items() if phase in seen)
                for phase in self.settings.canary_phases
            },
            "not_covered": lacking,
            "not_marked": missing,
            "is_marked": bool(self._seen[job_id]),
            "broke": self._describe_break(broke) if broke else None,
            "seconds_per_step": _pace(self._steps[job_id]),
            "heap": _rise(self._heaps[job_id]),
            **self._request(status),
        }
        found["text"] = _text_of(found, self.settings)
        state = "completed" if found["passed"] else "failed"
        write_json(self.run.path / "canary.json", found)
        return replace(result, state=state, exit_code=found["exit_code"], why=found["text"][0], canary=found)

    def _with_lost(self, status: JobStatus) -> JobStatus:
        """Return the status of a job that lost a rank just before it was asked to stop as that of one that failed."""
        lost = self._lost.get(status.job_id)
        if lost is None or status.state in _BROKEN:
            return status
        cause, evidence = str(lost.get("text")).removeprefix(f"{status.job_id} "), {"rank": lost.get("rank")}
        return replace(status, state="failed", exit_code=lost["code"], cause=cause, evidence=evidence)

    def _describe_break(self, status: JobStatus) -> dict[str, Any]:
        """Return the job that broke, in which phase, and which ranks: the one that was lost first, or all in it."""
        rank: Any = status.evidence.get("rank")
        last = self._last[status.job_id]
        phase = last.get(rank) or next(reversed(last.values()), "") or status.phase or ""
        ranks = [rank] if rank is not None else sorted(one for one in last if last[one] == phase)
        how = status.state.replace("_", " ") + " at its limit" * (status.state == "failed" and status.wants_more)
        named = {"job": status.job_id, "phase": phase, "ranks": ranks, "how": how}
        return {**named, "cause": status.cause, "exit_code": status.exit_code}

    def _code_of(self, status: JobStatus) -> int:
        """Return 3 for what ran out of memory or was killed; else the code of the command, or 4 in a config."""
        code = status.exit_code
        is_killed = code is None or code < 0 or 128 < code <= 192  # as a shell or srun says it
        if status.state != "failed" or status.wants_more or is_killed:
            return DoesNotFitError.exit_code
        known = (DoesNotFitError.exit_code, PeerFailedError.exit_code)
        is_own = scope_of(self.run.header) == "command" or code in known
        return code if is_own and code else JobFailedError.exit_code

    def _request(self, status: JobStatus | None) -> dict[str, Any]:
        """Return the peaks of a node, and what the long run asks for: with the slack that reservations have."""
        footprint = (status.footprint if status else None) or Footprint(0)
        more, peaks = 1 + self.settings.memory.slack, footprint.phases.items()
        host, device = status.peak_bytes if status else 0, footprint.bytes_per_device
        return {
            "host_peak_bytes": host,
            "device_peak_bytes": device,
            "phase_peak_bytes": {name: peak.private_bytes for name, peak in peaks},
            "memory": write_size(math.ceil(host * more), ("GiB", "MiB")) if host else None,
            "gpu_memory": write_size(math.ceil(device * more), ("GiB", "MiB")) if device else None,
            "slurm_mem": write_size(round_up_size(host * more)) if host else None,
        }


def _is_broken(status: JobStatus) -> bool:
    """Return whether a job failed, or somebody else than memfit ended it with a signal."""
    is_killed = status.state in ("preempted", "cancelled") and not status.asked and (status.exit_code or 0) < 0
    return status.state in _BROKEN or is_killed


def _ended_itself(status: JobStatus) -> bool:
    """Return whether a job went to its own end, or stopped as a canary of memfit's classes does."""
    is_whole = status.state == "completed" or (status.state == "preempted" and status.exit_code == 75)
    return is_whole and not status.asked


def _pace(steps: Sequence[tuple[float, int]]) -> float | None:
    """Return the median seconds of a step, without the first.

    >>> _pace([(0.0, 1), (0.5, 2), (1.0, 3), (3.0, 5)])
    0.5
    """
    took = [(end - began) / (last - first) for (began, first), (end, last) in pairwise(steps) if last > first]
    return median(took) if took else None


def _rise(heaps: Sequence[tuple[int, int]]) -> dict[str, int] | None:
    """Return by how much a heap rose at each step, if it did at every one, and by how much at the end of the epoch.

    >>> _rise([(10, 100), (12, 100), (14, 100), (17, 100)]), _rise([(10, 100), (12, 100), (12, 100), (14, 100)])
    ({'steps': 4, 'step_bytes': 2, 'epoch_bytes': 200}, None)
    """
    gaps = [later - size for (size, _), (later, _) in pairwise(heaps)]
    if len(gaps) < 3 or min(gaps) <= 0:
        return None
    step = int(median(gaps))
    return {"steps": len(heaps), "step_bytes": step, "epoch_bytes": step * heaps[-1][1]}


def _text_of(found: Mapping[str, Any], settings: RunConfig) -> list[str]:
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in found["phase_peak_bytes"].items())
    peak = f"peak of a node {format_bytes(found['host_peak_bytes'])}{f' ({phases})' if phases else ''}"
    if found["device_peak_bytes"]:
        peak += f", of a device {format_bytes(found['device_peak_bytes'])}"
    took = format_duration(found["seconds"])
    marks = 'mark them where they begin: memfit.phase("train"), "validate", "checkpoint"'
    if broke := found["broke"]:
        ranks = [str(rank) for rank in broke["ranks"]]
        whose = f"rank{'s' * (len(ranks) > 1)} {list_some(ranks, 16)}" if ranks else "the job"
        where = f"in phase {broke['phase']}" if broke["phase"] else f"after {took}, in no marked phase"
        what = f"canary: broke {where} ({whose}; {broke['how']}): {broke['cause']}"
        more = "" if broke["phase"] else f"; to know the phase, {marks}"
        return [what, peak, f"the long run would end so, too: change that, and give the same command again{more}"]
    if (missing := found["not_covered"]) and not found["is_marked"]:
        what = f"canary: it ran {took} and marked no phase: nobody knows whether it has validated and saved"
        return [what, peak, f"{marks}; or let it run to its end: --canary-args with a few steps"]
    if missing:
        lines = []
        for name in missing:
            ranks = [str(rank) for rank in found["phases"][name]]
            where = f" on all ranks (only on {list_some(ranks, 16)})" if ranks else ""
            lines.append(f'canary: phase {name} was not seen{where}: not covered, name it by memfit.phase("{name}")')
        later = f"--set canary_seconds={2 * settings.canary_seconds:g}"
        return [*lines, peak, f"mark it where it begins, or wait longer: {later}, or leave it out of canary_phases"]
    pace = found["seconds_per_step"]
    seen = [f"{phase} on {format_count(len(ranks), 'rank')}" for phase, ranks in found["phases"].items() if ranks]
    seen += [f"{pace:.3g} s a step"] if pace else []
    seen += [f"it ran to its end in {took}"] if found["ended_itself"] and found["not_marked"] else []
    on_device = f" --gpu-memory {found['gpu_memory']}" if found["gpu_memory"] else ""
    lacks = f"not marked: {list_some(found['not_marked'])}; if the long run does that, mark it where it begins"
    rise = found["heap"] or {"epoch_bytes": 0}
    grows = rise["epoch_bytes"] > settings.memory.slack * found["host_peak_bytes"]
    long = f"the long run: --memory {found['memory']}{on_device}; in Slurm: --mem={found['slurm_mem']}"
    return [
        f"canary: passed ({', '.join(seen)})",
        *([lacks] if found["not_marked"] else []),
        f"{peak}; {settings.memory.slack:.0%} more for the request",
        *(
            [_HEAP.format(rise["steps"], *map(format_bytes, (rise["step_bytes"], rise["epoch_bytes"])))]
            if grows
            else []
        ),
        long if found["memory"] else "what the long run needs is not known: it ended before its memory was measured",
    ]


# As planned or not


def read_planned(file: Path, run: RunDir) -> dict[str, Mapping[str, Any]]:
    """Return the forecasts of a plan by stage, and keep a copy in the run, which counts where the file is gone."""
    copy = run.path / "planned.json"
    found = read_json(file) or read_json(copy)
    stages = found["stages"] if found and fits(found, _PLAN) else []
    forecasts = {stage["name"]: stage["forecast"] for stage in stages if stage["forecast"]}
    if not forecasts:
        raise UsageError(
            f"{file} holds no plan that a run can be compared with.",
            rule="such a plan counts a job by lines: of first steps, ranks or a described machine.",
            remedy="plan again, with first steps: memfit run CONFIG --plan --out plan.json (docs/plan.md)",
        )
    write_json(copy, found)
    return forecasts


class Planned(Watcher):
    """Compares each stage's first job with its plan, after its first epoch and at its end."""

    def __init__(
        self, order: Order, graph: Graph, forecasts: Mapping[str, Mapping[str, Any]], events: EventWriter
    ) -> None:
        self._order, self._graph, self._forecasts, self._write = order, graph, forecasts, events.write
        self._said: dict[str, Mapping[str, Any]] = {}
        self._used: dict[str, Mapping[str, Any]] = {}
        self._died: dict[str, str] = {}  # how an attempt of a job ended that did not complete

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.get("job") is not None and not event.get("rank"):  # rank 0 tells of the job
                self._take(event["job"], event["kind"], event)

    def _take(self, job: str, kind: str, event: Event) -> None:
        state = str(event.get("state"))
        if kind == "planned":
            self._said[str(event.get("stage"))] = event
        elif kind == "loaders" and fits(event.get("settings"), {str: _VALUE}):
            self._used[job] = event["settings"]
        elif kind in ("epoch", "end") and state not in ("preempted", "cancelled"):  # those go on later
            if kind == "end" and state != "completed":
                self._died[job] = state.replace("_", " ")
            status = read_status(self._graph.run, job)
            stage = {unit.job_id: name for name, units in self._graph.units.items() for unit in units}.get(job, "")
            before = self._said.get(stage, {})
            is_due = kind == "end" or (not before and status.peak_bytes)
            if stage in self._forecasts and is_due and before.get("job", job) == job:
                found = self._compare(stage, status)
                if found["text"] != before.get("text"):
                    self._said[stage] = found
                    self._write("planned", **found)

    def _compare(self, stage: str, status: JobStatus) -> dict[str, Any]:
        """Return what was planned and measured of a job, and whether it ``holds``; None if not known."""
        forecast, spec, job = self._forecasts[stage], self._graph.stages[stage], status.job_id
        planned, used = forecast["settings"], {**self._used.get(job, {}), "ranks": self._order.ranks_of(spec)}
        held = {name: used[name] for name in planned if name in used}
        left = [name for name in planned if name not in used]
        left = left if job in self._used else ["loaders"]
        made = forecast.get("made_for") or {}
        changes = differences(
            {**made, **{name: planned[name] for name in held}}, {**(made_for(spec) if made else {}), **held}
        )
        differs = {name: f"{name} {then!r:.40} planned, {now!r:.40} in the run" for name, then, now in changes}
        words = [f"it ended {self._died[job]}"] if job in self._died else []
        words += ["another command" if name == "command" else text for name, text in differs.items()]
        sizes = _compare_sizes(forecast, status)
        holds = False if words or any(size["holds"] is False for size in sizes) else sizes[0]["holds"]
        seen = [size for size in sizes if size["measured"]]
        ranks = [size for size in seen if size["of"].startswith("rank")]
        ranks.sort(key=lambda size: size["measured"] / max(1, size["planned"]))
        for size in seen:
            if size not in ranks[:-1]:  # of the ranks, that which is furthest above its plan
                then, now = (format_bytes(size[name]) for name in ("planned", "measured"))
                words.append(f"{size['of']} {then} planned, {now} measured")
        left += [*(size["of"] for size in sizes if size not in seen), *(forecast.get("uncounted") or ())]
        verdict = {True: "is as planned", False: "is not as planned", None: "cannot be called as planned"}[holds]
        text = f"{job} {verdict}: {'; '.join(words)}" + (f"; not compared: {list_some(left, 16)}" if left else "")
        return {"job": job, "stage": stage, "differs": [*differs], "holds": holds, "bytes": sizes, "text": text}


def _compare_sizes(forecast: Mapping[str, Any], status: JobStatus) -> list[dict[str, Any]]:
    """Return bytes planned and measured of a node, each phase, each rank; None if not known."""
    planned = {"host memory": max(forecast["phases"].values(), default=0)}
    phases = forecast["phases"] if len(forecast["phases"]) > 1 else {}  # one alone is all of the host memory
    planned |= {f"phase {name}": size for name, size in phases.items() if name != "unmarked"}
    planned |= {f"rank {rank}": size for rank, size in enumerate(forecast.get("ranks") or ()) if status.ranks}
    found = {f"rank {one['rank']}": one["peak_bytes"] for one in status.ranks} | {"host memory": status.peak_bytes}
    if status.footprint is not None:
        found |= {f"phase {name}": peak.private_bytes for name, peak in status.footprint.phases.items()}
    sizes = []
    for of, size in planned.items():
        taken = found.get(of) or None
        holds = None if taken is None or forecast.get("uncounted") else taken <= (forecast.get("most") or _MOST) * size
        sizes.append({"of": of, "planned": size, "measured": taken, "holds": holds})
    return sizes
