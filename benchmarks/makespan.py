"""How long 60 jobs of unknown size take under one limit: memfit and plain pools beside an oracle.

    python benchmarks/makespan.py [--repeat 3] [--peers] [--seed 1] [--json FILE]

The jobs are real processes of four kinds, from 50 to 850 MiB and from 2 to 10 seconds: each touches its memory and
sleeps, so that two cores are enough. `memfit run` starts them under 2,048 MiB and knows their kinds and their numbers.
The oracle starts jobs in the same order as soon as they fit under the limit minus the reserve; it knows all sizes and
times, and what a bare process takes to start. With ``--peers`` a pool of threads, joblib and Dask run them too, with
the most workers for which the largest jobs together stay within the limit: more are not safe, for nobody knows which
meet. One that is not installed (extra ``dev``) is left out, and named.

The simulated time of the same jobs is printed beside it: ``benchmarks/policy.py`` is to differ by at most 0.1.
Exit status: 0 the median is at most 1.25 times the oracle's time and each job completed, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

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
    rows = [f"{number},{job.params['kind']}" for number, job in enumerate(jobs)]
    (work / "jobs.csv").write_text("\n".join(["number,kind", *rows]) + "\n")


def command(work: Path, number: str) -> list[str]:
    return [sys.executable, "-IS", str(work / "job.py"), str(work / "sizes.txt"), number]


def run_memfit(jobs: Sequence[SimJob], work: Path) -> tuple[float, int]:
    """Run the jobs with memfit; return the seconds from its start to its end, and how many attempts came to nothing."""
    write_table(jobs, work)
    words = [
        "run",
        "--param-file",
        "jobs.csv",
        "--limit",
        f"{LIMIT_MIB}MiB",
        "--reserve",
        f"{RESERVE_MIB}MiB",
        "--json",
    ]
    env = os.environ | {"MEMFIT_CLAIMS_DIR": str(work / "claims")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *words, "--", *command(work, "{number}"), "{kind}"],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    seconds = time.monotonic() - start
    if done.returncode:
        failed = [line for line in done.stderr.splitlines() if "completed" not in line and " grew" not in line]
        raise RuntimeError("\n".join([f"memfit exited with {done.returncode}", *failed[-30:]]))
    run = RunDir.open(Path(json.loads(done.stdout)["run"]))
    kinds = [event["kind"] for event in run.events()]
    return seconds, kinds.count("admit") - len(jobs)


def run_pool(commands: Sequence[Sequence[str]], most: int) -> None:
    with ThreadPoolExecutor(most) as pool:
        list(pool.map(subprocess.check_call, commands))


def run_joblib(commands: Sequence[Sequence[str]], most: int) -> None:
    import joblib  # type: ignore[import-untyped]

    joblib.Parallel(most)(joblib.delayed(subprocess.check_call)(words) for words in commands)


def run_dask(commands: Sequence[Sequence[str]], most: int) -> None:
    dask: Any = import_module("distributed")
    with dask.Client(n_workers=1, threads_per_worker=most, processes=False, dashboard_address=None) as client:
        client.gather(client.map(subprocess.check_call, commands))


PEERS: dict[str, Callable[[Sequence[Sequence[str]], int], None]] = {
    "pool": run_pool,
    "joblib": run_joblib,
    "Dask": run_dask,
}


def run_peer(name: str, jobs: Sequence[SimJob], work: Path, most: int) -> float | None:
    """Return the seconds that a peer takes from its start to its end; None if it is not installed."""
    write_table(jobs, work)
    start = time.monotonic()
    try:
        PEERS[name]([command(work, str(number)) for number in range(len(jobs))], most)
    except ImportError as error:
        print(f"{name}: {error}: not run")
        return None
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="how often memfit runs the jobs")
    parser.add_argument("--peers", action="store_true", help="run them with a plain pool, joblib and Dask too")
    parser.add_argument("--seed", type=int, default=1, help="of sizes, times and order")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    jobs = make_jobs(MIX, options.seed)
    oracle = oracle_seconds(jobs, (LIMIT_MIB - RESERVE_MIB) * MIB)
    simulated = simulate(jobs, mix=MIX, seed=options.seed).ratio
    print(f"{len(jobs)} jobs, {min(job.mib for job in jobs):.0f} to {max(job.mib for job in jobs):.0f} MiB", end=", ")
    print(f"{min(job.seconds for job in jobs):.1f} to {max(job.seconds for job in jobs):.1f} s; limit {LIMIT_MIB} MiB")
    print(f"oracle            {oracle:6.1f} s, {START_SECONDS} s to start a process")
    found = []
    with tempfile.TemporaryDirectory(prefix="memfit-makespan-") as name:
        for number in range(options.repeat):
            (work := Path(name, str(number))).mkdir()
            seconds, restarts = run_memfit(jobs, work)
            found.append(seconds / oracle)
            print(f"memfit            {seconds:6.1f} s, {seconds / oracle:.2f} x, {restarts} restarts", flush=True)
        most, times = largest_safe(jobs), dict[str, float]()
        for peer in PEERS if options.peers else ():
            if (took := run_peer(peer, jobs, Path(name), most)) is not None:
                times[peer] = took
                print(f"{peer:7} {most:2} at once {took:6.1f} s, {took / oracle:.2f} x", flush=True)
    ratio = statistics.median(found)
    print(
        f"memfit, median of {len(found)}: {ratio:.2f} x the oracle ({MOST_RATIO} at most); simulated {simulated:.2f} x"
    )
    if options.json:
        figures = {"oracle": oracle, "ratios": found, "simulated": simulated, "peers": times, "workers": most}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if ratio <= MOST_RATIO and abs(ratio - simulated) <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
