"""The job that dies at its first validation, and the same by memfit, on two nodes: a small form of the benchmark."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("libsumo")
pytest.importorskip("sklearn")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memfit_workloads.trajectory.bench import Trial

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


def test_the_naive_job_dies_at_its_first_validation_and_memfit_s_finishes_with_the_same_request(cluster, tmp_path):
    found = Trial(cluster, tmp_path / "lab", size=1024, simulations=1, epochs=1).steps()
    assert [step for step, figures in found.items() if not figures.get("ok", True)] == [], found
