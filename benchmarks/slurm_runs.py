"""Runs on a real Slurm of two nodes on this machine that is treated badly: what is lost, what runs twice.

    python benchmarks/slurm_runs.py [--part crash|folds|ranks|all] [--jobs 20]

Needs root, a cgroup v1 memory hierarchy and Slurm's packages; the cluster is its own and is gone afterwards.

- *crash*: a map of jobs in a partition that can be preempted. A job of the other partition takes both nodes; then
  the controller and the supervisor are killed with SIGKILL. The run is resumed while the controller is away. Each job
  must end once, with its result.
- *folds*: five folds of the ranker, on this host and as elements of a job array whose first request is too small.
  Tables and tensors must be the same.
- *ranks*: a torchrun command on two nodes with two ranks each. One rank takes too much; all are restarted with more.

Exit status: 0 all as it must be, 1 something is not, 2 Slurm is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.files import read_json
from memfit.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

JOB = """
import os, signal, sys, time
from pathlib import Path
number, seconds = sys.argv[1], float(sys.argv[2])
with open("starts", "a") as file:
    file.write(f"{number}\\n")
done = Path(f"done_{number}")
begun = time.monotonic()
left = float(done.read_text()) if done.exists() else seconds
def save(*_):
    done.write_text(str(max(0.0, left - (time.monotonic() - begun))))
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
time.sleep(left)
with open("ends", "a") as file:
    file.write(f"{number}\\n")
"""

RANK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
first = int(open("step").read()) if os.path.exists("step") else 0
if os.path.exists("total"):
    total = torch.load("total")
for step in range(first, 6):
    share = torch.tensor([float((step + 1) * (rank + 1))], dtype=torch.float64)
    dist.all_reduce(share)
    total += share
    if rank == 0:
        torch.save(total, "total"); open("step", "w").write(str(step + 1))
    dist.barrier()
    if rank == 3 and step == 2:
        block = torch.ones(300 << 20, dtype=torch.uint8)
print("total", total.item(), flush=True)
"""


class Lab:
    """A folder with programs in it, and memfit started there with the cluster's tools."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        bin_dir = Path(sys.executable).parent
        self.env = cluster.env | {"PATH": f"{bin_dir}:{cluster.env['PATH']}", "MEMFIT_RUNS_DIR": str(folder / "runs")}
        folder.mkdir()

    def start(self, *words: str) -> subprocess.Popen[str]:
        with open(self.folder / "memfit.log", "a") as log:
            command = [sys.executable, "-m", "memfit", *words]
            return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log, text=True)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def lines(self, name: str) -> Counter[str]:
        path = self.folder / name
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def run_dir(self, experiment: str) -> RunDir:
        return RunDir.all(self.folder / "runs", experiment)[0]


def wait_until(is_so: Callable[[], bool], seconds: float, meanwhile: Callable[[], object] = lambda: None) -> bool:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(0.2)
    return True


def crash(cluster: Any, folder: Path, num_jobs: int) -> bool:
    """A preemption, then SIGKILL of the controller and of the supervisor."""
    lab = Lab(cluster, folder)
    lab.write("job.py", JOB)
    options = ("--backend", "slurm", "--set", "slurm.partition=low", "--memory", "60MiB", "--name", "crash")
    command = ("--param", f"n=1..{num_jobs}", "--", sys.executable, "job.py", "{n}", "6")
    first = lab.start("run", *options, *command)
    ok = wait_until(lambda: len(lab.lines("starts")) >= 4, 60)
    hog = cluster.submit("sleep 4", "-N2", "--exclusive", "--mem=1500M", "-p", "main")
    cluster.wait(hog)
    preempted = sum(lab.lines("starts").values())
    ok = ok and wait_until(lambda: len(lab.lines("ends")) >= num_jobs // 3, 120)
    cluster.kill_controller()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = lab.start("resume", "crash")
    time.sleep(5)
    cluster.start_controller()
    drained: set[str] = set()

    def administer() -> None:
        """Give drained nodes back, as an administrator does: a crash can leave jobs that the nodes refuse."""
        for line in cluster.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines():
            name, _, state = line.partition(" ")
            if state.startswith("drain") and name not in drained:
                drained.add(name)
                cluster.call("scontrol", "update", f"NodeName={name}", "State=RESUME")

    ended = wait_until(lambda: second.poll() is not None, 900, administer)
    if not ended:
        second.kill()
    queue_is_empty = wait_until(lambda: not cluster.call("squeue", "-h").strip(), 60)
    if not queue_is_empty:
        print(cluster.call("squeue", "-h", "-r", "-o", "%i %T %r %N"))
    ends, starts = lab.lines("ends"), lab.lines("starts")
    wanted = Counter({str(number): 1 for number in range(1, num_jobs + 1)})
    again = sorted(set(starts.values()))
    ok = ok and ended and second.returncode == 0 and ends == wanted and queue_is_empty
    print(
        f"crash: {len(ends)} of {num_jobs} jobs ended, {sum(ends.values()) - len(ends)} of them twice; starts of a job:"
    )
    print(f"  {again[0]} to {again[-1]} ({preempted} had started when the other partition was done)")
    print(
        f"  nodes that the crash drained: {len(drained)}; left in the queue: {'nothing' if queue_is_empty else 'jobs'}"
    )
    return ok


def folds(cluster: Any, folder: Path) -> bool:
    """The ranker's folds here, and on Slurm with a first request that is too small."""
    lab, kills = Lab(cluster, folder), importlib.import_module("kills")
    config = importlib.import_module("workloads.test_ranker_killed").CONFIG
    for before, after in (
        ("splits: 2", "splits: 5"),
        ("dates: 110", "dates: 220"),
        ("coefficient: 0.5", "coefficient: 0.1"),
    ):
        config = config.replace(before, after)
    left = {}
    for name, more in (("here", ()), ("slurm", ("--backend", "slurm", "--set", "slurm.memory=200MiB"))):
        lab.write("config.yaml", config.replace("experiment: ranker", f"experiment: {name}"))
        if lab.start("run", "config.yaml", "--set", "retries=4", *more).wait(900):
            print((folder / "memfit.log").read_text()[-3000:])
            return False
        (path,) = (folder / "runs" / name).glob("run_*")
        left[name] = kills.left_by(RunDir(path))
        left[name].pop("stage_decision")
    run = lab.run_dir("slurm")
    killed = sorted(
        path.parent.name for path in run.path.glob("jobs/*/outcome_*.json") if _state(path) == "out_of_memory"
    )
    differs = [name for name in left["here"] if left["here"][name] != left["slurm"].get(name)]
    print(
        f"folds: {len(left['here'])} results compared, {len(differs)} differ; out of memory first: {', '.join(killed)}"
    )
    return bool(killed) and not differs and left["here"].keys() == left["slurm"].keys()


def _state(path: Path) -> str:
    return str((read_json(path) or {}).get("state"))


def ranks(cluster: Any, folder: Path) -> bool:
    """Two nodes with two ranks each, of which one takes too much."""
    lab = Lab(cluster, folder)
    lab.write("rank.py", RANK)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "500MiB", "--name", "ranks")
    torchrun = ("torchrun", "--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--max-restarts=0")
    code = lab.start("run", *options, "--", *torchrun, "rank.py").wait(600)
    jobs = lab.run_dir("ranks").job_dir("cmd_0001")
    first = read_json(jobs / "outcome_1.json") or {}
    out = (jobs / "out.log").read_text() if (jobs / "out.log").exists() else ""
    print(f"ranks: first attempt {first.get('state')} ({first.get('cause')}); then exit code {code}")
    return code == 0 and first.get("state") == "out_of_memory" and out.count("total 210.0") == 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("crash", "folds", "ranks", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=20, help="jobs of the crash (20)")
    options = parser.parse_args()
    lab = importlib.import_module("slurm.cluster")
    if reason := lab.missing():
        print(f"slurm: not run: {reason}", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[Any, Path], bool]] = {
        "crash": lambda cluster, folder: crash(cluster, folder, options.jobs), "folds": folds, "ranks": ranks,
    }  # fmt: skip
    ok = True
    with tempfile.TemporaryDirectory(prefix="memfit-bench-", dir="/tmp") as name:
        for part, run in parts.items():
            if options.part in (part, "all"):
                cluster = lab.Cluster(Path(tempfile.mkdtemp(prefix="memfit-slurm-", dir="/tmp")))
                try:
                    cluster.start()
                    is_right = run(cluster, Path(name) / part)
                    print(f"{part}: {'as it must be' if is_right else 'NOT as it must be'}", flush=True)
                    ok = ok and is_right
                finally:
                    cluster.stop()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
