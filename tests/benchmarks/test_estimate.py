"""The benchmark of estimates, without what it traces: every row is there, and verdicts that are known are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "estimate.py"


def test_the_grid_has_every_row_and_its_verdicts(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--skip-traced", "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    grid = json.loads(figures.read_text())["grid"]
    assert len(grid) == 3 * 3 * 2 * 2
    verdicts = {
        (row["gpu"], row["form"], row["checkpointing"], row["optimizer"]): row["formula"]["verdict"] for row in grid
    }
    assert verdicts["RTX 4090", "fp32 masters", "full", "adamw8bit"] == "does not fit"
    assert verdicts["RTX 5090", "pure bf16", "full", "adamw"] == "fits"
    assert "MISSED" not in done.stdout
