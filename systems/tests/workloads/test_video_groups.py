"""Whole groups, kept shares, a test set that no fold sees; and what goes wrong without them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import SplitError
from memfit_workloads.video.groups import StratifiedGroups

pytest.importorskip("sklearn")


@pytest.mark.proves("S1-27")
@pytest.mark.slow
@settings(deadline=None)
@given(seed=st.integers(0, 1000), n_splits=st.integers(2, 4), num_groups=st.integers(24, 40))
def test_no_group_is_split_and_every_row_is_validated_once_or_tested(seed, n_splits, num_groups):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), rng.integers(2, 6, num_groups))
    y = np.arange(len(groups)) % 2
    splitter = StratifiedGroups(n_splits, test_share=0.2, seed=seed)
    rest, test = splitter.hold_out(y, groups)
    assert not set(groups[rest]) & set(groups[test])
    validated = []
    for train, valid in splitter.split(y, groups):
        assert not set(groups[train]) & set(groups[valid])
        assert sorted([*train, *valid]) == list(rest)
        validated += list(valid)
    assert sorted([*validated, *test]) == list(range(len(y)))


@pytest.mark.proves("S1-27", "C-49")
def test_every_part_keeps_the_shares_of_the_classes():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), 5)
    y = (rng.random(200) < 0.25).astype(int)[groups]  # a class of its own for each group
    splitter = StratifiedGroups(4, test_share=0.2)
    shares = [y[valid].mean() for _, valid in splitter.split(y, groups)] + [y[splitter.hold_out(y, groups)[1]].mean()]
    assert max(abs(share - y.mean()) for share in shares) < 0.05


def nearest(train_x, train_y, x):
    """The class of the nearest training row: a model that knows its rows by heart."""
    return train_y[np.abs(x[:, None] - train_x[None]).sum(axis=2).argmin(axis=1)]


@pytest.mark.proves("S1-30")
def test_labels_that_mean_nothing_are_guessed_by_chance_and_only_rows_apart_from_their_group_say_otherwise():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(120), 6)
    x = rng.normal(size=(120, 8))[groups] + rng.normal(scale=0.01, size=(720, 8))  # near-duplicates within a group
    y = rng.integers(0, 2, 120)[groups]
    found, naive = [], []
    for train, valid in StratifiedGroups(5, test_share=0).split(y, groups):
        found.append((nearest(x[train], y[train], x[train]) == y[train]).mean())
        naive.append((nearest(x[train], y[train], x[valid]) == y[valid]).mean())
    assert np.mean(found) == 1.0 and abs(np.mean(naive) - 0.5) < 0.15
    rows = rng.permutation(720)
    train, valid = rows[:576], rows[576:]  # the same rows, split without a look at their groups
    assert (nearest(x[train], y[train], x[valid]) == y[valid]).mean() > 0.95


@pytest.mark.proves("S1-28")
def test_a_class_in_too_few_groups_is_refused_by_name():
    groups = np.repeat(np.arange(10), 4)
    y = (groups == 3).astype(int)
    with pytest.raises(SplitError, match="the class 1 lies in 1 groups"):
        list(StratifiedGroups(3, test_share=0).split(y, groups))
