"""Several `memfit run` at once under one real limit, which share it through the host's list of runs.

    python benchmarks/two_runs.py [--runs 2] [--jobs 30] [--seed 1] [--limit 1.5GiB] [--reserve 256MiB] [--one-by-one]

The jobs of `stress.py` (they burst, leak, lie, fork, map files and fill /dev/shm) are dealt out to several runs that
start at the same moment, each with a run directory of its own, in one control group with a hard limit; a neighbour
takes and gives back half of the reserve. Nothing but memfit's own list tells one run of the other. Printed are the
kernel's kills in all groups (wanted: 0), the results (wanted: every checksum right), restarts, the use of the budget,
and with --one-by-one how long the same runs take one after the other.

Exit status: 0 no kill and all results right, 1 otherwise. Needs what `stress.py` needs.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stress
from memfit.units import MIB, format_bytes


def run_together(setting: stress.Setting, work: Path, num_runs: int, *, at_once: bool = True) -> dict[str, Any]:
    """The jobs dealt out to several runs, at once or one after the other; the figures of all."""
    tag = uuid.uuid4().hex[:8]
    stress.write_jobs(setting.jobs, work)
    commands = [_command(setting, work, tag, number, num_runs) for number in range(num_runs)]
    if at_once:
        script = [f'{command} & pids="$pids $!"' for command in commands]
        script.append("for pid in $pids; do wait $pid || code=$?; done")
    else:
        script = [f"{command} || code=$?" for command in commands]
    trial = setting.try_out(
        ["sh", "-c", "\n".join([*script, "exit ${code:-0}"])],
        work,
        tag,
        {**os.environ, "MEMFIT_CLAIMS_DIR": str(work / "claims")},
    )
    results = stress.results_of(work.glob("runs/*/*/jobs/*/out.log"))
    figures = stress.figures_of(trial, setting.jobs, results, setting.budget_bytes)
    return figures | stress.told_by_memfit(work, figures["window"], setting.budget_bytes)


def _command(setting: stress.Setting, work: Path, tag: str, number: int, num_runs: int) -> str:
    """One of the runs: every ``num_runs``-th job."""
    folder = work / f"run_{number}"
    folder.mkdir()
    rows = stress.write_jobs(setting.jobs[number::num_runs], folder)
    options = ["--param-file", str(rows), "--memory", "{memory}", "--reserve", f"{setting.reserve_bytes // MIB}MiB"]
    options += ["--name", f"share_{number}", "--runs-dir", str(work / "runs"), "--json"]
    command = [sys.executable, "-m", "memfit", "run", *options, "--", sys.executable, *stress.template(work, tag)]
    return f"{shlex.join(command)} >{shlex.quote(str(folder / 'out'))} 2>{shlex.quote(str(folder / 'err'))}"


def report(figures: Mapping[str, Any], setting: stress.Setting) -> bool:
    """Print the figures; whether the kernel killed nothing and every result is right."""
    kills, num_right = figures["kills"], figures["num_jobs"] - figures["num_wrong"] - figures["num_missing"]
    limit, reserve = format_bytes(setting.limit_bytes), format_bytes(setting.reserve_bytes)
    print(f"kills       {kills['total']}: {kills['groups']} counted in groups below {limit}, neighbour killed: "
          f"{figures['neighbour_killed']}")  # fmt: skip
    print(f"results     {num_right} of {figures['num_jobs']} right; exit code {figures['exit_code']}; "
          f"states {figures['states']}")  # fmt: skip
    print(
        f"restarts    {figures['num_lost_attempts']} attempts, {figures['restarts']:.1%} of the run time; "
        f"memfit's events {figures['events']}"
    )
    for reason in figures["reasons"]:
        print(f"            - {reason}")
    print(
        f"use         {figures['use_jobs']:.1%} of {limit} less {reserve} while jobs waited, "
        f"{figures['use_jobs_with_tail']:.1%} with the tail; at once {figures['mean_at_once']:.1f}"
    )
    print(f"makespan    {figures['makespan']:.1f} s", flush=True)
    return kills["total"] == 0 and not figures["neighbour_killed"] and num_right == figures["num_jobs"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = stress.parser(__doc__ or "")
    parser.set_defaults(jobs=30, limit="1.5GiB", reserve="256MiB", hold=1.25)
    parser.add_argument("--runs", type=int, default=2, help="how many runs at once, each with --jobs jobs (default: 2)")
    parser.add_argument("--one-by-one", action="store_true", help="also one run after the other, to compare")
    options = parser.parse_args(arguments)
    options.jobs *= options.runs
    setting = stress.setting_of(options)
    print(f"{options.runs} runs of {options.jobs // options.runs} jobs at once, seed {options.seed}", flush=True)
    with stress.working_folder(options.work) as work:
        (work / "at_once").mkdir()
        figures = {"at_once": run_together(setting, work / "at_once", options.runs)}
        is_good = report(figures["at_once"], setting)
        if options.one_by_one:
            print("one after the other")
            (work / "one_by_one").mkdir()
            figures["one_by_one"] = run_together(setting, work / "one_by_one", options.runs, at_once=False)
            is_good &= report(figures["one_by_one"], setting)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
