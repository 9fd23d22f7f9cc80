"""The benchmark of loaders on a small panel: every contestant that is installed gives the same batches."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loaders.py"
PEERS = {"pandas": "pandas", "polars": "polars", "HF datasets": "datasets", "LitData": "litdata"}

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's page cache and /proc"),
    pytest.mark.slow,
]


def test_all_contestants_deliver_the_same_batches_and_nothing_is_left_behind(tmp_path):
    command = [sys.executable, str(SCRIPT), "--gib", "0.02", "--assets", "200", "--seconds", "0.1"]
    command += ["--num-workers", "0", "--directory", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    installed = {name for name, package in PEERS.items() if importlib.util.find_spec(package) is not None}
    for name in PEERS.keys() - installed:
        assert f"{name}: {PEERS[name]} is not installed, left out" in lines
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in figures} == {"memfit", *installed}
    assert "met    batches are the same for all" in lines
    assert all(row["warm_rate"] > 0 and row["cold_rate"] > 0 for row in figures)
    verdicts = [line[:6] for line in lines if line[:7] in ("met    ", "MISSED ")]
    assert len(verdicts) == 2
    assert done.returncode == (1 if "MISSED" in verdicts else 0), "the exit status says whether all targets were met"
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]
