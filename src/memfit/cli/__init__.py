"""The command line: one file per verb, errors turned into their exit codes here."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from memfit.cli._budget import budget
from memfit.cli._run import run
from memfit.errors import MemfitError

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
        print(f"memfit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
