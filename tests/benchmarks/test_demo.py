"""The demo shows what it says: folds killed without memfit, none with it, and a killed fold that goes on exactly."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_finishes_all_folds_with_memfit_and_a_killed_one_has_the_same_weights(tmp_path):
    shutil.copytree(ROOT / "examples/images", tmp_path / "examples/images")
    command = [sys.executable, str(ROOT / "benchmarks/demo.py"), "--svg", str(tmp_path / "folds.svg")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    table = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    without, with_it = re.findall(r"\d of 5", " ".join(table["folds finished at once"]))
    killed = [int(one) for one in table["killed by the kernel"]]
    assert with_it == "5 of 5"
    assert killed == [5 - int(without[0]), 0]
    assert killed[0] > 0
    assert "at most 2 ran at the same time" in done.stdout  # a third one would leave no page cache for the images
    assert "killed and continued" in done.stdout
    assert done.stdout.count("the same weights") == 1
    page = re.search(r"The page of the run: (\S+)", done.stdout)
    assert page and (tmp_path / page[1]).stat().st_size > 10_000
    assert (tmp_path / "folds.svg").read_text().startswith("<svg")
