"""How fast many tiny commands go: `memfit map` against `xargs -P`, the same 1,000 of the same interpreter.

    python benchmarks/throughput.py [--jobs 1000] [--rounds 3] [--most 1.5] [--json FILE] [-- MEMFIT OPTIONS]

The two take turns, so that a busy spell of the machine meets both. Each round's times are printed, wall clock and CPU
of everything that was started, detached helpers too; the ratio that counts is the median of the rounds' ratios. Exit
status: 0 it is at most --most (1.5), 1 it is more or a command failed.

ext4 passes by inodes that were freed within the last minutes, one by one: where thousands of files were just deleted
each new one takes half a millisecond. So nothing is deleted before the last round; name a folder elsewhere with TMPDIR
when something else deleted many. Modules are compiled once, as in an installation, and not at each start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TINY = [sys.executable, "-c", "pass"]
MOST_RATIO = 1.5
_PR_SET_CHILD_SUBREAPER = 36


def timed(command: Sequence[str], work: Path, text: str = "") -> dict[str, float]:
    """Wall clock and CPU seconds of a command and all that it started; ends the benchmark when it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=work, env=env, input=text, text=True, capture_output=True)
    seconds = time.perf_counter() - started
    reap()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{command[0]} {command[1]} ended with {done.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu}


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so that the CPU of those is counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Collect every orphan; each ends within seconds, for the run that started it is over."""
    deadline = time.monotonic() + 10
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def with_xargs(number: int, work: Path) -> dict[str, float]:
    numbers = "\n".join(map(str, range(1, number + 1)))
    return timed(["xargs", "-P", str(num_cores()), "-n", "1", *TINY], work, numbers)


def with_memfit(number: int, work: Path, options: Sequence[str]) -> dict[str, float]:
    """The same by memfit; every one of its commands must have completed."""
    command = [sys.executable, "-m", "memfit", "map", "--param", f"i=1..{number}", "--json", *options]
    found = timed([*command, "--", *TINY, "{i}"], work)
    outcomes = [json.loads(path.read_text()) for path in work.glob("runs/*/*/jobs/*/outcome.json")]
    num_completed = sum(outcome["state"] == "completed" for outcome in outcomes)
    if num_completed != number:
        raise SystemExit(f"memfit completed {num_completed} of {number} commands")
    return found


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, help="how many commands (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each (default: 3)")
    parser.add_argument("--most", type=float, default=MOST_RATIO, help=f"the largest ratio (default: {MOST_RATIO})")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("options", nargs="*", help="further options of memfit map, behind --")
    options = parser.parse_args()
    adopt_orphans()
    rounds: list[dict[str, Any]] = []
    print(f"{options.jobs} x {' '.join(TINY)}, {num_cores()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="memfit-throughput-") as folder:
        for number in range(1, options.rounds + 1):
            xargs = with_xargs(options.jobs, Path(folder, f"xargs_{number}"))
            memfit = with_memfit(options.jobs, Path(folder, f"memfit_{number}"), options.options)
            ratio = memfit["seconds"] / xargs["seconds"]
            more = (memfit["cpu_seconds"] - xargs["cpu_seconds"]) / options.jobs
            rounds.append({"xargs": xargs, "memfit": memfit, "ratio": ratio, "more_cpu_per_job": more})
            print(
                f"round {number}: xargs -P {num_cores()} {xargs['seconds']:.2f} s ({xargs['cpu_seconds']:.2f} s CPU), "
                f"memfit map {memfit['seconds']:.2f} s ({memfit['cpu_seconds']:.2f} s CPU), ratio {ratio:.2f}, "
                f"{more * 1000:+.1f} ms CPU a command ({memfit['cpu_seconds'] / xargs['cpu_seconds']:.2f} of xargs')",
                flush=True,
            )
    median = statistics.median(one["ratio"] for one in rounds)
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "median_ratio": median}, indent=2) + "\n")
    print(f"{'met   ' if median <= options.most else 'MISSED'} ratio {median:.2f}, median ({options.most} at most)")
    return 0 if median <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())
