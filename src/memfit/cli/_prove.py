"""``memfit prove``: run a training twice for some steps, and say whether a stop and resume gives the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from memfit.cli._terminal import AsJson, answer, console
from memfit.errors import DoesNotFitError, JobFailedError, UsageError
from memfit.files import read_json, write_json
from memfit.rundir import PROVE_OUTPUTS, PROVE_PLACE, PROVE_PLAN, PROVE_SEALED, PROVE_VARIABLE
from memfit.units import format_count, list_some

_CODES = {"same bytes": 0, "NOT the same": DoesNotFitError.exit_code, "not proved": JobFailedError.exit_code}
_TOLD_SECONDS, _END_SECONDS, _LINES = 5.0, 10.0, 8

Reports = list[dict[str, Any]]


def prove(
    context: typer.Context,
    source: Annotated[str | None, typer.Argument(metavar="CONFIG", hidden=True, show_default=False)] = None,
    *,
    seconds: Annotated[float, Option(min=0, help="Two epochs are made if they take no longer.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Say before a long run whether a stop and resume of your training gives the same bytes.

    \b
    memfit prove -- python train.py
    memfit prove -- torchrun --nproc-per-node 2 train.py

    It runs the command twice. The first run saves a checkpoint and is killed some steps later. The second one goes on
    from that checkpoint and makes the same steps again. memfit compares batches, losses, rates, and at the end weights,
    buffers, optimizer and your own objects.

    The training is one that memfit keeps exact: Trainer, Loop with a seed, exact() or Exact(). Settings stay as they
    are: if two epochs fit into --seconds, the steps pass an epoch's end and its validation; else they are steps 6 to
    12.

    Exit codes: 0 the same bytes, 2 bad usage, 3 not the same, 4 not proved, 130 interrupted.
    """
    command: tuple[str, ...] = context.obj or ()
    if source is not None or not command:
        raise UsageError(
            f"memfit prove was given {source or 'nothing to run'}, and no command behind --.",
            rule="it runs one command twice; of a config, prove the command of the stage that trains.",
            remedy="memfit prove -- python train.py",
        )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix=".memfit-prove-", dir=Path.cwd()))
    try:
        found = _prove(command, folder, seconds)
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)
    answer(found, as_json, [f"prove: {text}" for text in found["text"]])
    raise typer.Exit(_CODES[found["verdict"]])


def _prove(command: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Make both runs, and return the verdict as what ``--json`` prints."""
    first, why = _run(command, folder, "first", {"seconds": seconds, "seal": 0, "end": 0})
    one, second = first[0] if first else dict.fromkeys(("seal", "end", "epoch_ends", "validations"), 0), Reports()
    if not why:
        shutil.rmtree(folder / PROVE_OUTPUTS)
        (folder / PROVE_SEALED).rename(folder / PROVE_OUTPUTS)
        plan = {"seconds": seconds, "seal": one["seal"], "end": one["planned_end"]}
        second, why = _run(command, folder, "second", plan, len(first))
    differs = list(dict.fromkeys(name for each in second for name in each["differs"]))
    differences = [each["difference"] for each in second if each["difference"]]
    if not why and any(each["end"] != one["end"] for each in second):
        differences += [f"the second run ended after step {second[0]['end']}, the first one after step {one['end']}"]
    if differences:
        own = f"let a checkpoint hold {list_some(differs) or 'what moves'} (a state_dict, a buffer)"
        remedy = f"{own}, or make it a function of the step; then prove again"
        verdict, text = "NOT the same", [differences[0], remedy]
    elif why:
        verdict, text = "not proved", [why]
    else:
        passed = f"{format_count(one['epoch_ends'], 'epoch end')}, {format_count(one['validations'], 'validation')}"
        made = f"steps {one['seal'] + 1} to {one['end']} were made again from the checkpoint of step {one['seal']}"
        verdict, text = "same bytes", [f"{made}, and passed {passed}; weights, buffers and optimizer are the same"]
        text += [f"differs, and no step shows it: {list_some(differs)}"] * bool(differs)
    facts = {name: one[name] for name in ("seal", "end", "epoch_ends", "validations")} | {"ranks": len(first)}
    return {"verdict": verdict, **facts, "differs": differs, "text": [f"{verdict}: {text[0]}", *text[1:]]}


def _run(
    command: Sequence[str], folder: Path, name: str, plan: dict[str, Any], num_ranks: int = 1
) -> tuple[Reports, str]:
    """Run the command once; return the reports of its ranks, and why they prove nothing."""
    for path in folder.glob("*.json"):
        path.unlink()
    write_json(folder / PROVE_PLAN, plan)
    log, terminal, env = folder / f"{name} run.log", console(stderr=True), {**os.environ, PROVE_VARIABLE: str(folder)}
    terminal.say(f"prove: {name} run begins", "dim")
    with open(log, "wb") as output:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TOLD_SECONDS)
                break
            at = read_json(folder / PROVE_PLACE) or {"step": 0, "end": 0}
            most = f" of about {at['end']}" * bool(at["end"])
            terminal.say(f"prove: {name} run, " + (f"step {at['step']}{most}" if at["step"] else "no step yet"), "dim")
    finally:  # torchrun passes SIGTERM on to ranks outside of its group
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_END_SECONDS)
    reports = [one for path in sorted(folder.glob("report-*.json")) if (one := read_json(path))]
    whys = [one["why"] for one in reports if one["why"]]
    if len(reports) < num_ranks:
        code, said = process.returncode, log.read_text(errors="replace").splitlines()[-_LINES:]
        nothing = " and trained nothing that memfit keeps exact" * (code == 0)
        whys = ["\n  ".join([f"it ended with exit code {code}{nothing}", *said])]
    return reports, f"the {name} run: {whys[0]}" if whys else ""
