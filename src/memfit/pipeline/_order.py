"""What is to be run: a config, a plain function or a command, resolved into stages as plain data."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memfit import config
from memfit.errors import ConfigError, UsageError, nearest
from memfit.jobs import call_in_child
from memfit.memory import Budget
from memfit.pipeline._config import CommandSettings, RunConfig, StageSettings, of_commands, resolve_with_allocator
from memfit.pipeline._contract import Stage
from memfit.pipeline._describe import as_data, describe_commands
from memfit.pipeline._graph import ALL, Choice, chosen_units
from memfit.pipeline._grid import fill, own_stdin
from memfit.rundir import RunDir, damaged, read_whole

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh|torchrun|Rscript|julia|node|perl|ruby")
_SCRIPT = re.compile(r"\S+\.(?:py|sh|R|jl|js|pl|rb)")
#: The stage of commands that no config names, and its jobs: cmd_0004.
COMMAND_STAGE = "cmd"


@dataclass(frozen=True)
class Order:
    """A resolved order to run: its stages, and what it takes to go on with it.

    Attributes:
        settings: How jobs are run.
        stages: The stages as plain data, in order.
        fingerprint: Of what is run and with which settings; not of code and data, nor of how many run at once.
        origins: Where each setting comes from.
        facts: For ``run.json``.
        choice: What of it is asked for.
        params: The workload's settings.
        yaml: The resolved config; empty for a command.
        env: For each job of a workload.
        cwd: The folder that commands start in.
    """

    settings: CommandSettings
    stages: Sequence[Mapping[str, Any]]
    fingerprint: str
    origins: Mapping[str, str]
    facts: Mapping[str, Any]
    choice: Choice = ALL
    params: Mapping[str, Any] = field(default_factory=dict)
    yaml: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""

    @property
    def target(self) -> str:
        """The workload that the config names; empty for commands."""
        return getattr(self.settings, "target", "")

    @property
    def common(self) -> dict[str, Any]:
        """What every key depends on beside the stage's own."""
        return {"seed": getattr(self.settings, "seed", 0), "threads": self.settings.threads_per_job}

    def topology(self, stage: str) -> StageSettings:
        """What a stage needs of the machine."""
        stages = self.settings.stages if isinstance(self.settings, RunConfig) else {}
        return stages.get(stage, StageSettings())


def order_of_config(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    folders: Sequence[str] = (),
) -> Order:
    """The order that a config gives, or a function's name such as ``train:train``, its code asked in a process apart.

    Raises:
        ConfigError: If the config, its params or its stages are bad.
    """
    env = os.environ if env is None else env
    file, values = None, None
    if isinstance(source, Mapping):
        values = source
    elif _TARGET.fullmatch(str(source)) and not Path(source).exists():
        values = {"target": str(source), "experiment": str(source).rpartition(":")[2]}
    else:
        file = Path(source)
    resolved = resolve_with_allocator(RunConfig, file=file, values=values, env=env, overrides=overrides)
    settings = resolved.value
    chosen_units(settings.units, None)
    folders = folders or ([str(file.resolve().parent)] if file else [])
    child_env = python_path(folders, env)
    if settings.target:
        own = {"target": settings.target, "resolved": resolved.to_json(), "units": list(choice.combinations)}
        described = call_in_child("memfit.pipeline._describe:describe", own, env=dict(os.environ) | child_env)
    else:
        described = describe_commands(resolved)
    _check_topology(settings, described["stages"])
    content = {
        "target": settings.target,
        "seed": settings.seed,
        "threads_per_job": settings.threads_per_job,
        "params": described["params"],
        "units": list(choice.combinations),
        "commands": {name: stage.run for name, stage in settings.stages.items() if stage.run},
    }
    facts = {"kind": "stages", "target": settings.target, "cwd": str(Path.cwd()), "folders": list(folders)}
    return Order(
        settings=settings,
        stages=described["stages"],
        fingerprint=config.fingerprint(content),
        origins=described["origins"],
        facts=facts | {"origins": described["origins"], "units": list(choice.combinations)},
        choice=dataclasses.replace(choice, skip=tuple(settings.skip), units=settings.units),
        params=described["params"],
        yaml=described["yaml"],
        env=child_env,
        cwd=str(Path.cwd()),
    )


def python_path(folders: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Where an interpreter of a workload's finds its modules: the config's folder, this one, and the user's own."""
    return {"PYTHONPATH": os.pathsep.join([*folders, str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])])}


def _check_topology(settings: RunConfig, stages: Sequence[Mapping[str, Any]]) -> None:
    names = [stage["name"] for stage in stages]
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
                rule="what the stages of a target run stands in its code; a config without a target says it itself.",
                remedy="leave one of the two out",
            )


def resolve_settings(
    overrides: Sequence[config.Override] = (), env: Mapping[str, str] | None = None
) -> config.Resolved[CommandSettings]:
    """The settings of a run of commands, each with its origin: overrides before environment before defaults.

    Raises:
        ConfigError: If one is unknown or has a bad value.
    """
    env = of_commands(os.environ if env is None else env)
    return resolve_with_allocator(CommandSettings, env=env, overrides=overrides)


def order_of_command(
    command: Sequence[str], combinations: Sequence[Mapping[str, str]], resolved: config.Resolved[CommandSettings]
) -> Order:
    """The order to run a command for every combination of parameters.

    Raises:
        UsageError: If there is no such program.
    """
    for (program,) in dict.fromkeys(fill(command[:1], combination) for combination in combinations):
        if shutil.which(program) is None:
            path = Path(program)
            what = f"'{program}' is a folder" if path.is_dir() else f"'{program}' is not executable"
            raise UsageError(
                f"{what if path.exists() else f'there is no program {program!r}'}.",
                rule="a command begins with a program: one on the PATH, or the path of an executable file.",
                remedy="correct the name, make the file executable (chmod +x), or name what runs it: python, sh",
            )
    settings, origins = resolved.value, dict(resolved.origins)
    if own_stdin(combinations) is not None:
        settings = settings.model_copy(update={"retries": 0})
        origins["retries"] = "standard input can be read once"
    if not settings.experiment:
        settings = settings.model_copy(update={"experiment": name_of(command)})
        origins["experiment"] = "the program's name"
    if len(combinations) == 1 and not combinations[0] and origins["threads_per_job"] == config.DEFAULT:
        settings = settings.model_copy(update={"threads_per_job": Budget.read().num_cpus})
        origins["threads_per_job"] = "all cores, for the only job"
    return _of_commands(command, combinations, settings, origins, str(Path.cwd()))


def _of_commands(
    command: Sequence[str],
    combinations: Sequence[Mapping[str, str]],
    settings: CommandSettings,
    origins: Mapping[str, str],
    cwd: str,
) -> Order:
    content = {"template": tuple(command), "combinations": combinations, "cwd": cwd}
    facts = {
        "kind": "commands",
        "template": list(command),
        "combinations": [dict(one) for one in combinations],
        "cwd": cwd,
        "settings": settings.model_dump(mode="json"),
        "origins": dict(origins),
    }
    own = {"units": [dict(one) for one in combinations], "command": list(command), "keyed": False}
    stage = as_data(Stage(COMMAND_STAGE, tuple(command)), {}) | own
    return Order(settings, [stage], config.fingerprint(content), origins, facts, cwd=cwd)


#: What ``run.json`` holds for a run of commands.
FACTS = {
    "template": [str],
    "combinations": [{str: str}],
    "cwd": str,
    "settings": {"memory": {"tight_malloc": bool}},
    "origins": {str: str},
}


def order_of_run(run: RunDir) -> Order:
    """The order that a run was started with, by its own files; the current folder is that of its start.

    Raises:
        UsageError: If its config was never written.
    """
    if run.header.get("kind") == "commands":
        header = read_whole(run.path / "run.json", FACTS) or {}
        try:
            settings = CommandSettings.model_validate(header["settings"])
        except ValidationError as error:
            raise damaged(run.path / "run.json", f"has other settings than this memfit: {error}") from error
        return _of_commands(header["template"], header["combinations"], settings, header["origins"], header["cwd"])
    path = run.path / "config.yaml"
    if not path.exists():
        raise UsageError(
            f"{run.path} holds no config.yaml.",
            rule="a run goes on with the settings that it was started with; this one ended before they were written.",
            remedy="start it by its config: memfit run <config>",
        )
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    header = read_whole(run.path / "run.json") or {}
    choice = Choice(combinations=tuple(header.get("units") or ()))
    return order_of_config(path, env=others, choice=choice, folders=header.get("folders") or ())


def name_of(command: Sequence[str]) -> str:
    """What a command is called: its script or module, else its program.

    >>> name_of(["python3", "-u", "jobs/train.py", "--fold", "3"]), name_of(["python", "-m", "a.b"]), name_of(["/b/x"])
    ('train', 'a.b', 'x')
    """
    name = Path(command[0]).name
    if _INTERPRETER.fullmatch(name):
        module = dict(pairwise(command)).get("-m")
        name = module or next((Path(word).name for word in command if _SCRIPT.fullmatch(word)), name)
    name = Path(name).stem if _SCRIPT.fullmatch(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "command"
