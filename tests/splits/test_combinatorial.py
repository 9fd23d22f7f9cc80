"""Combinatorial purged folds: no label leaks by our own rule, and the paths hold each date once."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import MissingExtraError, SplitError
from memfit.splits import CombinatorialPurged, PurgedKFold

pytest.importorskip("skfolio", reason="skfolio comes with the ranker extra")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, CombinatorialPurged]:
    """The date of each row, several rows a date in any order, and a splitter over them."""
    n_blocks = draw(st.integers(3, 6))
    splitter = CombinatorialPurged(
        n_blocks,
        draw(st.integers(2, n_blocks - 1)),
        purged_size=draw(st.integers(0, 4)),
        embargo_size=draw(st.integers(0, 3)),
    )
    least = n_blocks * (splitter.purged_size + splitter.embargo_size + 2)
    distinct = np.cumsum(draw(st.lists(st.integers(1, 4), min_size=least, max_size=least + 12)))
    rows = np.concatenate([distinct, draw(st.lists(st.sampled_from(distinct.tolist()), max_size=20))])
    return rows[np.random.default_rng(draw(st.integers(0, 99))).permutation(len(rows))].astype(np.int64), splitter


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_training_rows_are_exactly_those_whose_label_meets_no_test_label_past_the_embargo(case) -> None:
    dates, splitter = case
    number = np.unique(dates, return_inverse=True)[1]
    for train, test in splitter.split(np.zeros(len(dates)), groups=dates):
        tested = np.unique(number[test])
        reach = splitter.purged_size
        meets = (np.abs(number[:, None] - tested) <= reach).any(axis=1)
        # The embargo follows the end of each stretch of tested dates.
        ends = [date for date in tested if date + 1 not in tested]
        embargoed = np.zeros(len(dates), bool)
        for end in ends:
            embargoed |= (number > end + reach) & (number <= end + reach + splitter.embargo_size)
        assert train.tolist() == np.flatnonzero(~meets & ~embargoed).tolist()
        assert not set(train.tolist()) & set(test.tolist())
        assert train.dtype == test.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_path_tests_each_row_once_and_each_fold_tests_its_blocks(case) -> None:
    dates, splitter = case
    folds = list(splitter.split(dates, groups=dates))
    paths = splitter.test_paths(dates, groups=dates)
    assert len(folds) == len(paths) == splitter.get_n_splits()
    for fold, (_, test) in enumerate(folds):
        assert np.flatnonzero(paths[fold] >= 0).tolist() == test.tolist()
    num_paths = math.comb(splitter.n_blocks - 1, splitter.n_test_blocks - 1)
    for path in range(num_paths):
        assert (paths == path).sum(axis=0).tolist() == [1] * len(dates)
    assert paths.max() == num_paths - 1


def test_numbers_of_folds_and_paths_are_those_of_the_book() -> None:
    splitter = CombinatorialPurged(6, 2, purged_size=0)
    assert splitter.get_n_splits() == 15
    assert (CombinatorialPurged(10, 8, purged_size=0).get_n_splits(), math.comb(9, 7)) == (45, 36)


def test_all_but_one_block_tested_trains_on_a_block_alone() -> None:
    folds = list(CombinatorialPurged(3, 2, purged_size=2, embargo_size=1).split(range(30)))
    # C = {1, 2}, {1, 3}, {2, 3} of three blocks of ten dates
    assert [train.tolist() for train, _ in folds] == [list(range(23, 30)), list(range(13, 18)), list(range(8))]


def test_with_the_blocks_of_one_size_a_single_stretch_is_purged_as_a_purged_k_fold_does() -> None:
    # Blocks 1 and 2 of 4, tested together, are the first half.
    train, test = next(CombinatorialPurged(4, 2, purged_size=3, embargo_size=2).split(range(40)))
    wanted = next(PurgedKFold(2, purged_size=3, embargo_size=2).split(range(40)))
    assert [train.tolist(), test.tolist()] == [part.tolist() for part in wanted]


def test_blocks_that_purge_and_embargo_would_swallow_are_refused() -> None:
    with pytest.raises(SplitError, match="6 blocks, 2 of them tested, over 30 dates cannot be had") as caught:
        CombinatorialPurged(6, 2, purged_size=4).split(range(30))
    assert "purged_size (4) + embargo_size (0)" in caught.value.rule


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(SplitError, match="at most 100,000 folds"):
        CombinatorialPurged(30, 15, purged_size=0).split(range(300))


@pytest.mark.parametrize(
    "sizes", [{"n_blocks": 2}, {"n_test_blocks": 1}, {"n_test_blocks": 6}, {"purged_size": -1}, {"embargo_size": 1.5}]
)
def test_sizes_out_of_range_are_refused(sizes: dict) -> None:
    with pytest.raises(SplitError):
        CombinatorialPurged(**{"n_blocks": 6, "n_test_blocks": 2, "purged_size": 1} | sizes)


def test_fewer_dates_than_blocks_are_refused() -> None:
    splitter = CombinatorialPurged(6, 2, purged_size=0)
    for ask in (splitter.split, splitter.test_paths):
        with pytest.raises(SplitError, match="3 distinct dates"):
            ask(range(3))


def test_without_skfolio_the_line_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skfolio.model_selection", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[ranker\]'"):
        CombinatorialPurged(4, 2, purged_size=0).split(range(40))


def test_scikit_learn_takes_it_as_a_splitter() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    dummy = pytest.importorskip("sklearn.dummy")
    splitter = CombinatorialPurged(4, 2, purged_size=1)
    scores = selection.cross_val_score(dummy.DummyRegressor(), np.zeros((40, 1)), np.arange(40.0), cv=splitter)
    assert len(scores) == splitter.get_n_splits() == 6
    assert not np.isnan(scores).any()
