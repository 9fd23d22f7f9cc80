"""Benchmarks as modules, and as commands."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        found = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, found.name, module)  # its dataclasses look there
        found.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark as a command in a folder of its own."""

    def command(name, *words):
        words = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    return command
