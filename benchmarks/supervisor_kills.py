"""SIGKILL the supervisor at random moments: the same results, no job twice at once, no finished work lost.

    python benchmarks/supervisor_kills.py [--kills 50] [--jobs 24] [--seed 0]

A sweep of short commands is run once without a disturbance and then again and again by supervisors that are killed with
SIGKILL after a random time, each time followed by the same command. Every command holds a file lock of its own while it
runs, so that a second one of it beside the first is caught by the kernel, and prints a checkable number. Exit status 0:
results equal, no job ran twice at once, every job was started once, and no process or control group is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
import fcntl, hashlib, os, sys, time
number, folder = sys.argv[1], sys.argv[2]
lock = open(f"{folder}/{number}.lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(f"{folder}/twice", "a").write(number + "\\n")
with open(f"{folder}/starts", "a") as starts:
    starts.write(number + "\\n")
block = bytearray(number.encode() * (4 << 20))
time.sleep(0.2 + int(number) % 5 / 10)
print(number, hashlib.sha256(block).hexdigest())
"""


def command(folder: Path, num_jobs: int) -> list[str]:
    """The sweep whose every job takes a fraction of a second."""
    sweep = [sys.executable, "-m", "memfit", "run", "--param", f"n=1..{num_jobs}", "--runs-dir", str(folder / "runs")]
    return [*sweep, "--name", "kills", "--json", "--", sys.executable, str(folder / "job.py"), "{n}", str(folder)]


def results(folder: Path) -> dict[str, str]:
    """What each job of the newest run printed, by job."""
    newest = max((folder / "runs" / "kills").glob("run_*"))
    return {path.parent.name: path.read_text() for path in sorted(newest.glob("jobs/*/out.log"))}


def is_complete(folder: Path) -> bool:
    """Whether the newest run said that it is over before its supervisor was killed."""
    outcomes = sorted((folder / "runs").glob("kills/run_*/outcome.json"))
    return bool(outcomes) and json.loads(outcomes[-1].read_text())["state"] == "completed"


def prepared(parent: Path, name: str) -> Path:
    """A folder of its own for a sweep."""
    folder = parent / name
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    return folder


def run_killed(folder: Path, num_jobs: int, num_kills: int, rng: random.Random) -> int:
    """Run a sweep whose supervisors are killed until it is done or enough were; how many were killed."""
    killed = 0
    while True:
        supervisor = subprocess.Popen(command(folder, num_jobs), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            supervisor.communicate(timeout=rng.uniform(0.05, 1.6) if killed < num_kills else 600)
            if supervisor.returncode != 0:
                raise SystemExit(f"the sweep ended with {supervisor.returncode}")
            return killed
        except subprocess.TimeoutExpired:
            os.kill(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
            killed += 1
            if is_complete(folder):  # the same command would start another run
                return killed


def left_over(parent: Path) -> list[str]:
    """Processes and control groups that are still there because of this benchmark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(parent) in words and path.parent.name != str(os.getpid()):
            found.append(f"process {path.parent.name}: {words.replace(chr(0), ' ')}")
    names = {run.name for run in parent.glob("*/runs/kills/run_*")}
    for base in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        found += [str(path) for path in base.glob("**/memfit-run_*") if path.name.removeprefix("memfit-") in names]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many supervisors to kill")
    parser.add_argument("--jobs", type=int, default=24, help="jobs in each sweep")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="memfit-kills-") as name:
        parent = Path(name).resolve()
        quiet = prepared(parent, "quiet")
        subprocess.run(command(quiet, options.jobs), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expected = results(quiet)
        num_kills = num_sweeps = num_starts = num_twice = 0
        same = True
        while num_kills < options.kills:
            folder = prepared(parent, f"killed_{num_sweeps}")
            num_kills += run_killed(folder, options.jobs, options.kills - num_kills, rng)
            num_sweeps += 1
            found = {job: text.replace(str(folder), str(quiet)) for job, text in results(folder).items()}
            same = same and found == expected
            num_starts += len((folder / "starts").read_text().splitlines())
            twice = folder / "twice"
            num_twice += len(twice.read_text().splitlines()) if twice.exists() else 0
        for _ in range(50):  # the last shims leave after their supervisor
            left = left_over(parent)
            if not left:
                break
            time.sleep(0.1)
    told = {
        "kills": num_kills,
        "sweeps": num_sweeps,
        "jobs": num_sweeps * options.jobs,
        "starts": num_starts,
        "twice_at_once": num_twice,
        "same_results": same,
        "left_over": left,
    }
    print(json.dumps(told, indent=2))
    good = same and not num_twice and not left and num_starts == num_sweeps * options.jobs
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
