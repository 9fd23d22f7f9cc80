"""``memfit prove``: run a training twice for some steps, and say whether a stop and resume gives the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
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
_POLL_SECONDS, _TOLD_SECONDS, _END_SECONDS = 0.1, 5.0, 10.0
#: The fewest steps after the checkpoint that prove a resume from it.
_FEWEST = 2
_LINES, _LINES_BYTES = 8, 1 << 16
#: What a note calls weights, buffers and optimizers begins so; and an average of the weights.
_WEIGHTS = ("the ", "a second set of the weights")

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
        self.how = self.how or f"ended with exit code {process.returncode}"
        with open(log, "rb") as output:
            output.seek(max(0, log.stat().st_size - _LINES_BYTES))
            self.how += "".join(f"\n  {line}" for line in output.read().decode(errors="replace").splitlines()[-_LINES:])
        found = [read_json(path) for path in sorted(self.folder.glob("report-*.json"))]
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
    if why := _why_not(first, runs.how):
        return _verdict("not proved", [f"the first run {why}"])
    one = first[0]
    shutil.rmtree(runs.folder / PROVE_OUTPUTS)
    (runs.folder / PROVE_SEALED).rename(runs.folder / PROVE_OUTPUTS)
    second = runs.run("second", seconds=seconds, seal=one["seal"], end=one["planned_end"], is_second=True)
    return _compare(first, second, runs.how)


def _why_not(first: Reports, how: str) -> str:
    """Return why the first run proves nothing, if that is so."""
    if not first:
        is_over = how.startswith("ended with exit code 0")
        return f"{'trained nothing that memfit keeps exact, and ' * is_over}{how}"
    one = first[0]
    if one["why"]:
        return f"proves nothing: {one['why']}"
    if one["end"] - one["seal"] < _FEWEST or not one["seal"]:
        return f"ended after {format_count(one['end'], 'step')}: too few to save and make {_FEWEST} more"
    return ""


def _compare(first: Reports, second: Reports, how: str) -> dict[str, Any]:
    """Return the verdict on two runs that have come to their ends."""
    one, seal = first[0], first[0]["seal"]
    differing = next((report for report in second if report["difference"]), None)
    at_end = list(dict.fromkeys(name for report in second for name in report["differs_at_end"]))
    weights = [name for name in at_end if name.startswith(_WEIGHTS)]
    own = [name for name in at_end if name not in weights]
    facts = {name: one[name] for name in ("seal", "end", "epoch_ends", "validations")}
    facts |= {"compared": min((report["compared"] for report in second), default=0), "ranks": len(first)}
    if differing is not None:
        lost, told = differing["differs_at_seal"], differing["difference"]
        what = f"NOT the same: {told}" + f"; what differs since the checkpoint: {list_some(lost)}" * bool(lost)
        return _verdict("not the same", [what, _remedy(lost)], facts, difference=told, differs=lost)
    if why := _why_not_compared(second, len(first), seal, how):
        return _verdict("not proved", [f"the second run {why}"], facts)
    if ends := [report["end"] for report in second if report["end"] != one["end"]]:
        what = f"NOT the same: the second run ended after step {ends[0]}, the first one after step {one['end']}"
        return _verdict("not the same", [what, _remedy(own)], facts, difference=what, differs=at_end)
    steps = f"steps {seal + 1} to {one['end']}"
    if weights:
        what = f"NOT the same: {steps} came out as before; what differs at the end: {list_some(weights + own)}"
        return _verdict("not the same", [what, _remedy(weights)], facts, differs=at_end)
    passed = [(one["epoch_ends"], "epoch's end", "epochs' ends"), (one["validations"], "validation", "validations")]
    words = ", ".join(f"{number} {name if number == 1 else names}" for number, name, names in passed if number)
    words = f"{words} passed" if words else "no epoch's end passed: what acts there was not tried"
    again = f"{steps} were made again from the checkpoint of step {seal} ({words})"
    lines = [f"same bytes: {again}; weights, buffers and optimizer are the same"]
    lines += [f"differs, and no step shows it: {list_some(own)}"] if own else []
    return _verdict("same", lines, facts, differs=own)


def _why_not_compared(second: Reports, num_ranks: int, seal: int, how: str) -> str:
    """Return why the second run proves nothing, if that is so."""
    if len(second) < num_ranks:
        return how
    if others := [report["began"] for report in second if report["began"] != seal]:
        return f"began at step {others[0]}: it did not take the checkpoint of step {seal}"
    if reasons := [report["why"] for report in second if report["why"]]:
        return f"was not compared: {reasons[0]}"
    compared = min(report["compared"] for report in second)
    return f"has made {format_count(compared, 'step')} again" if compared < _FEWEST else ""


def _remedy(lost: Sequence[str]) -> str:
    what = list_some(lost) if lost else "what moves"
    return (
        f"let a checkpoint hold {what} (a state_dict, a buffer), or make it a function of the step; then prove it again"
    )


def _verdict(verdict: str, lines: Sequence[str], facts: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    text = [f"not proved: {lines[0]}", *lines[1:]] if verdict == "not proved" else list(lines)
    return {"verdict": verdict, "difference": None, "differs": [], **(facts or {}), **more, "text": text}
