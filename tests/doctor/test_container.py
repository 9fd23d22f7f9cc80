"""In a real container: its own limits, its own /dev/shm of 64 MiB."""

import json
import sys

import pytest

from memory.containers import NoContainersError, podman

pytestmark = pytest.mark.slow

LOADER = "import torch\nfrom torch.utils.data import DataLoader\nDataLoader(d, num_workers=2, multiprocessing_context='spawn')\n"
PROGRAM = f"""
import json, sys
from memfit.doctor import Setup, examine
checks = examine([sys.executable, "-c", {LOADER!r}], Setup(threads=1, batch_bytes=20 << 20))
print(json.dumps([check.to_dict() for check in checks]))
"""


@pytest.mark.container
def test_a_container_is_examined_from_inside(tmp_path):
    try:
        with podman(tmp_path) as run:
            out = run("--memory=512m", "--shm-size=64m", command=[sys.executable, "-c", PROGRAM])
    except NoContainersError as reason:
        pytest.skip(str(reason))
    found = {check["check"]: check for check in json.loads(out)}
    assert found["/dev/shm"]["verdict"] == "problem"
    assert "2 workers x 2 batches x 20.0 MiB = 80.0 MiB; 64.0 MiB free of 64.0 MiB" in found["/dev/shm"]["finding"]
    assert "of 512.0 MiB" in found["budget"]["finding"]
