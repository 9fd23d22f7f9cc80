"""The job that died at its first validation, on two Slurm nodes with two ranks each: as it was, and by memfit.

    make bench NAME=trajectory ARGS="--size 1024 --simulations 2"

Needs root, a cgroup v1 memory hierarchy, Slurm's packages and the extra [trajectory]; the cluster is its own.
The stages before the training run once on this host. Then, with the same data, model and batch:

- *measure*: a canary of the naive training (naive.py) under a large request. The request of all that follows
  is its peak on a node less half of the validation data of the node's ranks: training fits, validation does not.
- *naive*: the naive batch script is killed at its first validation, and nothing is saved.
- *canary*: ``memfit run --canary`` on the naive training finds that in the first minute, with exit code 3.
- *memfit*: the workload trains under the same request, with a checkpoint before each validation.

Exit status: 0 all as it must be, 1 something is not, 2 Slurm or the simulator is missing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from harness import ROOT, parser, told, write_json
from memfit.files import read_json
from memfit.rundir import RunDir
from memfit.units import MIB

sys.path.insert(0, str(ROOT / "tests"))  # the cluster is that of the tests
CONFIG, NAIVE = Path(__file__).with_name("config.yaml"), Path(__file__).with_name("naive.py")
RANKS, NODES, BATCH, _NODE_MIB, _VALID_SHARE = 4, 2, 16, 2048, 0.4
#: What memfit adds to a request of several nodes for its watchers: so `--mem` is the same for all.
_OWN_MIB = 80


class Trial:
    """The steps of the comparison, each with its figures; all share one cluster, one folder and one request."""

    def __init__(self, cluster: Any, folder: Path, *, size: int, simulations: int, epochs: int) -> None:
        self.cluster, self.folder, self.epochs, self.request_mib = cluster, folder, epochs, 0
        self.env = cluster.env | {"PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}"}
        folder.mkdir()
        data = ("places=[RiLSA_example1]", "held_out=[]", "seconds=200", "stride_seconds=1")
        given = [f"data.{one}" for one in (*data, f"valid_share={_VALID_SHARE}", f"simulations={simulations}")]
        given += [f"vocabulary.size={size}", f"trainer.params.max_epochs={epochs}", "seeds=1"]
        given.append(f"dataloader.params.batch_size={BATCH}")
        self.words = [str(CONFIG), *(word for one in given for word in ("--set", f"params.{one}"))]
        self.words += ["--nproc", str(RANKS)]  # in the keys of all stages: the threads of a job follow from it

    def run(self, *words: str, seconds: float = 500) -> tuple[int, str]:
        """Run memfit with the cluster's tools to its end; return its exit code and what it said."""
        command = [sys.executable, "-m", "memfit", "run", *words]
        how: dict[str, Any] = {"cwd": self.folder, "env": self.env, "text": True, "timeout": seconds}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
        return done.returncode, done.stdout

    def newest(self, name: str = "trajectory") -> RunDir:
        return RunDir.all(self.folder / "runs", name)[0]

    def prepare(self) -> dict[str, Any]:
        """Make scenes, vocabulary and teacher table on this host."""
        code, said = self.run(*self.words, "--until", "teacher", seconds=1500)
        assert code == 0, said
        self.checkpoints = self.newest().path / "checkpoints"
        self.table_mib = sum(one.stat().st_size for one in self.checkpoints.glob("teacher_*/*.npy")) / MIB
        return {"table_mib": self.table_mib}

    def _slurm(self, request_mib: int) -> tuple[str, ...]:
        settings = (f"slurm.nodes={NODES}", f"slurm.memory={request_mib - _OWN_MIB}MiB", "retries=0")
        return ("--backend", "slurm", *(word for one in settings for word in ("--set", one)))

    def _canary(self, request_mib: int) -> tuple[int, str]:
        command = (sys.executable, str(NAIVE), str(self.checkpoints), "--batch_size", str(BATCH))
        options = ("--nproc", str(RANKS), "--name", "naive", "--canary-args", "--steps 5")
        return self.run("--canary", *self._slurm(request_mib), *options, "--", *command)

    def measure(self) -> dict[str, Any]:
        """Find the request: midway between what a node takes in training and in validation."""
        code, said = self._canary(_NODE_MIB - 200)
        assert code == 0, said
        verdict = read_json(self.newest("naive-canary").path / "canary.json") or {}
        peak, data = verdict["host_peak_bytes"] / MIB, RANKS // NODES * _VALID_SHARE * self.table_mib
        self.request_mib = round(peak - data / 2)
        return {"validate_mib": peak, "of_it_validation_data_mib": data, "request_mib": self.request_mib}

    def canary(self) -> dict[str, Any]:
        began = time.monotonic()
        code, said = self._canary(self.request_mib)
        line = next((one for one in said.splitlines() if one.startswith("canary: ")), said[-500:])
        is_found = code == 3 and line.startswith("canary: broke in phase validate (rank")
        return {"seconds": time.monotonic() - began, "exit_code": code, "line": line, "ok": is_found}

    def naive(self) -> dict[str, Any]:
        command = f"{sys.executable} {NAIVE} {self.checkpoints} --epochs {self.epochs} --batch_size {BATCH}"
        script = f"""\
            #SBATCH --job-name=trajectory
            #SBATCH --nodes={NODES}
            #SBATCH --ntasks-per-node={RANKS // NODES}
            #SBATCH --cpus-per-task=1
            #SBATCH --mem={self.request_mib}M
            #SBATCH --time=00:10:00

            export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((12000 + SLURM_JOB_ID))
            srun {command}
            """
        number = self.cluster.submit(textwrap.dedent(script))
        (state,) = self.cluster.wait(number, seconds=300)
        log = self.cluster.log_of(number).read_text()
        saved = (self.cluster.folder / "jobs/last.pt").exists()
        is_killed = "oom-kill event" in log.partition("validation: loading")[2] and not saved
        return {"state": state, "log": log, "saved": saved, "ok": is_killed}

    def memfit(self) -> dict[str, Any]:
        """Train with memfit from the prepared stages under the same request."""
        code, said = self.run(*self.words, *self._slurm(self.request_mib), "--until", "train")
        outcome = read_json(self.newest().path / "jobs/train_1/outcome.json") or {}
        own = [one for one in self.newest().events() if one["kind"] == "phase" and not one.get("rank")]
        phases = [one["phase"] for one in own if one["job"] == "train_1"]
        before = {phases[at - 1] for at, phase in enumerate(phases) if phase == "validate"}
        found = {"exit_code": code, "peak_of_node_mib": outcome.get("peak_bytes", 0) / MIB, "said": said[-500:]}
        is_right = code == 0 and before <= {"checkpoint", "preflight"}
        return found | {"phase_before_validation": sorted(before), "ok": is_right}

    def steps(self) -> dict[str, dict[str, Any]]:
        """Run all steps, print their figures, and return them."""
        found: dict[str, dict[str, Any]] = {}
        for step in (self.prepare, self.measure, self.naive, self.canary, self.memfit):
            figures = found[step.__name__] = step()
            told(bool(figures.get("ok", True)), step.__name__)
            for key, value in figures.items():
                print(f"  {key}: {value:.1f}" if isinstance(value, float) else f"  {key}: {value}", flush=True)
        return found


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
    cluster = lab.Cluster(Path(tempfile.mkdtemp(prefix="memfit-slurm-", dir="/tmp")), memory_mib=_NODE_MIB)
    try:
        cluster.start()
        with tempfile.TemporaryDirectory(prefix="memfit-bench-", dir="/tmp") as name:
            sizes = {"size": options.size, "simulations": options.simulations, "epochs": options.epochs}
            found = Trial(cluster, Path(name) / "lab", **sizes).steps()
    finally:
        cluster.stop()
    write_json(options.json, found)
    return 0 if all(one.get("ok", True) for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
