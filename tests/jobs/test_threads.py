"""Threads of numerical libraries are set before these are loaded, or not at all."""

import subprocess
import sys

import pytest

from memfit.errors import UsageError
from memfit.jobs import limit_threads


@pytest.mark.long
@pytest.mark.slow
def test_torch_and_numpy_have_the_threads_that_were_set_before_their_import():
    code = "from memfit.jobs import limit_threads; limit_threads(1); import torch; print(torch.get_num_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_late_call_is_refused_and_changes_nothing():
    env = {}
    with pytest.raises(UsageError, match="torch is imported already"):
        limit_threads(1, env=env, modules=["torch"])
    assert env == {}


def test_no_thread_at_all_is_refused():
    with pytest.raises(UsageError, match="0 threads"):
        limit_threads(0, env={}, modules=[])
