"""The flags that say how jobs are run, the same for ``memfit run`` and ``memfit map``, and the settings they set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from memfit.errors import ConfigError

MaxParallel = Annotated[
    str | None, typer.Option(help="The most jobs at once, or 'auto' for as many as fit.", metavar="auto|N")
]
Memory = Annotated[
    str | None,
    typer.Option(help="What one job takes, as a hint, or '{name}' of a parameter; it is measured.", metavar="SIZE"),
]
GpuMemory = Annotated[
    str | None, typer.Option(help="What one job takes on a GPU; it is placed on one with that room.", metavar="SIZE")
]
Limit = Annotated[str | None, typer.Option(help="Your own cap on all jobs together.", metavar="SIZE")]
Reserve = Annotated[str | None, typer.Option(help="What is never lent to jobs.", metavar="SIZE")]
Retries = Annotated[
    str | None, typer.Option(help="How often a job that ran out of memory, or was killed, starts again.", metavar="N")
]
OnFailure = Annotated[
    str | None, typer.Option(help="When a job fails: go on with the others, or stop them.", metavar="stop|continue")
]
Name = Annotated[str | None, typer.Option(help="The experiment: names the folder below the runs.", metavar="NAME")]
RunsDir = Annotated[str | None, typer.Option(help="The folder of all runs.", metavar="FOLDER")]
Threads = Annotated[str | None, typer.Option(help="Threads of each job's numerical libraries.", metavar="N")]
Grace = Annotated[str | None, typer.Option(help="How long a job that is asked to stop may take to.", metavar="SECONDS")]
NoTightMalloc = Annotated[
    bool, typer.Option("--no-tight-malloc", help="Leave glibc's allocator as it is: faster, and keeps freed memory.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting, for example memory.slack=0.2. Repeatable.", metavar="KEY=VALUE"),
]
New = Annotated[bool, typer.Option("--new", help="Start over instead of going on with the newest run.")]
Force = Annotated[bool, typer.Option("--force", help="Run also what does not fit the budget.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON; the log goes to stderr.")]

#: The setting of each flag.
_SETTINGS = {
    "max_parallel": "max_parallel",
    "memory": "memory.job",
    "gpu_memory": "memory.gpu_job",
    "limit": "memory.limit",
    "reserve": "memory.reserve",
    "retries": "retries",
    "on_failure": "on_failure",
    "name": "experiment",
    "runs_dir": "runs_dir",
    "threads": "threads_per_job",
    "grace": "grace_seconds",
    "folds": "folds",
}


def overrides_of(flags: Mapping[str, Any]) -> list[str]:
    """The flags of a command as overrides of settings.

    Raises:
        ConfigError: If a setting is given by its flag and with ``--set``.
    """
    given = {setting: (flag, flags[flag]) for flag, setting in _SETTINGS.items() if flags.get(flag) is not None}
    if "memory.job" in given and "{" in given["memory.job"][1]:
        flag, text = given.pop("memory.job")
        given["memory.job_of"] = (flag, json.dumps(text))
    if flags.get("no_tight_malloc"):
        given["memory.tight_malloc"] = ("no_tight_malloc", "false")
    for text in flags.get("set_") or []:
        name = text.partition("=")[0].strip()
        if name in given:
            flag, value = given[name]
            raise ConfigError(
                f"{name} is given twice: --{flag.replace('_', '-')} {value} and --set {text}.",
                rule="a setting has one value on the command line.",
                remedy=f"leave out --set {text}",
            )
    return [*(f"{name}={value}" for name, (_, value) in given.items()), *(flags.get("set_") or [])]
