"""The job that died at its first validation, on two Slurm nodes with two ranks each: as it was, and by memfit.

    make bench NAME=trajectory ARGS="--size 1024 --simulations 2"

Needs root, a cgroup v1 memory hierarchy, Slurm's packages and the extra [trajectory]; the cluster is its own.
The stages before the training run once on this host. Then, with the same data, model and batch:

- *measure*: a canary of the naive training (naive.py) under a large request. The request of all that follows
  is its peak on a node less half of the validation data of the node's ranks: training fits, validation does not.
- *naive*: the naive batch script is killed at its first validation, and nothing is saved.
- *canary*: ``memfit run --canary`` on the naive training finds that in the first minute, with exit code 3.
- *diagnose*: of the naive job's log and accounting; ``--fix`` writes a script, which runs; ``--verify`` proves it.
- *memfit*: the workload trains under the same request, with a checkpoint before each validation.
- *kill*, *one node*: the same with SIGKILL to a rank in epoch 2, and on one node. All three have the same weights.

Exit status: 0 all as it must be, 1 something is not, 2 Slurm or the simulator is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness import ROOT, parser, told, write_json
from memfit.files import read_json
from memfit.rundir import RunDir, read_events
from memfit.units import MIB, parse_bytes
from memfit_workloads.trajectory.data import SPLITS, Scenes

sys.path.insert(0, str(ROOT / "tests"))  # the cluster is that of the tests
CONFIG, NAIVE = Path(__file__).with_name("config.yaml"), Path(__file__).with_name("naive.py")
RANKS, NODES, BATCH, _NODE_MIB = 4, 2, 16, 2048
#: What memfit adds to a request of several nodes for its watchers: so `--mem` is the same for all.
_OWN_MIB = 80
_FIELDS = "JobID,JobName,State,ExitCode,ReqMem,MaxRSS,AveRSS,NTasks,NNodes,NCPUS,Elapsed,Timelimit"


class Trial:
    """The steps of the comparison, each with its figures; all share one cluster, one folder and one request."""

    def __init__(self, cluster: Any, folder: Path, *, settings: tuple[str, ...], epochs: int) -> None:
        self.cluster, self.folder, self.epochs, self.request_mib = cluster, folder, epochs, 0
        tools = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
        self.env = cluster.env | {"PATH": tools, "MEMFIT_RUNS_DIR": str(folder / "runs")}
        folder.mkdir()
        given = (f"trainer.params.max_epochs={epochs}", f"dataloader.params.batch_size={BATCH}", "seeds=1", *settings)
        self.words = [str(CONFIG), *(word for one in given for word in ("--set", f"params.{one}"))]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start memfit with the cluster's tools; what it says goes to memfit.log."""
        with open(self.folder / "memfit.log", "w") as log:
            command = [sys.executable, "-m", "memfit", *words]
            return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log, text=True)

    def run(self, *words: str, seconds: float = 400) -> tuple[int, str]:
        """Run memfit to its end; return its exit code and what it said."""
        process = self.start(*words)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        return code, (self.folder / "memfit.log").read_text()

    def prepare(self) -> dict[str, Any]:
        """Make scenes, vocabulary and teacher table on this host."""
        code, said = self.run("run", *self.words, "--until", "teacher", seconds=1500)
        assert code == 0, said
        return {"table_mib": self.table_mib}

    @property
    def table_mib(self) -> float:
        return sum(one.stat().st_size for one in self.checkpoints().glob("teacher_*/*.npy")) / MIB

    def checkpoints(self, name: str = "runs") -> Path:
        return self._run(name) / "checkpoints"

    def _canary(self, request_mib: int) -> tuple[int, str, dict[str, Any]]:
        slurm = self._slurm(NODES, request_mib)
        command = (sys.executable, str(NAIVE), str(self.checkpoints()), "--batch_size", str(BATCH))
        options = ("--nproc", str(RANKS), "--name", "naive", "--canary-args", "--steps 5")
        code, said = self.run("run", "--canary", *slurm, *options, "--", *command)
        return code, said, read_json(RunDir.all(self.folder / "runs", "naive-canary")[0].path / "canary.json") or {}

    @staticmethod
    def _slurm(nodes: int, request_mib: int) -> tuple[str, ...]:
        settings = (f"slurm.nodes={nodes}", f"slurm.memory={request_mib - _OWN_MIB}MiB", "retries=0")
        return ("--backend", "slurm", *(word for one in settings for word in ("--set", one)))

    def measure(self) -> dict[str, Any]:
        """Find the request: midway between what a node takes in training and in validation."""
        code, said, verdict = self._canary(_NODE_MIB - 200)
        assert code == 0, said
        peak, data = verdict["host_peak_bytes"] / MIB, RANKS // NODES * self._valid_bytes() / MIB
        self.request_mib = round(peak - data / 2)
        return {"validate_mib": peak, "of_it_validation_data_mib": data, "request_mib": self.request_mib}

    def _valid_bytes(self) -> int:
        """Return the size of the validation data, which each naive rank loads for itself."""
        total = 0
        for table in self.checkpoints().glob("teacher_*/teacher.npy"):
            folder = table.parent.with_name(table.parent.name.replace("teacher", "prepare")) / "scenes.arrays"
            num_valid = (np.load(folder / "split.npy") == SPLITS.index("valid")).sum()
            files = (table, *(folder / f"{name}.npy" for name in Scenes.NAMES))
            total += num_valid * sum(np.load(file, mmap_mode="r")[0].nbytes for file in files)
        return int(total)

    def canary(self) -> dict[str, Any]:
        began = time.monotonic()
        code, said, _ = self._canary(self.request_mib)
        line = next((one for one in said.splitlines() if one.startswith("canary: ")), said[-500:])
        is_found = code == 3 and line.startswith("canary: broke in phase validate (rank")
        return {"seconds": time.monotonic() - began, "exit_code": code, "line": line, "ok": is_found}

    def _submit(self, script: Path) -> tuple[str, str]:
        """Run a batch script to its end; return its number and what the accounting says."""
        number = self.cluster.call("sbatch", "--parsable", f"--chdir={self.folder}", str(script)).strip()
        self.cluster.wait(number, seconds=300)
        account = ""
        for _ in range(30):  # the accounting of its steps comes late
            time.sleep(2)
            account = self.cluster.call("sacct", "-j", number, "-P", f"--format={_FIELDS}")
            if f"\n{number}.0|" in account and "RUNNING" not in account:
                break
        return number, account

    def naive(self) -> dict[str, Any]:
        command = f"{sys.executable} {NAIVE} {self.checkpoints()} --epochs {self.epochs} --batch_size {BATCH}"
        script = f"""\
            #!/bin/bash
            #SBATCH --job-name=trajectory
            #SBATCH --nodes={NODES}
            #SBATCH --ntasks-per-node={RANKS // NODES}
            #SBATCH --cpus-per-task=1
            #SBATCH --mem={self.request_mib}M
            #SBATCH --time=00:10:00
            #SBATCH --output=slurm-%j.out

            export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((12000 + SLURM_JOB_ID))
            srun {command}
            """
        (self.folder / "train.slurm").write_text(textwrap.dedent(script))
        number, account = self._submit(self.folder / "train.slurm")
        (self.folder / "sacct.txt").write_text(account)
        step = next(one.split("|") for one in account.splitlines() if one.startswith(f"{number}.0|"))
        log = (self.folder / f"slurm-{number}.out").read_text()
        found: dict[str, Any] = {"job": number, "state": step[2], "exit_code": step[3], "sacct": account, "log": log}
        found |= {"max_rss_mib": parse_bytes(f"{step[5] or '0K'}iB") / MIB, "saved": (self.folder / "last.pt").exists()}
        is_killed = step[2] == "OUT_OF_MEMORY" and "validation: loading" in log and not found["saved"]
        return found | {"ok": is_killed and found["max_rss_mib"] < 0.75 * self.request_mib}

    def diagnose(self, number: str) -> dict[str, Any]:
        """Diagnose the naive job, run the script that ``--fix`` writes, and verify it."""
        log = f"slurm-{number}.out"
        options = (log, "--sacct", "sacct.txt", "--script", "train.slurm", "--fix", "--json")
        command = (sys.executable, "-m", "memfit", "diagnose", *options)
        found = json.loads(subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True).stdout)
        fixed = self.folder / found["fix"]["fixed"]
        again, account = self._submit(fixed)
        (self.folder / "sacct-fixed.txt").write_text(account)
        words = (log, "--verify", f"slurm-{again}.out", "--against", str(fixed), "--sacct", "sacct-fixed.txt")
        code, proof = self.run("diagnose", *words)
        figures = {name: found[name] for name in ("kind", "cause", "phase", "confidence", "arithmetic", "notes")}
        figures |= {"fixed": fixed.read_text(), "state": self.cluster.state(again), "verify": proof, "exit_code": code}
        right = {
            "verdict": (found["kind"], found["phase"], found["confidence"]) == ("host_cgroup", "validate", "proved"),
            "note": any("No line names a checkpoint" in one for one in found["notes"]),
            "arithmetic": "MaxRSS is one task's" in " ".join(found["arithmetic"]),
            "state": figures["state"] == "COMPLETED",
            "verify": code == 0,
            "saved": (self.folder / "last.pt").exists(),
        }
        wrong = [name for name, is_right in right.items() if not is_right]
        return figures | {"wrong": wrong, "ok": not wrong}

    def memfit(self, name: str, *, nodes: int = NODES, kill: bool = False) -> dict[str, Any]:
        """Train with memfit from the prepared stages, on some nodes; kill the last rank in epoch 2 if asked."""
        shutil.copytree(self.folder / "runs" / "trajectory", self.folder / name / "trajectory")
        each = self.request_mib * NODES // nodes  # one node has what two had
        words = ("--until", "train", "--nproc", str(RANKS), "--runs-dir", str(self.folder / name))
        process = self.start("run", *self.words, *self._slurm(nodes, each), *words)
        began, table, killed = time.monotonic(), 0, 0.0
        try:
            while process.poll() is None and time.monotonic() < began + 500:
                events = self._events(name)
                pids = _pids(events)
                table = max(table, sum(map(_table_bytes, pids)))
                if kill and not killed and any(one["kind"] == "epoch" for one in events):
                    killed = time.time()
                    os.kill(pids[-1], signal.SIGKILL)
                time.sleep(0.5)
        finally:
            process.kill()
        code, events = process.wait(), self._events(name)
        found: dict[str, Any] = {"exit_code": code, "seconds": time.monotonic() - began, "table_pss_mib": table / MIB}
        outcome = read_json(self._run(name) / "jobs/train_1/outcome.json") or {}
        found["peak_of_node_mib"] = outcome.get("peak_bytes", 0) / MIB
        own = [one for one in events if one["kind"] == "phase" and one["job"] == "train_1" and not one.get("rank")]
        phases = [one["phase"] for one in own]
        before = {phases[at - 1] for at, phase in enumerate(phases) if phase == "validate"}
        found |= {"phase_before_validation": sorted(before), "ok": code == 0 and before <= {"checkpoint", "preflight"}}
        if kill:
            after = [one["time"] for one in events if one["kind"] == "step" and one["time"] > killed]
            found["again"] = [one["text"] for one in events if one["kind"] == "ranks_again"]
            found["seconds_to_next_step"] = min(after, default=math.inf) - killed
            found["ok"] = found["ok"] and found["again"]
        more = {"said": (self.folder / "memfit.log").read_text()[-3000:]} if code else {}
        return found | (more or {"weights": _weights(self.checkpoints(name))})

    def _run(self, name: str) -> Path:
        return RunDir.all(self.folder / name, "trajectory")[0].path

    def _events(self, name: str) -> list[dict[str, Any]]:
        return list(read_events(self._run(name) / "events"))


def _pids(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the processes of the newest generation of ranks, by their rank."""
    found: dict[int, int] = {}
    for one in events:
        if one["kind"] == "ranks":
            found |= {int(rank): pid for rank, pid in one["pids"].items()}
    return [found[rank] for rank in sorted(found)]


def _table_bytes(pid: int) -> int:
    """Return the proportional memory of a process's mappings of the teacher table."""
    with contextlib.suppress(psutil.Error):
        maps = psutil.Process(pid).memory_maps()
        return sum(int(one.pss) for one in maps if one.path.endswith("teacher.npy"))
    return 0


def _weights(checkpoints: Path) -> str:
    """Return a digest of the weights that a training has left."""
    from memfit.training import load_checkpoint

    (path,) = checkpoints.glob("train_*/best")
    state = load_checkpoint(path)["model"]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()[:16]


def steps(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "prepare", trial.prepare()
    yield "measure", trial.measure()
    naive = trial.naive()
    yield "naive", naive
    yield "canary", trial.canary()
    yield "diagnose", trial.diagnose(naive["job"])
    ours = trial.memfit("two")
    yield "memfit", ours
    for title, name, more in (("kill", "kill", {"kill": True}), ("one node", "one", {"nodes": 1})):
        found = trial.memfit(name, **more)
        yield title, found | {"ok": found["ok"] and found.get("weights") == ours.get("weights")}


def main() -> int:
    given = parser(__doc__)
    given.add_argument("--size", type=int, default=1024, help="trajectories of the vocabulary (1024)")
    given.add_argument("--simulations", type=int, default=2, help="of 200 s each (2)")
    given.add_argument("--epochs", type=int, default=3)
    options = given.parse_args()
    lab = importlib.import_module("slurm.cluster")
    reason = lab.missing() if importlib.util.find_spec("libsumo") else "needs memfit-systems[trajectory]"
    if reason:
        print(f"trajectory: not run: {reason}", file=sys.stderr)
        return 2
    place = ("data.places=[RiLSA_example1]", "data.held_out=[]", "data.valid_share=0.4", "data.stride_seconds=1")
    sizes = (f"data.simulations={options.simulations}", "data.seconds=200", f"vocabulary.size={options.size}")
    cluster = lab.Cluster(Path(tempfile.mkdtemp(prefix="memfit-slurm-", dir="/tmp")), memory_mib=_NODE_MIB)
    found: dict[str, Any] = {}
    try:
        cluster.start()
        with tempfile.TemporaryDirectory(prefix="memfit-bench-", dir="/tmp") as name:
            trial = Trial(cluster, Path(name) / "lab", settings=(*place, *sizes), epochs=options.epochs)
            for step, figures in steps(trial):
                found[step] = figures
                told(bool(figures.get("ok", True)), step)
                for key, value in figures.items():
                    print(f"  {key}: {value:.1f}" if isinstance(value, float) else f"  {key}: {value}", flush=True)
    finally:
        cluster.stop()
    write_json(options.json, found)
    return 0 if all(one.get("ok", True) for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
