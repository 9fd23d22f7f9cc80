"""``memfit resume``: go on with a run where it stood."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from memfit.cli._run import show_run
from memfit.cli._settings import Quiet
from memfit.cli._terminal import AsJson
from memfit.pipeline import resume as resume_run
from memfit.reports import find_run


def resume(
    run: Annotated[str, typer.Argument(help="A run's folder, name or experiment.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run in the folder and with the settings that it was started with.

    Jobs that are done are kept, jobs that still run are taken over, interrupted ones go on from their checkpoints. The
    others start in the run's order, failed ones among them: with --on-failure stop the one that failed is tried again
    before those that never started. A run in which all is done stays as it is.

    Exit codes: 0 done, 2 bad input, 3 does not fit, 4 a job failed, 75 stopped and can go on.
    """
    show_run(partial(resume_run, find_run(run).path), quiet=quiet, as_json=as_json)
