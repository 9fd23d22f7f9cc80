"""The job that dies at its first validation, and the same by memfit, on two nodes: a small form of the benchmark."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("libsumo")
pytest.importorskip("sklearn")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memfit_workloads.trajectory.bench import Trial

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]
SETTINGS = (
    "data.places=[RiLSA_example1]",
    "data.held_out=[]",
    "data.valid_share=0.4",
    "data.simulations=1",
    "data.seconds=200",
    "data.stride_seconds=1",
)


def test_the_naive_job_dies_at_its_first_validation_and_memfit_s_finishes_with_the_same_request(cluster, tmp_path):
    trial = Trial(cluster, tmp_path / "lab", settings=(*SETTINGS, "vocabulary.size=1024"), epochs=1)
    trial.prepare()
    trial.measure()
    naive = trial.naive()
    assert naive["ok"], naive
    diagnosis = trial.diagnose(naive["job"])
    assert diagnosis["wrong"] == [], diagnosis
    memfit = trial.memfit("memfit")
    assert memfit["ok"], memfit
    assert memfit["table_pss_mib"] < 1.1 * trial.table_mib
