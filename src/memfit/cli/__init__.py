"""The command line: the file of a verb is loaded when it is called; errors are turned into their exit codes here."""

from __future__ import annotations

import errno
import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from memfit.errors import MemfitError, UsageError, nearest
from memfit.masking import mask, strip_controls

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["main"]

#: What users' commands begin with.
_PROGRAM = re.compile(r"python[0-9.]*|torchrun|accelerate|deepspeed|bash|sh")
#: The verbs: the file of each, and what it is for.
_VERBS = {
    "run": ("_run", "Run a workload, a function or a command under a budget."),
    "tune": ("_tune", "Search settings: many short trainings under one budget."),
    "watch": ("_runs", "Show a run that goes on, from any terminal."),
    "ps": ("_runs", "List your live runs on this host and their jobs."),
    "stop": ("_runs", "Stop a run, or one job, at a checkpoint."),
    "resume": ("_runs", "Continue a run that was stopped or killed."),
    "budget": ("_budget", "Show how much memory jobs may use, and which limit says so."),
    "report": ("_report", "Write a run as one HTML page with pictures."),
    "launch": ("_launch", "Print the file that starts a training on Slurm or in a container."),
    "estimate": ("_estimate", "Say what device memory a training will take, and what fits."),
    "doctor": ("_doctor", "Find what will go wrong on this machine, or with a command."),
    "prove": ("_prove", "Say before a long run whether a resume gives the same bytes."),
    "diagnose": ("_diagnose", "Say what killed a job, and what to do about it."),
    "compare": ("_compare", "Say what differs between two runs, and which is better."),
    "panel": ("_panel", "Build, check, extend and prune panels."),
}
#: Those that take a command behind --.
_OF_COMMANDS = ("run", "tune", "doctor", "prove")
#: What the help of a verb ends with.
_EPILOGS = {
    "run": "\b\nSettings for --set or a config; docs/commands.md lists all:\n"
    "  params.NAME=1  seed=7  units=1-3  max_parallel=4  threads_per_job=2  memory.limit=16GiB\n"
    "  memory.slack=0.2  memory.job=2GiB  notify.url_variable=NOTIFY_URL  track.to=[tensorboard]\n"
    "  canary_seconds=600  canary_phases=[train,validate,checkpoint]"
}
#: What people type, and how memfit calls it.
_MEANT = {
    **dict.fromkeys(("status", "list", "ls", "jobs"), "memfit ps"),
    **dict.fromkeys(("logs", "log", "tail", "top"), "memfit watch"),
    **dict.fromkeys(("kill", "cancel"), "memfit stop"),
    "help": "memfit --help",
    **dict.fromkeys(("--jobs", "-j", "-n", "--n-jobs", "--parallel"), "--max-parallel"),
    "--timeout": "-- timeout 1h python train.py; on Slurm: --set slurm.time=01:00:00",
}


class _Verbs(TyperGroup):
    """The verbs above, and those that installed packages name as entry points in the group ``memfit.verbs``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_VERBS, *sorted(_entry_points().names)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List every verb with its line; only verbs of other packages are loaded for that."""
        rows = [(name, text) for name, (_, text) in _VERBS.items()]
        rows += [
            (name, self.get_command(ctx, name).get_short_help_str(limit=120)) for name in sorted(_entry_points().names)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _VERBS:
            verb, text = load_verb(cmd_name), _VERBS[cmd_name][1]
        elif cmd_name in (found := _entry_points()).names:
            verb, text = found[cmd_name].load(), None
        elif ctx.resilient_parsing:  # a shell that completes a line
            return None
        else:
            raise UsageError(
                f"memfit has no verb '{cmd_name}'.",
                rule="memfit --help lists the verbs.",
                remedy=_suggest(cmd_name, self.list_commands(ctx)),
            )
        if not isinstance(verb, typer.Typer):
            one = typer.Typer(add_completion=False, rich_markup_mode=None)
            usage = "[OPTIONS] [-- COMMAND...]" if cmd_name in _OF_COMMANDS else None
            width, end = {"max_content_width": 100}, _EPILOGS.get(cmd_name)
            one.command(cmd_name, options_metavar=usage, short_help=text, epilog=end, context_settings=width)(verb)
            return typer.main.get_command(one)
        group = typer.main.get_command(verb)
        group.name, group.short_help = cmd_name, text
        return group


def load_verb(name: str) -> Any:
    """Load the file of a verb of memfit's own; None if there is no such verb."""
    return getattr(importlib.import_module(f"memfit.cli.{_VERBS[name][0]}"), name) if name in _VERBS else None


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # slow to load

    return entry_points(group="memfit.verbs")


app = typer.Typer(
    cls=_Verbs,
    help="Training that fits: plan, run, recover and explain the memory of PyTorch jobs.\n\n"
    "Begin with: memfit budget, then memfit run -- python train.py",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"memfit {version('memfit')}")
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
    for stream in filter(None, (sys.stdout, sys.stderr)):  # what a job writes passes by as bytes, and stays as it is
        stream.write = partial(lambda write, text: write(mask(text, by_name=False)), stream.write)
    words, command = _split(sys.argv[1:])
    try:
        sys.exit(app(args=words, prog_name="memfit", obj=command, standalone_mode=False))
    except MemfitError as error:
        _end(error)
    except OSError as error:
        if error.errno is None or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        _end(_refused(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's errors; typer brings a click of its own, or uses the other
            raise
        _end(_lost_command(words, command) or _misused(error, " ".join(["memfit", *words[:1]])))


def _split(words: list[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """memfit's own words, and the user's command: all that stands behind the first -- of a verb that runs commands."""
    if "--" not in words or words[0] not in _OF_COMMANDS:
        return words, None
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def _lost_command(words: list[str], command: tuple[str, ...] | None) -> UsageError | None:
    """Return the error for a command that was written without the -- before it."""
    at = next((at for at, word in enumerate(words) if at and _PROGRAM.fullmatch(word)), None)
    if command is not None or at is None or words[0] not in _OF_COMMANDS:
        return None
    return UsageError(
        f"{words[at]} begins a command, and there is no -- before it.",
        rule="the command stands behind --; what stands before it are memfit's own options.",
        remedy=f"write: {shlex.join(['memfit', *words[:at], '--', *words[at:]])}",
    )


def _end(error: MemfitError) -> NoReturn:
    print(f"memfit: {strip_controls(str(error))}", file=sys.stderr)
    sys.exit(error.exit_code)


def _misused(error: Any, path: str) -> MemfitError:
    """Return an error of click's (a flag that is unknown, a word too many) as one of three parts."""
    context, text = error.ctx, error.format_message()
    if context is not None and text == context.get_help():  # words are needed and none was given
        error.show()
        sys.exit(error.exit_code)
    path, text = context.command_path if context else path, text.partition(" (Possible")[0].rstrip(".")
    flags = [flag for one in context.command.params for flag in one.opts] if context else []
    name = error.option_name if hasattr(error, "possibilities") else ""
    near = _suggest(name, flags) if name else ""
    return UsageError(
        f"{path}: {text[:1].lower()}{text[1:]}.",
        rule=" ".join(context.get_usage().split()) if context else f"{path} --help says what it takes.",
        remedy=near if near.startswith("did") else f"see {path} --help",
    )


def _suggest(name: str, known: Sequence[str]) -> str:
    """Return what was probably meant by a verb or a flag."""
    meant = _MEANT.get(name, "")
    return f"did you mean {meant}?" if meant and (meant in known or " " in meant) else nearest(name, known)


def _refused(error: OSError) -> UsageError:
    """What the operating system refused to do with a file, as an error of three parts."""
    what = f"{error.filename or 'a file'}: {error.strerror}."
    rule = f"the operating system refused it ({errno.errorcode.get(error.errno or 0, error.errno)})."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space there, then run the same command again: it goes on where it stood"
    else:
        remedy = "make that path usable, or name another one"
    return UsageError(what, rule=rule, remedy=remedy)
