"""``memfit doctor``: find problems of this machine, or of a command, before it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from typer import Option

from memfit.cli._settings import Text, with_flags
from memfit.cli._terminal import AsJson, Console, bar, console
from memfit.errors import UsageError
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.checks import Check
    from memfit.doctor import Setup

_STYLES = {"problem": "bold red", "warning": "yellow", "ok": "green"}


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    workers: Annotated[int | None, Option(min=0, help="Loader workers, if the script does not say.")] = None
    batch: Annotated[Text, Option(help="The size of a batch, such as 64MiB, to check /dev/shm.")] = None
    threads: Annotated[int | None, Option(min=1, help="Threads of each job's numerical libraries.")] = None
    deep: Annotated[
        bool, Option("--deep", help="Import the script's modules in a child process and count its threads.")
    ] = False
    secrets: Annotated[
        bool, Option("--secrets", help="Look for keys and passwords in this repository's files and history instead.")
    ] = False
    strict: Annotated[bool, Option("--strict", help="Treat warnings as problems.")] = False
    verbose: Annotated[bool, Option("--verbose", help="Also print the checks that passed.")] = False
    as_json: AsJson = False


@with_flags
def doctor(context: typer.Context, *, flags: Flags) -> None:
    """Find problems of this machine, or of a command, without running the command.

    \b
    memfit doctor
    memfit doctor -- python train.py
    memfit doctor --secrets

    It reads the script's imports, loaders and forks, and starts its interpreter once. Each finding has a reason and a
    remedy.

    Exit codes: 0 no problem, 2 a problem (with --strict also a warning), or bad usage.
    """
    from memfit.doctor import examine, scan_secrets

    if flags.secrets:
        with bar("scanning") as progress:
            checks = scan_secrets(Path.cwd(), progress)
    else:
        checks = examine(context.obj or (), _setup(flags))
    if flags.as_json:
        typer.echo(json.dumps([check.to_dict() for check in checks], indent=2))
    else:
        _print(checks, console(), verbose=flags.verbose)
    bad = {"problem", "warning"} if flags.strict else {"problem"}
    raise typer.Exit(UsageError.exit_code if any(check.verdict in bad for check in checks) else 0)


def _setup(flags: Flags) -> Setup:
    """Return how the command is to run: by the flags, then by the settings of ``memfit run``."""
    from memfit.config import DEFAULT
    from memfit.doctor import Setup
    from memfit.pipeline import resolve_settings

    settings = resolve_settings()
    are_set = settings.origins["threads_per_job"] != DEFAULT
    return Setup(
        threads=settings.value.threads_per_job if flags.threads is None and are_set else flags.threads,
        tight_malloc=settings.value.memory.tight_malloc,
        cuda_allocator=settings.value.memory.cuda_allocator,
        runs_dir=Path(settings.value.runs_dir),
        num_workers=flags.workers,
        batch_bytes=None if flags.batch is None else parse_bytes(flags.batch),
        deep=flags.deep,
    )


def _print(checks: Sequence[Check], out: Console, *, verbose: bool) -> None:
    """Print problems and warnings with their remedies, and the counts; all checks if verbose."""
    bad = [check for check in checks if verbose or check.verdict != "ok"]
    width = max((len(check.check) for check in bad), default=0)
    for check in bad:
        style = _STYLES[check.verdict]
        head = f"[{style}]{check.verdict:<7}[/{style}] [bold]{check.check:<{width}}[/bold] "
        out.print(head + escape(check.finding), soft_wrap=True)
        table = Table.grid(padding=(0, 1))
        for name, text in (("why", check.reason), ("do", check.remedy), ("from", check.source)):
            if text:
                table.add_row(f"[dim]{name}[/dim]", escape(text))
        out.print(Padding(table, (0, 0, 0, 8 + width + 1), expand=False))
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("problem", "warning", "ok")}
    out.print(f"problems: {counts['problem']}, warnings: {counts['warning']}, ok: {counts['ok']} (--verbose lists all)")
