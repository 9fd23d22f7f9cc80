"""``memfit doctor``: find problems of this machine, or of a command, before it runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from memfit.cli._terminal import AsJson, answer
from memfit.errors import UsageError
from memfit.units import parse_bytes


def doctor(
    context: typer.Context,
    workers: Annotated[int | None, Option(min=0, help="Loader workers, if the script does not say.")] = None,
    batch: Annotated[str | None, Option(help="The size of a batch, such as 64MiB, to check /dev/shm.")] = None,
    strict: Annotated[bool, Option("--strict", help="Treat warnings as problems.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="Also print the checks that passed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find problems of this machine, or of a command, without running the command.

    \b
    memfit doctor
    memfit doctor -- python train.py

    It reads the script's imports, loaders and forks, and starts its interpreter once. Each finding has a reason and a
    remedy.

    Exit codes: 0 no problem, 2 a problem (with --strict also a warning), or bad usage.
    """
    from memfit.config import DEFAULT
    from memfit.doctor import Setup, examine
    from memfit.pipeline import resolve_settings
    from memfit.reports import view_checks

    settings = resolve_settings(values={"experiment": "doctor"})
    are_set = settings.origins["threads_per_job"] != DEFAULT
    setup = Setup(
        threads=settings.value.threads_per_job if are_set else None,
        cuda_allocator=settings.value.memory.cuda_allocator,
        runs_dir=Path(settings.value.runs_dir),
        num_workers=workers,
        batch_bytes=None if batch is None else parse_bytes(batch),
    )
    checks = examine(context.obj or (), setup)
    num = Counter(check.verdict for check in checks)
    last = f"problems: {num['problem']}, warnings: {num['warning']}, ok: {num['ok']} (--verbose lists all)"
    shown = [check for check in checks if verbose or check.verdict != "ok"]
    answer([check.to_dict() for check in checks], as_json, [*view_checks(shown, reasons=True), last])
    raise typer.Exit(UsageError.exit_code if num["problem"] or (strict and num["warning"]) else 0)
