"""Fixtures that several packages' tests share."""

import os
import signal
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# In the background of a shell Ctrl-C is ignored, and so it would be in all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure.
settings.register_profile("memfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memfit")

_V1_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_group():
    """Makes real cgroup v1 memory groups with a limit, and removes them afterwards."""
    if os.geteuid() != 0 or not (_V1_MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory")
    made = []

    def make(limit_bytes: int, parent: Path = _V1_MEMORY) -> Path:
        group = parent / f"memfit-test-{uuid.uuid4().hex[:8]}"
        group.mkdir()
        made.append(group)
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        return group

    yield make
    for group in reversed(made):
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail(f"{group} still holds processes: {(group / 'cgroup.procs').read_text().split()}")


@pytest.fixture(autouse=True)
def _alone_on_the_host(tmp_path_factory, monkeypatch):
    """Each test has a folder for temporary files, and so a host-wide list of runs, of its own."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """Tests see no MEMFIT_ variables of whoever starts them."""
    for name in [name for name in os.environ if name.startswith("MEMFIT_")]:
        monkeypatch.delenv(name)
