"""The job that died at its first validation, on two Slurm nodes with two ranks each: as it was, and by memfit.

    python benchmarks/trajectory.py [--json FILE] [--size 1024] [--simulations 2]

Needs root, a cgroup v1 memory hierarchy, Slurm's packages and memfit[trajectory]; the cluster is its own and is gone
afterwards. The stages before the training run once on this host. Then, with the same data, model and batch:

- *measure*: a canary of the naive training (trajectory_naive.py) under a large request. The request of all that follows
  is its peak on a node less half of the validation data of the node's ranks: training fits, validation does not.
- *naive*: the naive batch script is killed at its first validation, and nothing is saved.
- *canary*: ``memfit run --canary`` on the naive training finds that in the first minute, with exit code 3.
- *diagnose*: of the naive job's log and accounting; ``--fix`` writes a script, which runs; ``--verify`` proves it.
- *memfit*: the workload trains under the same request. A checkpoint is saved before each validation. The proportional
  memory (PSS) of the mapped teacher table is read from /proc/PID/smaps of all ranks.
- *kill*: the same, and a rank is killed with SIGKILL in epoch 2.
- *one node*: the same, with four ranks on one node. The weights of all three must be the same bytes.

Exit status: 0 all as it must be, 1 something is not, 2 Slurm or the simulator is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memfit.files import read_json
from memfit.rundir import RunDir, read_events
from memfit_workloads.trajectory.data import SPLITS, Scenes
from slurm_runs import ROOT, Lab

CONFIG = ROOT / "src/memfit_workloads/trajectory/config.yaml"
NAIVE = Path(__file__).with_name("trajectory_naive.py")
MIB, RANKS, NODES, BATCH, _NODE_MIB = 1 << 20, 4, 2, 64, 2048
#: What memfit adds to a request of several nodes for its watchers: so `--mem` is the same for all.
_OWN_MIB = 80
_FIELDS = "JobID,JobName,State,ExitCode,ReqMem,MaxRSS,AveRSS,NTasks,NNodes,NCPUS,Elapsed,Timelimit"


class Trial:
    """The steps of the comparison, each with its figures; all share one cluster, one folder and one request."""

    def __init__(self, cluster: Any, folder: Path, *, settings: tuple[str, ...], epochs: int) -> None:
        self.lab, self.cluster, self.folder, self.epochs = Lab(cluster, folder), cluster, folder, epochs
        given = (f"trainer.params.max_epochs={epochs}", f"dataloader.params.batch_size={BATCH}", "seeds=1", *settings)
        self.words = [str(CONFIG), *(word for one in given for word in ("--set", f"params.{one}"))]
        self.request_mib = 0

    def run(self, *words: str, seconds: float = 400) -> tuple[int, str]:
        """Run memfit to its end; return its exit code and what it said."""
        process = self.lab.start(*words)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        log = self.folder / "memfit.log"
        said = log.read_text()
        log.write_text("")
        return code, said

    # --- the stages before the training, and what they left

    def prepare(self) -> dict[str, Any]:
        """Make scenes, vocabulary and teacher table on this host."""
        code, said = self.run("run", *self.words, "--until", "teacher", seconds=1500)
        assert code == 0, said
        return {"table_mib": self.table_mib}

    @property
    def table_mib(self) -> float:
        """The size of the teacher table."""
        return sum(one.stat().st_size for one in self.checkpoints().glob("teacher_*/*.npy")) / MIB

    def checkpoints(self, name: str = "runs") -> Path:
        """Return the folder of a run's results."""
        return self._run(name) / "checkpoints"

    # --- the naive training

    def _canary(self, request_mib: int) -> tuple[int, str, dict[str, Any]]:
        slurm = (
            "--backend",
            "slurm",
            "--set",
            f"slurm.nodes={NODES}",
            "--set",
            f"slurm.memory={request_mib - _OWN_MIB}MiB",
        )
        command = (sys.executable, str(NAIVE), str(self.checkpoints()), "--batch_size", str(BATCH))
        options = ("--nproc", str(RANKS), "--name", "naive", "--set", "retries=0", "--canary-args", "--steps 5")
        code, said = self.run("run", "--canary", *slurm, *options, "--", *command)
        return code, said, read_json(RunDir.all(self.folder / "runs", "naive-canary")[0].path / "canary.json") or {}

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
        """Try the naive training under the request."""
        began = time.monotonic()
        code, said, _ = self._canary(self.request_mib)
        line = next((one for one in said.splitlines() if one.startswith("canary: ")), said[-500:])
        is_found = code == 3 and line.startswith("canary: broke in phase validate (rank")
        return {"seconds": time.monotonic() - began, "exit_code": code, "line": line, "ok": is_found}

    def _submit(self, script: Path) -> tuple[str, str]:
        """Run a batch script to its end; return its number and what the accounting says."""
        number = self.cluster.call("sbatch", "--parsable", f"--chdir={self.folder}", str(script)).strip()
        self.cluster.wait(number, seconds=300)
        time.sleep(2)  # the accounting of its steps
        return number, self.cluster.call("sacct", "-j", number, "-P", f"--format={_FIELDS}")

    def naive(self) -> dict[str, Any]:
        """Submit the naive batch script."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        command = f"{sys.executable} {NAIVE} {self.checkpoints()} --epochs {self.epochs} --batch_size {BATCH}"
        self.lab.write(
            "train.slurm",
            f"""\
            #!/bin/bash
            #SBATCH --job-name=trajectory
            #SBATCH --nodes={NODES}
            #SBATCH --ntasks-per-node={RANKS // NODES}
            #SBATCH --cpus-per-task=1
            #SBATCH --mem={self.request_mib}M
            #SBATCH --time=00:10:00
            #SBATCH --output=slurm-%j.out

            export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
            srun {command}
            """,
        )
        number, account = self._submit(self.folder / "train.slurm")
        (self.folder / "sacct.txt").write_text(account)
        step = next(one.split("|") for one in account.splitlines() if one.startswith(f"{number}.0|"))
        log = (self.folder / f"slurm-{number}.out").read_text()
        found: dict[str, Any] = {"job": number, "state": step[2], "exit_code": step[3], "sacct": account, "log": log}
        found |= {"max_rss_mib": int(step[5].rstrip("K") or 0) / 1024, "saved": (self.folder / "last.pt").exists()}
        is_killed = step[2] == "OUT_OF_MEMORY" and "validation: loading" in log and not found["saved"]
        return found | {"ok": is_killed and found["max_rss_mib"] < 0.75 * self.request_mib}

    def diagnose(self, number: str) -> dict[str, Any]:
        """Diagnose the naive job, run the script that ``--fix`` writes, and verify it."""
        log, sacct = f"slurm-{number}.out", "sacct.txt"
        found = self._json("diagnose", log, "--sacct", sacct, "--script", "train.slurm", "--fix")
        fixed = Path(found["fix"]["fixed"])
        again, account = self._submit(self.folder / fixed)
        (self.folder / "sacct-fixed.txt").write_text(account)
        words = (log, "--verify", f"slurm-{again}.out", "--against", str(fixed), "--sacct", "sacct-fixed.txt")
        proof = subprocess.run(
            (sys.executable, "-m", "memfit", "diagnose", *words), cwd=self.folder, env=self.lab.env, capture_output=True
        )
        request = next(one for one in (self.folder / fixed).read_text().splitlines() if "--mem=" in one)
        figures = {name: found[name] for name in ("kind", "cause", "phase", "confidence", "arithmetic", "notes")}
        figures |= {"fixed": request, "state": self.cluster.state(again), "verify": proof.stdout.decode()}
        is_told = (found["kind"], found["phase"], found["confidence"]) == ("host_cgroup", "validate", "proved")
        is_told = is_told and any("No line names a checkpoint" in one for one in found["notes"])
        is_told = is_told and "MaxRSS is one task's" in " ".join(found["arithmetic"])
        is_saved = (self.folder / "last.pt").exists()
        is_fixed = figures["state"] == "COMPLETED" and proof.returncode == 0 and is_saved
        return figures | {"exit_code": proof.returncode, "is_told": is_told, "ok": is_told and is_fixed}

    def _json(self, *words: str) -> Any:
        command = (sys.executable, "-m", "memfit", *words, "--json")
        return json.loads(subprocess.run(command, cwd=self.folder, env=self.lab.env, capture_output=True).stdout)

    # --- the same by memfit

    def memfit(self, name: str, *, nodes: int = NODES, kill: bool = False) -> dict[str, Any]:
        """Train with memfit from the prepared stages, on some nodes; kill the last rank in epoch 2 if asked."""
        shutil.copytree(self.folder / "runs" / "trajectory", self.folder / name / "trajectory")
        each = self.request_mib * NODES // nodes  # one node has what two had
        slurm = ("--backend", "slurm", "--set", f"slurm.nodes={nodes}", "--set", f"slurm.memory={each - _OWN_MIB}MiB")
        words = ("--until", "train", "--nproc", str(RANKS), "--set", "retries=0", "--runs-dir", str(self.folder / name))
        began, process, table, killed = time.monotonic(), self.lab.start("run", *self.words, *slurm, *words), 0, 0.0
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
        phases = [
            one["phase"] for one in events if one["kind"] == "phase" and one["job"] == "train_1" and not one.get("rank")
        ]
        before = {phases[at - 1] for at, phase in enumerate(phases) if phase == "validate"}
        found |= {"phase_before_validation": sorted(before), "ok": code == 0 and before <= {"checkpoint", "preflight"}}
        if kill:
            after = [one["time"] for one in events if one["kind"] == "step" and one["time"] > killed]
            found["again"] = [one["text"] for one in events if one["kind"] == "ranks_again"]
            found |= {
                "seconds_to_next_step": min(after, default=math.inf) - killed,
                "ok": found["ok"] and found["again"],
            }
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
    total, is_table = 0, False
    try:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            head = line.split(maxsplit=5)
            if "-" in head[0] and not head[0].endswith(":"):
                is_table = line.endswith("teacher.npy")
            elif is_table and head[0] == "Pss:":
                total += int(head[1]) << 10
    except OSError:
        pass
    return total


def _weights(checkpoints: Path) -> str:
    """Return a digest of the weights that a training has left."""
    from memfit.training import load_checkpoint

    (path,) = checkpoints.glob("train_*/best_model.pt")
    state = load_checkpoint(path)["model"]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()[:16]


def missing() -> str:
    """Return why it cannot run here; empty if it can."""
    if importlib.util.find_spec("libsumo") is None:
        return "needs memfit[trajectory]"
    return str(importlib.import_module("slurm.cluster").missing())


def steps(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all steps, and yield each with its figures."""
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


def with_cluster(call: Callable[[Any], int]) -> int:
    """Call with a cluster of two nodes that is gone afterwards."""
    lab = importlib.import_module("slurm.cluster")
    cluster = lab.Cluster(Path(tempfile.mkdtemp(prefix="memfit-slurm-", dir="/tmp")), memory_mib=_NODE_MIB)
    try:
        cluster.start()
        return call(cluster)
    finally:
        cluster.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--size", type=int, default=1024, help="trajectories of the vocabulary (1024)")
    parser.add_argument("--simulations", type=int, default=2, help="of 200 s each (2)")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if reason := missing():
        print(f"trajectory: not run: {reason}", file=sys.stderr)
        return 2
    place = ("data.places=[RiLSA_example1]", "data.held_out=[]", "data.valid_share=0.4")
    settings = (
        *place,
        f"data.simulations={options.simulations}",
        "data.seconds=200",
        "data.stride_seconds=1",
        f"vocabulary.size={options.size}",
    )

    def call(cluster: Any) -> int:
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="memfit-bench-", dir="/tmp") as name:
            trial = Trial(cluster, Path(name) / "lab", settings=settings, epochs=options.epochs)
            for step, figures in steps(trial):
                found[step] = figures
                print(f"{step}: {'as it must be' if figures.get('ok', True) else 'NOT as it must be'}", flush=True)
                for key, value in figures.items():
                    print(f"  {key}: {value:.1f}" if isinstance(value, float) else f"  {key}: {value}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))
        return 0 if all(one.get("ok", True) for one in found.values()) else 1

    return with_cluster(call)


if __name__ == "__main__":
    sys.exit(main())
