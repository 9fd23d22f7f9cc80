"""Resolve a config, a plain function or a command into an order: its stages and settings."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from memfit import config
from memfit.errors import ConfigError, DamagedError, UsageError, nearest
from memfit.files import read_whole
from memfit.jobs import Parent, call_in_child, own_threads, start_env
from memfit.masking import mask
from memfit.memory import Budget
from memfit.pipeline._command import (
    ALL,
    Choice,
    check_command,
    check_placeholders,
    chosen_units,
    config_of_command,
    own_stdin,
)
from memfit.pipeline._config import Resources, RunConfig, StageSettings, resolve_settings
from memfit.pipeline._describe import StageSpec, describe_commands
from memfit.rundir import RunDir
from memfit.units import format_bytes

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
#: What a run is of: the stages of a config, one command for each combination of parameters, or the trials of a study.
Kind = Literal["stages", "commands", "tune"]
#: A YAML file, its content, a function as ``module:name``, or the words of a command.
Source = Path | str | Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class Order:
    """What to run.

    The ``fingerprint`` names what runs and its settings, so that the same command finds its run. It leaves out code and
    data, and how many jobs run at once. ``facts`` go to ``run.json``, ``yaml`` is the resolved config. What commands
    made is kept in their own run alone, whatever code they ran: a run of ``commands`` that is finished is over.
    """

    settings: RunConfig
    stages: Sequence[StageSpec]
    kind: Kind = "stages"
    fingerprint: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    choice: Choice = ALL
    params: Mapping[str, Any] = field(default_factory=dict)
    yaml: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, StageSpec]:
        return {stage.name: stage for stage in self.stages}

    @property
    def common(self) -> dict[str, Any]:
        """What every key depends on."""
        return {"seed": self.settings.seed, "threads": 0 if self.kind == "commands" else self.settings.threads_per_job}

    def chosen(self) -> tuple[set[str], frozenset[str]]:
        """Return the stages that are asked for, and those that run again whether valid or not."""
        choice = self.choice
        for name in filter(None, [choice.until, choice.anew, *choice.skip]):
            if name not in self.by_name:
                raise UsageError(
                    f"there is no stage '{name}'.",
                    rule=f"the stages are {', '.join(self.by_name)}.",
                    remedy=nearest(name, list(self.by_name)),
                )
        last = choice.until
        asked = [last] if last else list(self.by_name)
        for name in asked:  # it grows as it is read
            asked += [one for one in self.waits_for(name) if one not in asked]
        for name in choice.skip:
            users = [other for other, stage in self.by_name.items() if name in stage.needs and other in asked]
            if users:
                raise UsageError(
                    f"stage {name} cannot be skipped: {', '.join(users)} read{'s' if len(users) == 1 else ''} it.",
                    rule="a stage can be skipped when others only wait for it, as for a gate.",
                    remedy=f"run up to it: --until {name}",
                )
        anew = {choice.anew} if choice.anew else set[str]()
        for name, stage in self.by_name.items():  # each comes after what it reads
            if anew.intersection(stage.reads):
                anew.add(name)
        return set(asked), frozenset(anew)

    def waits_for(self, name: str) -> list[str]:
        """Return the stages that one waits for directly, the gates that hold it included."""
        stage = self.by_name[name]
        return [*stage.reads, *stage.after, *self.gates(name)]

    def gates(self, name: str) -> list[str]:
        """Return the stages that hold one, but for those that are skipped."""
        skipped = self.choice.skip
        return [gate for gate, stage in self.by_name.items() if stage.holds == name and gate not in skipped]

    def topology(self, stage: str) -> StageSettings:
        return self.settings.stages.get(stage, StageSettings())

    def is_main(self, stage: StageSpec) -> bool:
        """Return whether a job of a stage gets what the run says of one job: it is one of many, or the only one."""
        return bool(stage.each or stage.units) or len(self.stages) == 1

    def ranks_of(self, stage: StageSpec) -> int:
        return self.resources_of(stage).ranks

    def resources_of(self, stage: StageSpec) -> Resources:
        own = self.topology(stage.name).resources
        return own or (self.settings.resources if self.is_main(stage) else Resources())

    def nodes_of(self, stage: StageSpec) -> int:
        if self.settings.backend != "slurm" or (self.settings.target and self.ranks_of(stage) == 1):
            return 1  # a function of one process has one node
        return self.settings.slurm_of(stage.name).nodes

    def gpus_of(self, stage: StageSpec) -> tuple[int, int | None]:
        """Return how many GPUs each job of a stage gets, and the memory that it asks for on each."""
        own, memory, is_main = self.topology(stage.name), self.settings.memory, self.is_main(stage)
        size = own.gpu_memory or (memory.gpu_job if is_main else None)
        return own.num_gpus or (memory.num_gpus if is_main else 0) or self.ranks_of(stage) * (size is not None), size

    def declared(self, stage: StageSpec) -> tuple[int | None, str]:
        """Return what one job of a stage takes on a node by the settings, and which of them says so."""
        own, each = self.topology(stage.name), self.resources_of(stage)
        if own.memory:
            return own.memory, f"declared: stages.{stage.name}.memory"
        if each.memory:
            tasks = each.ranks // self.nodes_of(stage)
            return each.memory * tasks, f"declared: {tasks} x {format_bytes(each.memory)}, resources.memory"
        said = "--memory" if self.origins.get("memory.job") == "--memory" else "memory.job"
        return (self.settings.memory.job if self.is_main(stage) else None), f"declared: {said}"


class Warm(contextlib.AbstractContextManager["Warm"]):
    """The process that imports a target once, describes its stages, and from which its jobs are forked.

    Attributes:
        parent: That process, from the first description on; None if there is none.
    """

    def __init__(self, *, can_fork: bool = True) -> None:
        self.parent: Parent | None = None
        self._can_fork = can_fork

    def describe(self, settings: RunConfig, env: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the description of a target's stages."""
        whole = dict(os.environ) | dict(env)
        if settings.warm == "auto" and settings.backend == "local" and self._can_fork:
            self._can_fork = False
            memory = settings.memory
            early = start_env(tight_malloc=memory.tight_malloc, cuda_allocator=memory.cuda_allocator)
            self.parent = Parent.start(settings.target, whole | early)
        parent = self.parent
        call = parent.call if parent and not parent.refused else partial(call_in_child, env=whole)
        return dict(call("memfit.pipeline._describe:describe", arguments))

    def __exit__(self, *_: object) -> None:
        if self.parent is not None:
            self.parent.close()


def _named_by(source: Source) -> tuple[Path | None, Mapping[str, Any] | None]:
    """Return the file of a config, or its values."""
    if isinstance(source, Mapping):
        return None, source
    if not isinstance(source, str | Path):
        return None, config_of_command(mask(list(source)))  # run.json has the words as they were
    if _TARGET.fullmatch(str(source)) and not Path(source).exists():
        return None, {"target": str(source), "experiment": str(source).rpartition(":")[2]}
    file = Path(source)
    if file.suffix not in (".yaml", ".yml") and (file.suffix == ".py" or not file.exists()):
        raise UsageError(
            f"{source} is no config and no function.",
            rule="memfit run takes a YAML config, a function as module:name, or a command behind --.",
            remedy=f"write: memfit run -- python {source}"
            if file.suffix == ".py"
            else "write for example: memfit run config.yaml, memfit run train:train, memfit run -- python train.py",
        )
    return file, None


def order_of_config(
    source: Source,
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    folders: Sequence[str] = (),
    with_memory: bool = False,
    warm: Warm | None = None,
) -> Order:
    """Resolve a config, a command, or a function's name such as ``train:train``; a child process imports its code."""
    env = os.environ if env is None else env
    file, values = _named_by(source)
    if not isinstance(source, str | Path | Mapping):
        return order_of_command(source, choice, values=values, env=env, overrides=overrides)
    resolved = resolve_settings(file=file, values=values, env=env, overrides=overrides)
    settings = resolved.value
    chosen_units(settings.units, None)
    folders = folders or ([str(file.resolve().parent)] if file else [])
    child_env = python_path(folders, env)
    if settings.target:
        own = {"target": settings.target, "resolved": resolved.to_json(), "with_memory": with_memory}
        own["units"] = list(choice.combinations)
        described = (warm or Warm(can_fork=False)).describe(settings, child_env, own)
    else:
        described = describe_commands(resolved)
    stages = [StageSpec(**one) for one in described["stages"]]
    _check_topology(settings, [stage.name for stage in stages])
    content = {
        "target": settings.target,
        "seed": settings.seed,
        "threads_per_job": settings.threads_per_job,
        "params": described["params"],
        "units": list(choice.combinations),
        "commands": {name: stage.run for name, stage in settings.stages.items() if stage.run},
    }
    params, yaml, origins = (described[name] for name in ("params", "yaml", "origins"))
    facts: dict[str, Any] = {"kind": "stages", "target": settings.target, "cwd": str(Path.cwd())}
    facts |= {"folders": list(folders), "origins": origins, "units": list(choice.combinations)}
    choice = dataclasses.replace(choice, skip=tuple(settings.skip), units=settings.units)
    name = config.fingerprint(content)
    order = Order(settings, stages, "stages", name, origins, facts, choice, params, yaml, child_env)
    if refused := described.get("refused"):
        asked, _ = order.chosen()
        for name in (stage.name for stage in stages if stage.name in asked and stage.name in refused):
            raise ConfigError(**refused[name])
    return order


def order_of_command(command: Sequence[str], choice: Choice, **given: Any) -> Order:
    """Order a command for every combination of parameters, or once: the only stage of a config."""
    units = [dict(one) for one in choice.combinations] or [{}]
    check_command(command, units)
    if given["values"] is not None and not any(units):
        given["values"] |= {"threads_per_job": Budget.read().num_cpus}  # all cores, for the only job
    if own_stdin(units) is not None:
        given["overrides"] = [*given["overrides"], ("standard input, which can be read once,", "retries=0")]
    resolved = resolve_settings(**given)
    settings = resolved.value
    check_placeholders([*command, *filter(None, [settings.memory.job_of])], list(units[0]))
    content: dict[str, Any] = {"template": list(command), "combinations": units}
    cwd, runs = Path.cwd(), settings.runs_dir.resolve()
    facts = {"kind": "commands", **content, "cwd": str(cwd), "origins": resolved.origins}
    content["cwd"] = os.path.relpath(cwd, runs) if runs.is_relative_to(cwd) else str(cwd)  # it may move with its runs
    stage = StageSpec("cmd", units=units, command=list(command))
    fingerprint, origins = config.fingerprint(content), resolved.origins
    return Order(settings, [stage], "commands", fingerprint, origins, facts, yaml=resolved.to_yaml())


def newest_run(order: Order) -> RunDir | None:
    """Return the newest run of an order; of commands none goes on that was copied, since their files were not."""
    found = RunDir.newest(order.settings.runs_dir, order.settings.experiment, order.fingerprint)
    return None if found is None or (order.kind == "commands" and found.is_copy) else found


def with_threads(order: Order, env: Mapping[str, str] | None, *, new: bool = False) -> Order:
    """Return an order with the threads that its unfinished run began with, else OMP_NUM_THREADS, if it sets none.

    Its fingerprint stays, so that the same command finds its run whatever that variable says.
    """
    known, settings = order.origins["threads_per_job"], order.settings
    origin, own = "environment OMP_NUM_THREADS", own_threads(os.environ if env is None else env)
    if known != config.DEFAULT and (order.kind, known) != ("commands", config.ARGUMENT):
        return order
    run = None if new else newest_run(order)
    threads = own * settings.resources.ranks or settings.threads_per_job
    with contextlib.suppress(ConfigError, DamagedError, KeyError):
        if run is not None and run.state not in ("completed", "stopped"):
            threads, origin = config.read_file(run.path / "config.yaml")["threads_per_job"], "the run that goes on"
    if threads == settings.threads_per_job:
        return order
    origins = {**order.origins, "threads_per_job": origin}
    settings = settings.model_copy(update={"threads_per_job": threads})
    yaml = re.sub(r"(?m)^threads_per_job: .*$", f"threads_per_job: {threads}", order.yaml)
    return dataclasses.replace(
        order, settings=settings, origins=origins, facts={**order.facts, "origins": origins}, yaml=yaml
    )


def python_path(folders: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return where a workload's interpreter finds modules: in these folders, the current one, and the user's own."""
    return {"PYTHONPATH": os.pathsep.join([*folders, str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])])}


def _check_topology(settings: RunConfig, names: Sequence[str]) -> None:
    for name, own in settings.stages.items():
        if name not in names:
            raise ConfigError(
                f"stages.{name} names no stage of the workload.",
                rule=f"its stages are {', '.join(names)}.",
                remedy=nearest(name, names),
            )
        if settings.target and own.run is not None:
            raise ConfigError(
                f"stages.{name}.run is given beside target: {settings.target}.",
                rule="the code of a target says what its stages run; a config without a target says it itself.",
                remedy="leave one of the two out",
            )


def order_of_run(run: RunDir, warm: Warm | None = None) -> Order:
    """Return the order that a run was started with, from its files; call it in the folder of its start."""
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    header, file = read_whole(run.path / "run.json") or {}, run.path / "config.yaml"
    if header.get("kind") == "commands":
        choice = Choice(combinations=tuple(header["combinations"]))
        return order_of_command(header["template"], choice, file=file, values=None, env=others, overrides=())
    choice = Choice(combinations=tuple(header.get("units") or ()))
    folders = run.header.get("folders") or ()
    return order_of_config(file, env=others, choice=choice, folders=folders, warm=warm)
