"""The benchmark of tokenised texts on few of them: every contestant that is installed gives the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sequences.py"

pytest.importorskip("torch")
pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc"), pytest.mark.slow]


def test_all_contestants_deliver_the_same_batches(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--examples", "200", "--rounds", "1", "--num-workers", "0"]
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode in (0, 1), done.stderr
    assert "met    batches are the same for all" in done.stdout.splitlines()
    names = {row["name"] for row in json.loads(figures.read_text())}
    assert {"DataLoader, tokenise", "DataLoader, ids", "memfit, ids"} <= names
