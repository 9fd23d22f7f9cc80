"""Hundreds of jobs that burst, leak, lie, fork, map files and fill /dev/shm under one real limit, run by memfit.

    python benchmarks/stress.py [--jobs 300] [--seed 1] [--hold 4] [--limit 3GiB] [--reserve 512MiB]

One control group with a hard limit holds `memfit run` with all its jobs, and beside it a neighbour that takes and gives
back memory at up to 200 MiB/s within the reserve. The kernel's killer is on, as always. The benchmark watches from
outside, ten times a second, and says

- kills: what the kernel counted in every group below the limit and on the whole host; wanted: 0;
- results: every job prints a checksum of all that it wrote; wanted: all right;
- restarts: run time of attempts that came to nothing as a share of all run time; wanted: at most 2 %. The jobs tell it
  themselves, by a line in a journal when they begin and when they are through;
- use: the jobs' non-reclaimable bytes, as a mean over time, of (limit - reserve); wanted: at least 80 % while jobs were
  waiting, that is from the first start to the moment when the last job was started for the first time. The reserved
  bytes and the same with the tail are said beside it.

Exit status: 0 all targets met, 1 one was missed. Needs root and a writable memory hierarchy of cgroup v1 or, on v2, a
group that hands the memory controller down, as the root does below systemd; --cgroup names another one. It makes a
group and removes it, and stays within the limit.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import stress_job
from memfit.units import MIB, format_bytes, format_duration, parse_bytes
from stress_watch import PROGRAM, Arena, Sample, Trial, top_group, try_out

#: How often each kind comes, of 20.
KINDS = {"burst": 6, "leak": 4, "liar": 3, "fork": 2, "map": 2, "shm": 3}
SMALLEST_MIB = 24
#: What an interpreter takes beside what it allocates.
OWN_MIB = 10
#: Seconds for which a job holds its peak, from half to one and a half of this: so long that two cores can fill 3 GiB
#: again and again.
HOLD_SECONDS = 4.0
MOST_RESTARTS, LEAST_USE = 0.02, 0.80


@dataclass(frozen=True)
class StressJob:
    """One line of the job file: what a job takes, what it says it takes, and for how long it holds it."""

    kind: str
    size_mib: int
    seed: int
    declared_mib: int
    file_mib: int
    hold: float

    @property
    def expected(self) -> str:
        return stress_job.expected(self.kind, self.size_mib, self.seed, self.file_mib)

    def row(self) -> dict[str, str]:
        """Its columns: the arguments of the program, and the declared size."""
        return {
            "kind": self.kind,
            "size": str(self.size_mib),
            "seed": str(self.seed),
            "hold": f"{self.hold:.2f}",
            "file": str(self.file_mib),
            "memory": f"{self.declared_mib}MiB",
        }


def make_jobs(number: int, seed: int, largest_mib: int, hold: float = HOLD_SECONDS) -> list[StressJob]:
    """The same jobs for the same seed: sizes from 24 MiB to the largest, as many small as large ones by doubling."""
    chance = random.Random(seed)
    return [_make_job(chance, one, largest_mib, hold) for one in range(1, number + 1)]


def _make_job(chance: random.Random, seed: int, largest_mib: int, hold: float) -> StressJob:
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    size = round(SMALLEST_MIB * (largest_mib / SMALLEST_MIB) ** chance.random())
    num_processes = stress_job.FORK_SHARES if kind == "fork" else 1
    declared = round(size * 1.05) + OWN_MIB * num_processes
    if kind == "liar":  # ten times too small, or ten times too large
        too_small = chance.random() < 0.6
        size = chance.randint(largest_mib // 3, largest_mib) if too_small else max(SMALLEST_MIB, size // 4)
        declared = size // 10 if too_small else size * 10
    if kind == "map":
        size = min(size, 64)
        declared = size + OWN_MIB
    seconds = hold * chance.uniform(0.5, 1.5)
    return StressJob(kind, size, seed, declared, declared * 2 if kind == "map" else 0, seconds)


def write_jobs(jobs: Sequence[StressJob], work: Path) -> Path:
    """The job file, and beside it the file that the ``map`` jobs read."""
    with open(work / "jobs.csv", "w", newline="") as lines:
        writer = csv.DictWriter(lines, list(jobs[0].row()))
        writer.writeheader()
        writer.writerows(job.row() for job in jobs)
    with open(work / "file.bin", "wb") as content:
        for _ in range(max(job.file_mib for job in jobs)):
            content.write(stress_job.block(0))
        content.flush()
        os.fsync(content.fileno())
    return work / "jobs.csv"


def template(work: Path, tag: str) -> list[str]:
    """The command of every job, with the columns of the job file in braces."""
    fixed = ["--file", str(work / "file.bin"), "--journal", str(work / "journal"), "--tag", tag]
    columns = {"kind": "kind", "size": "size", "seed": "seed", "hold": "hold", "file-mib": "file"}
    return [str(PROGRAM), *(word for key, name in columns.items() for word in (f"--{key}", f"{{{name}}}")), *fixed]


def figures_of(
    trial: Trial, jobs: Sequence[StressJob], results: Mapping[int, str], budget_bytes: int
) -> dict[str, Any]:
    """The figures of one trial: kills, results, restarts, use and times."""
    by_seed = {job.seed: job for job in jobs}
    wrong = sorted(seed for seed, text in results.items() if seed not in by_seed or text != by_seed[seed].expected)
    missing = sorted(by_seed.keys() - results.keys())
    lost = [attempt for attempt in trial.attempts if attempt.end != "done"]
    lost_seconds = sum(attempt.seconds for attempt in lost)
    run_seconds = sum(attempt.seconds for attempt in trial.attempts)
    return use_of(trial, budget_bytes) | {
        "exit_code": trial.exit_code,
        "seconds": trial.seconds,
        "kills": dict(trial.kills),
        "neighbour_killed": trial.neighbour_ended,
        "num_jobs": len(jobs),
        "num_wrong": len(wrong),
        "num_missing": len(missing),
        "wrong": wrong[:20],
        "missing": missing[:20],
        "num_lost_attempts": len(lost),
        "lost_by_end": {end: sum(attempt.end == end for attempt in lost) for end in ("fail", "killed")},
        "lost_seconds": lost_seconds,
        "run_seconds": run_seconds,
        "restarts": lost_seconds / run_seconds if run_seconds else 0.0,
        "charged_peak_bytes": trial.peak_bytes,
        "left_in_shm": len(trial.left_in_shm),
        "lost": [asdict(attempt) | asdict(by_seed[attempt.seed]) for attempt in lost],
        "samples": [astuple(sample) for sample in trial.samples],
    }


def use_of(trial: Trial, budget_bytes: int) -> dict[str, Any]:
    """Means over time, weighted by it, of what was used while jobs waited for their first start, and with the tail."""
    firsts: dict[int, float] = {}
    for attempt in trial.attempts:
        firsts.setdefault(attempt.seed, attempt.started)
    begin, last = min(firsts.values(), default=0.0), max(firsts.values(), default=0.0)
    end = max((attempt.seen for attempt in trial.attempts), default=0.0)

    def mean(until: float, what: Callable[[Sample], int]) -> float:
        within = [sample for sample in trial.samples if begin <= sample.time <= until]
        weights = [(later.time - sample.time, what(sample)) for sample, later in pairwise(within)]
        return sum(weight * value for weight, value in weights) / max(1e-9, sum(weight for weight, _ in weights))

    return {
        "window": [begin, last, end],
        "makespan": end - begin,
        "waiting_seconds": last - begin,
        "use_jobs": mean(last, lambda sample: sample.jobs) / budget_bytes,
        "use_all": mean(last, lambda sample: sample.run) / budget_bytes,
        "use_jobs_with_tail": mean(end, lambda sample: sample.jobs) / budget_bytes,
        "use_all_with_tail": mean(end, lambda sample: sample.run) / budget_bytes,
        "mean_neighbour_bytes": round(mean(last, lambda sample: sample.neighbour)),
        "most_neighbour_bytes": max((sample.neighbour for sample in trial.samples), default=0),
        "most_at_once": max((sample.num_running for sample in trial.samples), default=0),
        "mean_at_once": mean(last, lambda sample: sample.num_running),
    }


@dataclass(frozen=True)
class Setting:
    """What all trials share: the jobs and the limit under which they run.

    Attributes:
        jobs: The jobs.
        limit_bytes: The hard limit of the group that holds everything.
        reserve_bytes: What of it is left to the neighbour and to the framework itself.
        cgroup: Where the group is made.
        timeout: After so many seconds a trial is ended.
    """

    jobs: Sequence[StressJob]
    limit_bytes: int
    reserve_bytes: int
    cgroup: Path
    timeout: float

    @property
    def budget_bytes(self) -> int:
        return self.limit_bytes - self.reserve_bytes

    def try_out(
        self, command: Sequence[str], work: Path, tag: str, env: Mapping[str, str], *, as_container: bool = False
    ) -> Trial:
        """Run a command that runs the jobs in a fresh group, with a neighbour that stays within half of the reserve.

        As in a container, the group stands at the top of what the command sees as the memory hierarchy.
        """
        half = self.reserve_bytes // 2 // MIB
        with Arena(self.cgroup, self.limit_bytes) as arena:
            if as_container:
                mount = f'mount --bind {arena.path} {top_group()} && exec "$@"'
                command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
            return try_out(arena, command, work, neighbour_mib=half, tag=tag, env=env, timeout=self.timeout)


def run_memfit(setting: Setting, work: Path) -> dict[str, Any]:
    """The jobs under ``memfit run``; the figures."""
    tag = uuid.uuid4().hex[:8]
    rows = write_jobs(setting.jobs, work)
    reserve = f"{setting.reserve_bytes // MIB}MiB"
    # Walls hold what a forecast misses, so that the slack on top of it is small here; the default is a tenth.
    options = ["--param-file", str(rows), "--memory", "{memory}", "--reserve", reserve, "--retries", "2", "--json"]
    options += ["--set", "memory.slack=0.02"]
    command = [sys.executable, "-m", "memfit", "run", *options, "--", sys.executable, "-IS", *template(work, tag)]
    # Runs of others on this host lend from the same list; this one keeps a list of its own, in its own folder.
    trial = setting.try_out(command, work, tag, {**os.environ, "MEMFIT_CLAIMS_DIR": str(work / "claims")})
    figures = figures_of(trial, setting.jobs, results_of(work.glob("runs/*/*/jobs/*/out.log")), setting.budget_bytes)
    return figures | told_by_memfit(work, figures["window"], setting.budget_bytes)


def results_of(logs: Iterable[Path]) -> dict[int, str]:
    """What the jobs printed, by seed."""
    return parse_results(line for path in logs for line in path.read_text(errors="replace").splitlines())


def parse_results(lines: Iterable[str]) -> dict[int, str]:
    """The results among lines that jobs printed.

    >>> parse_results(["hello", "result 3 00c0ffee"])
    {3: '00c0ffee'}
    """
    words = (line.split() for line in lines if line.startswith("result "))
    return {int(found[1]): found[2] for found in words if len(found) == 3}


def told_by_memfit(work: Path, window: Sequence[float], budget_bytes: int) -> dict[str, Any]:
    """What memfit's run directory says itself: reserved bytes over time, kills it has proof of, and how jobs ended."""
    lines = (line for path in work.glob("runs/*/*/events/*.jsonl") for line in path.read_text().splitlines())
    events = sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))
    outcomes = [json.loads(path.read_text()) for path in work.glob("runs/*/*/jobs/*/outcome.json")]
    reserved: dict[str, int] = {}
    area, before = 0.0, window[0]
    for event in events:
        now = min(max(event["time"], window[0]), window[1])
        area, before = area + sum(reserved.values()) * (now - before), now
        if event["kind"] == "admit":
            reserved[event["job"]] = event["reservation_bytes"] or 0
        elif event["kind"] == "grow":
            reserved[event["job"]] = event["to_bytes"]
        elif event["kind"] in ("end", "retry"):
            reserved.pop(event["job"], None)
    kinds = [event["kind"] for event in events]
    states = [outcome.get("state") for outcome in outcomes]
    return {
        "reserved": area / max(1e-9, window[1] - window[0]) / budget_bytes,
        "events": {kind: kinds.count(kind) for kind in ("admit", "grow", "short", "aside", "retry", "stop", "end")},
        "states": {state: states.count(state) for state in sorted(set(map(str, states)))},
        "memfit_oom_kills": sum(outcome.get("evidence", {}).get("oom_kill", 0) for outcome in outcomes),
        "reasons": sorted({event["reason"] for event in events if event["kind"] in ("retry", "aside")})[:20],
    }


def targets(figures: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each target in words, with what was reached, and whether that is enough."""
    kills, restarts, use = figures["kills"]["total"], figures["restarts"], figures["use_jobs"]
    num_right = figures["num_jobs"] - figures["num_wrong"] - figures["num_missing"]
    return [
        (f"{kills} kills (0 wanted)", kills == 0 and not figures["neighbour_killed"]),
        (f"{num_right} of {figures['num_jobs']} results right (all wanted)", num_right == figures["num_jobs"]),
        (f"restarts {restarts:.1%} of the run time ({MOST_RESTARTS:.0%} at most)", restarts <= MOST_RESTARTS),
        (f"use {use:.1%} while jobs waited ({LEAST_USE:.0%} at least)", use >= LEAST_USE),
        (f"exit code {figures['exit_code']} (0 wanted)", figures["exit_code"] == 0),
    ]


def report(figures: Mapping[str, Any], setting: Setting) -> bool:
    """Print the figures; whether every target was met."""
    kills, lost = figures["kills"], figures["lost_by_end"]
    print(f"one real limit        {format_bytes(setting.limit_bytes)}, reserve {format_bytes(setting.reserve_bytes)}")
    print(
        f"neighbour             {format_bytes(figures['mean_neighbour_bytes'])} on average, at most "
        f"{format_bytes(figures['most_neighbour_bytes'])}; killed: {figures['neighbour_killed']}"
    )
    print(
        f"kills                 {kills['total']}: counted below the limit {kills['groups']}, on the host "
        f"{kills['host']}, of these elsewhere {kills['elsewhere']}; in memfit's outcomes {figures['memfit_oom_kills']}"
    )
    print(
        f"results               {figures['num_jobs']} jobs, {figures['num_wrong']} wrong, "
        f"{figures['num_missing']} missing {figures['missing'] or ''}"
    )
    print(f"jobs' states          {figures['states']}")
    print(
        f"restarts              {figures['restarts']:.2%}: {figures['num_lost_attempts']} attempts, "
        f"{figures['lost_seconds']:.1f} of {figures['run_seconds']:.1f} s (failed {lost['fail']}, ended "
        f"{lost['killed']}); memfit's events {figures['events']}"
    )
    for reason in figures["reasons"]:
        print(f"                      - {reason}")
    print(
        f"use while jobs waited {figures['use_jobs']:.1%} used by jobs, {figures['use_all']:.1%} with memfit itself, "
        f"{figures['reserved']:.1%} reserved; the first {format_duration(figures['waiting_seconds'])}"
    )
    print(f"use with the tail     {figures['use_jobs_with_tail']:.1%}, {figures['use_all_with_tail']:.1%} with memfit")
    print(f"at once               {figures['mean_at_once']:.1f} on average, {figures['most_at_once']} at most")
    print(f"makespan              {format_duration(figures['makespan'])}, all in all {figures['seconds']:.1f} s")
    print(f"charged peak          {format_bytes(figures['charged_peak_bytes'])}")
    print(f"left in /dev/shm      {figures['left_in_shm']} files")
    for text, is_met in targets(figures):
        print(f"{'met   ' if is_met else 'MISSED'} {text}")
    return all(is_met for _, is_met in targets(figures))


@contextmanager
def working_folder(kept: Path | None) -> Iterator[Path]:
    """A folder on a real disk; removed at the end unless it was named."""
    work = (kept or Path(tempfile.mkdtemp(prefix="memfit-stress-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        if kept is None:
            shutil.rmtree(work)


def parser(text: str) -> argparse.ArgumentParser:
    """The options that this benchmark and the one with peers share."""
    options = argparse.ArgumentParser(description=text.partition("\n")[0])
    options.add_argument("--jobs", type=int, default=300, help="how many jobs (default: 300)")
    options.add_argument("--seed", type=int, default=1, help="which jobs (default: 1)")
    options.add_argument("--hold", type=float, default=HOLD_SECONDS, help="seconds a job holds its peak (default: 4)")
    options.add_argument("--limit", type=parse_bytes, default="3GiB", help="the hard limit (default: 3GiB)")
    options.add_argument("--reserve", type=parse_bytes, default="512MiB", help="left to the neighbour (512MiB)")
    options.add_argument("--cgroup", type=Path, default=top_group(), help=f"where to make the group ({top_group()})")
    options.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a trial is ended")
    options.add_argument("--work", type=Path, help="a new folder to work in; kept (default: a temporary one)")
    options.add_argument("--json", type=Path, help="write the figures there too")
    return options


def setting_of(options: argparse.Namespace) -> Setting:
    """The jobs and the limit; the largest job takes a sixth of the budget.

    Raises:
        SystemExit: If no group can be made here.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not os.access(options.cgroup, os.W_OK):
        raise SystemExit(f"{options.cgroup} cannot be written: this needs root, or a group that is yours by --cgroup")
    largest_mib = (options.limit - options.reserve) // 6 // MIB
    jobs = make_jobs(options.jobs, options.seed, largest_mib, options.hold)
    return Setting(jobs, options.limit, options.reserve, options.cgroup, options.timeout)


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    setting = setting_of(options)
    kinds = ", ".join(f"{sum(job.kind == kind for job in setting.jobs)} {kind}" for kind in KINDS)
    print(f"{len(setting.jobs)} jobs of seed {options.seed}: {kinds}", flush=True)
    with working_folder(options.work) as work:
        figures = run_memfit(setting, work)
        if not figures["makespan"]:
            print((work / "err.log").read_text(), file=sys.stderr)
            raise SystemExit("memfit started no job")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if report(figures, setting) else 1


if __name__ == "__main__":
    sys.exit(main())
