"""Resolve a config, a plain function or a command into an order: its stages and settings."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memfit import config
from memfit.errors import ConfigError, UsageError, nearest
from memfit.files import damaged, read_whole
from memfit.jobs import Parent, call_in_child, start_env
from memfit.memory import Budget
from memfit.pipeline._config import CommandSettings, RunConfig, StageSettings, of_commands, resolve_with_allocator
from memfit.pipeline._describe import StageSpec, describe_commands
from memfit.pipeline._grid import ALL, PLACEHOLDER, Choice, chosen_units, fill, own_stdin
from memfit.rundir import RunDir

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh|torchrun|Rscript|julia|node|perl|ruby")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_SCRIPT = re.compile(r"\S+\.(?:py|sh|R|jl|js|pl|rb)")
#: What ``run.json`` holds for a run of commands.
FACTS = {"template": [str], "combinations": [{str: str}], "settings": dict, "origins": {str: str}}


@dataclass(frozen=True)
class Order:
    """What to run.

    The ``fingerprint`` names what runs and its settings, so that the same command finds its run. It leaves out code and
    data, and how many jobs run at once. ``facts`` go to ``run.json``, ``yaml`` is the resolved config.
    """

    settings: CommandSettings
    stages: Sequence[StageSpec]
    fingerprint: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    choice: Choice = ALL
    params: Mapping[str, Any] = field(default_factory=dict)
    yaml: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The workload that the config names; empty for commands."""
        return getattr(self.settings, "target", "")

    @property
    def is_keyed(self) -> bool:
        """False for commands without a config."""
        return all(stage.keyed for stage in self.stages)

    @cached_property
    def by_name(self) -> dict[str, StageSpec]:
        """The stages by their names, in order."""
        return {stage.name: stage for stage in self.stages}

    @property
    def common(self) -> dict[str, Any]:
        """What every key depends on."""
        return {"seed": getattr(self.settings, "seed", 0), "threads": self.settings.threads_per_job}

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
        """Return what a stage needs of the machine."""
        stages = self.settings.stages if isinstance(self.settings, RunConfig) else {}
        return stages.get(stage, StageSettings())


class Warm(contextlib.AbstractContextManager["Warm"]):
    """The process that imports a target once, describes its stages, and from which its jobs are forked.

    Attributes:
        parent: That process, from the first description on; None if there is none.
    """

    def __init__(self) -> None:
        self.parent: Parent | None = None
        self._is_asked = False

    def describe(self, settings: RunConfig, env: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the description of a target's stages."""
        whole = dict(os.environ) | dict(env)
        if settings.warm == "auto" and settings.backend == "local" and not self._is_asked:
            self._is_asked = True
            memory = settings.memory
            early = start_env(tight_malloc=memory.tight_malloc, cuda_allocator=memory.cuda_allocator)
            self.parent = Parent.start(settings.target, whole | early)
        function = "memfit.pipeline._describe:describe"
        if self.parent is not None and not self.parent.refused:
            found = self.parent.call(function, arguments)
        else:
            found = call_in_child(function, arguments, env=whole)
        return dict(found)

    def __exit__(self, *_: object) -> None:
        if self.parent is not None:
            self.parent.close()


def _named_by(source: Path | str | Mapping[str, Any]) -> tuple[Path | None, Mapping[str, Any] | None]:
    """Return the file of a config, or its values."""
    file: Path | None = None
    values: Mapping[str, Any] | None = None
    if isinstance(source, Mapping):
        values = source
    elif _TARGET.fullmatch(str(source)) and not Path(source).exists():
        values = {"target": str(source), "experiment": str(source).rpartition(":")[2]}
    else:
        file = Path(source)
        if file.suffix not in (".yaml", ".yml") and (file.suffix == ".py" or not file.exists()):
            raise UsageError(
                f"{source} is no config and no function.",
                rule="memfit run takes a YAML config, a function as module:name, or a command behind --.",
                remedy=f"write: memfit run -- python {source}"
                if file.suffix == ".py"
                else "write for example: memfit run config.yaml, memfit run train:train, memfit run -- python train.py",
            )
    return file, values


def order_of_config(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    folders: Sequence[str] = (),
    with_memory: bool = False,
    warm: Warm | None = None,
) -> Order:
    """Resolve a config, or a function's name such as ``train:train``; a child process imports its code."""
    env = os.environ if env is None else env
    file, values = _named_by(source)
    resolved = resolve_with_allocator(RunConfig, file=file, values=values, env=env, overrides=overrides)
    settings = resolved.value
    chosen_units(settings.units, None)
    folders = folders or ([str(file.resolve().parent)] if file else [])
    child_env = python_path(folders, env)
    if settings.target:
        own: dict[str, Any] = {
            "target": settings.target,
            "resolved": resolved.to_json(),
            "units": list(choice.combinations),
        }
        own |= {"with_memory": with_memory}
        if warm is not None:
            described = warm.describe(settings, child_env, own)
        else:
            described = call_in_child("memfit.pipeline._describe:describe", own, env=dict(os.environ) | child_env)
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
    facts = {"kind": "stages", "target": settings.target, "cwd": str(Path.cwd()), "folders": list(folders)}
    order = Order(
        settings,
        stages,
        config.fingerprint(content),
        described["origins"],
        facts | {"origins": described["origins"], "units": list(choice.combinations)},
        dataclasses.replace(choice, skip=tuple(settings.skip), units=settings.units),
        described["params"],
        described["yaml"],
        child_env,
    )
    if refused := described.get("refused"):
        asked, _ = order.chosen()
        for name in (stage.name for stage in stages if stage.name in asked and stage.name in refused):
            raise ConfigError(**refused[name])
    return order


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


def resolve_settings(
    overrides: Sequence[config.Override] = (), env: Mapping[str, str] | None = None
) -> config.Resolved[CommandSettings]:
    """Return the settings of a run of commands, each with its origin.

    Overrides come before ``MEMFIT_`` variables, and these before defaults.

    Raises:
        ConfigError: If one is unknown or has a bad value.
    """
    env = of_commands(os.environ if env is None else env)
    return resolve_with_allocator(CommandSettings, env=env, overrides=overrides)


def order_of_command(
    command: Sequence[str],
    combinations: Sequence[Mapping[str, str]],
    settings: CommandSettings,
    origins: Mapping[str, str],
) -> Order:
    """Order a command for every combination of parameters."""
    for (program,) in dict.fromkeys(fill(command[:1], combination) for combination in combinations):
        if shutil.which(program) is None:
            path = Path(program)
            what = f"'{program}' is a folder" if path.is_dir() else f"'{program}' is not executable"
            raise UsageError(
                f"{what if path.exists() else f'there is no program {program!r}'}.",
                rule="a command begins with a program: one on the PATH, or the path of an executable file.",
                remedy="correct the name, make the file executable (chmod +x), or name what runs it: python, sh",
            )
    script = command[1] if len(command) > 1 and _PYTHON.fullmatch(command[0]) else ""
    if script.endswith(".py") and not PLACEHOLDER.search(script) and not Path(script).exists():
        raise UsageError(
            f"there is no script {script!r} in {Path.cwd()}.",
            rule="what python is given as a script is a file.",
            remedy="correct its name, or go to its folder first",
        )
    changed: dict[str, tuple[Any, str]] = {}
    if own_stdin(combinations) is not None:
        changed["retries"] = 0, "standard input can be read once"
    if not settings.experiment:
        changed["experiment"] = _name_of(command), "the program's name"
    if len(combinations) == 1 and not combinations[0] and origins.get("threads_per_job") == config.DEFAULT:
        changed["threads_per_job"] = Budget.read().num_cpus, "all cores, for the only job"
    settings = settings.model_copy(update={name: value for name, (value, _) in changed.items()})
    origins = {**origins, **{name: origin for name, (_, origin) in changed.items()}}
    template, units = list(command), [dict(one) for one in combinations]
    content = {"template": template, "combinations": units, "cwd": str(Path.cwd())}
    facts = {"kind": "commands", **content, "settings": settings.model_dump(mode="json"), "origins": origins}
    stage = StageSpec("cmd", units=units, command=template, keyed=False)
    return Order(settings, [stage], config.fingerprint(content), origins, facts)


def order_of_run(run: RunDir, warm: Warm | None = None) -> Order:
    """Return the order that a run was started with, from its files; call it in the folder of its start."""
    if run.header.get("kind") == "commands":
        header = read_whole(run.path / "run.json", FACTS) or {}
        try:
            settings = CommandSettings.model_validate(header["settings"])
        except ValidationError as error:
            raise damaged(run.path / "run.json", f"has other settings than this memfit: {error}") from error
        return order_of_command(header["template"], header["combinations"], settings, header["origins"])
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    header = read_whole(run.path / "run.json") or {}
    choice = Choice(combinations=tuple(header.get("units") or ()))
    folders = header.get("folders") or ()
    return order_of_config(run.path / "config.yaml", env=others, choice=choice, folders=folders, warm=warm)


def _name_of(command: Sequence[str]) -> str:
    """Name a command by its script or module, else by its program.

    >>> _name_of(["python3", "-u", "jobs/train.py", "--fold", "3"]), _name_of(["python", "-m", "a.b"])
    ('train', 'a.b')
    >>> [_name_of(words) for words in (["python", "-c", "x"], ["bash", "go.sh", "1"], ["python", "train_{fold}.py"])]
    ['python', 'go', 'train_-fold']
    """
    name = Path(command[0]).name
    if _INTERPRETER.fullmatch(name):
        module = dict(pairwise(command)).get("-m")
        name = module or next((Path(word).name for word in command if _SCRIPT.fullmatch(word)), name)
    name = Path(name).stem if _SCRIPT.fullmatch(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "command"
