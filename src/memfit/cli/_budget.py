"""``memfit budget``: how much memory jobs may use, and which limit says so."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli._terminal import AsJson, answer
from memfit.config import write_yaml
from memfit.memory import Budget
from memfit.pipeline import resolve_settings
from memfit.planning import Machine


def budget(
    as_json: AsJson = False,
    as_machine: Annotated[
        bool, typer.Option("--as-machine", help="Print machine.yaml, as run --plan --on takes it.")
    ] = False,
) -> None:
    """Show how much memory jobs may use here, and which limit says so.

    \b
    memfit budget
    MEMFIT_MEMORY__LIMIT=8GiB memfit budget --json
    memfit budget --as-machine > machine.yaml

    It reads the limits of cgroups, Slurm, ulimit, the host, and your own of memory.limit. The one that leaves least
    counts. GPUs are listed with the processes of others on them.

    Exit codes: 0 done, 2 a setting that cannot be read.
    """
    memory = resolve_settings(values={"experiment": "budget"}).value.memory
    found = Budget.read(cap_bytes=memory.limit, reserve_bytes=memory.reserve)
    if as_machine:
        machine = Machine.here(found).model_dump(mode="json", exclude_none=True)
        answer(machine, as_json, [write_yaml(machine).rstrip()])
        return
    from memfit.reports import view_budget

    answer(found.to_dict(), as_json, view_budget(found))
