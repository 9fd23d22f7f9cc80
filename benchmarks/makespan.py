"""How long 60 jobs of unknown size take under one limit: memfit and a plain pool beside an oracle.

    python benchmarks/makespan.py [--repeat 3] [--pool] [--seed 1] [--json FILE]

The jobs are real processes of four kinds, from 50 to 850 MiB and from 2 to 10 seconds: each touches its memory and
sleeps, so that two cores are enough. `memfit run` starts them under 2,048 MiB and knows their kinds and their numbers.
The oracle starts jobs in the same order as soon as they fit under the limit minus the reserve; it knows all sizes and
times, and what a bare process takes to start. With ``--pool`` a pool of threads runs them too, with the most workers
for which the largest jobs together stay within the limit: more are not safe, for nobody knows which meet.

The simulated time of the same jobs is printed beside it: ``benchmarks/policy.py`` is to differ by at most 0.1.
Exit status: 0 the median is at most 1.25 times the oracle's time and each job completed, 1 not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import parser, told, write_json
from memfit.rundir import RunDir
from memfit.units import MIB
from policy import LIMIT_MIB, OWN_MIB, RESERVE_MIB, START_SECONDS, SimJob, make_jobs, oracle_seconds, simulate

MIX, MOST_RATIO, MOST_DIFFERENCE = "as in makespan.py", 1.25, 0.1
_SECONDS = 600
#: What a job does: its own line of the table says how much it takes, and for how long.
_PROGRAM = """
import sys, time
mib, seconds = open(sys.argv[1]).read().splitlines()[int(sys.argv[2])].split()
block = bytearray(int(float(mib) * 1048576))
for at in range(0, len(block), 4096):
    block[at] = 1
time.sleep(float(seconds))
"""


def write_table(jobs: Sequence[SimJob], work: Path) -> None:
    """Write the jobs' program, their sizes and times, which memfit does not read, and their parameters."""
    (work / "job.py").write_text(_PROGRAM)
    (work / "sizes.txt").write_text("".join(f"{job.mib:.1f} {job.seconds:.2f}\n" for job in jobs))
    rows = [{"number": str(number), "kind": str(job.params["kind"])} for number, job in enumerate(jobs)]
    (work / "jobs.json").write_text(json.dumps(rows))


def command(work: Path, number: object) -> list[str]:
    return [sys.executable, "-IS", str(work / "job.py"), str(work / "sizes.txt"), str(number)]


def run_memfit(jobs: Sequence[SimJob], work: Path) -> tuple[float, int]:
    """Run the jobs with memfit; return the seconds from its start to its end, and how many attempts came to nothing."""
    write_table(jobs, work)
    driver = str(Path(__file__).with_name("_run_rows.py"))
    words = ["jobs.json", f"memory.limit={LIMIT_MIB}MiB", f"memory.reserve={RESERVE_MIB}MiB", "--"]
    whole = [sys.executable, driver, *words, *command(work, "{number}"), "{kind}"]
    env = os.environ | {"MEMFIT_CLAIMS_DIR": str(work / "claims")}
    start = time.monotonic()
    done = subprocess.run(whole, cwd=work, env=env, capture_output=True, text=True, timeout=_SECONDS)
    seconds = time.monotonic() - start
    if done.returncode:
        failed = [line for line in done.stderr.splitlines() if "completed" not in line and " grew" not in line]
        raise RuntimeError("\n".join([f"memfit exited with {done.returncode}", *failed[-30:]]))
    run = RunDir.open(Path(json.loads(done.stdout)["run"]))
    return seconds, [event["kind"] for event in run.events()].count("admit") - len(jobs)


def run_pool(jobs: Sequence[SimJob], work: Path, most: int) -> float:
    """Return the seconds of a pool of threads with so many workers."""
    write_table(jobs, work)
    start = time.monotonic()
    with ThreadPoolExecutor(most) as pool:
        list(pool.map(subprocess.check_call, [command(work, number) for number in range(len(jobs))]))
    return time.monotonic() - start


def largest_safe(jobs: Sequence[SimJob]) -> int:
    """Return how many jobs may run at once whichever these are.

    >>> largest_safe([SimJob(800, 1.0), SimJob(700, 1.0), SimJob(600, 1.0), SimJob(10, 1.0)])
    2
    """
    sizes, total = sorted((job.mib + OWN_MIB for job in jobs), reverse=True), 0.0
    for number, size in enumerate(sizes):
        total += size
        if total > LIMIT_MIB - RESERVE_MIB:
            return number
    return len(sizes)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=3, help="how often memfit runs the jobs")
    options.add_argument("--pool", action="store_true", help="run them with a plain pool too")
    options.add_argument("--seed", type=int, default=1, help="of sizes, times and order")
    options.add_argument("--jobs", type=int, help="only the first so many")
    args = options.parse_args()
    jobs = make_jobs(MIX, args.seed)[: args.jobs]
    oracle = oracle_seconds(jobs, (LIMIT_MIB - RESERVE_MIB) * MIB)
    simulated = simulate(jobs, mix=MIX, seed=args.seed).ratio
    print(f"{len(jobs)} jobs; oracle {oracle:.1f} s, {START_SECONDS} s to start a process; limit {LIMIT_MIB} MiB")
    found, figures = list[float](), {"oracle": oracle, "simulated": simulated}
    with tempfile.TemporaryDirectory(prefix="memfit-makespan-") as name:
        for number in range(args.repeat):
            (work := Path(name, str(number))).mkdir()
            seconds, restarts = run_memfit(jobs, work)
            found.append(seconds / oracle)
            print(f"memfit {seconds:6.1f} s, {seconds / oracle:.2f} x, {restarts} restarts", flush=True)
        if args.pool:
            most = largest_safe(jobs)
            figures["pool"] = took = run_pool(jobs, Path(name), most)
            print(f"pool   {took:6.1f} s, {took / oracle:.2f} x, {most} at once", flush=True)
    middle = statistics.median(found)
    write_json(args.json, figures | {"ratios": found})
    asked = [
        told(middle <= MOST_RATIO, f"median of {len(found)}: {middle:.2f} x the oracle ({MOST_RATIO} at most)"),
        told(
            abs(middle - simulated) <= MOST_DIFFERENCE, f"simulated {simulated:.2f} x ({MOST_DIFFERENCE} apart at most)"
        ),
    ]
    return 0 if all(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
