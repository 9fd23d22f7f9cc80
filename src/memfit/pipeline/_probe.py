"""Look at a workload in an interpreter of its own, outside of a run: trace its step, count its loaders.

``memfit estimate`` traces the step on the first unit of the stage that names its loader and step (probe). A plan makes
the loaders that a stage names.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from memfit import config
from memfit.errors import UntraceableError, UsageError
from memfit.estimation import TIME_LIMIT
from memfit.jobs import JobStatus, call_in_child, load_target, thread_env
from memfit.pipeline._command import Choice
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Context, Probe, load_workload
from memfit.pipeline._describe import StageSpec, describe
from memfit.pipeline._graph import Graph
from memfit.pipeline._order import Order, python_path
from memfit.pipeline._run import stage_order
from memfit.pipeline._source import UnitSource
from memfit.pipeline._stage import make_context, only, run_stage
from memfit.rundir import RunDir, batch_size_of, loader_settings
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.training import Longest

_SECONDS = 120  # loaders are made so long at most
#: Which batch of a loader is traced, by the finding of ``memfit.training.find_longest``.
_WHICH = {
    "known": "the longest batch, as its loader says it: {size}",
    "lengths": "a batch of the longest samples: {size}",
    "all": "the largest of all {number} batches: {size}",
    "sampled": "the largest of the first {number} batches: {size}; a later one may be larger",
}


def call_alone(
    function: str,
    source: Path | str,
    arguments: Mapping[str, Any],
    *,
    overrides: Sequence[config.Override],
) -> dict[str, Any]:
    """Call ``module:name`` in an interpreter of its own with the threads of a job, and return its result.

    It gets ``target``, ``resolved`` (the config as JSON) and the arguments; what it raises is raised here.
    """
    file = Path(source)
    resolved = config.resolve(RunConfig, file=file, overrides=overrides)
    child_env = dict(os.environ) | python_path([str(file.resolve().parent)], os.environ)
    child_env |= thread_env(resolved.value.threads_per_job)
    order = {"target": resolved.value.target, "resolved": resolved.to_json(), **arguments}
    found: dict[str, Any] = call_in_child(function, order, env=child_env)
    return found


def context_of(
    target: str, whole: config.Resolved[RunConfig], stage: str, folder: Path, unit: str = "1"
) -> tuple[Context, Any]:
    """Run what a stage needs in this process, and return the context and params of one of its units.

    Panels go to the config's ``panels_dir``, so that those of earlier runs are found; all else goes to ``folder``.
    """
    described = describe(target, whole.to_json())
    stages, params = [StageSpec(**one) for one in described["stages"]], described["params"]
    order = Order(whole.value, stages, choice=Choice(until=stage, units=unit), params=params)
    (folder / "checkpoints").mkdir()
    run = RunDir(folder)
    source = UnitSource(Graph(order).look(run), lambda unit: unit)
    jobs = list[Any]()
    while True:
        jobs += source.next(1)
        job = jobs.pop(0)
        if job.stage.command is not None:
            raise UsageError(
                f"stage {stage} needs stage {job.stage.name}, which is a command.",
                rule="what is measured outside of a run is made by stages that are functions.",
                remedy=f"measure it in a run: memfit run CONFIG --until {stage} --units 1",
            )
        asked = stage_order(order, run, job)
        job.manifest(run).with_suffix("").mkdir()
        if job.stage.name == stage:
            return make_context(asked), only(load_workload(target).params.model_validate(params), asked["stage"])
        run_stage(asked)
        source.ended(JobStatus(job.job_id, "completed"))


def estimate_workload(
    source: Path | str,
    *,
    overrides: Sequence[config.Override] = (),
    formula: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Estimate the training step of a config's workload, on its first fold, in an interpreter of its own.

    The answer is that of ``memfit.planning.ask``. Of a traced step it has no ``setup``, and ``data`` is the batch that
    was traced and the panels beside it. A stage that names its model, and no step, is estimated from that model's
    config.json, without any data. ``how`` are fields of ``memfit.planning.Question`` for the device and the time limit.
    """
    asked = {"how": how, "formula": formula}
    found = call_alone(f"{__name__}:estimate_in_child", source, asked, overrides=overrides)
    answer = ask_of_model(found, **how, formula=formula) if "question" in found else found
    return answer | {"accept_tight": found["accept_tight"]}


def ask_of_model(asked: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Return the estimate of what `question_of` found; ``how`` are fields of `memfit.planning.Question`."""
    from memfit.planning import Question, ask

    question = {**asked["question"], **how, "allocator": how.get("allocator") or asked["question"]["allocator"]}
    answer = ask(Question.from_dict(question | {"time_limit": min(how.get("time_limit", math.inf), TIME_LIMIT)}))
    return answer | {"data": {"text": asked["text"]}}


def question_of(target: str, params: Mapping[str, Any], stage: str, allocator: str | None) -> dict[str, Any]:
    """Return the question about the model that a stage names, in JSON, and what it is about."""
    from memfit.planning import Question

    workload = load_workload(target)
    probe = workload.stage(stage).probe
    assert probe is not None and probe.model is not None
    model, setup, *weights = probe.model(workload.params.model_validate(params))
    text = f"the model and the settings of stage {stage} of '{target}', at its longest lengths"
    asked = Question(model, setup, None, allocator, settings=probe.settings, weights="".join(weights))
    return {"question": asked.to_dict(), "text": text}


def estimate_in_child(target: str, resolved: str, how: Mapping[str, Any], formula: bool) -> dict[str, Any]:
    """Trace the step on the longest batch that a run prepares; of a model alone return `question_of` it."""
    from memfit.estimation import AllocatorSettings, Setup, check_allocator, estimate_step, limit_time
    from memfit.planning import Question

    whole = config.Resolved.from_json(RunConfig, resolved)
    asked = Question({}, Setup(), **how)
    device, text = asked.device, asked.allocator or whole.value.memory.cuda_allocator
    if text is not None:
        check_allocator(text, name="--allocator")
    settings = None if text is None else AllocatorSettings.parse(text)
    workload, accepts = load_workload(target), {"accept_tight": whole.value.accept_tight}
    stage, probe = next(((one.name, one.probe) for one in workload.stages if one.probe), ("", Probe()))
    if probe.model is not None and probe.step is None:
        params = config.resolve_nested(whole, "params", workload.params).value.model_dump(mode="json")
        return question_of(target, params, stage, whole.value.memory.cuda_allocator) | accepts
    if formula:
        raise UsageError(
            f"--formula was given, and no stage of '{target}' names a model.",
            rule="the formula reads a model's config.json; a step is traced.",
            remedy="leave --formula out, or name the model: Stage(..., probe=Probe(model=function))",
        )
    from memfit.training import find_longest

    if probe.loader is None or probe.step is None:
        named = f"stage {stage} of '{target}' names no {'loader' if probe.loader is None else 'step'}"
        raise UsageError(
            f"{named if stage else f'no stage of {target!r} says how it is measured'}.",
            rule="memfit traces the step that a stage names, on a batch of its loader.",
            remedy="name both, Stage(..., probe=Probe(loader, step)): docs/stages.md says what each takes and returns",
        )
    with tempfile.TemporaryDirectory(prefix="memfit-probe-") as folder:
        context, params = context_of(target, whole, stage, Path(folder))
        longest, make_step = find_longest(probe.loader(context, params, 0)), probe.step

        def make_of(batch: Any) -> Callable[[], Any]:
            return lambda: partial(make_step(context, params), batch)

        try:
            with limit_time(asked.time_limit):
                traced = estimate_step(make_of(longest.batch), gpu=device, allocator=settings)
        except UntraceableError as error:
            where = f", in {error.module}" if error.module else ""
            raise UsageError(
                f"the step of '{target}' cannot be traced: {error.what}{where}.",
                rule="memfit runs it twice on fake tensors, which have shapes and no values.",
                remedy="take values out of tensors of the batch alone (.item(), .numpy()), allow it more time with "
                "--time-limit, or measure a run on the device",
            ) from error
        found = traced.to_dict() | dict.fromkeys(("setup", "largest_batch", "change")) | {"others": []}
        return found | {"data": _describe_data(context, longest), **accepts}


def _describe_data(context: Context, longest: Longest) -> dict[str, Any]:
    size, outputs = format_bytes(longest.num_bytes), [one for found in context.needs.values() for one in found]
    panels = [one.panel(out["name"]) for one in outputs for out in one.facts["outputs"] if out["kind"] == "panel"]
    mapped, named = sum(panel.nbytes for panel in panels), [f"the output of {name}" for name in context.needs]
    read = f"{', '.join(map(repr, panels) if panels else named) or 'no other stage'}, for {context.dir.name}"
    beside = f"panel {format_bytes(mapped)}, mapped once for all jobs; a batch {size} for each that is ready"
    return {
        "batch_bytes": longest.num_bytes,
        "is_longest": longest.how != "sampled",
        "num_batches_seen": longest.num_seen,
        "panel_bytes": mapped,
        "text": f"{read}; {_WHICH[longest.how].format(number=longest.num_seen, size=size)}\n"
        f"host, beside the device: {beside}",
    }


# Loaders


def ask_of_loaders(order: Order, function: str, num_ranks: int) -> dict[str, Any]:
    """Return the facts of loaders that a function makes. It finds ``num_ranks`` in the variable ``WORLD_SIZE``."""
    own = {"function": function, "target": order.settings.target, "params": dict(order.params)}
    env = {**os.environ, **order.env, "WORLD_SIZE": str(num_ranks)}
    return dict(call_in_child(f"{__name__}:loaders_in_child", own, env=env))


def loaders_in_child(function: str, target: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Make the loaders of one rank; return their numbers and settings."""
    make = load_target(function)
    values = load_workload(target).params.model_validate(params) if target else dict(params)

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise UsageError(
            f"the loaders of {function} were not made within {_SECONDS} s.",
            rule="a plan makes the loaders of one rank, to count samples and steps.",
            remedy="let it return loaders of a sample, or leave stages.NAME.loaders out",
        )

    signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    made = make(values)
    signal.alarm(0)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(
            f"{function} returned a {type(made).__name__}, not two loaders.",
            rule="it returns the loader of the training and that of the validation, or None for the second.",
            remedy="end it with: return train, valid",
        )
    samples = [None if one is None else _num_samples(one) for one in made]
    return {
        "workers": int(getattr(made[0], "num_workers", 0)),
        "batch": batch_size_of(made[0]) or 0,
        "samples": samples[0],
        "valid": samples[1],
        "drops": bool(getattr(made[0], "drop_last", False)),
        "settings": loader_settings(made[0]) | loader_settings(made[1], "validation"),
    }


def _num_samples(loader: Any) -> int:
    data = getattr(loader, "dataset", getattr(loader, "examples", None))
    return len(loader) * (batch_size_of(loader) or 0) if data is None else len(data)
