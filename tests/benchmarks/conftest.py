"""Benchmarks as modules, and as commands."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))


@pytest.fixture
def benchmark():
    """Imports a benchmark."""
    return importlib.import_module


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark as a command in a folder of its own."""

    def command(name, *words):
        words = [sys.executable, str(BENCHMARKS / "harness.py"), "run", name, *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    return command
