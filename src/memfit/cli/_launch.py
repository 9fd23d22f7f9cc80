"""``memfit launch``: the files that start a training elsewhere."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from memfit import config as settings
from memfit import slurm
from memfit.cli._settings import AcceptTight, Set, with_flags
from memfit.cli._terminal import AsJson, Console, answer
from memfit.errors import UsageError
from memfit.memory import Budget, Footprint
from memfit.planning import Launch, LaunchConfig, LaunchFormat, Machine, Measured
from memfit.reports import find_run
from memfit.rundir import read
from memfit.units import format_bytes


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    measured: Annotated[str | None, Option(help="Take memory and time of an epoch from this run.", metavar="RUN")] = (
        None
    )
    on: Annotated[Path | None, Option(help="Compare with the machine that this file describes.", metavar="YAML")] = None
    accept_tight: AcceptTight = False
    set_: Set = None
    test_only: Annotated[bool, Option("--test-only", help="Let sbatch check the script; submit nothing.")] = False
    submit: Annotated[bool, Option("--submit", help="Hand the script to sbatch.")] = False
    as_json: AsJson = False


@with_flags
def launch(
    config: Annotated[Path, typer.Argument(help="A YAML file that describes the training; see docs/launch.md.")],
    format_: Annotated[LaunchFormat, Option("--format", help="Which file to print.")] = "sbatch",
    *,
    flags: Flags,
) -> None:
    """Print a batch script, a Compose file, a Dockerfile, .dockerignore or .env for a training, with computed sizes.

    \b
    memfit launch job.yaml
    memfit launch job.yaml --measured trial --test-only
    memfit launch job.yaml --on machine.yaml
    memfit launch job.yaml --format compose > compose.yaml

    It changes nothing unless --submit is given. Memory follows from the peak of one rank, /dev/shm from the batches of
    the loader workers, cores from the workers, the time limit from the epochs. Secrets appear as names of variables.

    Exit codes: 0 done, 2 bad settings or refused by Slurm, 3 more memory than a node has, or tight (under 5 % left).
    """
    if (flags.submit or flags.test_only) and format_ != "sbatch":
        raise UsageError(
            f"--{'submit' if flags.submit else 'test-only'} was given with --format {format_}.",
            rule="Slurm takes batch scripts only.",
            remedy="leave --format out",
        )
    if config.is_file() and not {"target", "stages"}.isdisjoint(settings.read_file(config)):
        raise UsageError(
            f"{config} is a config of memfit run.",
            rule="memfit launch takes a file of its own, whose command may start that config.",
            remedy=f"write a file with these three lines: name: job, command: memfit run {config}, memory: 4GiB",
        )
    given = [*(flags.set_ or []), *(["accept_tight=true"] if flags.accept_tight else [])]
    found = settings.resolve(LaunchConfig, file=config, env={}, overrides=given).value
    made = Launch.of(found, _measured(flags.measured) if flags.measured is not None else None, format_)
    notes = []
    if flags.on is not None:
        made.check_machine(Machine.read(flags.on), str(flags.on))
    else:
        notes.append(_check_room(made, format_))
    text = made.render(format_)
    if flags.submit or flags.test_only:
        notes.append(_hand_over(text, is_test=flags.test_only))

    def show(_: Console) -> None:
        typer.echo(text, nl=False)
        for note in filter(None, notes):
            typer.echo(f"memfit: {note}", err=True)

    answer({"format": format_, "text": text, "figures": made.figures(), "notes": notes}, flags.as_json, show)


def _measured(name: str) -> Measured:
    state = read(find_run(name))
    found = [(Footprint.from_dict(one.footprint), one) for one in state.jobs.values() if one.footprint is not None]
    if not found:
        raise UsageError(
            f"no job of {state.run.path} was measured.",
            rule="--measured takes the peak of a run's largest job.",
            remedy="name a run whose jobs have trained and validated, or give --set memory.node=8GiB",
        )
    footprint, largest = max(found, key=lambda one: one[0].private_bytes)
    seconds = largest.seconds / largest.epochs_done if largest.seconds and largest.epochs_done >= 1 else None
    return Measured(footprint.private_bytes, footprint.shared_bytes, seconds, state.run.path.name)


def _check_room(made: Launch, form: LaunchFormat) -> str:
    """Compare with the partition's largest node, or say what could not be compared."""
    if form == "sbatch":
        try:
            partition, size, _ = slurm.read_largest_node(made.config.slurm.partition)
        except (slurm.NoAnswerError, UsageError) as error:
            what = error.what if isinstance(error, UsageError) else str(error)
            return f"memory was not compared with the partition's nodes: {what}"
        made.check_node(size, f"the largest node of partition {partition}")
        return ""
    limit = Budget.read().binding.limit_bytes
    if form == "compose" and made.memory_bytes > limit:
        return f"this host has {format_bytes(limit)}: the container needs {format_bytes(made.memory_bytes)}"
    return ""


def _hand_over(text: str, *, is_test: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        path = Path(folder) / "job.sh"
        path.write_text(text)
        try:
            if is_test:
                return slurm.check_script(path)
            return f"submitted as job {slurm.submit_script(path)}"
        except slurm.NoAnswerError as error:
            raise UsageError(
                f"Slurm does not answer: {error}.",
                rule="sbatch asks the controller.",
                remedy="look with squeue whether it got the job, then give the command again",
            ) from error
