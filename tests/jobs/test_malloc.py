"""What the allocator settings of a job do to the gap between live and resident memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.jobs import Job, child_env
from memfit.memory import read_heap
from memfit.rundir import RunDir

# Blocks below glibc's default threshold for a mapping of their own, every fiftieth kept: the holes between stay.
CHURN = """
from memfit.memory import read_heap
blocks = [bytearray(100_000) for _ in range(1500)]
kept = blocks[::50]
del blocks
heap = read_heap()
print(heap["resident_bytes"] - heap["live_bytes"])
"""


def gap_bytes(tight: bool) -> int:
    job = Job("churn", command=("true",), tight_malloc=tight)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env |= child_env(job, RunDir(Path("/nowhere")))
    env.pop("MEMFIT_RUN_DIR")
    done = subprocess.run([sys.executable, "-c", CHURN], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.proves("S0-07")
@pytest.mark.skipif(not read_heap(), reason="needs glibc 2.33 or newer (mallinfo2)")
def test_the_jobs_allocator_settings_close_the_gap_between_live_and_resident_memory():
    loose, tight = gap_bytes(tight=False), gap_bytes(tight=True)
    assert loose > 100 << 20
    assert tight < loose / 10


def test_the_allocator_can_be_left_alone():
    job = Job("loose", command=("true",), tight_malloc=False)
    assert not [name for name in child_env(job, RunDir(Path("/nowhere"))) if name.startswith("MALLOC_")]
