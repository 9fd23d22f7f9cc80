"""Walk-forward folds: the past alone is trained on, purged, with a gap, in a window that expands or rolls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import SplitError
from memfit.splits import PurgedKFold, SplitSummary, WalkForward, sizes_table

DAY = np.timedelta64(1, "D")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, WalkForward]:
    """Dates of the rows in any order, the ends of their labels, and a splitter."""
    distinct = draw(st.lists(st.integers(0, 60), min_size=4, max_size=25, unique=True))
    days = draw(st.permutations(distinct + draw(st.lists(st.sampled_from(distinct), max_size=25))))
    lengths = draw(st.lists(st.integers(0, 9), min_size=len(days), max_size=len(days)))
    dates = np.datetime64("2024-01-01") + np.array(days) * DAY
    ends = dates + np.array(lengths) * DAY
    splitter = WalkForward(
        draw(st.integers(1, min(5, len(distinct) - 1))),
        label_end=ends,
        embargo_size=draw(st.integers(0, 3)),
        train_size=draw(st.sampled_from([None, None, 1, 3])),
    )
    return dates, ends, splitter


def allowed_by_brute_force(dates: np.ndarray, ends: np.ndarray, splitter: WalkForward, first: np.datetime64) -> list:
    """Row by row: before the test block, with a label that ends early enough, on one of the last dates that are left."""
    distinct = sorted(set(dates.tolist()))
    number = distinct.index(first.item())
    limit = distinct[max(number - splitter.embargo_size, 0)]
    left = [row for row in range(len(dates)) if dates[row] < first and ends[row].item() < limit]
    if splitter.train_size is None:
        return left
    last = sorted({dates[row].item() for row in left})[-splitter.train_size :]
    return [row for row in left if dates[row].item() in last]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_training_rows_are_exactly_those_that_a_row_by_row_check_allows(case) -> None:
    dates, ends, splitter = case
    try:
        folds = list(splitter.split(np.zeros(len(dates)), groups=dates))
    except SplitError:
        assert any(one.num_train_rows == 0 for one in splitter.describe(dates))
        return
    for train, test in folds:
        assert train.tolist() == allowed_by_brute_force(dates, ends, splitter, dates[test].min())
        assert dates[train].max() < dates[test].min()
        assert ends[train].max() < dates[test].min()  # no label that was learned reaches a test date
        assert train.dtype == test.dtype == np.int64


@settings(max_examples=100, deadline=None)
@given(cases())
def test_all_blocks_but_the_first_are_tested_once_in_the_order_of_time(case) -> None:
    dates, _, splitter = case
    blocks = PurgedKFold(splitter.n_splits + 1, purged_size=0).describe(dates)
    assert [one.num_test_rows for one in splitter.describe(dates)] == [one.num_test_rows for one in blocks[1:]]
    try:
        folds = list(splitter.split(dates))
    except SplitError:
        return
    tested = np.concatenate([test for _, test in folds])
    assert len(tested) == len(set(tested.tolist())) == len(dates) - blocks[0].num_test_rows
    starts = [dates[test].min() for _, test in folds]
    assert starts == sorted(starts)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_row_up_to_the_test_block_is_accounted_for_unless_it_rolled_out(case) -> None:
    dates, _, splitter = case
    expanding = WalkForward(splitter.n_splits, label_end=splitter.label_end, embargo_size=splitter.embargo_size)
    later = len(dates) - sum(
        one.num_test_rows for one in PurgedKFold(splitter.n_splits + 1, purged_size=0).describe(dates)[:1]
    )
    for rolling, whole in zip(splitter.describe(dates), expanding.describe(dates), strict=True):
        later -= whole.num_test_rows
        counted = whole.num_train_rows + whole.num_purged_before + whole.num_embargoed + whole.num_test_rows
        assert counted + later == len(dates)
        assert rolling.num_train_dates == min(splitter.train_size or 99, whole.num_train_dates)
        assert (rolling.num_purged_before, rolling.num_embargoed) == (whole.num_purged_before, whole.num_embargoed)


@pytest.mark.parametrize("horizon", [1, 6])
def test_a_purge_of_the_horizon_leaks_nothing_and_one_less_leaks(horizon: int) -> None:
    def num_leaks(purged_size: int) -> int:
        return sum(
            int((train + horizon >= test.min()).sum())
            for train, test in WalkForward(5, purged_size=purged_size).split(range(200))
        )

    assert num_leaks(horizon) == 0
    assert num_leaks(horizon - 1) == 5  # one row before each of 5 test blocks


def test_sizes_that_a_user_can_expect() -> None:
    summaries = WalkForward(4, purged_size=5, embargo_size=2).describe(range(500))
    assert [one.num_train_rows for one in summaries] == [93, 193, 293, 393]
    assert summaries[0] == SplitSummary(1, 93, 93, 100, 100, 5, 0, 2, 0)
    assert len(sizes_table(summaries).splitlines()) == 5
    rolling = WalkForward(4, purged_size=5, train_size=60).describe(range(500))
    assert [one.num_train_dates for one in rolling] == [60] * 4


def test_a_fold_does_not_change_when_later_rows_come() -> None:
    dates = np.repeat(np.arange(60), 2)
    (train, test), *_ = WalkForward(2, purged_size=3).split(dates, groups=dates)
    early = WalkForward(1, purged_size=3).split(dates[dates < 40], groups=dates[dates < 40])
    assert [part.tolist() for part in next(early)] == [train.tolist(), test.tolist()]


def test_a_fold_without_a_past_is_refused_before_the_first_fold_with_the_sizes() -> None:
    splitter = WalkForward(4, purged_size=12)
    with pytest.raises(SplitError, match=r"1 of 4 folds \(fold 1\)") as caught:
        splitter.split(range(50))  # not iterated: the call itself refuses
    assert sizes_table(splitter.describe(range(50))) in str(caught.value)
    assert "purged_size=12" in caught.value.rule


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"n_splits": 0}, "n_splits is 0"),
        ({"train_size": 0}, "train_size is 0"),
        ({"embargo_size": -1}, "embargo_size is -1"),
        ({"purged_size": None}, "neither label_end nor purged_size"),
        ({"label_end": [1]}, "label_end and purged_size are both"),
    ],
)
def test_sizes_that_are_no_counts_and_labels_without_a_reach_are_refused(sizes: dict, text: str) -> None:
    with pytest.raises(SplitError, match=text):
        WalkForward(**{"n_splits": 3, "purged_size": 1} | sizes)


def test_more_blocks_than_dates_are_refused() -> None:
    with pytest.raises(SplitError, match="3 distinct dates cannot be cut into 4"):
        WalkForward(3, purged_size=0).split(range(3))


def test_scikit_learn_takes_it_as_a_splitter() -> None:
    selection = pytest.importorskip("sklearn.model_selection", reason="scikit-learn comes with the ranker extra")
    dummy = pytest.importorskip("sklearn.dummy")
    splitter = WalkForward(3, purged_size=1)
    scores = selection.cross_val_score(dummy.DummyRegressor(), np.zeros((20, 1)), np.arange(20.0), cv=splitter)
    assert len(scores) == splitter.get_n_splits() == 3
