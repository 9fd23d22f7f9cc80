"""The Slurm backend on a real cluster: the contract of all backends, and what only it promises."""

import contextlib

import pytest

from memfit.jobs import SlurmBackend, SlurmOptions
from memfit.rundir import RunDir
from memfit.testing import ProcessContract

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow]


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
