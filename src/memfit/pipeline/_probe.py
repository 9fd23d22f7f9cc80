"""A workload's loader and step outside of a run: measured by ``memfit bench loader``, traced by ``memfit estimate``.

Each is made of the first unit of the stage that names it (probe), in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import config
from memfit.errors import MissingExtraError, UntraceableError, UsageError
from memfit.jobs import JobStatus, call_in_child, limit_threads
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Context, Probe
from memfit.pipeline._describe import describe, load_workload
from memfit.pipeline._graph import Choice, Graph
from memfit.pipeline._order import Order, python_path
from memfit.pipeline._run import stage_order
from memfit.pipeline._stage import make_context, only, run_stage
from memfit.rundir import RunDir
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.training import Longest

_HOW = (
    "write loader(context, params, num_workers), a unit's training batches, and step(context, params), which gives a "
    "function that takes one training step, and name both: Stage(..., probe=Probe(loader, step)); docs/commands.md "
    "shows them"
)
#: Which batch of a loader is traced, as ``memfit.training.find_longest`` found it.
_WHICH = {
    "known": "the longest batch, as its loader says it: {size}",
    "lengths": "a batch of the longest samples: {size}",
    "all": "the largest of all {number} batches: {size}",
    "sampled": "the largest of the first {number} batches: {size}; a later one may be larger",
}


# The first unit of the stage


def call_alone(
    function: str,
    source: Path | str,
    arguments: Mapping[str, Any],
    *,
    overrides: Sequence[config.Override],
) -> dict[str, Any]:
    """What a function gives that takes ``target``, ``resolved`` (the config) and further arguments.

    It works in an interpreter of its own, with the threads of a job.

    Raises:
        UsageError: If the config is bad; and what the function raises.
    """
    file = Path(source)
    resolved = config.resolve(RunConfig, file=file, overrides=overrides)
    child_env = dict(os.environ) | python_path([str(file.resolve().parent)], os.environ)
    limit_threads(resolved.value.threads_per_job, env=child_env, modules=())
    order = {"target": resolved.value.target, "resolved": resolved.to_json(), **arguments}
    found: dict[str, Any] = call_in_child(function, order, env=child_env)
    return found


@contextlib.contextmanager
def probed(target: str, resolved: str, *needed: str) -> Iterator[tuple[Context, Any, Probe]]:
    """The first unit of the stage that says how it is measured: its context, its params, and what it says.

    Args:
        target: The workload.
        resolved: The config.
        needed: What the stage must name: ``loader``, ``step``.

    Raises:
        UsageError: If no stage names them.
    """
    stages = load_workload(target).stages
    stage, probe = next(((one.name, one.probe) for one in stages if one.probe is not None), ("", Probe()))
    missing = [name for name in needed if getattr(probe, name) is None]
    if missing:
        who = f"stage {stage} of '{target}' names no {' and no '.join(missing)}"
        raise UsageError(
            f"{who if stage else f'no stage of {target!r} says how it is measured'}.",
            rule="what is measured is the loader and the step that a stage names (probe).",
            remedy=_HOW,
        )
    whole = config.Resolved.from_json(RunConfig, resolved)
    with tempfile.TemporaryDirectory(prefix="memfit-probe-") as folder:
        yield *first_context(target, whole, stage, Path(folder)), probe


def first_context(
    target: str, whole: config.Resolved[RunConfig], stage: str, folder: Path, unit: str = "1"
) -> tuple[Context, Any]:
    """Run what a stage needs in this process, and return the context and the params of one of its units.

    Args:
        target: The workload.
        whole: The config; panels go to its ``panels_dir``, so those of earlier runs are found.
        stage: The stage.
        folder: Where all else goes.
        unit: The unit.
    """
    described = describe(target, whole.to_json())
    order = Order(whole.value, described["stages"], "", {}, {}, Choice(until=stage, units=unit), described["params"])
    (folder / "checkpoints").mkdir()
    run = RunDir(folder)
    graph = Graph(order, run, make_job=lambda unit: unit)
    while True:
        job = next(iter(graph.next(1)))
        if job.stage["command"] is not None:
            raise UsageError(
                f"stage {stage} needs stage {job.stage['name']}, which is a command.",
                rule="what is measured outside of a run is made by stages that are functions.",
                remedy=f"measure it in a run: memfit run CONFIG --until {stage} --units 1",
            )
        asked = stage_order(order, run, job)
        if job.stage["name"] == stage:
            params = load_workload(target).params.model_validate(described["params"])
            return make_context(asked), only(params, job.stage)
        run_stage(asked)
        graph.ended(JobStatus(job.job_id, "completed"))


def data_text(context: Context) -> str:
    """What a context's stage reads, in words."""
    found = [repr(panel) for panel in _panels(context)] or [f"the output of {name}" for name in context.needs]
    return f"{', '.join(found) or 'no other stage'}, for {context.dir.name}"


def _panels(context: Context) -> list[Any]:
    """The panels that a context's stage needs: each mapped once, however many jobs read it."""
    outputs = [output for outputs in context.needs.values() for output in outputs]
    return [
        output.panel(one["name"]) for output in outputs for one in output.facts["outputs"] if one["kind"] == "panel"
    ]


# Its loader, measured


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


def bench_loader(source: Path | str, how: LoaderBench, *, overrides: Sequence[config.Override] = ()) -> dict[str, Any]:
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
    return call_alone(f"{__name__}:measure_in_child", source, {"how": asdict(how)}, overrides=overrides)


def measure_in_child(target: str, resolved: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the workload's data as a run does, and measure the loader of its first fold."""
    from memfit.data import choose_mode, choose_num_workers, measure_loader, verdict

    asked = LoaderBench(**how)
    with probed(target, resolved, "loader", *(["step"] if asked.with_model else [])) as (context, params, probe):
        assert probe.loader is not None
        make = functools.partial(probe.loader, context, params)
        step = probe.step(context, params) if asked.with_model and probe.step else asked.step_seconds
        data, found = data_text(context), dict[str, Any]()
        taking: dict[str, Any] = {"seconds": asked.seconds, "consume": step}
        if asked.modes:
            counts = [number for number in asked.num_workers if number]
            chosen: Any = choose_mode(
                make, num_workers=counts, num_epochs=asked.num_epochs, budget_bytes=asked.budget_bytes, **taking
            )
            found = {"modes": [asdict(mode) for mode in chosen.modes], "mode": chosen.name}
        else:
            reports = measure_loader(make, num_workers=asked.num_workers, **taking)
            chosen = choose_num_workers(reports, budget_bytes=asked.budget_bytes)
            found["reports"] = [
                asdict(one) | {"verdict": asdict(verdict(one)), "forecast_bytes": _forecast(make(one.num_workers))}
                for one in reports
            ]
    choice = {"num_workers": chosen.num_workers, "choice": chosen.text, "budget_bytes": asked.budget_bytes}
    return {"data": data} | found | choice


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


# Its step, traced


def estimate_workload(
    source: Path | str,
    *,
    gpu: str | None = None,
    available_bytes: int | None = None,
    allocator: str | None = None,
    overrides: Sequence[config.Override] = (),
    time_limit: float = math.inf,
) -> dict[str, Any]:
    """Estimate the training step of a config's workload, on its first fold, in an interpreter of its own.

    Args:
        source: The config.
        gpu: The device's name or size; None for any.
        available_bytes: What others leave of the device; None for all of it.
        allocator: As in ``PYTORCH_CUDA_ALLOC_CONF``; None for the config's ``memory.cuda_allocator``.
        overrides: Further settings of the config.
        time_limit: Seconds for the trace.

    Returns:
        What ``memfit.planning.ask`` gives, without a ``setup``, for the step is the workload's own: ``data`` says what
        the batch is; ``host`` what the host's memory holds beside it, which is never added to the device's: ``panel``
        (mapped, and shared by all jobs), ``batch_bytes``, and ``loader`` (see ``memfit.data.loader_footprint``; None
        for a loader of another kind).

    Raises:
        UsageError: If the config is bad, its workload names no loader or no step, or the step cannot be traced.
    """
    from memfit.estimation import check_allocator, find_gpu

    if gpu is not None:
        find_gpu(gpu)
    if allocator is not None:
        check_allocator(allocator, name="--allocator")
    arguments = {"gpu": gpu, "available_bytes": available_bytes, "allocator": allocator, "time_limit": time_limit}
    return call_alone(f"{__name__}:estimate_in_child", source, arguments, overrides=overrides)


def estimate_in_child(
    target: str, resolved: str, gpu: str | None, available_bytes: int | None, allocator: str | None, time_limit: float
) -> dict[str, Any]:
    """Prepare the workload's data as a run does, take its longest batch, and trace its step."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError.of("torch", "torch", "an estimate of a workload's step")
    from memfit.estimation import check_allocator, limit_time
    from memfit.training import find_longest

    with probed(target, resolved, "loader", "step") as (context, params, probe):
        text = allocator or config.Resolved.from_json(RunConfig, resolved).value.memory.cuda_allocator
        warned = [] if text is None else check_allocator(text)
        assert probe.loader is not None and probe.step is not None
        loader, make_step = probe.loader(context, params, 0), probe.step
        longest = find_longest(loader)

        def make() -> Any:
            step = make_step(context, params)
            return lambda: step(longest.batch)

        with limit_time(time_limit):
            found = _trace(make, target, gpu, available_bytes, text)
        host, read = _host(loader, longest, sum(panel.nbytes for panel in _panels(context))), data_text(context)
    which = _WHICH[longest.how].format(number=longest.num_seen, size=format_bytes(longest.num_bytes))
    data = {
        "batch_bytes": longest.num_bytes,
        "is_longest": longest.how != "sampled",
        "num_batches_seen": longest.num_seen,
        "text": f"{read}; {which}\n{host['text']}",
    }
    beside = {"setup": None, "largest_batch": None, "change": None, "smaller_model": None}
    return found | beside | {"notes": [*found["notes"], *warned], "data": data, "host": host}


def _trace(
    make: Any, target: str, gpu: str | None, available_bytes: int | None, allocator: str | None
) -> dict[str, Any]:
    from memfit.estimation import AllocatorSettings, estimate_step, find_gpu

    device = None if gpu is None else find_gpu(gpu)
    if device is not None and available_bytes is not None:
        device = replace(device, total_bytes=min(device.total_bytes, available_bytes))
    settings = None if allocator is None else AllocatorSettings.parse(allocator)
    try:
        return estimate_step(make, gpu=device, allocator=settings).to_dict()
    except UntraceableError as error:
        where = f", in {error.module}" if error.module else ""
        raise UsageError(
            f"the step of '{target}' cannot be traced: {error.what}{where}.",
            rule="it is run twice on fake tensors, which have shapes and no values.",
            remedy="take values out of tensors of the batch alone (.item(), .numpy()), allow it more time with "
            "--time-limit, or measure a run on the device",
        ) from error


def _host(loader: Any, longest: Longest, panel_bytes: int) -> dict[str, Any]:
    """The host's side; the device's figures hold nothing of it."""
    from memfit.data import loader_footprint

    batches = f"a batch {format_bytes(longest.num_bytes)} for each that is ready"
    footprint = None
    with contextlib.suppress(UsageError):  # a loader of another kind
        footprint = loader_footprint(loader).to_dict()
        batches = f"the loader {format_bytes(footprint['private_bytes'])} in the training's process"
    text = f"host, beside the device: panel {format_bytes(panel_bytes)}, mapped once for all jobs; {batches}"
    return {"panel": {"mapped_bytes": panel_bytes}, "batch_bytes": longest.num_bytes, "loader": footprint, "text": text}
