"""What ``memfit bench loader`` measures: a workload's loader, in an interpreter of its own, with a job's threads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import UsageError
from memfit.jobs import call_in_child, limit_threads
from memfit.pipeline._config import RunConfig

_HERE = "memfit.pipeline._bench"
_HOW = (
    "write a function loader(context, params, num_workers) that gives a fold's training batches, and name it: "
    "FoldWorkload(..., loader=loader); docs/commands.md shows one"
)


@dataclass(frozen=True)
class LoaderBench:
    """How a loader is measured.

    Attributes:
        num_workers: The counts of workers.
        seconds: How long each measurement goes on.
        step_seconds: How long a step of the trainer takes; None without one.
        with_model: Take the workload's own training step.
        budget_bytes: What the workers may take.
    """

    num_workers: Sequence[int] = (0, 1, 2, 4)
    seconds: float = 5.0
    step_seconds: float | None = None
    with_model: bool = False
    budget_bytes: int | None = None


def bench_loader(
    source: Path | str,
    how: LoaderBench,
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure the loader of a config's workload on its first fold, and choose a number of workers.

    Returns:
        ``reports`` (see ``memfit.data.LoaderReport``), each with its ``verdict``; ``num_workers``, the choice, and
        ``choice``, its arithmetic; ``data``, what was read.

    Raises:
        UsageError: If the config is bad, or its workload names no loader, or no step where one is asked for.
        DoesNotFitError: If no count of workers fits the budget.
    """
    env = os.environ if env is None else env
    file = Path(source)
    resolved = config.resolve(RunConfig, file=file, env=env, overrides=overrides)
    folders = [str(file.resolve().parent), str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])]
    child_env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    limit_threads(resolved.value.threads_per_job, env=child_env, modules=())
    found: dict[str, Any] = call_in_child(
        f"{_HERE}:measure_in_child",
        {"target": resolved.value.target, "resolved": resolved.to_json(), "how": asdict(how)},
        env=child_env,
    )
    return found


def measure_in_child(target: str, resolved: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the workload's data as a run does, and measure the loader of its first fold."""
    from memfit.data import choose_num_workers, measure_loader, verdict
    from memfit.pipeline._workload import PrepareContext, first_fold, load_workload

    workload, asked = load_workload(target), LoaderBench(**how)
    if workload.loader is None or (asked.with_model and workload.step is None):
        missing = "loader" if workload.loader is None else "step"
        raise UsageError(
            f"the workload '{target}' names no {missing}.",
            rule="memfit bench loader measures the loader that a FoldWorkload names, and --with-model its step.",
            remedy=_HOW if missing == "loader" else "leave --with-model out, give --step-ms, or name a step",
        )
    whole = config.Resolved.from_json(RunConfig, resolved)
    params = config.resolve_nested(whole, "params", workload.params).value
    prepared = workload.prepare(PrepareContext(whole.value.panels_dir), params)
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        context = first_fold(prepared, whole.value.seed, Path(folder))
        make = workload.loader
        step = workload.step(context, params) if asked.with_model and workload.step else asked.step_seconds
        reports = measure_loader(
            lambda number: make(context, params, number),
            num_workers=asked.num_workers,
            seconds=asked.seconds,
            consume=step,
        )
    choice = choose_num_workers(reports, budget_bytes=asked.budget_bytes)
    panel = prepared.panel
    return {
        "data": f"{panel!r}, {len(context.train_dates)} dates of fold 1",
        "reports": [asdict(report) | {"verdict": asdict(verdict(report))} for report in reports],
        "num_workers": choice.num_workers,
        "choice": choice.text,
        "budget_bytes": asked.budget_bytes,
    }
