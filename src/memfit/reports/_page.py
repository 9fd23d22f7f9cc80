"""A run as one HTML page without network and script: learning curves, results, memory, jobs, and why some failed."""

from __future__ import annotations

import json
import shlex
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from memfit.errors import DamagedError
from memfit.files import write_atomic
from memfit.masking import mask
from memfit.memory import Sample, read_series
from memfit.reports._charts import CHART_STYLE, COLOURS, Bar, Layer, draw_bars, draw_stack, legend
from memfit.reports._curves import PLACES, draw_curves, draw_machine, last_values, read_curves
from memfit.reports._differences import read_settings
from memfit.reports._numbers import (
    explain_rank,
    format_column,
    format_number,
    metrics_of,
    or_dash,
    summarize_metrics,
)
from memfit.reports._study_text import explain_params, explain_region, study_facts
from memfit.reports._summary import BAD, explain_forecast, summarize
from memfit.reports._table import are_repetitions, short_names
from memfit.rundir import Event, RunDir, RunState, read, read_events, show_state
from memfit.units import format_bytes, format_duration

_NUM_POINTS = 240  # more points than this make a chart no finer
_MOST_BARS = 40  # bars beyond this are left out and counted: the longest jobs stay
_GAP_SECONDS = 30.0  # a job without a sample for so long was not running: it waited for its next attempt
_PHASES = ("load", "build", "train", "validate", "checkpoint", "preflight")
_OTHER = "no phase marked"
_MOST_TOLD = 200  # of more jobs, the first so many are in the table
_MOST_LINES = 30  # a longer table is folded
_LARGE, _SMALL = 960, 400  # the widths of a chart on a large and on a small screen, and the points that it has there
_MOST_COLUMNS = 8  # of more units than this, each is a row of the results, and else a column
_MOST_LETTERS = 200

_CSS = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--bad:#c62828}
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}
@media(prefers-color-scheme:dark){:root{--bad:#ff8a80}}
h1{font-size:1.5rem;margin:0}
h1,.note{overflow-wrap:anywhere}
h3{font-size:1rem;margin:.8rem 0 .2rem}
td{max-width:24rem;overflow-wrap:break-word}
h2{font-size:1.1rem;margin:2.2rem 0 .4rem}
p{margin:.3rem 0}
svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
table:has(th:nth-child(2):last-child){width:auto;min-width:min(100%,22rem)}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.legend{font-size:13px}
.legend span{margin-right:1.1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
.facts div,pre{background:var(--soft);border-radius:6px;padding:.5rem .9rem}
.facts b{display:block;font-size:1.15rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;margin:.3rem 0}
.note{opacity:.7}
.failed{color:var(--bad);font-weight:600}
.wide{overflow-x:auto;margin-bottom:.8rem}
.wide th:first-child,.wide td:first-child{position:sticky;left:0;background:Canvas}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:.6rem}
.small{display:none}
@media(max-width:640px){
body{margin:1rem auto;padding:0 .6rem}
h1{font-size:1.2rem}
.large{display:none}.small{display:block}
table{font-size:13px}
th,td{padding:.3rem .4rem}
meter{display:block;margin:0 0 0 auto}
}
meter{width:4.5rem;margin-left:.6rem;vertical-align:middle}
"""
#: A cell of a table: its text; or its text and a share from 0 to 1, which is drawn as a bar behind it.
_Cell = str | tuple[str, float]


@dataclass(frozen=True)
class _Seen:
    """A run as it was read."""

    state: RunState
    summary: Mapping[str, Any]
    events: Sequence[Event]
    series: Mapping[str, Sequence[Sample]]
    colours: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.state.run.path.parent.name}/{self.state.run.path.name}"

    @property
    def start(self) -> float:
        return min((samples[0].time for samples in self.series.values()), default=0.0)

    @property
    def seconds(self) -> float:
        return max((samples[-1].time for samples in self.series.values()), default=0.0) - self.start

    @property
    def limit(self) -> tuple[str, int] | None:
        binding = self.summary["budget"].get("binding")
        return (str(binding["name"]), int(binding["limit_bytes"])) if binding else None

    @cached_property
    def layers(self) -> list[Layer]:
        """The private memory of all jobs at evenly spaced times, summed by phase."""
        sums: dict[str, list[float]] = {}
        step = self.seconds / (_NUM_POINTS - 1) or 1.0
        for samples in self.series.values():
            times = [sample.time - self.start for sample in samples]
            for first, last in _attempts(samples):
                for point in range(int(times[first] / step), min(_NUM_POINTS, int(times[last] / step) + 2)):
                    sample = samples[max(first, bisect_right(times, point * step, hi=last + 1) - 1)]
                    sums.setdefault(_phase(sample), [0.0] * _NUM_POINTS)[point] += sample.private_bytes
        return [Layer(name, colour, sums[name]) for name, colour in self.colours.items() if name in sums]

    @cached_property
    def reported(self) -> dict[str, dict[str, float]]:
        """What each of several commands reported last."""
        told = {str(job["job"]): job["reported"] for job in self.summary["jobs"] if job["reported"]}
        return {job: {name: nan if one is None else one for name, one in own.items()} for job, own in told.items()}

    @property
    def totals(self) -> list[float]:
        """The private memory of all jobs together, at the same times."""
        return [sum(values) for values in zip(*(layer.values for layer in self.layers), strict=True)]


def write_page(run: RunDir, path: Path) -> Path:
    """Write a run as an HTML page; return the file."""
    series, state = _read(run), read(run)
    seen = _Seen(state, summarize(state), read_events(run.events_dir), series, _colours(series))
    write_atomic(path, mask(_page(seen), by_name=False))
    return path


def _read(run: RunDir) -> dict[str, list[Sample]]:
    """Return the memory of each job over time, all its attempts in order."""
    found: dict[str, list[Sample]] = {}
    for path in run.path.glob("jobs/*/memory*.jsonl"):
        with suppress(DamagedError, OSError):
            found.setdefault(path.parent.name, []).extend(read_series(path))
    return {job: sorted(samples, key=lambda one: one.time) for job, samples in found.items() if samples}


def _colours(series: Mapping[str, Sequence[Sample]]) -> dict[str, str]:
    """Return a colour for each phase; grey where a job marked none."""
    found = {_phase(sample) for samples in series.values() for sample in samples} - {_OTHER}
    phases = sorted(found, key=lambda name: (name not in _PHASES, name))
    return {name: COLOURS[at % (len(COLOURS) - 1)] for at, name in enumerate(phases)} | {_OTHER: COLOURS[-1]}


def _page(seen: _Seen) -> str:
    name, words = escape(seen.name), [str(word) for word in seen.state.header.get("template") or ()]
    body = [f'<h1>{name.replace("/", "/<wbr>")}</h1><p class="note">{escape(str(seen.state.run.path))}</p>']
    body += [f"<pre>{escape(shlex.join(mask(words)))}</pre>"] if words else []
    body.append(_facts(seen))
    if (study := seen.summary.get("study")) is not None:
        body += ["<h2>Study</h2>", *_study(study)]
    body += [*_learned(seen), *_results(seen)]
    body += ["<h2>Memory over time</h2>", *_memory(seen), *_machine(seen), "<h2>Jobs</h2>", *_jobs(seen), *_sizes(seen)]
    if deaths := list(_deaths(seen)):
        body += ["<h2>What failed</h2>", *deaths]
    body += ["<h2>Settings</h2>", *_settings(seen)]
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    body.append(f'<p class="note">Written by memfit report on {made}.</p>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    head += f"<style>{_CSS}{CHART_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _facts(seen: _Seen) -> str:
    """Return the figures that matter most, and why the run ended."""
    summary = seen.summary
    facts = {
        "state": show_state(str(summary["state"])),
        "jobs": ", ".join(f"{number} {name}" for name, number in summary["counts"].items()) or "none started",
        "wall clock": format_duration(summary["wall_seconds"], short=True),
        "most jobs at once": str(summary["most_at_once"]),
    }
    if peak := int(max(seen.totals, default=0)):
        facts["peak of all jobs together"] = format_bytes(peak)
    if seen.limit is not None:
        facts[f"limit ({seen.limit[0]})"] = format_bytes(seen.limit[1])
    if (study := summary.get("study")) is not None:
        facts["trials"] = f"{study['num_ended']} of {study['n_trials']}"
        facts[f"best {study['number']}"] = or_dash(study["best"], lambda best: format_number(best["value"]))
    if summary["num_restarts"]:
        lost = sum(job.earlier_seconds for job in seen.state.jobs.values())
        took = f" ({format_duration(lost, short=True)} of earlier attempts)" if lost else ""
        facts["restarts by memfit"] = f"{summary['num_restarts']}{took}"
    boxes = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in facts.items())
    why = f'<p class="failed">{escape(summary["why"])}</p>' if summary["why"] else ""
    planned = "".join(f"<p>{escape(text)}</p>" for text in summary["planned"])
    return f'<div class="facts">{boxes}</div>{why}{planned}'


def _table(headings: Sequence[str], rows: Sequence[Sequence[_Cell]], *, num_words: int, what: str = "figures") -> str:
    """Return a table whose columns behind the first ``num_words`` hold numbers; it leaves out empty ones and folds."""

    def line(cells: Sequence[_Cell], tag: str) -> str:
        kinds = ("" if at < num_words else ' class="number"' for at in range(len(cells)))
        pairs = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{_cell(cell)}</{tag}>' for kind, cell in pairs)}</tr>"

    shown = [at for at in range(len(headings)) if any(cells[at] not in ("", "-") for cells in rows)]
    num_words = sum(at < num_words for at in shown)
    headings, rows = [headings[at] for at in shown], [[cells[at] for at in shown] for cells in rows]
    lines = "".join(line(cells, "td") for cells in rows)
    table = f'<div class="wide"><table>{line(headings, "th")}{lines}</table></div>'
    if len(rows) <= _MOST_LINES:
        return table
    return f"<details><summary>{len(rows)} {what}</summary>{table}</details>"


def _cell(cell: _Cell) -> str:
    text, share = (cell, None) if isinstance(cell, str) else cell
    return escape(text) + ("" if share is None else f'<meter value="{share:.3f}"></meter>')


def _study(study: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts of a study, all trials, and the settings that were refused."""
    yield _table(("", ""), list(study_facts(study)), num_words=2)
    sizes = {"host peak": "peak_bytes", "device peak": "device_peak_bytes"}
    sizes = {name: key for name, key in sizes.items() if any(one[key] for one in study["trials"])}
    names = dict.fromkeys(name for one in study["trials"] for name, _ in explain_params(one["params"]))
    rows = []
    for one, value in zip(study["trials"], _values(study), strict=True):
        params = dict(explain_params(one["params"]))
        numbers: list[_Cell] = [value, or_dash(one["seconds"] or None, format_duration)]
        numbers += [or_dash(one[key] or None, format_bytes) for key in sizes.values()]
        rows.append((one["trial"], one["state"], one["cause"], *numbers, *(params.get(name, "-") for name in names)))
    yield _table(("trial", "state", "why", study["number"], "time", *sizes, *names), rows, num_words=3, what="trials")
    if settings := study["refused"]["settings"]:
        words = [
            (name.removeprefix("params."), *(explain_region(one[key]) for key in ("refused", "accepted")))
            for name, one in settings.items()
        ]
        yield _table(("setting", "refused", "accepted"), words, num_words=3)
    for one in study["differs"]:
        yield f'<p class="note">A rerun of {escape(one["trial"])} may end otherwise: {escape(one["why"])}.</p>'


def _values(study: Mapping[str, Any]) -> Iterator[_Cell]:
    """Yield the objective of each trial with a bar: whole for the best one, half for the median, none far off."""
    best, trials = study["best"], study["trials"]
    done = [one["value"] for one in trials if one["state"] == "completed" and one["value"] is not None]
    middle = median(done or [0.0])
    for one in trials:
        text, value = or_dash(one["value"], format_number), one["value"]
        if best is None or value is None:
            yield text
        else:
            reach = 2 * abs(best["value"] - middle) or 1.0
            yield text, max(0.0, 1 - abs(best["value"] - value) / reach)


def _learned(seen: _Seen) -> Iterator[str]:
    """Yield the learning curves, and where each job stood last."""
    curves = read_curves(seen.state, seen.events)
    if not curves:
        return
    study = seen.summary.get("study") or {}
    sign = -1 if study.get("direction") == "maximize" else 1
    done = [one for one in study.get("trials", ()) if one["value"] is not None]
    ranked = [one["trial"] for one in sorted(done, key=lambda one: sign * one["value"])]
    yield "<h2>Learning curves</h2>"
    yield from draw_curves(curves, seen.state, ranked or [one["trial"] for one in study.get("trials", ())])
    if not seen.reported:
        values = {seen.state.name(job): own for job, own in last_values(curves).items()}
        yield f"<details><summary>last values</summary>{_results_table(values, has_mean=False)}</details>"


def _results(seen: _Seen) -> Iterator[str]:
    """Yield what each unit of a stage returned or each command reported last, beside their mean and deviation."""
    tables, jobs, names = [], seen.state.jobs, short_names(seen.state)
    for stage in seen.state.stage_names if seen.state.kind == "stages" else ():
        units = [job for job in jobs.values() if job.stage == stage and metrics_of(job.result)]
        numbers = {job.name.removeprefix(f"{stage}_"): metrics_of(job.result) for job in units}
        if [job.id for job in units] == [stage]:
            facts = [(name, *format_column([value], [])) for name, value in numbers[stage].items()]
            tables.append(f"<h3>{escape(stage)}</h3>{_table(('', 'value'), facts, num_words=1)}")
        elif units:
            tables.append(f"<h3>{escape(stage)}</h3>{_results_table(numbers)}")
    if seen.reported:
        told = {names[jobs[job].name]: own for job, own in seen.reported.items()}
        tables.append(_results_table(told, has_mean=are_repetitions(seen.state)))
    if tables:
        yield "<h2>Results</h2>" + "".join(tables)


def _results_table(numbers: Mapping[str, Mapping[str, float]], *, has_mean: bool = True) -> str:
    rows = []
    for name, (mean, sd, _) in summarize_metrics([*numbers.values()]).items():
        spread = [mean, sd] if has_mean and name not in PLACES else []
        told = format_column([own.get(name) for own in numbers.values()], spread)
        rows.append([name, *(told[len(numbers) :] or ["", ""] * has_mean), *told[: len(numbers)]])
    table = [["", *["mean", "sd"] * has_mean, *numbers], *rows]
    if len(numbers) > _MOST_COLUMNS:
        table = [list(column) for column in zip(*table, strict=True)]
    return _table(table[0], table[1:], num_words=1)


def _settings(seen: _Seen) -> Iterator[str]:
    config, origins = read_settings(seen.state.run), seen.state.header.get("origins") or {}
    rows = []
    for name, origin in origins.items() if isinstance(origins, Mapping) else ():
        value: Any = config
        for part in str(name).split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if name != "schema_version" and (origin != "default" or name.startswith("params.")):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((name, text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…", str(origin)))
    if rows:
        yield _table(("setting", "value", "from"), rows, num_words=3, what="settings")
    yield '<p class="note">All others have their defaults: config.yaml in the folder of the run has them all.</p>'


def _machine(seen: _Seen) -> Iterator[str]:
    """Yield what the jobs took of cores, disk and GPUs over time."""
    charts = [*draw_machine(seen.series, seen.events, seen.start, seen.seconds, _NUM_POINTS)] if seen.seconds else []
    if charts:
        title = "CPU, disk and GPU" if any("GPU" in chart for chart in charts) else "CPU and disk"
        yield f'<h2>{title}</h2><div class="charts">{"".join(charts)}</div>'


def _both(draw: Callable[[int], str]) -> str:
    """Return a chart for large screens and one for small ones, of which the browser shows one."""
    return f'<div class="large">{draw(_LARGE)}</div><div class="small">{draw(_SMALL)}</div>'


def _memory(seen: _Seen) -> Iterator[str]:
    if not any(seen.totals):
        yield "<p>No job has left a sample of its memory.</p>"
        return
    yield legend([(layer.name, layer.colour) for layer in seen.layers])
    marks = [
        (samples[-1].time - seen.start, f"{job['job']} {job['state']}: {job['cause']}")
        for job in seen.summary["jobs"]
        if job["state"] in BAD and (samples := seen.series.get(job["job"]))
    ]
    label = f"Private memory of all jobs of {seen.name} over time, by phase"
    layers, limit = seen.layers, seen.limit
    yield _both(lambda width: draw_stack(layers, seen.seconds, label, limit=limit, marks=marks, size=(width, 280)))
    yield (
        '<p class="note">The private memory of all jobs together, by what each job was doing. Memory that several '
        "jobs share, such as a mapped panel, is not in it. A red cross is a job that failed.</p>"
    )


def _attempts(samples: Sequence[Sample]) -> Iterator[tuple[int, int]]:
    """Return the first and the last sample of each attempt: they are apart in time."""
    pairs = enumerate(pairwise(samples), start=1)
    starts = [0, *(at for at, (before, after) in pairs if after.time - before.time > _GAP_SECONDS), len(samples)]
    return ((first, following - 1) for first, following in pairwise(starts))


def _phase(sample: Sample) -> str:
    return sample.phase or _OTHER


def _jobs(seen: _Seen) -> Iterator[str]:
    jobs = [job for job in seen.summary["jobs"] if job["job"] in seen.series]
    jobs = sorted(jobs, key=lambda job: job["seconds"] or 0.0)[-_MOST_BARS:]
    jobs.sort(key=lambda job: seen.series[job["job"]][0].time)
    if not jobs:
        yield "<p>No job has run yet.</p>"
        return
    bars = []
    for job in jobs:
        samples = seen.series[job["job"]]
        phases = [_phase(sample) for sample in samples]
        parts: list[tuple[float, float, str]] = []
        for first, last in _attempts(samples):
            for phase, group in groupby(range(first, last + 1), phases.__getitem__):
                begin, *rest = group
                end = min((rest or [begin])[-1] + 1, last)
                times = (samples[begin].time - seen.start, samples[end].time - seen.start)
                parts.append((*times, seen.colours[phase]))
        note = show_state(job["state"]) + (f", {format_duration(job['seconds'], short=True)}" if job["seconds"] else "")
        note += f", attempt {job['attempt']}" if job["attempt"] > 1 else ""
        note += f" after {format_duration(lost, short=True)}" if (lost := job["earlier_seconds"]) else ""
        bars.append(Bar(seen.state.name(job["job"]), parts, note, job["state"] in BAD))
    label = f"When each job of {seen.name} ran, by phase"
    yield _both(lambda width: draw_bars(bars, seen.seconds, label, width))
    if left := len(seen.series) - len(jobs):
        yield f'<p class="note">{left} shorter jobs are not shown.</p>'


def _sizes(seen: _Seen) -> Iterator[str]:
    """Yield a table of the jobs: the peak of each beside its reservation, and the time of its attempts."""
    rows = list[tuple[_Cell, ...]]()
    for job in seen.summary["jobs"][:_MOST_TOLD]:
        peak, reserved = job["peak_bytes"] or None, job["reserved_bytes"] or None
        texts = [or_dash(size, format_bytes) for size in (peak, reserved)]
        share = (texts[0], min(1.0, peak / reserved)) if peak and reserved else texts[0]
        times = [or_dash(job[key] or None, format_duration) for key in ("seconds", "earlier_seconds")]
        name, state = seen.state.name(job["job"]), show_state(job["state"])
        attempts = str(job["attempt"]) if job["attempt"] > 1 else "-"
        rows.append((name, state, share, texts[1], times[0], attempts, times[1]))
    if rows:
        headings = ["job", "state", "peak", "reserved", "time", "attempts", "earlier attempts"]
        yield _table(headings, rows, num_words=2, what="jobs")
        error = seen.summary["forecast_error"]
        told = "" if error is None else f" Forecast: {explain_forecast(error)}."
        told += " The logs are jobs/JOB/out.log and err.log."
        yield f'<p class="note">Peak: private memory. The bar is its share of what was reserved.{told}</p>'
    yield from _ranks(seen)


def _ranks(seen: _Seen) -> Iterator[str]:
    """Yield a table of the ranks of jobs of several, and which were lost."""
    rows = list[tuple[_Cell, ...]]()
    for job in [job for job in seen.state.jobs.values() if job.ranks][:_MOST_TOLD]:
        rows += [(job.name, str(rank["rank"]), *explain_rank(rank, job)) for rank in job.ranks]
    if rows:
        headings = ("job", "rank", "last at", "memory", "peak", "of the reservation")
        yield "<h2>Ranks</h2>" + _table(headings, rows, num_words=3, what="ranks")
    for job in seen.state.jobs.values():
        for event in job.lost:
            yield f"<p>{escape(job.name)}: {escape(job.explain_lost(event))}</p>"


def _deaths(seen: _Seen) -> Iterator[str]:
    """Yield why each failed job ended, with the line that shows it."""
    for job in seen.summary["jobs"]:
        if job["state"] not in BAD:
            continue
        end = f"{seen.state.name(job['job'])} {job['state']}"
        yield f'<p><span class="failed">{escape(end)}</span>: {escape(job["cause"] or "it left no result")}</p>'
        if job["diagnosis"]:
            yield f"<pre>{escape(job['diagnosis'])}</pre>"
        folder = escape(str(seen.state.run.job_dir(job["job"])))
        yield f'<p class="note">log: {escape(job["log"])}; more: memfit diagnose {folder}</p>'
