"""Compare a run with the plan that it was given: its settings and its worst phase, once the first epoch is over."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import fits, read_json, write_json
from memfit.jobs import read_status
from memfit.pipeline._graph import Graph
from memfit.rundir import FolderTail, RunDir
from memfit.units import format_bytes, list_some

_LOOK_SECONDS = 0.5
_VALUE = (int, bool, type(None))
_FORECAST = {"settings": {str: _VALUE}, "phases": {str: int}}
_PLAN = {"stages": [{"name": str, "forecast": (_FORECAST, type(None))}]}


def read_planned(file: Path, run: RunDir) -> dict[str, Mapping[str, Any]]:
    """Return the forecasts of a plan by stage, and keep a copy in the run, which counts where the file is gone.

    Raises:
        UsageError: If there is no such file, or it holds no forecast of a stage.
    """
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


class Planned:
    """Follows a run's jobs, and says once for each stage whether its first one is as planned.

    Args:
        graph: The run and its stages.
        forecasts: What `read_planned` gave.
        ranks: The ranks of a job by stage.
        say: Writes an event.
    """

    def __init__(
        self,
        graph: Graph,
        forecasts: Mapping[str, Mapping[str, Any]],
        ranks: Mapping[str, int],
        say: Callable[..., None],
    ) -> None:
        self._graph, self._forecasts, self._ranks, self._say = graph, forecasts, ranks, say
        self._events, self._look_at = FolderTail(graph.run.events_dir), 0.0
        self._said = set[str]()
        self._used: dict[str, Mapping[str, Any]] = {}
        self._phases: defaultdict[str, list[str]] = defaultdict(list)

    def look(self, *, now: bool = False) -> None:
        """Take in new events, twice a second."""
        if now or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            for event in self._events.read():
                if fits(event.get("job"), str) and not event.get("rank"):  # rank 0 tells of the job
                    self._take(event["job"], event)

    def _take(self, job: str, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "planned":
            self._said.add(str(event.get("stage")))
        elif kind == "loaders" and fits(event.get("settings"), {str: _VALUE}):
            self._used[job] = event["settings"]
        elif kind == "phase":
            self._phases[job].append(str(event.get("phase")))
        elif kind in ("epoch", "end"):
            named = {unit.job_id: name for name, units in self._graph.units.items() for unit in units}
            stage = named.get(job, "")
            if stage in self._forecasts and stage not in self._said:
                self._said.add(stage)
                self._compare(stage, job, is_whole=kind == "epoch" or event.get("state") == "completed")

    def _compare(self, stage: str, job: str, *, is_whole: bool) -> None:
        planned, phases = self._forecasts[stage]["settings"], self._forecasts[stage]["phases"]
        used = {**self._used.get(job, {}), "ranks": self._ranks[stage]}
        absent = used.get("validation", True) is None
        both = [name for name in planned if name in used]
        others = [name for name in both if planned[name] != used[name]]
        words = [f"{name} {_show(planned[name])} planned, {_show(used[name])} in the run" for name in others]
        worst = max(phases, key=lambda name: phases[name], default="")
        seen = list(dict.fromkeys(self._phases[job]))
        if is_whole and worst and worst not in seen:
            peak = format_bytes(read_status(self._graph.run, job).peak_bytes)
            words.append(
                f"phase {worst}, the worst with {format_bytes(phases[worst])} planned, was not seen "
                f"({list_some(seen) or 'no phase'} was, with {peak} in the run)"
            )
        text = f"{job} is not as planned: {'; '.join(words)}"
        if not words:
            same = ", ".join(f"{name} {_show(planned[name])}" for name in both if planned[name])
            text = f"{job} is as planned: {same}" + (f"; phase {worst}, the worst, was seen" if is_whole else "")
        if left := [name for name in planned if name not in used and not (absent and name.startswith("validation"))]:
            text += f"; not known of the run: {list_some(left)}"
        self._say("planned", job=job, stage=stage, differs=others, text=text)


def _show(value: int | None) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else f"{value:,}"
