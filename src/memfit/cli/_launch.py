"""``memfit launch``: the files that start a training elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from memfit import slurm
from memfit.cli._settings import join, set_flag, settings_of, tight_flag, with_flags
from memfit.cli._terminal import AsJson, answer, console
from memfit.errors import UsageError
from memfit.pipeline import plan_launch
from memfit.planning import Launch, LaunchFormat, render


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    accept_tight: bool = tight_flag()
    set_: list[str] | None = set_flag()
    as_json: AsJson = False


@with_flags
def launch(
    config: Annotated[Path, typer.Argument(help="A config of memfit run; its block launch: is for this command.")],
    format_: Annotated[LaunchFormat, Option("--format", help="Which file to print.")] = "sbatch",
    *,
    flags: Flags,
) -> None:
    """Print what starts a config elsewhere: a batch script or a Kubernetes Job.

    \b
    memfit launch config.yaml
    memfit launch config.yaml | sbatch
    memfit launch config.yaml --format kubernetes | kubectl apply -f -

    It changes nothing. Memory and /dev/shm follow from the plan (memfit run config.yaml
    --plan). Secrets appear as names of variables.

    Exit codes: 0 done, 2 bad settings, 3 more memory than a node has, or tight (under 5 % left).
    """
    made = plan_launch(config, overrides=join(settings_of(flags), flags.set_), form=format_)
    notes = [note] if (note := _check_room(made, format_)) else []
    text = render(made, format_)
    answer({"format": format_, "text": text, "figures": made.figures(), "notes": notes}, flags.as_json, [text.rstrip()])
    for note in () if flags.as_json else notes:
        console(stderr=True).say(f"memfit: {note}")


def _check_room(made: Launch, form: LaunchFormat) -> str:
    """Compare with the partition's largest node, or say what could not be compared."""
    if form == "sbatch":
        try:
            partition, memory, _ = slurm.read_largest_node(made.slurm["partition"])
        except (slurm.NoAnswerError, UsageError) as error:
            what = error.what if isinstance(error, UsageError) else str(error)
            return f"memory was not compared with the partition's nodes: {what}"
        made.check_node(memory, f"the largest node of partition {partition}")
        return ""
    return ""
