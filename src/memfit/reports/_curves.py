"""What jobs reported while they ran: learning curves, and what they took of the machine over time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.files import fits, open_own
from memfit.memory import Sample
from memfit.reports._charts import COLOURS, Line, byte_ticks, draw_lines, legend, number_ticks
from memfit.reports._numbers import is_number
from memfit.rundir import Event, RunDir, RunState, event_time, read_events
from memfit.units import format_bytes, format_count, natural_order

#: Numbers of an epoch that say how fast it was, not what was learned.
_PACE = frozenset({"seconds", "samples_per_second", "wait_share", "device_use", "num_threads"})
_NO_METRIC = _PACE | {"time", "epoch", "num_epochs", "rank", "step", "num_steps"}
_PART = re.compile(r"^(?:(train|training)|(valid|val|validation|eval|test))[_/.-](?=.)")
#: More charts than these, and more jobs in colour, tell nothing.
_MOST_CHARTS, _MOST_COLOURS, _MOST_LINES = 12, len(COLOURS) - 1, 60
#: Numbers in a line of a log that are a metric by their name, and where the line says it stands.
_LOGGED = re.compile(
    r"(?<![\w.])(?P<name>(?:\w+[_/.-])?(?:loss|acc|accuracy|auc|auroc|f1|score|error|mae|mse|rmse|r2|perplexity|ppl"
    r"|reward|bleu|iou|dice|psnr|wer))['\"]?\s*[:=]?\s*(?P<value>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan)\b",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"\bepoch['\"]?[ :=#\[(]{1,3}(?P<epoch>\d+(?:\.\d+)?)", re.IGNORECASE)
_STEP = re.compile(r"\b(?:step|iter|iteration)['\"]?[ :=#\[(]{1,3}(?P<step>\d+)(?:/ *(?P<total>\d+))?", re.IGNORECASE)
_MOST_LOG_BYTES = 1 << 20


@dataclass
class Curves:
    """The numbers that jobs reported: by metric, then by job and part (training or not), then by epoch.

    Attributes:
        values: A metric without its part: ``loss`` of ``train_loss`` and ``valid_loss``.
        by_step: True if a log counted steps alone.
        is_from_logs: True if some job wrote them into its log only.
    """

    values: dict[str, dict[tuple[str, bool], dict[float, float]]] = field(default_factory=dict)
    by_step: bool = False
    is_from_logs: bool = False

    def add(self, job: str, name: str, at: float, value: float) -> None:
        """Take in a number; of one that comes again at the same epoch, after a restart, the last counts."""
        found = _PART.match(name)
        metric = name[found.end() :] if found else name
        is_training = bool(found and found[1]) or name == "loss"
        self.values.setdefault(metric, {}).setdefault((job, is_training), {})[at] = value

    @property
    def jobs(self) -> list[str]:
        """The jobs that reported something, in natural order."""
        return sorted({job for of in self.values.values() for job, _ in of}, key=natural_order)


def read_curves(state: RunState, events: Sequence[Event]) -> Curves:
    """Return what the jobs of a run reported by epoch, or else by step; of a job that reported nothing, its log."""
    found, by_step = Curves(), dict[str, dict[float, float]]()
    for event in events:
        job, kind = str(event.get("job")), event.get("kind")
        if kind not in ("epoch", "step") or job not in state.jobs or not _is_sane(event.get("epoch")):
            continue
        if kind == "epoch" and not event.get("rank"):
            numbers = {name: value for name, value in event.items() if name not in _NO_METRIC and _is_sane(value)}
            for name, value in numbers.items():
                found.add(job, name, float(event["epoch"]), float(value))
        elif kind == "step" and all(_is_sane(event.get(one)) for one in ("loss", "step", "num_steps")):
            done = event["epoch"] - 1 + event["step"] / max(1, event["num_steps"])
            by_step.setdefault(job, {})[float(done)] = float(event["loss"])
    several = {job for of in found.values.values() for (job, _), points in of.items() if len(points) > 1}
    for job, points in by_step.items():
        if job not in several and len(points) > 1:
            found.values.setdefault("loss", {})[job, True] = points
    for job in [job for job in state.jobs if job not in found.jobs][:_MOST_LINES]:
        for name, at, value, is_step in _read_log(state.run, job):
            found.by_step, found.is_from_logs = found.by_step or is_step, True
            found.add(job, name, at, value)
    return found


def _read_log(run: RunDir, job: str) -> Iterator[tuple[str, float, float, bool]]:
    """Yield the metrics in the lines of a job's logs that name an epoch or a step: the end of a long log."""
    for name in ("out.log", "err.log"):
        with suppress(OSError), open_own(run.job_dir(job) / name) as log:
            log.seek(max(0, log.seek(0, 2) - _MOST_LOG_BYTES))
            text = log.read(_MOST_LOG_BYTES).decode(errors="replace")
            for line in re.split(r"[\r\n]+", text):
                epoch, step = _EPOCH.search(line), _STEP.search(line)
                if len(line) > 1000 or not (epoch or step):
                    continue
                at = float(epoch["epoch"]) if epoch else float(step["step"] if step else 0)
                if epoch and step and step["total"]:
                    at += int(step["step"]) / max(1, int(step["total"])) - 1
                for one in _LOGGED.finditer(line):
                    yield one["name"].lower(), at, float(one["value"]), epoch is None


def draw_curves(curves: Curves, state: RunState, ranked: Sequence[str] = ()) -> Iterator[str]:
    """Yield a chart for each metric with a curve for each job; a trial has one colour, the ``ranked`` come first."""
    of = {job: job.partition(".")[0] if ranked else job for job in curves.jobs}
    order = list(dict.fromkeys([*(one for one in ranked if one in of.values()), *of.values()]))
    colours = {one: COLOURS[min(at, _MOST_COLOURS)] for at, one in enumerate(order)}
    jobs = sorted(of, key=lambda job: order.index(of[job]))[:_MOST_LINES]
    is_crowd, have_both = len(order) > _MOST_COLOURS, False
    charts = []
    metrics = sorted(curves.values, key=lambda metric: metric != "loss")
    for metric in metrics[:_MOST_CHARTS]:
        own = curves.values[metric]
        both = {True, False} <= {is_training for _, is_training in own}
        have_both = have_both or both
        lines = []
        for job in jobs:
            for is_training in (False, True):
                if points := own.get((job, is_training)):
                    part = (" training" if is_training else " validation") if both else ""
                    colour, places = colours[of[job]], sorted(points.items())
                    faint = colour == COLOURS[-1]
                    lines.append(Line(f"{state.name(job)}{part}", colour, places, both and is_training, faint))
        along = "step" if curves.by_step else "epoch"
        charts.append(draw_lines(lines, f"{metric} of each job by {along}", title=metric, along=along))
    if not charts:
        return
    named = [(state.name(one), colour) for one, colour in colours.items() if colour != COLOURS[-1]]
    yield legend([*named, (format_count(len(order) - len(named), "other"), COLOURS[-1])] if is_crowd else named)
    yield f'<div class="charts">{"".join(charts)}</div>'
    notes = ["Dashed: training; solid: validation."] if have_both else []
    notes += ["Read from the lines of the logs."] if curves.is_from_logs else []
    if (left := len(metrics) - _MOST_CHARTS) > 0:
        notes.append(f"The table below has {format_count(left, 'more metric')}.")
    yield f'<p class="note">{" ".join([*notes, "Point at a chart to see its values."])}</p>'


def last_values(curves: Curves) -> dict[str, dict[str, float]]:
    """Return for each job its last epoch, or step, and behind it the last value of each number, by name."""
    columns = [(metric, part) for metric, of in curves.values.items() for part in sorted({part for _, part in of})]
    both = {metric for metric, part in columns if (metric, not part) in columns}
    found = {}
    for job in curves.jobs:
        points = {
            f"{metric}, {'training' if part else 'validation'}" if metric in both else metric: own
            for metric, part in columns
            if (own := curves.values[metric].get((job, part)))
        }
        last = {"step" if curves.by_step else "epoch": max(max(own) for own in points.values())}
        found[job] = last | {name: own[max(own)] for name, own in points.items()}
    return found


def read_reported(state: RunState) -> dict[str, dict[str, float]]:
    """Return `last_values` of a run of several commands: what stands for the results that functions return."""
    if state.kind != "commands" or state.is_one:
        return {}
    return last_values(read_curves(state, read_events(state.run.events_dir)))


def draw_machine(
    series: Mapping[str, Sequence[Sample]], events: Sequence[Event], start: float, seconds: float, num_points: int
) -> Iterator[str]:
    """Yield charts of the cores, disk and GPUs that all jobs together used over time, where that was recorded."""
    samples, step = [*series.values()], seconds / num_points or 1.0
    figures: dict[str, tuple[str, Callable[[float], str], Callable[[float, float], list[float]]]] = {
        "CPU: cores that the jobs kept busy": ("cpu_seconds", _cores, number_ticks),
        "Disk: read and written per second": ("disk_bytes", _per_second, _bytes),
    }
    for title, (name, text, ticks) in figures.items():
        points = _rate(samples, name, start, step, num_points)
        if any(value for _, value in points):
            lines = [Line("all jobs", COLOURS[0], points)]
            yield draw_lines(lines, title, title=title, along=seconds, y_text=text, ticks=ticks)
    devices = sorted({uuid for one in samples for sample in one for uuid in sample.device_bytes})
    if devices:
        lines = [
            Line(f"GPU {at}", COLOURS[at % _MOST_COLOURS], _held(samples, uuid, start, step, num_points))
            for at, uuid in enumerate(devices)
        ]
        title = "GPU: memory that the jobs hold"
        yield draw_lines(lines, title, title=title, along=seconds, y_text=_size, ticks=_bytes)
    for name, title in (("device_use", "GPU: busy, by epoch"), ("wait_share", "Steps that waited for data, by epoch")):
        shares: dict[str, list[tuple[float, float]]] = {}
        for event in events:
            if event.get("kind") == "epoch" and _is_sane(event.get(name)) and event_time(event):
                shares.setdefault(str(event["job"]), []).append(
                    (max(0.0, float(event["time"]) - start), float(event[name]))
                )
        lines = [
            Line(job, COLOURS[min(at, _MOST_COLOURS)], points, is_faint=at >= _MOST_COLOURS)
            for at, (job, points) in enumerate([*shares.items()][:_MOST_LINES])
        ]
        if lines:
            yield draw_lines(lines, title, title=title, along=seconds, y_text=_percent, ticks=number_ticks)


def _rate(
    samples: Sequence[Sequence[Sample]], name: str, start: float, step: float, num_points: int
) -> list[tuple[float, float]]:
    """Return how fast a sum of all jobs grew, per second, at evenly spaced times."""
    sums = [0.0] * num_points
    for one in samples:
        for before, after in pairwise(one):
            grown = getattr(after, name) - getattr(before, name)
            took = after.time - before.time
            if grown <= 0 or took <= 0:  # another attempt, or a process that ended
                continue
            first, last = (before.time - start) / step, (after.time - start) / step
            for at in range(max(0, int(first)), min(num_points, math.ceil(last))):
                share = min(last, at + 1) - max(first, at)
                sums[at] += grown / took * share
    return [((at + 0.5) * step, value) for at, value in enumerate(sums)]


def _held(
    samples: Sequence[Sequence[Sample]], uuid: str, start: float, step: float, num_points: int
) -> list[tuple[float, float]]:
    """Return what all jobs held on a device at evenly spaced times."""
    sums = [0.0] * num_points
    for one in samples:
        for before, after in pairwise(one):
            for at in range(
                max(0, int((before.time - start) / step)), min(num_points, int((after.time - start) / step) + 1)
            ):
                if before.time <= start + (at + 0.5) * step < after.time:
                    sums[at] += before.device_bytes.get(uuid, 0)
    return [((at + 0.5) * step, value) for at, value in enumerate(sums)]


def _is_sane(value: object) -> bool:
    return is_number(value) and fits(value, (int, float))


def _cores(value: float) -> str:
    return f"{value:.2f}"


def _size(value: float) -> str:
    return format_bytes(round(value))


def _per_second(value: float) -> str:
    return f"{format_bytes(round(value))}/s"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _bytes(_: float, high: float) -> list[float]:
    return byte_ticks(high)
