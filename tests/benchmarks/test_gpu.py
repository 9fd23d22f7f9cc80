"""The checks on a GPU, as far as they go without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, GPU, "--part", "step"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "there is no GPU here\n")


def test_a_case_is_estimated_without_a_gpu():
    words = [sys.executable, GPU, "--trace", "lstm, 64 x 256"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"method": "traced"' in done.stdout and '"name": "H100-80GB"' in done.stdout
