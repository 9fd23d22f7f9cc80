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
from memfit.jobs import ALLOCATOR_VARIABLES, OnFailure, SlurmOptions
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
_Name = Annotated[str, Field(min_length=1)]
_Folder = Annotated[Path, BeforeValidator(_not_empty)]


class MemorySettings(Settings):
    """How much of the machine's memory the run may use."""

    limit: Annotated[ByteSize, AfterValidator(_enough)] | None = None  # of all jobs together; the smallest limit counts
    reserve: ByteSize | None = None  # the memory to keep free; None for a share of the limit
    slack: Annotated[float, Field(ge=0.0, le=10.0)] = DEFAULT_SLACK  # on top of the measured peak of similar jobs
    job: ByteSize | None = None  # a hint for one job, which memfit checks before the first job starts
    job_of: str | None = None  # the same for each command of a sweep, in terms of its parameters: ``"{memory}"``
    num_gpus: Annotated[int, Field(ge=0)] = 0  # of one job; it sees no others. 1 when ``gpu_job`` is given
    gpu_job: ByteSize | None = None  # a hint: the memory of one job on each of its GPUs
    tight_malloc: bool = True  # let glibc give freed memory back at once, so that resident memory follows live memory
    cuda_allocator: Annotated[str, AfterValidator(_allocator)] | None = None  # your own variable counts before it


class Resources(Settings):
    """The processes of one job."""

    ranks: Annotated[int, Field(ge=1)] = 1  # processes of a job, one group of ``torch.distributed``, on all nodes
    memory: Annotated[ByteSize, Field(ge=1)] | None = None  # a hint: the memory of one rank with its loader workers


class StageSettings(Settings):
    """The command of a stage, and what the stage needs of the machine."""

    # the command: a line for the shell, or a list of words. Placeholders: ``{unit}``, its fields and its variable
    # in ``each``, ``{dir}`` (its folder), ``{seed}``, ``{params.NAME}``, and the name of another stage for its
    # folder
    run: str | list[str] | None = None
    needs: list[str] = Field(default_factory=list)  # stages whose folders it reads, beside those in the command
    after: list[str] = Field(default_factory=list)  # stages that it only waits for
    each: str | None = None  # ``fold in params.folds``, or ``fold in prepare.folds`` of that stage's ``result.json``
    holds: str | None = None  # the stage of which all units but the first wait until this one has passed
    in_order: bool = False  # whether each unit waits for the one before
    memory: ByteSize | None = None  # a hint: the memory of one of its jobs
    gpu_memory: ByteSize | None = None  # the same on each of its GPUs
    num_gpus: Annotated[int, Field(ge=0)] | None = None  # how many GPUs one of its jobs needs
    resources: Resources | None = None  # how many ranks one of its jobs has
    # a function, as ``module:function``, with which ``--plan`` counts the memory of loaders: it takes the params,
    # and returns the loader of the training and that of the validation (or None) of one rank
    loaders: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    slurm: SlurmOptions | None = None  # what its jobs ask of Slurm; what is not given is as in ``slurm`` of the run


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
        track: Where its epochs and ends are shown: TensorBoard, Weights & Biases, MLflow.
        params: The workload's own settings.
        canary: Try a few steps of every phase, and stop: a run of its own that says whether the long run would hold.
        canary_args: Words that a canary adds to a command, such as ``--max_steps 20 --eval_steps 10``.
        canary_phases: The phases that a canary waits for; if they are given, it must see them, also of a job that ends
            before. Every rank that marks phases must reach each; of a checkpoint, one rank is enough.
        canary_seconds: How long a canary waits for them.
        planned: A plan that ``run --plan --out`` kept: after the first epoch the run says whether it is as planned.
        tune: How `memfit tune` searches settings; ``memfit run`` does not look at it.
        launch: What `memfit launch` needs beside this; ``memfit run`` does not look at it.
        warm: ``auto`` forks the jobs of a target from one process that has imported its code, where that is safe;
            ``never`` starts a new interpreter for each.
    """

    schema_version: Literal[1] = 1
    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
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

    @property
    def most_at_once(self) -> int | None:
        """The most jobs at once; None for as many as fit."""
        return None if self.max_parallel == "auto" else self.max_parallel

    @property
    def threads_per_rank(self) -> int:
        return max(1, self.threads_per_job // self.resources.ranks)

    def slurm_of(self, stage: str) -> SlurmOptions:
        """Return what the jobs of a stage ask of Slurm: its own options over those of the run."""
        own = self.stages[stage].slurm if stage in self.stages else None
        return self.slurm.model_copy(update={name: getattr(own, name) for name in own.model_fields_set} if own else {})


def resolve_settings(
    *,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[config.Override] = (),
) -> config.Resolved[RunConfig]:
    """Resolve the settings of a run. A PYTORCH_CUDA_ALLOC_CONF that the user set overrides ours."""
    env = os.environ if env is None else env
    found = config.resolve(RunConfig, file=file, values=values, env=env, overrides=overrides)
    asked = found.value.memory.cuda_allocator
    name = next((name for name in ALLOCATOR_VARIABLES if env.get(name)), None)
    if asked is None or name is None or env[name] == asked:
        return found
    own = (f"environment {name}, over {found.origins[_ALLOCATOR]} {asked}", f"{_ALLOCATOR}={json.dumps(env[name])}")
    return config.resolve(RunConfig, file=file, values=values, env=env, overrides=[*overrides, own])
