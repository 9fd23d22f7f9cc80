"""The command line: one file per verb, errors turned into their exit codes here."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, NoReturn

import typer

from memfit.cli._average import average
from memfit.cli._backtest import backtest
from memfit.cli._bench import bench
from memfit.cli._budget import budget
from memfit.cli._compare import compare
from memfit.cli._diagnose import diagnose
from memfit.cli._doctor import doctor
from memfit.cli._estimate import estimate
from memfit.cli._map import map_
from memfit.cli._panel import panel
from memfit.cli._ps import ps
from memfit.cli._resume import resume
from memfit.cli._run import run
from memfit.cli._stop import stop
from memfit.cli._watch import watch
from memfit.cli._workflow import workflow
from memfit.errors import MemfitError, UsageError

app = typer.Typer(
    help="Training that fits: plan, run, recover and explain the memory of PyTorch jobs.\n\n"
    "Begin with: memfit budget, then memfit run -- python train.py",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(options_metavar="[OPTIONS] [-- COMMAND...]", short_help="Run folds, or one command, under a budget.")(run)
app.command(
    "map", options_metavar="[OPTIONS] -- COMMAND...", short_help="Run a command for every combination of parameters."
)(map_)
app.command(short_help="Train a fold, pass a gate, train the others, judge them all.")(workflow)
app.command(short_help="Show a run that goes on, from any terminal.")(watch)
app.command(short_help="List your live runs on this host and their jobs.")(ps)
app.command(short_help="Have a run, or one job, checkpoint and end.")(stop)
app.command(short_help="Go on with a run that was stopped or killed.")(resume)
app.command(short_help="Show what memory may be used, and who says so.")(budget)
app.command(short_help="Say what device memory a training will take, and what fits.")(estimate)
app.command(options_metavar="[OPTIONS] [-- COMMAND...]", short_help="Examine this place, or a command in it.")(doctor)
app.command(short_help="Say what killed a job, and what to do about it.")(diagnose)
app.command(short_help="Average checkpoints of one training.")(average)
app.command(short_help="Backtest checkpoints on dates that they never saw.")(backtest)
app.command(short_help="Say whether one run is better than another, by their days.")(compare)
app.add_typer(panel, name="panel", short_help="Build, check, extend, prune and export panels.")
app.add_typer(bench, name="bench", short_help="Measure a part of a training on this machine.")


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

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
    words, command = _split(sys.argv[1:])
    try:
        app(args=words, obj=command)
    except MemfitError as error:
        _end(error)
    except OSError as error:
        if error.errno is None or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        _end(_refused(error))


def _split(words: list[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """memfit's own words, and the user's command: all that stands behind the first -- of a verb that runs commands."""
    if words[:1] not in (["run"], ["map"], ["doctor"]) or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


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
        remedy = "make that path usable, or name another one"
    return UsageError(what, rule=rule, remedy=remedy)
