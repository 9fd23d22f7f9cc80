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
            for one in seen:
                known = one.measured.get("estimates", {}).get(stage.name, math.inf)
                if (
                    one.state == "out_of_memory"
                    and one.measured.get("failed_stage") == stage.name
                    and known <= estimate
                ):
                    return (
                        f"{stage.name} is estimated at {format_bytes(estimate)}; {one.name} was estimated at "
                        f"{format_bytes(known)} and ran out of memory"
                    )
        line = _line(stage.name, seen, limit, peaks).extrapolate(_job(stage.name, trial.params, estimate))
        if line is not None:
            least = math.ceil(line.peak_bytes - line.error_bytes - limit / SIXTEENTHS)
            if least > limit:
                return (
                    f"{stage.name} takes {format_bytes(least)} or more, by the line through {line.num_jobs} earlier "
                    f"trials; the {place} has {format_bytes(limit)}"
                )
    return ""


def _line(stage: str, seen: Sequence[Trial], limit: int, peaks: str) -> Forecast:
    forecast = Forecast()
    for one in seen:
        peak = one.measured.get(peaks, {}).get(stage)
        if peak and one.state in ("completed", "pruned", "out_of_memory"):
            job = _job(stage, one.params, one.measured.get("estimates", {}).get(stage))
            forecast.learn(job, Footprint.declared(round_peak(peak, limit)))
    return forecast


def _job(stage: str, params: Mapping[str, Any], estimate: int | None) -> Job:
    declared = None if estimate is None else Footprint.declared(estimate)
    return Job("trial", command=("-",), params=params_of(params), stage=stage, footprint=declared)
