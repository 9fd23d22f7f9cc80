"""The command line: one file per verb, errors turned into their exit codes here."""

from __future__ import annotations

import errno
import importlib.metadata
import sys
from typing import Annotated, NoReturn

import typer

from memfit.cli._budget import budget
from memfit.cli._run import run
from memfit.errors import MemfitError, UsageError

app = typer.Typer(
    help="Training that fits: plan, run, recover and explain the memory of PyTorch jobs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(budget)
app.command()(run)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memfit {importlib.metadata.version('memfit')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of memfit's own is printed in its three parts and gives the exit code."""
    try:
        app()
    except MemfitError as error:
        _end(error)
    except OSError as error:
        if error.errno is None or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        _end(_refused(error))


def _end(error: MemfitError) -> NoReturn:
    print(f"memfit: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _refused(error: OSError) -> UsageError:
    """What the operating system refused to do with a file, as an error of three parts."""
    what = f"{error.filename or 'a file'}: {error.strerror}."
    rule = f"the operating system refused it ({errno.errorcode.get(error.errno or 0, error.errno)})."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space there, then run the same command again: it goes on where it stood"
    else:
        remedy = "make that path usable, or name another with --set runs_dir=... or --set panels_dir=..."
    return UsageError(what, rule=rule, remedy=remedy)
