"""A run as one HTML page without network and script: learning curves, results, memory, jobs, and why some failed."""

from __future__ import annotations

import shlex
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from memfit.errors import DamagedError
from memfit.files import fits, write_atomic
from memfit.masking import mask
from memfit.memory import Sample, read_series
from memfit.reports._charts import CHART_STYLE, COLOURS, Layer, Line, draw_stack, legend
from memfit.reports._columns import BAD, COLUMNS, columns_of
from memfit.reports._curves import draw_curves, last_values, read_curves
from memfit.reports._parts import Chart, Facts, Note, Part, Table, to_html
from memfit.reports._study import study_of, view_trials
from memfit.reports._summary import decisions, totals, view_failures, view_results, view_table
from memfit.rundir import Reader, RunDir, liveness, show_state
from memfit.units import format_bytes

_NUM_POINTS = 240  # more points than this make a chart no finer
_PHASES = ("load", "build", "train", "validate", "checkpoint", "preflight")
_AHEAD = {"at_time": (int, float), "limit_bytes": int, "place": frozenset({""})}  # what of a job's growth is drawn
_MOST_TOLD = 200  # of more jobs, the first so many are in the table

_CSS = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--bad:#c62828}
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}
@media(prefers-color-scheme:dark){:root{--bad:#ff8a80}}
h1{font-size:1.5rem;margin:0}
h1,.note{overflow-wrap:anywhere}
td{max-width:24rem;overflow-wrap:break-word}
h2{font-size:1.1rem;margin:2.2rem 0 .4rem}
p{margin:.3rem 0}
svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.legend{font-size:13px}
.legend span{margin-right:1.1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
pre{background:var(--soft);border-radius:6px;padding:.5rem .9rem;font-size:13px;margin:.3rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
p b{margin-right:.6rem}
.note{opacity:.7}
.failed{color:var(--bad);white-space:pre-line}
.wide{overflow-x:auto;margin-bottom:.8rem}
.wide th:first-child,.wide td:first-child{position:sticky;left:0;background:Canvas}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:.6rem}
.wide>svg{min-width:800px}
"""


class _Seen:
    """A run as it was read, with the memory of its jobs over time, summed by phase: by job where none marks a phase."""

    def __init__(self, run: RunDir) -> None:
        reader = Reader(run)
        self.events, self.state = reader.read(), reader.state()
        #: The memory of each job over time in each of its attempts, which have a file each.
        self.series: dict[str, list[list[Sample]]] = {}
        for path in run.path.glob("jobs/*/memory*.jsonl"):
            with suppress(DamagedError, OSError):
                if samples := read_series(path):
                    self.series.setdefault(path.parent.name, []).append(samples)
        for attempts in self.series.values():
            attempts.sort(key=lambda one: one[0].time)
        self.name = f"{run.path.parent.name}/{run.path.name}"
        every = [samples for attempts in self.series.values() for samples in attempts]
        times = [one.time for samples in every for one in (samples[0], samples[-1])]
        self.start = min(times, default=0.0)
        self.seconds = max(times, default=0.0) - self.start
        marked = {sample.phase for samples in every for sample in samples if sample.phase}
        self.by = "phase" if marked else "job"
        self.layers = self._layers(sorted(marked, key=lambda name: (name not in _PHASES, name)))
        self.peak_bytes = int(max(map(sum, zip(*(layer.values for layer in self.layers), strict=True)), default=0))

    def _layers(self, phases: Sequence[str]) -> list[Layer]:
        """Return what jobs held over time: a layer for each phase, or else for each of the first jobs."""
        rest = "no phase marked" if phases else "other jobs"
        shown = phases or [job for job in self.state.jobs if job in self.series][: len(COLOURS) - 1]
        colours = {name: COLOURS[at % (len(COLOURS) - 1)] for at, name in enumerate(shown)} | {rest: COLOURS[-1]}
        sums: dict[str, list[float]] = {}
        step = self.seconds / (_NUM_POINTS - 1) or 1.0
        for job, samples in ((job, samples) for job, attempts in self.series.items() for samples in attempts):
            times = [sample.time - self.start for sample in samples]
            for point in range(int(times[0] / step), min(_NUM_POINTS, int(times[-1] / step) + 2)):
                sample = samples[max(0, bisect_right(times, point * step) - 1)]
                name = sample.phase if phases else job
                layer = sums.setdefault(name if name in colours else rest, [0.0] * _NUM_POINTS)
                layer[point] += sample.private_bytes
        return [Layer(name, colour, sums[name]) for name, colour in colours.items() if name in sums]


def write_page(run: RunDir, path: Path) -> Path:
    write_atomic(path, mask(_page(_Seen(run)), by_name=False))
    return path


def _page(seen: _Seen) -> str:
    name, words = escape(seen.name), [str(word) for word in seen.state.header.get("template") or ()]
    body = [f'<h1>{name.replace("/", "/<wbr>")}</h1><p class="note">{escape(str(seen.state.run.path))}</p>']
    body += [f"<pre>{escape(shlex.join(mask(words)))}</pre>"] if words else []
    for title, parts in _sections(seen):
        if found := to_html(parts):
            body.append(f"<h2>{title}</h2>{found}" if title else found)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    body.append(f'<p class="note">Written by memfit report on {made}. The settings: config.yaml in that folder.</p>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    head += f"<style>{_CSS}{CHART_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _sections(seen: _Seen) -> Iterator[tuple[str, Iterator[Part]]]:
    """Yield the titles of the page and what is below each; one below which is nothing is left out."""
    state, found = seen.state, study_of(seen.state)
    study = found.summarize() if found else None
    yield "", _facts(seen)
    yield "Study", view_trials(study, whole=True) if study else iter(())
    yield "Learning curves", _learned(seen, [one.name for one in found.ranked or found.trials] if found else [])
    yield "Results", view_results(state, None) if study is None else iter(())
    yield "Memory over time", _memory(seen)
    yield "Jobs", _jobs(seen)
    yield "What failed", view_failures(state, here=False)


def _facts(seen: _Seen) -> Iterator[Part]:
    state = liveness(seen.state.run).state
    facts = [("state", show_state(state)), *decisions(seen.state, True), *totals(seen.state, True)]
    facts += [("peak", f"{format_bytes(seen.peak_bytes)} of all jobs together")] if seen.peak_bytes else []
    yield Facts(facts)
    yield Note(seen.state.outcome.get("why") or "", "red")


def _learned(seen: _Seen, ranked: Sequence[str]) -> Iterator[Part]:
    """Yield the learning curves, and where each job stood last."""
    curves = read_curves(seen.state, seen.events)
    if not curves:
        return
    yield from map(Chart, draw_curves(curves, seen.state, ranked))
    state, last = seen.state, last_values(curves)
    are_commands = state.kind == "commands" and not state.is_one  # the numbers of those that completed are results
    if not are_commands or all(state.jobs[job].state != "completed" for job in last):
        names = [state.name(job) for job in last]
        tables = to_html(view_table("job", names, (), [*last.values()], None, has_mean=False))
        yield Chart(f"<details><summary>last values</summary>{tables}</details>")


def _memory(seen: _Seen) -> Iterator[Part]:
    if not seen.peak_bytes:
        yield Note("No job has left a sample of its memory.")
        return
    yield Chart(legend([(layer.name, layer.colour) for layer in seen.layers]))
    marks = [
        (attempts[-1][-1].time - seen.start, f"{job.id} {job.shown}: {job.cause}")
        for job in seen.state.jobs.values()
        if job.shown in BAD and (attempts := seen.series.get(job.id))
    ]
    label = f"Private memory of all jobs of {seen.name} over time, by {seen.by}"
    binding, layers = seen.state.budget.get("binding"), seen.layers
    limit = (str(binding["name"]), int(binding["limit_bytes"])) if binding else None
    yield Chart(
        f'<div class="wide">{draw_stack(layers, seen.seconds, label, limit=limit, marks=[*marks, *_ahead(seen)])}</div>'
    )
    yield Note(
        f"The private memory of all jobs together, by {seen.by}. Memory that several jobs share, such as a mapped "
        "panel, is not in it. A red cross is a job that failed.",
        "dim",
    )


def _ahead(seen: _Seen) -> Iterator[Line]:
    """Yield for each running job that grows a line from now to its limit, at most as long as the run has lasted."""
    for job in seen.state.running:
        samples = (seen.series.get(job.id) or [[]])[-1]
        if samples and job.growth_told and fits(job.growth, _AHEAD):
            now, top = samples[-1].time - seen.start, sum(layer.values[-1] for layer in seen.layers)
            left, more = job.growth["at_time"] - samples[-1].time, job.growth["limit_bytes"] - samples[-1].private_bytes
            share = min(1.0, seen.seconds / max(left, 1.0))
            yield Line(
                job.growth_told, "currentColor", [(now, top), (now + share * left, top + share * more)], is_dashed=True
            )


def _jobs(seen: _Seen) -> Iterator[Part]:
    headings = columns_of("page")
    rows = [[COLUMNS[name].text(job) for name in headings] for job in [*seen.state.jobs.values()][:_MOST_TOLD]]
    if rows:
        yield Table(headings, rows, ("job", "state"), "jobs")
        yield Note("Peak: private memory. The logs are jobs/JOB/out.log and err.log.", "dim")
    else:
        yield Note("No job has run yet.")
