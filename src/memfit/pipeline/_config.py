"""The settings of a run: for commands, and for a config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from memfit import config
from memfit.config import ByteSize, Settings
from memfit.errors import ConfigError
from memfit.integrations import NotifySettings, TrackSettings
from memfit.jobs import OnFailure, SlurmOptions
from memfit.memory import DEFAULT_SLACK
from memfit.planning import LaunchSettings
from memfit.units import MIB

_LEAST_LIMIT_BYTES = 16 * MIB  # an interpreter alone takes 10


def _enough(limit: int) -> int:
    if limit < _LEAST_LIMIT_BYTES:
        raise ValueError(f"must be {_LEAST_LIMIT_BYTES // MIB}MiB or more, so that a process can start in it")
    return limit


def _not_empty(path: object) -> object:
    if path == "":
        raise ValueError("must name a folder")
    return path


def _allocator(text: str) -> str:
    from memfit.estimation import check_allocator  # only where the setting is given

    try:
        check_allocator(text)
    except ConfigError as error:
        raise ValueError(f"{error.what.partition(': ')[2]} {error.rule} {error.remedy}") from None
    return text


_ALLOCATOR = "memory.cuda_allocator"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_Name = Annotated[str, Field(min_length=1)]
_Folder = Annotated[Path, BeforeValidator(_not_empty)]


class MemorySettings(Settings):
    """How much of the machine's memory the run may use.

    Attributes:
        limit: Your own limit on the host memory of all jobs together; the smallest limit counts.
        reserve: The memory to keep free; None for a share of the limit.
        slack: What each job reserves on top of the measured peak of similar jobs, as a share of it.
        job: A hint: the memory of one job. memfit checks it before the first job starts, and then measures that job.
        job_of: The same for each command of a sweep, in terms of its parameters: ``"{memory}"``.
        num_gpus: How many GPUs one job needs; it sees no others. 1 when ``gpu_job`` is given.
        gpu_job: A hint: the memory of one job on each of its GPUs.
        tight_malloc: Let glibc give freed memory back at once, so that resident memory follows live memory.
        cuda_allocator: The settings of torch's CUDA allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``. If you set that
            variable or ``PYTORCH_ALLOC_CONF`` yourself, yours counts.
    """

    limit: Annotated[ByteSize, AfterValidator(_enough)] | None = None
    reserve: ByteSize | None = None
    slack: Annotated[float, Field(ge=0.0, le=10.0)] = DEFAULT_SLACK
    job: ByteSize | None = None
    job_of: str | None = None
    num_gpus: Annotated[int, Field(ge=0)] = 0
    gpu_job: ByteSize | None = None
    tight_malloc: bool = True
    cuda_allocator: Annotated[str, AfterValidator(_allocator)] | None = None


class Resources(Settings):
    """The processes of one job.

    Attributes:
        ranks: How many processes a job is, as one group of ``torch.distributed``: on all its nodes together.
        memory: A hint: the memory of one rank with its loader workers.
    """

    ranks: Annotated[int, Field(ge=1)] = 1
    memory: Annotated[ByteSize, Field(ge=1)] | None = None


class StageSettings(Settings):
    """The command of a stage, and what the stage needs of the machine.

    Attributes:
        run: The command: a line for the shell, or a list of words. Placeholders: ``{unit}``, its fields and its
            variable in ``each``, ``{dir}`` (its folder), ``{seed}``, ``{params.NAME}``, and the name of another
            stage for its folder.
        needs: Stages whose folders it reads; those that the command names are added.
        after: Stages that it only waits for.
        each: The list of its units: ``fold in params.folds``, or ``fold in prepare.folds`` from the ``result.json``
            that a stage left in its folder.
        holds: The stage of which all units but the first wait until this one has passed.
        in_order: Whether each unit waits for the one before.
        memory: A hint: the memory of one of its jobs.
        gpu_memory: The same on each of its GPUs.
        num_gpus: How many GPUs one of its jobs needs.
        resources: How many ranks one of its jobs has.
        like: The stage whose measured memory counts for this one too.
        loaders: A function, as ``module:function``, with which ``--plan`` counts the memory of loaders: it takes the
            params, and returns the loader of the training and that of the validation (or None) of one rank.
        slurm: What its jobs ask of Slurm; what is not given is as in ``slurm`` of the run.
    """

    run: str | list[str] | None = None
    needs: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)
    each: str | None = None
    holds: str | None = None
    in_order: bool = False
    memory: ByteSize | None = None
    gpu_memory: ByteSize | None = None
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    resources: Resources | None = None
    like: str | None = None
    loaders: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    slurm: SlurmOptions | None = None


class RunConfig(Settings):
    """The config of a run. A command is one stage of a config that is made for it.

    Attributes:
        schema_version: The version of this format.
        experiment: Names the folder below ``runs_dir``.
        target: A function or a workload as ``module:NAME``; empty where the stages are commands.
        stages: Per stage its command, where there is no target, and what it needs of the machine.
        seed: All random numbers follow from it.
        units: Which units to run: ``all``, or numbers, ranges and names such as ``2-5``.
        skip: Stages that count as passed.
        max_parallel: ``auto`` for as many jobs at once as fit, or the most.
        accept_tight: Also run a job whose declared peak leaves less than 5 % of what it gets alone.
        on_failure: When a job fails, ``continue`` with the others or ``stop`` them at their next checkpoint.
        retries: How often to restart a job that ran out of memory, or that something outside of memfit ended.
        threads_per_job: Threads of each job's numerical libraries, however many jobs run at once.
        grace_seconds: How long a job may take to stop.
        runs_dir: The folder of all runs.
        panels_dir: The cache of panels, shared by all runs.
        memory: How much of the machine's memory the run may use.
        resources: How many ranks each job has, where it has units or the run has one stage; else the stage says it.
        backend: ``local`` runs the jobs on this host, ``slurm`` as elements of job arrays.
        slurm: What each job asks of Slurm.
        notify: Who is told how the run goes.
        track: Where its epochs and ends are shown: TensorBoard, Weights & Biases, MLflow, trackio.
        params: The workload's own settings.
        canary: Try a few steps of every phase, and stop: a run of its own that says whether the long run would hold.
        canary_args: Words that a canary adds to a command, such as ``--max_steps 20 --eval_steps 10``.
        canary_phases: The phases that a canary must see. Every rank that marks phases must reach each; of a checkpoint,
            one rank is enough.
        canary_seconds: How long a canary waits for them.
        planned: A plan that ``run --plan --out`` kept: after the first epoch the run says whether it is as planned.
        tune: How `memfit tune` searches settings; ``memfit run`` does not look at it.
        launch: What `memfit launch` needs beside this; ``memfit run`` does not look at it.
        warm: ``auto`` forks the jobs of a target from one process that has imported its code, where that is safe;
            ``never`` starts a new interpreter for each.
    """

    schema_version: Literal[1] = 1
    experiment: _Name
    target: str = ""
    stages: dict[str, StageSettings] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0)] = 0
    units: str = "all"
    skip: list[str] = Field(default_factory=list)
    max_parallel: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    accept_tight: bool = False
    on_failure: OnFailure = "continue"
    retries: Annotated[int, Field(ge=0)] = 2
    threads_per_job: Annotated[int, Field(ge=1)] = 1
    grace_seconds: Annotated[float, Field(gt=0)] = 60.0
    runs_dir: _Folder = Path("runs")
    panels_dir: _Folder = Path("panels")
    memory: MemorySettings = MemorySettings()
    resources: Resources = Resources()
    backend: Literal["local", "slurm"] = "local"
    slurm: SlurmOptions = SlurmOptions()
    notify: NotifySettings = NotifySettings()
    track: TrackSettings = TrackSettings()
    params: dict[str, Any] = Field(default_factory=dict)
    canary: bool = False
    canary_args: str = ""
    canary_phases: list[_Name] = Field(default_factory=lambda: ["train", "validate", "checkpoint"], min_length=1)
    canary_seconds: Annotated[float, Field(gt=0)] = 600.0
    planned: Path | None = None
    tune: dict[str, Any] = Field(default_factory=dict)
    launch: LaunchSettings = LaunchSettings()
    warm: Literal["auto", "never"] = "auto"


def resolve_settings(
    *,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[config.Override] = (),
) -> config.Resolved[RunConfig]:
    """Resolve the settings of a run, as `memfit.config.resolve` does.

    A variable for torch's allocator that the user set (``PYTORCH_CUDA_ALLOC_CONF``) overrides ours.
    """
    env = os.environ if env is None else env
    found = config.resolve(RunConfig, file=file, values=values, env=env, overrides=overrides)
    asked = found.value.memory.cuda_allocator
    name = next((name for name in _ALLOCATOR_VARIABLES if env.get(name)), None)
    if asked is None or name is None or env[name] == asked:
        return found
    own = (f"environment {name}, over {found.origins[_ALLOCATOR]} {asked}", f"{_ALLOCATOR}={json.dumps(env[name])}")
    return config.resolve(RunConfig, file=file, values=values, env=env, overrides=[*overrides, own])
