"""Refuse a trial that cannot fit, before it starts: by its estimate, and by those of trials that ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.pipeline import Order
from memfit.tuning._record import Trial
from memfit.units import format_bytes

#: An out-of-memory says something of trials with a larger estimate if its own was this share of the limit.
_LEAST_ESTIMATE = 1 / 2


def params_of(params: Mapping[str, Any]) -> dict[str, str]:
    """Return searched settings as a job's parameters, by the last parts of their names.

    >>> params_of({"params.train.lr": 0.1, "params.model.layers": 2})
    {'lr': '0.1', 'layers': '2'}
    """
    return {name.rpartition(".")[2]: str(value) for name, value in params.items()}


def why_infeasible(order: Order, seen: Sequence[Trial], limits: Mapping[str, int | None]) -> str:
    """Return why a trial cannot run, with the arithmetic; empty if it may."""
    for stage in order.stages:
        on_device = bool(order.topology(stage.name).num_gpus or order.settings.memory.num_gpus)
        place, limit = ("device", limits["device"]) if on_device else ("host", limits["host"])
        estimate = stage.memory_bytes
        if limit is None or estimate is None:
            continue
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
