"""``memfit budget``: how much memory jobs may use, and which limit says so."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from memfit.cli._terminal import AsJson, answer
from memfit.config import write_yaml
from memfit.memory import Budget
from memfit.planning import Machine
from memfit.units import parse_memory


def budget(
    as_json: AsJson = False,
    limit: Annotated[
        str | None, typer.Option(help="The most that all jobs may use, such as 8GiB.", metavar="SIZE")
    ] = None,
    reserve: Annotated[str | None, typer.Option(help="Memory to keep free, such as 512MiB.", metavar="SIZE")] = None,
    as_machine: Annotated[
        bool, typer.Option("--as-machine", help="Print machine.yaml, as run --plan --on takes it.")
    ] = False,
) -> None:
    """Show how much memory jobs may use here, and which limit says so.

    \b
    memfit budget
    memfit budget --limit 8GiB --json
    memfit budget --as-machine > machine.yaml

    It reads the limits of cgroups, Slurm, ulimit and the host. The one that leaves least counts. GPUs are listed with
    the processes of others on them.

    Exit codes: 0 done, 2 a size that cannot be read.
    """
    found = Budget.read(
        cap_bytes=None if limit is None else parse_memory(limit),
        reserve_bytes=None if reserve is None else parse_memory(reserve),
    )
    if as_machine:
        machine = Machine.here(found).model_dump(mode="json", exclude_none=True)
        answer(machine, as_json, lambda _: typer.echo(write_yaml(machine), nl=False))
        return
    from memfit.reports import print_budget

    answer(found.to_dict(), as_json, partial(print_budget, found))
