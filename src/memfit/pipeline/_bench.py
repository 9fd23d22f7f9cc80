"""What ``memfit bench loader`` measures: a workload's loader, in an interpreter of its own, with a job's threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import UsageError
from memfit.pipeline._probe import call_alone, data_text, probed


@dataclass(frozen=True)
class LoaderBench:
    """How a loader is measured.

    Attributes:
        num_workers: The counts of workers.
        seconds: How long each measurement goes on.
        step_seconds: How long a step of the trainer takes; None without one.
        with_model: Take the workload's own training step.
        budget_bytes: What the workers may take.
        modes: Compare the modes of `memfit.data.choose_mode` in place of counts.
        num_epochs: Epochs of the training that modes are compared over.
    """

    num_workers: Sequence[int] = (0, 1, 2, 4)
    seconds: float = 5.0
    step_seconds: float | None = None
    with_model: bool = False
    budget_bytes: int | None = None
    modes: bool = False
    num_epochs: int = 10


def bench_loader(
    source: Path | str,
    how: LoaderBench,
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure the loader of a config's workload on its first fold, and choose a number of workers.

    Returns:
        ``reports`` (see ``memfit.data.LoaderReport``), each with its ``verdict`` and ``forecast_bytes`` (what
        ``memfit.data.loader_footprint`` says of its processes and batches; None where it cannot); ``num_workers``, the
        choice, and ``choice``, its arithmetic; ``data``, what was read. Of modes ``modes`` (see
        ``memfit.data.ModeReport``) and ``mode``, the choice, in place of ``reports``.

    Raises:
        UsageError: If the config is bad, or its workload names no loader, or no step where one is asked for.
        DoesNotFitError: If no count of workers fits the budget.
    """
    arguments = {"how": asdict(how)}
    return call_alone(f"{__name__}:measure_in_child", source, arguments, overrides=overrides, env=env)


def measure_in_child(target: str, resolved: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the workload's data as a run does, and measure the loader of its first fold."""
    from memfit.data import choose_num_workers, measure_loader, verdict

    asked = LoaderBench(**how)
    with probed(target, resolved, "loader", *(["step"] if asked.with_model else [])) as (context, params, probe):
        assert probe.loader is not None
        make = functools.partial(probe.loader, context, params)
        step = probe.step(context, params) if asked.with_model and probe.step else asked.step_seconds
        data = data_text(context)
        if asked.modes:
            return {"data": data} | _modes(make, step, asked)
        reports = measure_loader(make, num_workers=asked.num_workers, seconds=asked.seconds, consume=step)
        forecasts = [_forecast(make(number)) for number in sorted(set(asked.num_workers))]
    choice = choose_num_workers(reports, budget_bytes=asked.budget_bytes)
    return {
        "data": data,
        "reports": [
            asdict(report) | {"verdict": asdict(verdict(report)), "forecast_bytes": forecast}
            for report, forecast in zip(reports, forecasts, strict=True)
        ],
        "num_workers": choice.num_workers,
        "choice": choice.text,
        "budget_bytes": asked.budget_bytes,
    }


def _modes(make: Callable[[int], Any], step: Any, asked: LoaderBench) -> dict[str, Any]:
    from memfit.data import choose_mode

    found = choose_mode(
        make,
        num_workers=[number for number in asked.num_workers if number],
        seconds=asked.seconds,
        consume=step,
        num_epochs=asked.num_epochs,
        budget_bytes=asked.budget_bytes,
    )
    return {
        "modes": [asdict(mode) for mode in found.modes],
        "mode": found.name,
        "num_workers": found.num_workers,
        "choice": found.text,
        "budget_bytes": asked.budget_bytes,
    }


def _forecast(loader: Any) -> int | None:
    """What the loader's processes and batches will take; None for a loader of another kind, or without any."""
    from memfit.data import loader_footprint

    if not getattr(loader, "num_workers", 0):
        return None
    try:
        found = loader_footprint(loader)
    except UsageError:
        return None
    return found.private_bytes - found.parts["data"]
