"""One Slurm cluster for all tests of a session that ask for it."""

import tempfile
from pathlib import Path

import pytest

from slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster():
    """A real Slurm with two nodes and accounting, on this machine alone."""
    if reason := missing():
        pytest.skip(reason)
    # Short, because it holds sockets.
    made = Cluster(Path(tempfile.mkdtemp(prefix="memfit-slurm-", dir="/tmp")))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Show beside a failure what Slurm wrote and knows."""
    report = yield
    if report.failed and isinstance(made := item.funcargs.get("cluster"), Cluster):
        report.sections.append(("Slurm", made.describe()))
    return report
