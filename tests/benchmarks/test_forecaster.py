"""The benchmark of the forecaster on a small store, and its intervals beside those of SciPy."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "forecaster.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_forecaster", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_line_of_an_effect_has_the_interval_of_a_paired_t_test(script):
    random = np.random.default_rng(0)
    one, other = random.normal(size=(2, 7))
    line = script.line_of_effect(
        *({seed: {"icir": value} for seed, value in enumerate(all)} for all in (one, other)), "icir"
    )
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert f"({interval.low:+.4f} to {interval.high:+.4f})" in line and line.endswith("no difference shown")


def test_the_variants_change_settings_of_the_plain_run_and_nothing_else(script, tmp_path):
    plain = script.config_of("generated", 100, 2, 0, tmp_path)["params"]["train"]
    for changed in script.VARIANTS.values():
        assert set(changed) <= set(plain) and all(plain[name] != value for name, value in changed.items())


@pytest.mark.slow
def test_the_store_gives_the_same_batches_from_the_panel_and_from_parquet():
    command = [sys.executable, str(SCRIPT), "--part", "store", "--rows", "1", "--seconds", "0.05", "--step-ms", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "of 112 columns" in lines[0] and lines[-1] == "the same batches: met"
    assert sum("samples/s warm" in line for line in lines) == 3
