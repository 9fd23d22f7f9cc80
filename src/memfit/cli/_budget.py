"""``memfit budget``: what may be used here, who says so, under which permission."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from memfit.cli._terminal import AsJson
from memfit.memory import Budget
from memfit.units import parse_bytes


def budget(
    as_json: AsJson = False,
    limit: Annotated[
        str | None, typer.Option(help="Your own cap on what memfit starts, for example 8GiB.", metavar="SIZE")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="What to keep back of the headroom, for example 512MiB.", metavar="SIZE")
    ] = None,
) -> None:
    """Show what memory may be used here, who says so, and under which permission.

    Every limit is shown: control groups up through their ancestors, Slurm, ulimit, the host, your own cap; the one that
    leaves least binds. GPUs are shown with the processes of others on them.

    Exit codes: 0 done, 2 a size that cannot be read.
    """
    found = Budget.read(
        cap_bytes=None if limit is None else parse_bytes(limit),
        reserve_bytes=None if reserve is None else parse_bytes(reserve),
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    from rich.console import Console

    from memfit.reports import print_budget

    print_budget(found, Console())
