"""The flags that say how jobs are run, the same for ``memfit run`` and ``memfit map``, and the settings they set."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from memfit.config import Override
from memfit.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON; the log goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what goes wrong, and the summary.")]


@dataclass(frozen=True)
class Flags:
    """The flags that both verbs have; each is written here and nowhere else."""

    max_parallel: Annotated[
        str | None, typer.Option(help="The most jobs at once, or 'auto' for as many as fit.", metavar="auto|N")
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(help="What one job takes, as a hint, or '{name}' of a parameter; it is measured.", metavar="SIZE"),
    ] = None
    num_gpus: Annotated[
        str | None, typer.Option(help="How many GPUs one job needs; it sees no others.", metavar="N")
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="What one job takes on each of its GPUs, as a hint; it is measured.", metavar="SIZE"),
    ] = None
    limit: Annotated[str | None, typer.Option(help="Your own cap on all jobs together.", metavar="SIZE")] = None
    reserve: Annotated[str | None, typer.Option(help="What is never lent to jobs.", metavar="SIZE")] = None
    retries: Annotated[
        str | None,
        typer.Option(help="How often a job that ran out of memory, or was killed, starts again.", metavar="N"),
    ] = None
    on_failure: Annotated[
        str | None,
        typer.Option(
            help="When a job fails: stop the others, or continue with them; 'first': start no more if it is the first "
            "to end and has a bug.",
            metavar="stop|first|continue",
        ),
    ] = None
    name: Annotated[
        str | None, typer.Option(help="The experiment: names the folder below the runs.", metavar="NAME")
    ] = None
    runs_dir: Annotated[str | None, typer.Option(help="The folder of all runs.", metavar="FOLDER")] = None
    threads: Annotated[str | None, typer.Option(help="Threads of each job's numerical libraries.", metavar="N")] = None
    grace: Annotated[
        str | None,
        typer.Option(
            help="How long a job that is asked to stop may take to save and end; then it is killed.", metavar="SECONDS"
        ),
    ] = None
    no_tight_malloc: Annotated[
        bool,
        typer.Option("--no-tight-malloc", help="Leave glibc's allocator as it is: faster, and keeps freed memory."),
    ] = False
    cuda_allocator: Annotated[
        str | None,
        typer.Option(
            help="What torch's allocator for CUDA is told before a job starts: expandable_segments:True. A variable "
            "PYTORCH_CUDA_ALLOC_CONF of your own wins.",
            metavar="KEY:VALUE,...",
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, for example memory.slack=0.2. Repeatable.", metavar="KEY=VALUE"),
    ] = None
    new: Annotated[bool, typer.Option("--new", help="Start over instead of going on with the newest run.")] = False
    force: Annotated[bool, typer.Option("--force", help="Run also what does not fit the budget.")] = False
    quiet: Quiet = False
    as_json: AsJson = False

    def overrides(self, **more: str | None) -> list[Override]:
        """What was given, as overrides of settings; ``more`` are settings that have a flag of the same name.

        Raises:
            ConfigError: If a setting is given by its flag and with ``--set``.
        """
        texts = {setting: (f"--{flag.replace('_', '-')}", getattr(self, flag)) for flag, setting in _SETTINGS.items()}
        texts |= {setting: (f"--{setting}", text) for setting, text in more.items()}
        given = {setting: (flag, text) for setting, (flag, text) in texts.items() if text is not None}
        if "memory.job" in given and "{" in given["memory.job"][1]:
            flag, text = given.pop("memory.job")
            given["memory.job_of"] = (flag, json.dumps(text))
        if self.cuda_allocator is not None:
            given["memory.cuda_allocator"] = ("--cuda-allocator", json.dumps(self.cuda_allocator))
        if self.no_tight_malloc:
            given["memory.tight_malloc"] = ("--no-tight-malloc", "false")
        for text in self.set_ or []:
            name = text.partition("=")[0].strip()
            if name in given:
                flag, value = given[name]
                raise ConfigError(
                    f"{name} is given twice: {flag} {value} and --set {text}.",
                    rule="a setting has one value on the command line.",
                    remedy=f"leave out --set {text}",
                )
        return [*((flag, f"{name}={value}") for name, (flag, value) in given.items()), *(self.set_ or [])]


#: The setting of each flag that gives one a value.
_SETTINGS = {
    "max_parallel": "max_parallel",
    "memory": "memory.job",
    "num_gpus": "memory.num_gpus",
    "gpu_memory": "memory.gpu_job",
    "limit": "memory.limit",
    "reserve": "memory.reserve",
    "retries": "retries",
    "on_failure": "on_failure",
    "name": "experiment",
    "runs_dir": "runs_dir",
    "threads": "threads_per_job",
    "grace": "grace_seconds",
}


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose last parameter is a record of flags, as typer is to see it: with each flag a parameter."""
    *own, last = inspect.signature(verb, eval_str=True).parameters.values()
    record, keyword = last.annotation, inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(record, include_extras=True)
    known = {one.name: one.default for one in fields(record)}
    names = [name for kind in record.__mro__ for name in vars(kind).get("__annotations__", {}) if name in known]
    flags = [inspect.Parameter(name, keyword, default=known[name], annotation=hints[name]) for name in names]

    def call(**given: Any) -> None:
        verb(**{one.name: given.pop(one.name) for one in own}, **{last.name: record(**given)})

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__annotations__ = {one.name: one.annotation for one in [*own, *flags]}
    vars(call)["__signature__"] = inspect.Signature([*own, *flags])
    return call
