"""Compare a run with the plan that it was given: its settings, its memory, its worst phase, and how it ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.config import differences
from memfit.errors import UsageError
from memfit.files import fits, read_json, write_json
from memfit.jobs import read_status
from memfit.pipeline._graph import Graph
from memfit.pipeline._results import made_for
from memfit.pipeline._supervise import Watcher
from memfit.rundir import RunDir
from memfit.units import format_bytes, list_some

_VALUE = (int, bool, type(None))
_MOST = 1.1  # a job that takes more than this multiple of its plan is not as planned
_FORECAST = {"settings": {str: _VALUE}, "phases": {str: int}, "made_for": ({str: (dict, str)}, type(None))}
_PLAN = {"stages": [{"name": str, "forecast": (_FORECAST, type(None))}]}


def read_planned(file: Path, run: RunDir) -> dict[str, Mapping[str, Any]]:
    """Return the forecasts of a plan by stage, and keep a copy in the run, which counts where the file is gone."""
    copy = run.path / "planned.json"
    found = read_json(file) or read_json(copy)
    stages = found["stages"] if found and fits(found, _PLAN) else []
    forecasts = {stage["name"]: stage["forecast"] for stage in stages if stage["forecast"]}
    if not forecasts:
        raise UsageError(
            f"{file} holds no plan that a run can be compared with.",
            rule="such a plan has lines: of loaders, ranks or a described machine.",
            remedy="name the loaders and plan again: memfit run CONFIG --plan --out plan.json (docs/plan.md)",
        )
    write_json(copy, found)
    return forecasts


class Planned(Watcher):
    """Follows a run's jobs, and says for each stage whether its first one is as planned.

    It says so after the first epoch or at the end, and once more where a job that was as planned did not end so.
    ``forecasts`` are those of `read_planned`, ``ranks`` the ranks of a job by stage.
    """

    def __init__(
        self,
        graph: Graph,
        forecasts: Mapping[str, Mapping[str, Any]],
        ranks: Mapping[str, int],
        say: Callable[..., None],
    ) -> None:
        super().__init__(graph.run)
        self._graph, self._forecasts, self._ranks, self._say = graph, forecasts, ranks, say
        self._said: dict[str, Mapping[str, Any]] = {}
        self._used: dict[str, Mapping[str, Any]] = {}
        self._phases: defaultdict[str, list[str]] = defaultdict(list)

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if fits(event.get("job"), str) and not event.get("rank"):  # rank 0 tells of the job
                self._take(event["job"], event)

    def _take(self, job: str, event: Mapping[str, Any]) -> None:
        kind, state = event.get("kind"), str(event.get("state"))
        if kind == "planned":
            self._said[str(event.get("stage"))] = event
        elif kind == "loaders" and fits(event.get("settings"), {str: _VALUE}):
            self._used[job] = event["settings"]
        elif kind == "phase":
            self._phases[job].append(str(event.get("phase")))
        elif kind == "end" and state in ("preempted", "cancelled"):
            return  # those go on later
        elif kind == "end" or (kind == "epoch" and read_status(self.run, job).peak_bytes):  # measured by now
            named = {unit.job_id: name for name, units in self._graph.units.items() for unit in units}
            stage = named.get(job, "")
            before = self._said.get(stage, {"job": job, "holds": True})
            if stage in self._forecasts and before["job"] == job and before.get("holds"):
                found = self._compare(stage, job, state if kind == "end" else "")
                if stage not in self._said or not found["holds"]:
                    self._said[stage] = found
                    self._say("planned", **found)

    def _compare(self, stage: str, job: str, state: str) -> dict[str, Any]:
        """Return what is as planned of a job that ended so, or has made its first epoch, and what is not."""
        forecast, phases = self._forecasts[stage], self._forecasts[stage]["phases"]
        planned, used = forecast["settings"], {**self._used.get(job, {}), "ranks": self._ranks[stage]}
        absent = used.get("validation", True) is None
        both = [name for name in planned if name in used]
        others = [name for name in both if planned[name] != used[name]]
        left = [name for name in planned if name not in used and not (absent and name.startswith("validation"))]
        is_dead, seen = state not in ("", "completed"), list(dict.fromkeys(self._phases[job]))
        words = [f"it ended {state.replace('_', ' ')}"] if is_dead else []
        given = forecast.get("made_for") or {}
        for name, then, now in differences(given, made_for(self._graph.stages[stage])) if given else ():
            words.append("another command" if name == "command" else _told(name, repr(then)[:40], repr(now)[:40]))
        words += [_told(name, _show(planned[name]), _show(used[name])) for name in others]
        most, worst = max(phases.values(), default=0), max(phases, key=lambda name: phases[name], default="")
        same = [f"{name} {_show(planned[name])}" for name in both if planned[name] and name not in others]
        taken = read_status(self.run, job).peak_bytes
        if forecast.get("uncounted") or not (taken and most):
            left.append("memory")
        else:
            sizes = _told("host memory", format_bytes(most), format_bytes(taken))
            (words if taken > _MOST * most else same).append(sizes)
        if not seen:
            left.append("phases")
        elif worst in seen:
            same.append(f"phase {worst}, the worst planned, was seen")
        elif not is_dead:
            words.append(f"phase {worst}, the worst planned, was not seen ({list_some(seen)} was)")
        what = f"not as planned: {'; '.join(words)}" if words else f"as planned: {', '.join(same)}"
        text = f"{job} is {what}" + (f"; not compared: {list_some(left, 16)}" if left else "")
        return {"job": job, "stage": stage, "differs": others, "holds": not words, "text": text}


def _told(name: str, then: str, now: str) -> str:
    return f"{name} {then} planned, {now} in the run"


def _show(value: int | None) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else f"{value:,}"
