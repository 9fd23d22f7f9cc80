"""``memfit seeds``: the interval beside scipy's, when there is no verdict, and which runs count."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats

from cli.test_compare_runs import NEW_CODE, PARAMS, make, rows
from memfit.errors import DataError
from memfit_workloads.seeds import compare_seeds

__all__ = ["make"]


@pytest.fixture
def run(memfit):
    return memfit


def draws(seed: int, n: int, shift: float = 0.0, scale: float = 1.0) -> dict[int, float]:
    return dict(enumerate(np.random.default_rng(seed).normal(shift, scale, n).tolist(), 1))


def test_the_interval_is_that_of_a_paired_t_test():
    a, b = draws(0, 8), draws(1, 8)
    found = compare_seeds(a, b)
    expected = scipy.stats.ttest_rel(list(a.values()), list(b.values())).confidence_interval(0.95)
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high))
    assert (found.n, found.difference) == (8, pytest.approx(np.mean([*a.values()]) - np.mean([*b.values()])))


@pytest.mark.proves("C-54")
def test_seeds_that_make_all_the_difference_give_a_verdict_either_way_and_equal_draws_none():
    a, b = draws(0, 6, shift=3.0, scale=0.1), draws(1, 6, scale=0.1)
    assert compare_seeds(a, b).verdict == "A is higher"
    assert compare_seeds(b, a).verdict == "A is lower"
    assert compare_seeds(draws(0, 6), draws(1, 6)).verdict == "no difference shown"


@pytest.mark.proves("S2-20")
def test_the_interval_holds_the_true_difference_as_often_as_its_level_says():
    found = [compare_seeds(draws(seed, 5, 1.0), draws(seed + 9000, 5)) for seed in range(400)]
    assert 0.92 < sum(one.lower < 1 < one.upper for one in found) / 400 < 0.98


@pytest.mark.proves("S2-12")
def test_seeds_are_paired_by_number():
    found = compare_seeds({3: 1.0, 1: 2.0, 8: 9.0}, {1: 1.0, 3: 0.5, 4: 7.0})
    assert dict(found.pairs) == {1: (2.0, 1.0), 3: (1.0, 0.5)}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fewer_than_five_pairs_give_no_verdict(n):
    found = compare_seeds(draws(0, n, shift=50.0), draws(1, n))
    assert found.verdict == "too few pairs"
    assert (found.lower == -math.inf) is (n == 1)


def test_a_number_that_no_seed_changes_gives_no_verdict():
    found = compare_seeds(dict.fromkeys(range(9), 2.0), dict.fromkeys(range(9), 1.0))
    assert found.verdict == "the seed changes nothing"


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [({1: 0.0}, {2: 0.0}, "A has 1, B has 2"), ({}, {2: 0.0}, "A has none"), ({1: math.nan}, {1: 0.0}, "A is nan")],
)
def test_seeds_that_cannot_be_paired_are_refused(a, b, said):
    with pytest.raises(DataError, match=said):
        compare_seeds(a, b)


def seeds(make, experiment, values, **top):
    """One run for each seed, of two folds whose mean is the value."""
    for seed, value in enumerate(values, 1):
        make(experiment, [value - 0.1, value + 0.1], seed=seed, **top)


NOISE = [0.01, -0.02, 0.0, 0.02, -0.01]


@pytest.mark.proves("S2-01", "S2-40")
def test_over_five_seeds_a_clear_difference_is_shown_with_its_interval(make, run):
    seeds(make, "sgd", [0.5 + one for one in NOISE])
    seeds(make, "adamw", [0.7 + one * 2 for one in NOISE], params=PARAMS | {"lr": 0.2})
    done = run("seeds", "adamw", "sgd", "--metric", "fold.rank_ic")
    assert (done.exit_code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [
        "change    params.lr: 0.1 -> 0.2   (B -> A)",
        "A is higher: fold.rank_ic, A less B over 5 seeds",
        "  difference +0.2, 95 % interval +0.1804 to +0.2196, n 5",
    ]
    assert rows(done.out)[3:5] == [["seed", "B", "A", "A", "less", "B"], ["1", "0.5100", "0.7200", "+0.21"]]
    assert rows(done.out)[-1:] == [["sd", "0.0158", "0.0316"]]
    found = json.loads(run("seeds", "sgd", "adamw", "--metric", "fold.rank_ic", "--json").out)
    assert (found["verdict"], found["n"], found["change"]) == ("A is lower", 5, "params.lr")


def test_fewer_than_five_pairs_and_one_pair_give_no_verdict(make, run):
    seeds(make, "sgd", [0.1, 0.2, 0.3, 0.4])
    seeds(make, "adamw", [0.91, 0.92, 0.93, 0.94])
    done = run("seeds", "runs/adamw", "runs/sgd", "--metric", "fold.rank_ic")
    assert "too few pairs" in done.out and "Fewer than 5 pairs prove little" in done.out
    seeds(make, "one", [0.9])
    found = json.loads(run("seeds", "one", "sgd", "--metric", "fold.rank_ic", "--json").out)
    assert (found["n"], found["lower"]) == (1, None)


def test_runs_of_a_side_that_differ_in_more_than_the_seed_are_refused(make, run):
    seeds(make, "sgd", [0.5] * 5)
    seeds(make, "mixed", [0.5] * 4)
    make("mixed", [0.5], seed=5, params=PARAMS | {"lr": 0.2})
    done = run("seeds", "mixed", "sgd", "--metric", "fold.rank_ic")
    assert done.exit_code == 2
    assert "the runs of A differ among themselves: params.lr: 0.2 -> 0.1" in done.err


def test_over_seeds_a_second_difference_is_refused_too(make, run):
    seeds(make, "sgd", NOISE)
    seeds(make, "adamw", NOISE, params=PARAMS | {"lr": 0.2}, made_by=NEW_CODE)
    words = ("seeds", "adamw", "sgd", "--metric", "fold.rank_ic")
    assert run(*words).exit_code == 2
    assert run(*words, "--differs", "code").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sgd", "sgd"), "missing option '--metric'"),
        (("sgd", "sgd", "--metric", "fold.rank"), "A has no number fold.rank"),
        (("sgd", "none", "--metric", "fold.rank_ic"), "'none' names no experiment"),
        (("sgd", "other", "--metric", "fold.rank_ic"), "no seed is in both: A has 1, 2, B has 9"),
    ],
)
def test_what_cannot_be_compared_over_seeds_is_refused(make, run, words, message):
    seeds(make, "sgd", [0.1, 0.2])
    make("other", [0.1], seed=9)
    done = run("seeds", *words)
    assert done.exit_code == 2
    assert message in done.err
