"""The flags that several verbs share, and how typer reads them from a record."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from typer import Option

from memfit.cli._terminal import AsJson
from memfit.config import Override
from memfit.errors import ConfigError

Text = str | None
_TEXTS = ("experiment", "units", "planned", "canary_args")  # also where they look like numbers
Set = Annotated[
    list[str] | None,
    Option("--set", help="Change a setting: memory.slack=0.2. Repeatable.", metavar="KEY=VALUE"),
]
AcceptTight = Annotated[
    bool, Option("--accept-tight", help="Also accept less than 5 % left of the memory."), "accept_tight=true"
]


@dataclass(frozen=True)
class Output:
    """How a run is shown."""

    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only failures and the summary.")] = False
    verbose: Annotated[bool, Option("--verbose", help="Also show waits, forecasts, OOM kills, epochs.")] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Flags(Output):
    """The flags of a run of jobs. A flag that gives a setting its value names it behind its option."""

    param: Annotated[
        list[str] | None,
        Option(help="Values of {fold}, such as fold=1..5 or fold=1,3.", metavar="NAME=VALUES"),
    ] = None
    plan: Annotated[bool, Option("--plan", help="Print what would run, why, and how many fit.")] = False
    limit: Annotated[Text, Option(help="The most memory of all jobs together.", metavar="SIZE"), "memory.limit"] = None
    memory: Annotated[
        Text,
        Option(help="Expected peak of one job; {name}: a parameter.", metavar="SIZE"),
        "memory.job",
    ] = None
    max_parallel: Annotated[
        Text, Option(help="Run at most N jobs at once, or as many as fit.", metavar="auto|N"), "max_parallel"
    ] = None
    nproc: Annotated[
        Text, Option(help="Processes (ranks) of each job, as of torchrun.", metavar="N"), "resources.ranks"
    ] = None
    backend: Annotated[
        Text, Option(help="Run jobs here, or as job arrays of Slurm.", metavar="local|slurm"), "backend"
    ] = None
    set_: Set = None
    name: Annotated[  # typer 0.27 would call the flag --NAME
        Text, Option("--name", help="The experiment, a folder below the runs.", metavar="NAME"), "experiment"
    ] = None
    new: Annotated[bool, Option("--new", help="Start a new run; do not continue the newest.")] = False
    num_gpus: Annotated[Text, Option(help="GPUs of each job. It sees no others.", metavar="N"), "memory.num_gpus"] = (
        None
    )
    gpu_memory: Annotated[
        Text, Option(help="Expected peak of one job on each of its GPUs.", metavar="SIZE"), "memory.gpu_job"
    ] = None
    reserve: Annotated[Text, Option(help="Memory that is kept free.", metavar="SIZE"), "memory.reserve"] = None
    retries: Annotated[Text, Option(help="Restarts after a kill or an out-of-memory.", metavar="N"), "retries"] = None
    on_failure: Annotated[
        Text,
        Option(help="After a failure: stop all jobs, or continue.", metavar="stop|continue"),
        "on_failure",
    ] = None
    runs_dir: Annotated[Text, Option(help="The folder of all runs.", metavar="FOLDER"), "runs_dir"] = None
    grace: Annotated[
        Text,
        Option(help="Time to save before a stopped job is killed.", metavar="SECONDS"),
        "grace_seconds",
    ] = None
    accept_tight: AcceptTight = False
    force: Annotated[bool, Option("--force", help="Also run jobs that do not fit the budget.")] = False

    def overrides(self) -> list[Override]:
        """Return the flags as overrides of settings."""
        given = settings_of(self)
        if self.memory and "{" in self.memory:
            given["memory.job_of"] = given.pop("memory.job")
        return join(given, self.set_)


def spell(name: str) -> str:
    """Return a flag as it is typed, from the name of its field."""
    return f"--{name.strip('_').replace('_', '-')}"


def settings_of(flags: object) -> dict[str, tuple[str, Any]]:
    """Return the settings that flags give, each with its flag and value."""
    found = {}
    for name, hint in get_type_hints(type(flags), include_extras=True).items():
        value = getattr(flags, name)
        for setting in hint.__metadata__[1:] if value is not None and value is not False else ():
            key, _, text = setting.partition("=")
            is_text = key in _TEXTS or isinstance(value, list) or str(value)[:1] in "[{\"'"
            found[key] = (spell(name), text or (json.dumps(value) if is_text else value))
    return found


def join(given: Mapping[str, tuple[str, Any]], texts: Sequence[str] | None, option: str = "--set") -> list[Override]:
    """Return what flags and a repeatable option give, as overrides; ConfigError if both give one."""
    found: list[Override] = [(flag, f"{name}={value}") for name, (flag, value) in given.items()]
    for text in texts or ():
        name = text.partition("=")[0].strip()
        if name in given:
            raise ConfigError(
                f"{name} is given twice: {given[name][0]} and {option} {text}.",
                rule="a setting has one value on the command line.",
                remedy=f"leave out {option} {text}",
            )
        found.append(text if option == "--set" else (f"{option} {name}", text))
    return found


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb in which each field of its last parameter, a record of flags, is a parameter for typer."""
    *own, last = inspect.signature(verb, eval_str=True).parameters.values()
    record, keyword = last.annotation, inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(record, include_extras=True)
    known = {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in fields(record)}
    kinds = sorted(record.__mro__, key=lambda kind: kind is not Flags)  # those used most first
    names = [name for kind in kinds for name in vars(kind).get("__annotations__", {}) if name in known]
    flags = [inspect.Parameter(name, keyword, default=known[name], annotation=hints[name]) for name in names]

    def call(**given: Any) -> None:
        verb(**{one.name: given.pop(one.name) for one in own}, **{last.name: record(**given)})

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__annotations__ = {one.name: one.annotation for one in [*own, *flags]}
    vars(call)["__signature__"] = inspect.Signature([*own, *flags])
    return call
