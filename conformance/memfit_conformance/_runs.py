"""Fork the runs of a row from a process that has imported its framework, and compare them with an unbroken one."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from memfit_conformance import _task as task
from memfit_conformance._damage import damage
from memfit_conformance._moments import Moment
from memfit_conformance._strike import Strike, Trace, install

#: So long one run may take, in seconds, and so much memory it may take beside what was imported, in bytes.
LIMIT, MEMORY = 30.0, 1 << 30
_EXITS = {"TERM": -signal.SIGTERM, "INT": 130, "USR1": -signal.SIGUSR1, "GROUP": -signal.SIGTERM}
_STOPPED = 75


@dataclass(frozen=True)
class Row:
    """One moment in one combination."""

    framework: str
    with_memfit: bool
    moment: Moment
    options: task.Options

    def reference(self) -> Row:
        """Return the row of the unbroken run that this one is compared with."""
        return Row(
            self.framework,
            self.with_memfit,
            Moment("", "unbroken"),
            replace(self.options, signal="KILL", own_stop=False),
        )


@dataclass
class Run:
    """What one process did."""

    exit_code: int
    lines: list[dict[str, Any]]
    log: str
    memory: int

    def has(self, kind: str) -> bool:
        return any(line["kind"] == kind for line in self.lines)

    def struck(self) -> int:
        """Return how many strikes it had."""
        return sum(line["kind"] == "struck" for line in self.lines)

    def batches(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return samples, inputs and loss of each micro-batch, by optimizer step."""
        found: dict[int, list[tuple[Any, ...]]] = {}
        for line in self.lines:
            if line["kind"] == "batch":
                found.setdefault(line["step"], []).append((line["ids"], line["inputs"], line["loss"]))
        return found

    def error(self) -> dict[str, Any]:
        return next((line for line in self.lines if line["kind"] == "error"), {})


@dataclass
class Cell:
    """What differs in one row.

    Attributes:
        text: For the table.
        is_good: Whether it is the same training, or was refused before step 1, or the framework has no such moment.
        exits: The exit code of each run.
        memory: The most resident memory of a run, in bytes.
        log: The end of what the last run wrote.
    """

    text: str
    is_good: bool
    exits: list[int]
    memory: int = 0
    log: str = ""


def run_row(row: Row, place: Path, reference: Run | None) -> tuple[Cell, list[Run]]:
    """Do the runs of a row in a folder of its own."""
    folder = place / "out"
    folder.mkdir(parents=True)
    module = importlib.import_module(f"memfit_conformance.{row.framework}")
    stops = [*row.moment.stops, *([()] if row.moment.number == "63" else [])]
    runs = []
    for number, strikes in enumerate([*stops, ()]):
        is_last = number == len(stops)
        options = replace(row.options, **row.moment.resume) if is_last else row.options
        if is_last and row.moment.damage:
            try:
                damage(row.moment.damage, folder, module.CHECKPOINTS, module.FILES)
            except (OSError, ValueError) as error:
                runs[-1].log += f"\nno checkpoint to damage: {error!r}"
                return Cell("suite: nothing to damage", False, [one.exit_code for one in runs], 0, runs[-1].log), runs
        fitted = tuple(_fitted(strike, row.options) for strike in strikes)
        runs.append(_run(module, folder, place / f"run-{number}", options, fitted, row.with_memfit))
    if reference is None:
        return Cell("", runs[-1].exit_code == 0, [runs[-1].exit_code], log=runs[-1].log), runs
    return judge(row, runs, reference), runs


def _fitted(strike: Strike, options: task.Options) -> Strike:
    """Return the strike at the same place of a training that has other steps than 24."""
    epoch = options.steps // task.EPOCHS
    places = {11: epoch - 1, 12: epoch, 18: epoch + epoch // 2, 23: options.steps - 1, 24: options.steps}
    step = strike.step if strike.step is None or epoch == 12 else places.get(strike.step, strike.step)
    is_batch = strike.point == "batch"
    return replace(strike, step=step, nth=min(strike.nth, options.accumulation - 1) if is_batch else strike.nth)


def _run(
    module: Any, folder: Path, place: Path, options: task.Options, strikes: Sequence[Strike], with_memfit: bool
) -> Run:
    """Fork one run and wait for it; end it and what it started after the limit."""
    place.mkdir()
    process = os.fork()
    if process == 0:
        _child(module, folder, place, options, tuple(strikes), with_memfit)
    handle = os.pidfd_open(process)
    is_over = False
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        is_over = not poll.poll(LIMIT * 1000)
    finally:
        os.close(handle)
        for end in (os.killpg, os.kill):  # the group is there once the child has made it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(process, signal.SIGKILL)  # not reaped yet, so the number is its own
        _, status, usage = os.wait4(process, 0)
    lines = [json.loads(line) for line in (place / "trace").read_text().splitlines()]
    if is_over:
        lines.append({"kind": "error", "type": f"no end within {LIMIT:.0f} s", "is_refusal": False})
    log = (place / "log").read_text(errors="replace")
    return Run(os.waitstatus_to_exitcode(status), lines, log, usage.ru_maxrss << 10)


def _child(
    module: Any, folder: Path, place: Path, options: task.Options, strikes: tuple[Strike, ...], with_memfit: bool
) -> NoReturn:
    """Do what a script would do, in a process group of its own; never return."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.chdir(place)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_now() + MEMORY, resource.RLIM_INFINITY))
        trace = Trace(place / "trace", folder, options, strikes)
        torch.set_num_threads(options.threads)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        install(trace)
        module.run(folder, options, trace, with_memfit)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        trace.write("exit", type=type(error).__name__)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        traceback.print_exc()
        kinds = {(one.__module__.split(".")[0], one.__name__) for one in type(error).__mro__}
        trace.write("error", type=type(error).__name__, text=str(error), is_refusal=("memfit", "MemfitError") in kinds)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _data_now() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))


def judge(row: Row, runs: Sequence[Run], reference: Run) -> Cell:
    """Say what differs between the runs of a row and the unbroken one."""
    exits, last = [run.exit_code for run in runs], runs[-1]
    memory = max(run.memory for run in runs)

    def cell(text: str, is_good: bool) -> Cell:
        return Cell(text, is_good, exits, memory, "" if is_good else last.log[-3000:])

    if reference.exit_code:
        return replace(cell("suite: the unbroken run fails", False), log=reference.log[-3000:])
    why = row.moment.why_absent(row.framework, row.with_memfit)
    has_folder = any(strike.action == "FOLDER" for strikes in row.moment.stops for strike in strikes)
    if why and has_folder:  # the folder was made, and nothing is saved over it
        return cell(f"not there: {why}", True)
    needed = [len(strikes) if row.with_memfit else 1 for strikes in row.moment.stops]
    if any(run.struck() < number for run, number in zip(runs, needed, strict=False)):
        if why:
            return cell(f"not there: {why}", True)
        if runs[0].error().get("is_refusal") and not runs[0].has("batch"):
            return cell("refused before step 1", True)
        if row.options.steps < 24:
            return cell("not there: so short a training does not come to it", True)
        return replace(cell("suite: never struck", False), log=runs[0].log[-3000:])
    faults = [_exit_fault(row, run, strikes) for run, strikes in zip(runs, row.moment.stops, strict=False)]
    faults = [one for one in dict.fromkeys(faults) if one]
    if last.error() or last.exit_code:
        kind = last.error().get("type", f"exit {last.exit_code}")
        if last.error().get("is_refusal") and not last.has("batch"):
            return cell("refused before step 1", not faults)
        when = "after step 1" if last.has("batch") else "before step 1"
        return cell("; ".join([f"crash {when}: {kind}", *faults]), False)
    found = _difference(runs, reference)
    if found and "may not be exact" in last.log:
        faults.append("memfit warned")
    if row.moment.is_change:
        return cell(f"not refused: {', '.join(found) or 'the change is ignored'}", False)
    text = "; ".join([", ".join(found) or ("same" if not faults else "same bytes"), *faults])
    return cell(text, not found and not faults)


def _exit_fault(row: Row, run: Run, strikes: Sequence[Strike]) -> str:
    """Return what is wrong with the end of a run that was struck, or an empty string."""
    struck = run.struck()
    if not struck:
        return ""
    action = strikes[struck - 1].action
    action = row.options.signal if action == "stop" else action
    code = run.exit_code
    if action in ("KILL", "FOLDER"):
        return "" if code == -signal.SIGKILL else f"exit {code} at SIGKILL"
    if action in _EXITS:
        if code == _STOPPED or run.has("end") or (row.moment.may_die and code == _EXITS[action]):
            return ""
        name = run.error().get("type")
        text = f"exit {code}" if code >= 0 else f"ends by signal {-code}"
        return f"{text} ({name})" if name else text
    return "" if code or run.has("end") else f"exit {code} after a failure"


def _difference(runs: Sequence[Run], reference: Run) -> list[str]:
    """Return which of samples, masks, losses and hash differ."""
    whole, found = reference.batches(), set()
    done = -1
    for run in runs:
        steps = run.batches()
        if steps and min(steps) > done + 1:
            found.add("samples")  # some steps were not made
        for step, batches in steps.items():
            expected = whole.get(step, [])
            is_cut = step == max(steps) and run is not runs[-1]
            if [one[0] for one in batches] != [one[0] for one in expected[: len(batches) if is_cut else None]]:
                found.add("samples")
            for mine, theirs in zip(batches, expected, strict=False):
                if mine[0] == theirs[0] and mine[1] != theirs[1]:
                    found.add("masks")
                if mine[2] != theirs[2]:
                    found.add("losses")
        done = max([done, *steps])
    if done < max(whole):
        found.add("samples")
    hashes = [next((line["hash"] for line in run.lines if line["kind"] == "end"), "") for run in (runs[-1], reference)]
    if hashes[0] != hashes[1]:
        found.add("hash")
    return [name for name in ("samples", "masks", "losses", "hash") if name in found]


def as_json(row: Row, cell: Cell) -> Mapping[str, Any]:
    """Return a row and its cell as plain values."""
    return {
        "framework": row.framework,
        "with_memfit": row.with_memfit,
        "moment": row.moment.number,
        "name": row.moment.name,
        "options": asdict(row.options),
        **asdict(cell),
    }
