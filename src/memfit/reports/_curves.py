"""What jobs reported while they ran: learning curves, and the numbers that stand for results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from memfit.files import fits, open_own
from memfit.reports._charts import COLOURS, Line, draw_lines, legend
from memfit.reports._numbers import is_number
from memfit.rundir import Event, Reader, RunDir, RunState
from memfit.units import format_count, natural_order

#: Numbers of an epoch that say when and how fast it was, not what was learned.
_NO_METRIC = {"time", "epoch", "num_epochs", "rank", "step", "num_steps", "seconds", "samples_per_second", "wait_share"}
_NO_METRIC |= {"device_use", "num_threads"}
_PART = re.compile(r"^(?:(train|training)|(valid|val|validation|eval|test))[_/.-](?=.)")
#: More charts than these, and more jobs in colour, tell nothing.
_MOST_CHARTS, _MOST_COLOURS, _MOST_LINES = 12, len(COLOURS) - 1, 60
PLACES = ("epoch", "step", "round")  # how far a job was when it wrote its numbers: of these no mean is formed
_VALUE = r"(?P<value>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan)\b"
_NAMED = (
    r"(?<![\w.])(?P<name>(?:\w+[_/.-])?(?:loss|acc|accuracy|auc|auroc|f1|score|error|mae|mse|rmse|mape|r2|logloss|ic|icir"
    r"|sharpe|precision|recall|ndcg|map|mcc|corr|perplexity|ppl|reward|bleu|iou|dice|psnr|wer))['\"]?\s*[:=]?\s*"
)
#: What is read of a log: how a line says where it stands, in which unit, and how it names its numbers.
_LOGGED = [
    (re.compile(place, re.IGNORECASE), re.compile(name + _VALUE, re.IGNORECASE))
    for place, name in (
        (r"\bepoch['\"]?[ :=#\[(]{1,3}(?P<epoch>\d+(?:\.\d+)?)", _NAMED),
        (r"\b(?:step|iter|iteration)['\"]?[ :=#\[(]{1,3}(?P<step>\d+)", _NAMED),
        (r"\bfold[ _:=#\[(]{1,3}\d", _NAMED),  # fold 4 ic 0.0412
        # [20]  valid_0's l2: 1.00 of LightGBM; [19]  validation-rmse:0.5 of XGBoost
        (r"^\[(?P<round>\d+)\]\s", r"(?P<name>\w[\w.]*(?:'s |-)[\w@.-]+): ?"),
    )
]
_MOST_LOG_BYTES = 1 << 20
#: The numbers that jobs reported: by metric without its part, job and part (training or not), then by epoch.
Curves = dict[tuple[str, str, bool], dict[float, float]]


def read_curves(state: RunState, events: Sequence[Event]) -> Curves:
    """Return what the jobs of a run reported by epoch, or else by step, in the events that its reader understood.

    After a restart the last counts.
    """
    found, by_step = Curves(), dict[str, dict[float, float]]()
    for event in events:
        job, kind = str(event.get("job")), event["kind"]
        if kind == "epoch" and job in state.jobs and not event.get("rank"):
            for name in [name for name, value in event.items() if name not in _NO_METRIC and _is_sane(value)]:
                part = _PART.match(name)
                metric, is_training = name[part.end() :] if part else name, bool(part and part[1]) or name == "loss"
                found.setdefault((metric, job, is_training), {})[float(event["epoch"])] = float(event[name])
        elif kind == "step" and job in state.jobs and _is_sane(event.get("loss")):
            done = event["epoch"] - 1 + event["step"] / max(1, event["num_steps"])
            by_step.setdefault(job, {})[float(done)] = float(event["loss"])
    several = {job for (_, job, _), points in found.items() if len(points) > 1}
    steps = {job: points for job, points in by_step.items() if job not in several and len(points) > 1}
    return found | {("loss", job, True): points for job, points in steps.items()}


def _jobs_of(curves: Curves) -> list[str]:
    return sorted({job for _, job, _ in curves}, key=natural_order)


def _of_both_parts(curves: Curves) -> set[str]:
    of, of_others = ({metric for metric, _, part in curves if part is one} for one in (True, False))
    return of & of_others


def draw_curves(curves: Curves, state: RunState, ranked: Sequence[str] = ()) -> Iterator[str]:
    """Yield a chart for each metric with a curve for each job; a trial has one colour, the ``ranked`` come first."""
    of = {job: job.partition(".")[0] if ranked else job for job in _jobs_of(curves)}
    order = list(dict.fromkeys([*(one for one in ranked if one in of.values()), *of.values()]))
    colours = {one: COLOURS[min(at, _MOST_COLOURS)] for at, one in enumerate(order)}
    jobs = sorted(of, key=lambda job: order.index(of[job]))[:_MOST_LINES]
    metrics, both = dict.fromkeys(metric for metric, _, _ in curves), _of_both_parts(curves)
    shown = sorted(metrics, key=lambda metric: metric != "loss")[:_MOST_CHARTS]
    charts = []
    for metric in shown:
        parts = {False: " validation", True: " training"} if metric in both else {False: "", True: ""}
        lines = [
            Line(f"{state.name(job)}{text}", colour, sorted(points.items()), bool(text) and part, colour == COLOURS[-1])
            for job in jobs
            for part, text in parts.items()
            if (points := curves.get((metric, job, part))) and (colour := colours[of[job]])
        ]
        charts.append(draw_lines(lines, metric))
    others = [(format_count(len(order) - _MOST_COLOURS, "other"), COLOURS[-1])] if order[_MOST_COLOURS:] else []
    yield legend([*((state.name(one), colours[one]) for one in order[:_MOST_COLOURS]), *others])
    yield f'<div class="charts">{"".join(charts)}</div>'
    notes = ["Dashed: training; solid: validation."] if both.intersection(shown) else []
    if (left := len(metrics) - _MOST_CHARTS) > 0:
        notes.append(f"The table below has {format_count(left, 'more metric')}.")
    yield f'<p class="note">{" ".join(notes)}</p>' if notes else ""


def last_values(curves: Curves) -> dict[str, dict[str, float]]:
    """Return for each job its last epoch, and behind it the last value of each number, by name."""
    metrics, both = dict.fromkeys(metric for metric, _, _ in curves), _of_both_parts(curves)
    found = {}
    for job in _jobs_of(curves):
        points = {
            f"{metric}, {'training' if part else 'validation'}" if metric in both else metric: own
            for metric in metrics
            for part in (False, True)
            if (own := curves.get((metric, job, part)))
        }
        found[job] = {"epoch": max(map(max, points.values()))} | {name: own[max(own)] for name, own in points.items()}
    return found


def read_reported(state: RunState) -> dict[str, dict[str, float]]:
    """Return the last numbers of commands that completed, which stand for results: of events, else of logs."""
    if state.kind != "commands" or state.is_one:
        return {}
    found = last_values(read_curves(state, Reader(state.run).read()))
    found = found or {job: own for job in [*state.jobs][:_MOST_LINES] if (own := _read_logs(state.run, job))}
    return {job: values for job, values in found.items() if state.jobs[job].state == "completed"}


def _read_logs(run: RunDir, job: str) -> dict[str, float]:
    """Return where a job was last, and the last value of each number in its logs, of long ones in their ends."""
    places, numbers = dict[str, float](), dict[str, float]()
    for name in ("out.log", "err.log"):
        with suppress(OSError), open_own(run.job_dir(job) / name) as log:
            log.seek(max(0, log.seek(0, 2) - _MOST_LOG_BYTES))
            for line in re.split(r"[\r\n]+", log.read(_MOST_LOG_BYTES).decode(errors="replace")):
                for place, number in _LOGGED if len(line) <= 1000 else ():
                    if (at := place.search(line)) and (said := [*number.finditer(line)]):
                        places |= {unit: float(value) for unit, value in at.groupdict().items()}
                        numbers |= {one["name"].lower(): float(one["value"]) for one in said}
    return places | numbers


def _is_sane(value: object) -> bool:
    return is_number(value) and fits(value, (int, float))
