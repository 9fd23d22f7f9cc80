"""A small seeded version of the simulation: what the test and the interval promise, and what others on them do not."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("arch")
pytest.importorskip("statsmodels")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decision.py"


@pytest.fixture(scope="module")
def decision():
    specification = importlib.util.spec_from_file_location("benchmark_decision", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # its dataclass looks there
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


@pytest.mark.slow
def test_overlapping_labels_are_tested_as_promised_and_others_reject_far_too_often(decision):
    found = decision.rates(240, 5, "normal", num_series=100, seed=1, num_resamples=100)
    # 100 series know a share of 5 % to about ± 2.2 points.
    assert 0.01 <= found.size <= 0.10
    assert found.decided <= found.size
    assert 0.90 <= found.coverage <= 0.99
    assert found.root_n > 0.8
    assert found.no_lags > 0.25
    assert found.bartlett > found.size
    assert found.basic < found.coverage


def test_the_power_is_what_was_foreseen(decision):
    error = decision.true_standard_error(240, 5)
    share = decision.found_share(240, 5, decision.minimal_detectable_effect(error, 240), num_series=300, seed=1)
    assert share == pytest.approx(0.8, abs=0.07)


def test_a_share_out_of_bounds_is_called_missed(decision, capsys):
    assert decision.judge("size", 0.05, (0.03, 0.08))
    assert not decision.judge("size", 0.09, (0.03, 0.08))
    assert capsys.readouterr().out == "met    size: 0.050 (0.03 to 0.08)\nMISSED size: 0.090 (0.03 to 0.08)\n"


@pytest.mark.slow
def test_gaps_between_folds_do_no_harm(decision):
    found = decision.rates(240, 5, "five folds", num_series=60, seed=1, num_resamples=100)
    assert 0.0 < found.size <= 0.13
    assert found.coverage >= 0.87
