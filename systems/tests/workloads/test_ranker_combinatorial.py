"""Combinatorial purged folds: no label leaks by our own rule, and the paths hold each date once."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import SplitError
from memfit.splits import PurgedKFold
from memfit_workloads.ranker.combinatorial import CombinatorialPurged


@st.composite
def cases(draw):
    """The number of dates, and a splitter over them."""
    n_blocks = draw(st.integers(3, 6))
    splitter = CombinatorialPurged(
        n_blocks,
        draw(st.integers(2, n_blocks - 1)),
        purged_size=draw(st.integers(0, 4)),
        embargo_size=draw(st.integers(0, 3)),
    )
    least = n_blocks * (splitter.purged_size + splitter.embargo_size + 2)
    return draw(st.integers(least, least + 12)), splitter


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_training_dates_are_exactly_those_whose_label_meets_no_test_label_past_the_embargo(case):
    num_dates, splitter = case
    number, reach = np.arange(num_dates), splitter.purged_size
    for train, test in splitter.split(number):
        meets = (np.abs(number[:, None] - test) <= reach).any(axis=1)
        # The embargo follows the end of each stretch of tested dates.
        embargoed = np.zeros(num_dates, bool)
        for end in set(test) - set(test - 1):
            embargoed |= (number > end + reach) & (number <= end + reach + splitter.embargo_size)
        assert train.tolist() == np.flatnonzero(~meets & ~embargoed).tolist()
        assert test.tolist() == sorted(set(test.tolist()) - set(train.tolist()))
        assert train.dtype == test.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_path_tests_each_date_once_and_each_fold_tests_its_blocks(case):
    num_dates, splitter = case
    folds, paths = list(splitter.split(range(num_dates))), splitter.test_paths(range(num_dates))
    assert len(folds) == len(paths) == math.comb(splitter.n_blocks, splitter.n_test_blocks)
    for fold, (_, test) in enumerate(folds):
        assert np.flatnonzero(paths[fold] >= 0).tolist() == test.tolist()
    num_paths = math.comb(splitter.n_blocks - 1, splitter.n_test_blocks - 1)
    for path in range(num_paths):
        assert (paths == path).sum(axis=0).tolist() == [1] * num_dates
    assert paths.max() == num_paths - 1


def test_all_but_one_block_tested_trains_on_a_block_alone():
    folds = list(CombinatorialPurged(3, 2, purged_size=2, embargo_size=1).split(range(30)))
    # C = {1, 2}, {1, 3}, {2, 3} of three blocks of ten dates
    assert [train.tolist() for train, _ in folds] == [list(range(23, 30)), list(range(13, 18)), list(range(8))]


def test_with_the_blocks_of_one_size_a_single_stretch_is_purged_as_a_purged_k_fold_does():
    # Blocks 1 and 2 of 4, tested together, are the first half.
    train, test = next(CombinatorialPurged(4, 2, purged_size=3, embargo_size=2).split(range(40)))
    wanted = next(PurgedKFold(2, purged_size=3, embargo_size=2).split(range(40)))
    assert [train.tolist(), test.tolist()] == [part.tolist() for part in wanted]


def test_blocks_that_purge_and_embargo_would_swallow_are_refused():
    with pytest.raises(SplitError, match="6 blocks, 2 of them tested, over 30 dates cannot be had") as caught:
        CombinatorialPurged(6, 2, purged_size=4).split(range(30))
    assert "purged_size (4) + embargo_size (0)" in caught.value.rule


@pytest.mark.parametrize(("n_blocks", "n_test_blocks", "num_dates"), [(30, 15, 300), (6, 2, 3)])
def test_too_many_folds_and_too_few_dates_are_refused(n_blocks, n_test_blocks, num_dates):
    splitter = CombinatorialPurged(n_blocks, n_test_blocks, purged_size=0)
    for ask in (splitter.split, splitter.test_paths):
        with pytest.raises(SplitError, match="at most 100,000 folds"):
            ask(range(num_dates))
