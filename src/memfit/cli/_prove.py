"""``memfit prove``: run a training twice for some steps, and say whether a stop and resume gives the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from memfit.cli._terminal import AsJson, answer, console
from memfit.errors import DoesNotFitError, InterruptedRunError, JobFailedError, UsageError
from memfit.files import read_json, write_json
from memfit.rundir import PROVE_OUTPUTS, PROVE_PLACE, PROVE_PLAN, PROVE_SEALED, PROVE_VARIABLE
from memfit.units import format_count, format_duration, list_some

_CODES = {"same": 0, "not the same": DoesNotFitError.exit_code, "not proved": JobFailedError.exit_code}
_SAID = {"same": "same bytes", "not the same": "NOT the same", "not proved": "not proved"}
_POLL_SECONDS, _TOLD_SECONDS, _END_SECONDS = 0.1, 5.0, 10.0
#: The fewest steps after the checkpoint that prove a resume from it.
_FEWEST = 2
_LINES, _LINES_BYTES = 8, 1 << 16
#: Names of weights, buffers and optimizers begin so, and those of a second set of the weights end so.
_WEIGHTS, _SECOND = "the ", " (weights)"

Reports = list[dict[str, Any]]


def prove(
    context: typer.Context,
    source: Annotated[str | None, typer.Argument(metavar="CONFIG", hidden=True, show_default=False)] = None,
    *,
    seconds: Annotated[float, Option(min=0, help="Two epochs are made if they take no longer.")] = 60.0,
    wait: Annotated[float, Option(min=1, help="Seconds without a step after which a run is ended.")] = 600.0,
    keep: Annotated[bool, Option("--keep", help="Keep the folder with outputs and reports.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say before a long run whether a stop and resume of your training gives the same bytes.

    \b
    memfit prove -- python train.py
    memfit prove -- torchrun --nproc-per-node 2 train.py

    It runs the command twice. The first run saves a checkpoint and is killed some steps later. The second one goes on
    from that checkpoint and makes the same steps again. memfit compares batches, losses, rates, and at the end weights,
    buffers, optimizer and your own objects. Both runs keep their checkpoints in a folder that is removed at the end.

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
    began, before = time.monotonic(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix=".memfit-prove-", dir=Path.cwd()))
    try:
        found = _prove(_Runs(command, folder, wait), seconds)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            "memfit prove was interrupted.",
            rule="both runs must come to their last step; nothing of the training was changed.",
            remedy="give the same command again",
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    found["seconds"], found["folder"] = round(time.monotonic() - began, 1), str(folder) if keep else None
    lines = [f"prove: {text}" for text in found["text"]]
    lines += [f"It took {format_duration(found['seconds'])}." + f" Outputs and reports: {folder}" * keep]
    answer(found, as_json, lines)
    raise typer.Exit(_CODES[found["verdict"]])


@dataclass
class _Runs:
    """Starts the command, and waits for the reports of its ranks. ``how`` is how the last one ended."""

    command: Sequence[str]
    folder: Path
    wait: float
    how: str = ""

    def run(self, name: str, **plan: Any) -> Reports:
        """Run it once, and return the reports of its ranks."""
        for path in self.folder.glob("*.json"):
            path.unlink()
        write_json(self.folder / PROVE_PLAN, {"seal": 0, "end": 0, "is_second": False, **plan})
        self.how, log = "", self.folder / f"{name} run.log"
        with open(log, "wb") as output:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            env = {**os.environ, PROVE_VARIABLE: str(self.folder)}
            process = subprocess.Popen(self.command, env=env, start_new_session=True, **options)
        console(stderr=True).say(f"prove: {name} run begins", "dim")
        try:
            self._follow(process, name)
        finally:
            _end(process)
        is_ended, self.how = bool(self.how), self.how or f"ended with exit code {process.returncode}"
        with open(log, "rb") as output:
            output.seek(max(0, log.stat().st_size - _LINES_BYTES))
            self.how += "".join(f"\n  {line}" for line in output.read().decode(errors="replace").splitlines()[-_LINES:])
        found = [] if is_ended else [read_json(path) for path in sorted(self.folder.glob("report-*.json"))]
        return [one for one in found if one is not None]

    def _follow(self, process: subprocess.Popen[bytes], name: str) -> None:
        step, told, changed = 0, 0.0, time.monotonic()
        while process.poll() is None:
            now, place = time.monotonic(), read_json(self.folder / PROVE_PLACE) or {"step": 0, "end": 0}
            if place["step"] != step:
                step, changed = place["step"], now
            elif now - changed > self.wait:
                self.how = f"made no step of an exact training in {self.wait:g} s (--wait)"
                return
            if step and now - told > _TOLD_SECONDS:
                told, most = now, f" of about {place['end']}" * bool(place["end"])
                console(stderr=True).say(f"prove: {name} run, step {step}{most}", "dim")
            time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it has left; torchrun passes SIGTERM on to ranks outside of its group."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _prove(runs: _Runs, seconds: float) -> dict[str, Any]:
    """Make both runs, and return the verdict as what ``--json`` prints."""
    first = runs.run("first", seconds=seconds)
    if first and not first[0]["why"] and not first[0]["seal"] and (steps := first[0]["end"]) > _FEWEST:
        shutil.rmtree(runs.folder / PROVE_OUTPUTS, ignore_errors=True)  # it ended before the checkpoint was due
        first = runs.run("first", seconds=seconds, seal=max(1, (steps - 1) // 2), end=steps + 1)
    why, second = _why_not_made(first, runs.how), []
    if not why:
        shutil.rmtree(runs.folder / PROVE_OUTPUTS)
        (runs.folder / PROVE_SEALED).rename(runs.folder / PROVE_OUTPUTS)
        plan = {"seal": first[0]["seal"], "end": first[0]["planned_end"], "is_second": True}
        second = runs.run("second", seconds=seconds, **plan)
    verdict, text, differs = ("not proved", [why], []) if why else _judge(first, second, runs.how)
    facts = {name: first[0][name] if first else 0 for name in ("seal", "end", "epoch_ends", "validations")}
    facts |= {"compared": min((report["compared"] for report in second), default=0), "ranks": len(first)}
    return {"verdict": verdict, **facts, "differs": differs, "text": [f"{_SAID[verdict]}: {text[0]}", *text[1:]]}


def _why_not_made(first: Reports, how: str) -> str:
    """Return why the first run proves nothing, if that is so."""
    if not first:
        is_over = how.startswith("ended with exit code 0")
        return f"the first run {'trained nothing that memfit keeps exact, and ' * is_over}{how}"
    one = first[0]
    is_short = not one["seal"] or one["end"] - one["seal"] < _FEWEST
    short = f"it ended after {format_count(one['end'], 'step')}: too few to save and make {_FEWEST} more"
    return one["why"] or short * is_short


def _why_not_compared(first: Reports, second: Reports, how: str) -> str:
    """Return why the second run proves nothing, if that is so."""
    seal, compared = first[0]["seal"], min((report["compared"] for report in second), default=0)
    faults = [how] if len(second) < len(first) else []
    faults += [f"began at step {one['began']}, not at {seal}" for one in second if one["began"] != seal]
    faults += [f"was not compared: {one['why']}" for one in second if one["why"]]
    faults += [f"has made {format_count(compared, 'step')} again"] if compared < _FEWEST else []
    return f"the second run {faults[0]}" if faults else ""


def _judge(first: Reports, second: Reports, how: str) -> tuple[str, list[str], list[str]]:
    """Return the verdict on two runs, its lines, and the names of what differs."""
    one, steps = first[0], f"steps {first[0]['seal'] + 1} to {first[0]['end']}"
    found = dict.fromkeys(name for report in second for name in report["differs_at_end"])
    weights = [name for name in found if name.startswith(_WEIGHTS) or name.endswith(_SECOND)]
    at_end = [*weights, *(name for name in found if name not in weights)]
    for report in second:
        if report["difference"]:
            lost = report["differs_at_seal"]
            since = f"; what differs since the checkpoint: {list_some(lost)}" * bool(lost)
            return "not the same", [report["difference"] + since, _remedy(lost)], lost
    if why := _why_not_compared(first, second, how):
        return "not proved", [why], []
    if ends := [report["end"] for report in second if report["end"] != one["end"]]:
        what = f"the second run ended after step {ends[0]}, the first one after step {one['end']}"
        return "not the same", [what, _remedy(at_end)], at_end
    if weights:
        what = f"{steps} came out as before; what differs at the end: {list_some(at_end)}"
        return "not the same", [what, _remedy(weights)], at_end
    passed = [(one["epoch_ends"], "epoch's end", "epochs' ends"), (one["validations"], "validation", "validations")]
    words = ", ".join(f"{number} {name if number == 1 else names}" for number, name, names in passed if number)
    words = f"{words} passed" if words else "no epoch's end passed: what acts there was not tried"
    again = f"{steps} were made again from the checkpoint of step {one['seal']} ({words})"
    lines = [f"{again}; weights, buffers and optimizer are the same"]
    return "same", lines + [f"differs, and no step shows it: {list_some(at_end)}"] * bool(at_end), at_end


def _remedy(lost: Sequence[str]) -> str:
    what = list_some(lost) if lost else "what moves"
    return f"let a checkpoint hold {what} (a state_dict, a buffer), or make it a function of the step; then prove again"
