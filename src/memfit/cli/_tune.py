"""``memfit tune``: search settings, each trial a run of the workload, all under one budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from memfit.checks import check_one_given
from memfit.cli._run import follow
from memfit.cli._settings import Output, Text, flag, join, set_flag, settings_of, with_flags
from memfit.cli._terminal import answer
from memfit.errors import StoppedError, UsageError
from memfit.reports import find_run, summarize_study, view_study
from memfit.rundir import RunDir, read
from memfit.tuning import TuneResult, of_command
from memfit.tuning import tune as search


@dataclass(frozen=True)
class TuneFlags(Output):
    """The flags of this verb."""

    n_trials: int | None = flag("How many trials. More than before goes on.", "N", "tune.n_trials")
    max_epochs: int | None = flag("Epochs of each trial: sets what tune.epochs names.", "N", min=1)
    study_name: Text = flag("The study's name, a folder below the runs.", "NAME", "experiment")
    param: list[str] | None = flag(
        "For a command: lr=1e-5..1e-3:log, layers=2..4 or batch=32,64. Repeatable.", "NAME=VALUES"
    )
    objective: Text = flag("For a command: the number to improve, from its last line or reports.", "NAME")
    minimize: bool = flag("For a command: less is better.")
    limit: Text = flag("The most memory of all jobs together.", "SIZE", "memory.limit")
    set_: list[str] | None = set_flag()
    new: bool = flag("Start a new study; do not continue the newest.")
    force: bool = flag("Also run jobs that do not fit the budget.")
    status: Text = flag("Show a study, running or ended; start nothing.", "STUDY")


@with_flags
def tune(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(help="A YAML config with a section tune.", metavar="CONFIG", show_default=False)
    ] = None,
    *,
    flags: TuneFlags,
) -> None:
    """Search settings: many short trainings under one memory budget.

    \b
    memfit tune config.yaml --n-trials 40 --max-epochs 10
    memfit tune --param lr=1e-5..1e-2:log --objective loss --minimize -- python train.py --lr {lr}
    memfit tune --status my-study
    memfit run runs/my-study/run_.../best.yaml

    The config's section tune names what is searched:

    \b
    tune:
      space:
        - {name: params.train.learning_rate, low: 1.0e-5, high: 1.0e-3, log: true}
        - {name: params.train.batch_size, choices: [2048, 4096, 8192]}
      objective: fold.rank_ic
      direction: maximize
      epochs: params.train.num_epochs

    memfit refuses trials that cannot fit before they start, ends bad ones early, and writes best.yaml. Killed, the same
    command goes on, and the study is the same as without the kill.

    Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4 no trial completed, 75 stopped, 130 interrupted.
    """
    if flags.status:
        state = read(find_run(flags.status))
        answer(summarize_study(state), flags.as_json, view_study(state))
        return
    command: tuple[str, ...] | None = context.obj
    check_one_given(
        {f"a config ({source})": source, "a command": command or None},
        none="memfit tune was given nothing to search",
        rule="it searches the settings of a config, or the parameters of a command behind --.",
        remedy="write memfit tune config.yaml, or memfit tune --param lr=0.1,0.01 --objective loss -- COMMAND {lr}",
    )
    what: Any = source if source is not None else _of_command(command or (), flags)
    how: dict[str, Any] = {"max_epochs": flags.max_epochs, "new": flags.new, "force": flags.force}
    show_study(partial(search, what, overrides=join(settings_of(flags), flags.set_), **how), flags)


def _of_command(command: tuple[str, ...], flags: TuneFlags) -> dict[str, Any]:
    if not flags.param or not flags.objective:
        raise UsageError(
            f"memfit tune was given a command and no {'--objective' if flags.param else '--param'}.",
            rule="a search over a command needs its parameters and the number to improve.",
            remedy="write for example --param lr=1e-5..1e-2:log --objective loss --minimize",
        )
    direction = "minimize" if flags.minimize else "maximize"
    tuned = {"objective": f"trial.{flags.objective}", "direction": direction}
    return of_command(command, flags.param, flags.study_name or "tune", tuned)


def show_study(start: Callable[..., TuneResult], flags: Output) -> NoReturn:
    """Show a study while it goes on, print what it found, and exit with its code."""
    result, log, _ = follow(start, flags)
    state = read(RunDir(result.path))
    answer(summarize_study(state), flags.as_json, view_study(state))
    if result.exit_code == StoppedError.exit_code:
        log.say("\nstopped; the same command goes on")
    raise typer.Exit(result.exit_code)
