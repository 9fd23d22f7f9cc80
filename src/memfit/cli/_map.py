"""``memfit map``: a command for every combination of parameters, under one budget."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli._run import close
from memfit.cli._settings import Flags, with_flags
from memfit.cli._terminal import console, survive_hangup
from memfit.errors import UsageError
from memfit.pipeline import expand, fill, read_budget, resolve_settings, run_commands
from memfit.reports import LiveRun, print_budget


@with_flags
def map_(
    context: typer.Context,
    param: Annotated[
        list[str] | None,
        typer.Option(help="Values of one parameter: fold=1..5, lr=1e-3,1e-4. Repeatable.", metavar="NAME=VALUES"),
    ] = None,
    param_file: Annotated[
        Path | None, typer.Option(help="A CSV file whose rows are combinations.", metavar="CSV", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and the budget; start none.")] = False,
    *,
    flags: Flags,
) -> None:
    """Run the command behind -- for every combination of parameters, under one memory budget.

    memfit map --param fold=1..5 --param lr=1e-3,1e-4 -- python train.py --fold {fold} --lr {lr}

    Values are ranges (1..5, 1..9..2), lists, or both; quotes as in CSV keep a comma: name="a,b". {name} is replaced
    wherever it stands in the command; all other braces stay. The first commands are measured; as many run at once as
    fit. The same command goes on where the last one stood, with what is not done yet.

    Exit codes: 0 done, 2 bad input, 3 does not fit, 4 a command failed, 75 stopped and can go on.
    """
    command: tuple[str, ...] | None = context.obj
    if not command:
        raise UsageError(
            "memfit map was given no command.",
            rule="the command stands behind --, with a {name} for each parameter.",
            remedy="write for example: memfit map --param fold=1..5 -- python train.py --fold {fold}",
        )
    if not param and param_file is None:
        raise UsageError(
            "memfit map was given no parameter.",
            rule="it runs a command for every combination of its parameters.",
            remedy="add for example --param fold=1..5, or run it once: memfit run -- ...",
        )
    settings = resolve_settings(flags.overrides())
    if dry_run:
        words = [*command, *filter(None, [settings.value.memory.job_of])]
        commands = [fill(command, combination) for combination in expand(words, param or [], param_file)]
        budget = read_budget(settings.value)
        if flags.as_json:
            typer.echo(json.dumps({"commands": commands, "budget": budget.to_dict()}, indent=2))
        else:
            for line in commands:
                typer.echo(shlex.join(line))
            typer.echo("")
            print_budget(budget, console())
        return
    log = console(stderr=flags.as_json)
    live = LiveRun(log, quiet=flags.quiet)
    survive_hangup()
    try:
        result = run_commands(
            command,
            params=param or [],
            param_file=param_file,
            settings=settings,
            new=flags.new,
            force=flags.force,
            view=live.show,
        )
    finally:
        live.close()
    close(result, log, as_json=flags.as_json, view=live.view)
