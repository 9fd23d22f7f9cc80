"""The batch script and the training of docs/slurm.md, as they stand there, on a real Slurm cluster."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.cluster import Cluster, _until

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.long]
PAGE = Path(__file__).parents[2] / "docs/slurm.md"


def write_files(folder: Path) -> None:
    folder.mkdir()
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(text)


def test_a_job_that_is_preempted_and_requeued_in_mid_training_ends_with_the_same_weights(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone, here, node = tmp_path / "alone", tmp_path / "here", cluster.nodes[0]
    write_files(alone)
    write_files(here)
    cluster.env["PATH"] = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    with subprocess.Popen([sys.executable, "train.py"], cwd=alone, stdout=subprocess.PIPE, text=True) as reference:
        cluster.call("scontrol", "create", "PartitionName=spot", "Nodes=ALL", "PriorityTier=1", "GraceTime=60")
        where = ("--parsable", "-p", "spot", "-w", node, f"--chdir={here}", f"--output={here}/log")
        job = cluster.call("sbatch", *where, str(here / "train.sbatch")).strip()

        def is_past(step: int, seconds: float = 300) -> None:
            _until(seconds, f"checkpoint {step}", lambda: (here / f"out/step-{step}").exists())

        is_past(100)
        cluster.wait(cluster.submit("sleep 1", "-w", node, "-N1", "-n4"))  # it needs the whole node
        is_past(200)
        log = (here / "log").read_text()
        assert "Stopped by SIGTERM" in log and log.count("goes on") == 1, log
        cluster.call("scontrol", "requeue", job)
        assert cluster.wait(job, seconds=180) == ["COMPLETED"], (here / "log").read_text()
        done = reference.communicate()[0].splitlines()[-1]
    log = (here / "log").read_text()
    assert log.count("goes on") == 2 and log.splitlines()[-1] == done and done.startswith("done: "), log
