"""The Slurm backend on a real cluster: the contract of all backends, and what only it promises."""

import contextlib

import pytest

from jobs.contract import ProcessContract, wait_for, wait_for_end
from memfit.jobs import Job, SlurmBackend, SlurmOptions, Submission
from memfit.rundir import RunDir

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def in_cluster(cluster, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.env[name])
    return cluster


class TestSlurmBackend(ProcessContract):
    @pytest.fixture
    def run_dir(self, tmp_path, in_cluster):
        return RunDir.create(tmp_path, "contract", "0" * 64)

    @pytest.fixture
    def make_backend(self, run_dir):
        return lambda: SlurmBackend(run_dir, SlurmOptions(memory=256 << 20), grace_seconds=5)

    @pytest.fixture
    def outage(self, monkeypatch):
        @contextlib.contextmanager
        def hide():
            with monkeypatch.context() as patch:
                patch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
                yield

        return hide

    def test_one_of_those_that_wait_is_cancelled_while_the_others_of_its_array_go_on(self, run_dir, in_cluster):
        backend = SlurmBackend(run_dir, SlurmOptions(memory=256 << 20), max_parallel=1)
        jobs = [Job(f"job_{number}", command=("sleep", "3")) for number in range(4)]
        backend.submit([Submission(job, None) for job in jobs])
        wait_for(backend, lambda: backend.poll()["job_0"].state == "running")
        backend.cancel("job_1")
        status = wait_for_end(backend, "job_1")
        assert (status.state, status.asked, status.started) == ("cancelled", True, None)
        assert {wait_for_end(backend, name).state for name in ("job_0", "job_2", "job_3")} == {"completed"}
