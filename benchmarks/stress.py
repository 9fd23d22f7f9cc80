"""Hundreds of jobs that burst, leak, lie, fork, map files and fill /dev/shm under one real limit, run by memfit.

    python benchmarks/stress.py [--jobs 300] [--seed 1] [--hold 4] [--limit 3GiB] [--reserve 512MiB] [--runs 1]

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

With ``--runs 2`` the jobs are dealt out to several runs that start at the same moment. Nothing but memfit's own list
tells one run of the other; asked are then kills and results alone.

Exit status: 0 all targets met, 1 one was missed. Needs root and a writable memory hierarchy of cgroup v1 or, on v2, a
group that hands the memory controller down, as the root does below systemd; --cgroup names another one. It makes a
group and removes it, and stays within the limit.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import _stress_job
from _stress_watch import PROGRAM, Sample, Trial, try_out
from harness import Limited, find_parent, print_table, told, write_json
from harness import parser as parser_of
from memfit.units import MIB, format_bytes, format_duration, parse_bytes

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
        return _stress_job.expected(self.kind, self.size_mib, self.seed, self.file_mib)

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
    num_processes = _stress_job.FORK_SHARES if kind == "fork" else 1
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
    (work / "jobs.json").write_text(json.dumps([job.row() for job in jobs]))
    with open(work / "file.bin", "wb") as content:
        for _ in range(max(job.file_mib for job in jobs)):
            content.write(_stress_job.block(0))
        content.flush()
        os.fsync(content.fileno())
    return work / "jobs.json"


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
    """What all trials share: the jobs, the hard limit, and what of it is left to the neighbour and to memfit itself."""

    jobs: Sequence[StressJob]
    limit_bytes: int
    reserve_bytes: int
    cgroup: Path
    timeout: float

    @property
    def budget_bytes(self) -> int:
        return self.limit_bytes - self.reserve_bytes

    def try_out(self, command: Sequence[str], work: Path, tag: str, env: Mapping[str, str]) -> Trial:
        """Run a command that runs the jobs in a fresh group, with a neighbour that stays within half of the reserve."""
        half = self.reserve_bytes // 2 // MIB
        with Limited(self.cgroup, self.limit_bytes, ("run", "neighbour")) as group:
            return try_out(group, command, work, neighbour_mib=half, tag=tag, env=env, timeout=self.timeout)


def run_memfit(setting: Setting, work: Path, num_runs: int = 1) -> dict[str, Any]:
    """The jobs under ``memfit run``, or dealt out to several runs at once; the figures."""
    tag = uuid.uuid4().hex[:8]
    rows = write_jobs(setting.jobs, work)
    # Walls hold what a forecast misses, so that the slack on top of it is small here; the default is a tenth.
    command = memfit_command(setting, rows, ["memory.slack=0.02"], template(work, tag))
    if num_runs > 1:
        parts = [_share(setting, work, tag, number, num_runs) for number in range(num_runs)]
        script = [f'{part} & pids="$pids $!"' for part in parts]
        script.append("for pid in $pids; do wait $pid || code=$?; done; exit ${code:-0}")
        command = ["sh", "-c", "\n".join(script)]
    # Runs of others on this host lend from the same list; this one keeps a list of its own, in its own folder.
    trial = setting.try_out(command, work, tag, {**os.environ, "MEMFIT_CLAIMS_DIR": str(work / "claims")})
    figures = figures_of(trial, setting.jobs, results_of(work.glob("runs/*/*/jobs/*/out.log")), setting.budget_bytes)
    return figures | told_by_memfit(work, figures["window"], setting.budget_bytes)


def _share(setting: Setting, work: Path, tag: str, number: int, num_runs: int) -> str:
    """The command of one of several runs: every ``num_runs``-th job."""
    folder = work / f"run_{number}"
    folder.mkdir()
    rows = write_jobs(setting.jobs[number::num_runs], folder)
    settings = [f"experiment=share_{number}", f"runs_dir={work / 'runs'}"]
    words = shlex.join(memfit_command(setting, rows, settings, template(work, tag)))
    return f"{words} >{shlex.quote(str(folder / 'out'))} 2>{shlex.quote(str(folder / 'err'))}"


def memfit_command(setting: Setting, rows: Path, settings: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the command that runs the rows of a job file under memfit."""
    own = ['memory.job_of="{memory}"', f"memory.reserve={setting.reserve_bytes // MIB}MiB", *settings]
    driver = Path(__file__).with_name("_run_rows.py")
    return [sys.executable, str(driver), str(rows), *own, "--", sys.executable, "-IS", *words]


def results_of(logs: Iterable[Path]) -> dict[int, str]:
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


def report(figures: Mapping[str, Any], setting: Setting, num_runs: int) -> bool:
    """Print the figures; whether every target was met."""
    kills, lost = figures["kills"], figures["lost_by_end"]
    sizes = {name: format_bytes(figures[name]) for name in figures if name.endswith("_bytes")}
    shares = {name: f"{figures[name]:.1%}" for name in ("use_jobs", "use_all", "reserved", "use_jobs_with_tail")}
    lines = [
        ("limit, reserve", f"{format_bytes(setting.limit_bytes)}, {format_bytes(setting.reserve_bytes)}; charged peak "
         f"{sizes['charged_peak_bytes']}; left in /dev/shm: {figures['left_in_shm']} files"),
        ("neighbour", f"{sizes['mean_neighbour_bytes']} on average, at most {sizes['most_neighbour_bytes']}; "
         f"killed: {figures['neighbour_killed']}"),
        ("kills", f"{kills}; in memfit's outcomes {figures['memfit_oom_kills']}"),
        ("results", f"{figures['num_wrong']} wrong, missing {figures['missing']}; states {figures['states']}"),
        ("restarts", f"{figures['num_lost_attempts']} attempts, {figures['lost_seconds']:.1f} of "
         f"{figures['run_seconds']:.1f} s ({lost}); memfit's events {figures['events']}"),
        *(("", f"- {reason}") for reason in figures["reasons"]),
        ("use while jobs waited", f"{shares['use_jobs']}, {shares['use_all']} with memfit itself, {shares['reserved']} "
         f"reserved; with the tail {shares['use_jobs_with_tail']}"),
        ("at once", f"{figures['mean_at_once']:.1f} on average, {figures['most_at_once']} at most"),
        ("makespan", f"{format_duration(figures['makespan'])}, all in all {figures['seconds']:.1f} s"),
    ]  # fmt: skip
    print_table(lines)
    asked = [told(is_met, text) for text, is_met in targets(figures)[: None if num_runs == 1 else 2]]
    return all(asked)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=300, help="how many jobs (default: 300)")
    parser.add_argument("--runs", type=int, default=1, help="how many runs at once share them (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="which jobs (default: 1)")
    parser.add_argument("--hold", type=float, default=HOLD_SECONDS, help="seconds a job holds its peak (default: 4)")
    parser.add_argument("--limit", type=parse_bytes, default="3GiB", help="the hard limit (default: 3GiB)")
    parser.add_argument("--reserve", type=parse_bytes, default="512MiB", help="left to the neighbour (512MiB)")
    parser.add_argument("--cgroup", type=Path, default=find_parent(), help="where to make the group")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a trial is ended")
    parser.add_argument("--work", type=Path, help="a new folder to work in; kept (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.cgroup is None:
        raise SystemExit("no group can be made here: this needs root, or a group that is yours by --cgroup")
    largest_mib = (options.limit - options.reserve) // 6 // MIB
    jobs = make_jobs(options.jobs, options.seed, largest_mib, options.hold)
    setting = Setting(jobs, options.limit, options.reserve, options.cgroup, options.timeout)
    kinds = ", ".join(f"{sum(job.kind == kind for job in setting.jobs)} {kind}" for kind in KINDS)
    print(f"{len(setting.jobs)} jobs of seed {options.seed}: {kinds}", flush=True)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(prefix="memfit-stress-")
    with nullcontext(options.work) if options.work else temporary as name:
        work = Path(name).resolve()
        figures = run_memfit(setting, work, options.runs)
        if not figures["makespan"]:
            print((work / "err.log").read_text(), file=sys.stderr)
            raise SystemExit("memfit started no job")
    write_json(options.json, figures)
    return 0 if report(figures, setting, options.runs) else 1


if __name__ == "__main__":
    sys.exit(main())
