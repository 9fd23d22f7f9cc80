"""``memfit map``: a short name for ``memfit run --param ... -- COMMAND``."""

from __future__ import annotations

import typer

from memfit.cli._run import start_commands
from memfit.cli._settings import Flags, with_flags
from memfit.errors import UsageError


@with_flags
def map_(context: typer.Context, *, flags: Flags) -> None:
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
    if not flags.param and flags.param_file is None:
        raise UsageError(
            "memfit map was given no parameter.",
            rule="it runs a command for every combination of its parameters.",
            remedy="add for example --param fold=1..5, or run it once: memfit run -- ...",
        )
    start_commands(context, command, flags)
