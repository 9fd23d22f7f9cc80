"""Refuse a trial that cannot fit, before it starts: by an estimate, and by what earlier trials took.

The peaks of earlier trials are rounded up to 1/16 of the limit, so that small differences between runs decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.jobs import Forecast, Job
from memfit.memory import Footprint
from memfit.pipeline import Order
from memfit.tuning._record import Trial
from memfit.units import format_bytes

#: The step of rounded peaks, as a share of the limit.
SIXTEENTHS = 16
#: A line through peaks refuses a trial only if it rests on so many, they differ by this share of the limit, and it
#: misses none by more than this share of that. Without this, lines over settings that have nothing to do with memory
#: refused trials that fit.
_LEAST_TRIALS, _LEAST_RISE, _MOST_ERROR = 8, 1 / 4, 1 / 8
#: An out-of-memory says something of trials with a larger estimate if its own was this share of the limit.
_LEAST_ESTIMATE = 1 / 2


def round_peak(peak_bytes: int, limit_bytes: int) -> int:
    """Return a peak rounded up to a sixteenth of the limit.

    >>> round_peak(100, 160), round_peak(101, 160)
    (100, 110)
    """
    step = max(1, limit_bytes // SIXTEENTHS)
    return -(-peak_bytes // step) * step


def params_of(params: Mapping[str, Any]) -> dict[str, str]:
    """Return searched settings as a job's parameters, by the last parts of their names.

    >>> params_of({"params.train.lr": 0.1, "params.model.layers": 2})
    {'lr': '0.1', 'layers': '2'}
    """
    return {name.rpartition(".")[2]: str(value) for name, value in params.items()}


def why_infeasible(order: Order, trial: Trial, seen: Sequence[Trial], limits: Mapping[str, int | None]) -> str:
    """Return why a trial cannot run, with the arithmetic; empty if it may.

    Args:
        order: What it would run; its stages may have an estimate.
        trial: Its settings.
        seen: The trials and canaries that have ended, and that it may see.
        limits: The study's own limits in bytes, ``host`` and ``device``.
    """
    for stage in order.stages:
        on_device = bool(order.topology(stage.name).num_gpus or order.settings.memory.num_gpus)
        place, limit = ("device", limits["device"]) if on_device else ("host", limits["host"])
        if limit is None:
            continue
        peaks = "device_peaks" if on_device else "peaks"
        estimate = stage.memory_bytes
        if estimate is not None:
            if estimate > limit:
                return (
                    f"{stage.name} takes at least {format_bytes(estimate)} by its estimate; the {place} has "
                    f"{format_bytes(limit)}"
                )
            if (worse := _ran_out_with_less(stage.name, estimate, seen, limit)) is not None:
                known = format_bytes(_estimate_of(worse, stage.name))
                return (
                    f"{stage.name} is estimated at {format_bytes(estimate)}; {worse.name} was estimated at {known} and "
                    "ran out of memory"
                )
        least, num_trials = _by_line(_job(stage.name, trial.params, estimate), seen, limit, peaks)
        if least > limit:
            return (
                f"{stage.name} takes {format_bytes(least)} or more, by the line through {num_trials} earlier trials; "
                f"the {place} has {format_bytes(limit)}"
            )
    return ""


def _estimate_of(trial: Trial, stage: str) -> int:
    return int(trial.measured.get("estimates", {}).get(stage, 0))


def _ran_out_with_less(stage: str, estimate: int, seen: Sequence[Trial], limit: int) -> Trial | None:
    """Return a trial that ran out of memory with no larger an estimate; none if one with as much completed."""
    if any(one.state == "completed" and _estimate_of(one, stage) >= estimate for one in seen):
        return None
    for one in seen:
        is_of_stage = one.state == "out_of_memory" and one.measured.get("failed_stage") == stage
        if is_of_stage and _LEAST_ESTIMATE * limit <= _estimate_of(one, stage) <= estimate:
            return one
    return None


def _by_line(job: Job, seen: Sequence[Trial], limit: int, peaks: str) -> tuple[int, int]:
    """Return the least bytes that a job takes by the line through the peaks of so many earlier trials.

    That is 0 without a line to rely on. The peak of a trial that ran out of memory is the limit's, so it is left out.
    """
    forecast, found = Forecast(), list[int]()
    for one in seen:
        peak = one.measured.get(peaks, {}).get(job.stage)
        if peak and one.state in ("completed", "pruned"):
            found.append(round_peak(peak, limit))
            estimate = one.measured.get("estimates", {}).get(job.stage)
            forecast.learn(_job(job.stage, one.params, estimate), Footprint.declared(found[-1]))
    line = forecast.extrapolate(job)
    if line is None or line.num_jobs < _LEAST_TRIALS:
        return 0, 0
    rise = max(found) - min(found)
    if rise < _LEAST_RISE * limit or line.error_bytes > _MOST_ERROR * rise:
        return 0, 0
    return math.ceil(line.peak_bytes - line.error_bytes - limit / SIXTEENTHS), line.num_jobs


def _job(stage: str, params: Mapping[str, Any], estimate: int | None) -> Job:
    declared = None if estimate is None else Footprint.declared(estimate)
    return Job("trial", command=("-",), params=params_of(params), stage=stage, footprint=declared)
