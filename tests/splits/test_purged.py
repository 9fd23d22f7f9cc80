"""PurgedKFold and WalkForward against a brute-force reading of their rules, and each known error of public code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import SplitError
from memfit.splits import PurgedKFold, SplitSummary, WalkForward, sizes_table

DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class Case:
    """Rows in any order, with dates that skip days and labels of any length that may end between two dates."""

    dates: np.ndarray
    ends: np.ndarray
    n_splits: int
    embargo_size: int
    lookback_size: int

    @property
    def splitter(self) -> PurgedKFold:
        return PurgedKFold(
            self.n_splits,
            label_end=self.ends,
            embargo_size=self.embargo_size,
            lookback_size=self.lookback_size,
        )


@st.composite
def dated_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """The dates of rows, the ends of their labels, and the number of distinct dates."""
    distinct = draw(st.lists(st.integers(0, 60), min_size=4, max_size=25, unique=True))
    days = draw(st.permutations(distinct + draw(st.lists(st.sampled_from(distinct), max_size=25))))
    lengths = draw(st.lists(st.integers(0, 9), min_size=len(days), max_size=len(days)))
    dates = np.datetime64("2024-01-01") + np.array(days) * DAY
    return dates, dates + np.array(lengths) * DAY, len(distinct)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dates, ends, num_dates = draw(dated_rows())
    sizes = draw(st.integers(2, min(6, num_dates))), draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 1, 4]))
    return Case(dates, ends, *sizes)


def folds_or_none(case: Case) -> list[tuple[np.ndarray, np.ndarray]] | None:
    try:
        return list(case.splitter.split(np.zeros(len(case.dates)), groups=case.dates))
    except SplitError:
        return None


def allowed_by_brute_force(case: Case, test: np.ndarray) -> list[int]:
    """Row by row: the rows whose label meets no test label, past the embargo, with windows that do not meet."""
    distinct = sorted(set(case.dates.tolist()))
    tested = {case.dates[row].item() for row in test}
    labels_end = max(case.ends[row].item() for row in test)
    embargoed = [day for day in distinct if day > labels_end][: case.embargo_size]
    number = {day: position for position, day in enumerate(distinct)}
    allowed = []
    for row in range(len(case.dates)):
        day, end = case.dates[row].item(), case.ends[row].item()
        meets = any(day <= case.ends[other].item() and case.dates[other].item() <= end for other in test)
        near = any(abs(number[day] - number[other]) <= case.lookback_size for other in tested)
        if not (meets or day in tested or day in embargoed or (case.lookback_size and near)):
            allowed.append(row)
    return allowed


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_training_rows_are_exactly_those_that_a_row_by_row_check_allows(case: Case) -> None:
    folds = folds_or_none(case)
    if folds is None:
        summaries = case.splitter.describe(case.dates)
        assert any(summary.num_train_rows == 0 for summary in summaries)
        return
    for train, test in folds:
        assert train.tolist() == allowed_by_brute_force(case, test)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_training_label_meets_a_test_label_and_each_row_is_tested_once(case: Case) -> None:
    folds = folds_or_none(case) or []
    for train, test in folds:
        starts, ends = case.dates[train][:, None], case.ends[train][:, None]
        assert not ((starts <= case.ends[test]) & (case.dates[test] <= ends)).any()
        assert not set(train) & set(test)
        assert train.dtype == test.dtype == np.int64
    if folds:
        assert sorted(np.concatenate([test for _, test in folds])) == list(range(len(case.dates)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_row_of_every_fold_is_accounted_for(case: Case) -> None:
    summaries = case.splitter.describe(case.dates)
    for summary in summaries:
        dropped = summary.num_purged_before + summary.num_purged_after + summary.num_embargoed + summary.num_lookback
        assert summary.num_train_rows + dropped + summary.num_test_rows == len(case.dates)
    for summary, (train, test) in zip(summaries, folds_or_none(case) or [], strict=False):
        assert (summary.num_train_rows, summary.num_test_rows) == (len(train), len(test))
        assert summary.num_train_dates == len(set(case.dates[train].tolist()))
        assert summary.num_test_dates == len(set(case.dates[test].tolist()))


@pytest.mark.proves("S0-04")
@settings(max_examples=100, deadline=None)
@given(st.integers(10, 80), st.integers(2, 10), st.integers(0, 5))
def test_a_fixed_reach_purges_what_the_same_label_ends_purge(num_dates: int, n_splits: int, reach: int) -> None:
    dates = np.arange(num_dates)
    by_size = PurgedKFold(n_splits, purged_size=reach).describe(dates)
    assert by_size == PurgedKFold(n_splits, label_end=dates + reach).describe(dates)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 120), st.integers(2, 12))
def test_test_blocks_are_neighbouring_dates_of_nearly_one_size_and_lose_no_remainder(num: int, n_splits: int) -> None:
    if num < n_splits:
        return
    sizes = [summary.num_test_dates for summary in PurgedKFold(n_splits, purged_size=0).describe(range(num))]
    assert sum(sizes) == num
    assert max(sizes) - min(sizes) <= 1


# The errors of public splitters, one test each.


def test_the_test_interval_starts_at_the_first_test_date_not_at_the_end_of_its_label() -> None:
    folds = list(PurgedKFold(2, purged_size=5).split(range(40)))
    assert folds[1][0].tolist() == list(range(15))  # 15..19 are open on day 20; starting at day 25 would keep them


def test_the_test_interval_ends_at_the_latest_label_end_not_at_that_of_the_last_row() -> None:
    ends = np.arange(20)
    ends[3] = 14  # an early test row whose label is the last to be known
    train, test = next(PurgedKFold(2, label_end=ends).split(range(20)))
    assert test.tolist() == list(range(10))
    assert train.tolist() == list(range(15, 20))


def test_the_embargo_counts_from_the_end_of_the_test_labels() -> None:
    train, _ = next(PurgedKFold(2, purged_size=3, embargo_size=2).split(range(20)))
    assert train.tolist() == [15, 16, 17, 18, 19]  # tested 0..9, labels end on 12, embargoed 13 and 14


def test_the_embargo_does_not_touch_rows_before_the_test_block() -> None:
    *_, (train, _) = PurgedKFold(2, purged_size=0, embargo_size=7).split(range(20))
    assert train.tolist() == list(range(10))


def test_a_label_that_ends_between_two_dates_is_not_moved_to_the_later_one() -> None:
    dates = np.array([0, 10, 20, 30])
    train, _ = list(PurgedKFold(2, label_end=[0, 19, 20, 30]).split(range(4), groups=dates))[1]
    assert train.tolist() == [0, 1]  # 19 lies before the first test date, 20
    train, _ = list(PurgedKFold(2, label_end=[0, 20, 20, 30]).split(range(4), groups=dates))[1]
    assert train.tolist() == [0]  # closed intervals: an end on the test date itself meets it


def test_unresolved_labels_are_refused_and_counted() -> None:
    ends = np.array(["2024-01-02", "NaT", "2024-01-04", "NaT"], "datetime64[D]")
    days = np.arange("2024-01-01", "2024-01-05", dtype="datetime64[D]")
    with pytest.raises(SplitError, match=r"2 of 4 rows have no date in label_end \(first: row 1\)") as caught:
        PurgedKFold(2, label_end=ends).split(days)
    assert "drop those rows" in caught.value.remedy


@pytest.mark.parametrize("horizon", [1, 6])
@pytest.mark.parametrize(("kind", "num_borders"), [(PurgedKFold, 8), (WalkForward, 5)])
def test_a_purge_of_the_horizon_leaks_nothing_and_one_less_leaks(kind: type, num_borders: int, horizon: int) -> None:
    def num_leaks(purged_size: int) -> int:
        return sum(
            int((np.abs(train[:, None] - test) <= horizon).any(axis=1).sum())
            for train, test in kind(5, purged_size=purged_size).split(range(200))
        )

    assert num_leaks(horizon) == 0
    assert num_leaks(horizon - 1) == num_borders  # one row on each border of a test block with training rows


# Sizes that a user can expect.


@pytest.mark.proves("C-45")
@pytest.mark.parametrize(("num_dates", "middle"), [(242, 183), (484, 376), (700, 549)])
def test_a_purge_by_label_overlap_leaves_most_dates_to_train_on(num_dates: int, middle: int) -> None:
    summaries = PurgedKFold(5, purged_size=5, embargo_size=1).describe(range(num_dates))
    third = summaries[2]
    assert third.num_train_rows == num_dates - third.num_test_rows - 5 - 5 - 1 == middle
    assert [summary.num_purged_before for summary in summaries] == [0, 5, 5, 5, 5]
    assert [summary.num_purged_after for summary in summaries] == [5, 5, 5, 5, 0]


@pytest.mark.proves("S0-04")
def test_a_long_look_back_purge_is_refused_before_the_first_fold_with_the_sizes() -> None:
    splitter = PurgedKFold(5, purged_size=5, embargo_size=5, lookback_size=200)
    with pytest.raises(SplitError, match=r"1 of 5 folds \(fold 3\)") as caught:
        splitter.split(range(484))  # not iterated: the call itself refuses
    assert sizes_table(splitter.describe(range(484))) in str(caught.value)
    assert "over 484 dates" in caught.value.rule
    list(PurgedKFold(5, purged_size=5, embargo_size=5).split(range(484)))


def test_the_look_back_drops_rows_on_both_sides_of_the_test_block() -> None:
    train, test = list(PurgedKFold(3, purged_size=0, lookback_size=2).split(range(30)))[1]
    assert test.tolist() == list(range(10, 20))
    assert train.tolist() == [*range(8), *range(22, 30)]


def test_the_table_of_sizes_has_one_line_a_fold() -> None:
    heads, line = sizes_table([SplitSummary(1, 10, 5, 4, 2, 0, 1, 2, 3)]).splitlines()
    assert len(heads) == len(line)
    assert line.split() == ["1", "10", "5", "4", "2", "0", "1", "2", "3"]


# What a row's date may be.


def test_the_order_of_the_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    dates = np.repeat(np.arange(30), 4)
    ends = dates + rng.integers(0, 4, len(dates))
    shuffle = rng.permutation(len(dates))
    plain = list(PurgedKFold(3, label_end=ends).split(dates, groups=dates))
    moved = PurgedKFold(3, label_end=ends[shuffle]).split(dates, groups=dates[shuffle])
    for (train, test), (moved_train, moved_test) in zip(plain, moved, strict=True):
        assert set(shuffle[moved_train]) == set(train)
        assert set(shuffle[moved_test]) == set(test)


def test_a_date_array_given_as_x_is_taken_as_the_dates_and_other_arrays_only_by_their_length() -> None:
    days = np.repeat(np.arange("2024-01-01", "2024-01-09", dtype="datetime64[D]"), 3)
    splitter = PurgedKFold(2, purged_size=1)
    assert splitter.describe(days) == splitter.describe(np.zeros((24, 2)), groups=days)
    assert splitter.describe(np.zeros(24, int)) == splitter.describe(range(24))
    sparse = pytest.importorskip("scipy.sparse")
    assert splitter.describe(sparse.csr_array((24, 2))) == splitter.describe(range(24))


def test_dates_and_label_ends_may_be_of_two_units() -> None:
    days = np.arange("2024-01-01", "2024-01-21", dtype="datetime64[D]")
    later = (days + np.timedelta64(2, "D")).astype("M8[ns]")
    assert PurgedKFold(4, label_end=later).describe(days) == PurgedKFold(4, purged_size=2).describe(range(20))
    later = np.where(np.arange(20) == 9, np.datetime64("9999-12-31"), days)  # in nanoseconds it is a day of 1816
    assert PurgedKFold(2, label_end=later).describe(days.astype("M8[ns]"))[0].num_purged_after == 10


HOURS = np.arange("2024-01-01", "2024-01-05", dtype="M8[D]").astype("M8[ns]")
_REACH = (
    "how long a label stays open decides what is purged; without it nothing would be.",
    "pass purged_size=h when every label looks h dates ahead, or label_end=<one date per row>",
)
_FEWER = "give more dates or fewer folds, or shorten the labels, embargo_size or lookback_size"
_DROP = "drop those rows first, from X, groups and label_end alike: the rows where {} is missing"


@pytest.mark.parametrize(
    ("given", "rows", "told"),
    [
        ({}, None, ("neither label_end nor purged_size is given.", *_REACH)),
        ({"label_end": [1], "purged_size": 1}, None, ("label_end and purged_size are both given.", *_REACH)),
        (
            {"purged_size": 1, "lookback_size": 2},
            {"X": range(4)},
            (
                "nothing is left to train on in 2 of 2 folds (fold 1, 2):\n{table}",
                "purged_size=1, lookback_size=2 over 4 dates.",
                _FEWER,
            ),
        ),
        (
            {"label_end": [3] * 4},
            {"X": range(4)},
            (
                "nothing is left to train on in 2 of 2 folds (fold 1, 2):\n{table}",
                "labels that reach far over 4 dates.",
                _FEWER,
            ),
        ),
        (
            {"n_splits": 3, "purged_size": 0},
            {"X": range(4), "groups": [0, 0, 1, 1]},
            (
                "2 distinct dates cannot be cut into 3 test blocks.",
                "each block needs at least one date.",
                "give more dates or a smaller n_splits",
            ),
        ),
        (
            {"label_end": [0, 1, 2]},
            {"X": range(4)},
            (
                "label_end has the shape (3,), but there are 4 rows.",
                "label_end holds one date per row, in the order of the rows.",
                "pass label_end as a 1-D array of 4 dates",
            ),
        ),
        (
            {"purged_size": 0},
            {"X": range(1), "groups": ["2020-01-02"]},
            (
                "groups is of the type <U10.",
                "a date is a datetime64 or a number.",
                "convert it first: groups=pandas.DatetimeIndex(groups).tz_localize(None)",
            ),
        ),
        (
            {"purged_size": 0},
            {"X": np.array(["NaT", "2024-01-03"], "M8[D]")},
            (
                "1 of 2 rows have no date in groups (first: row 0).",
                "a row without a date lies in no test block, and an open label has no end to purge by.",
                _DROP.format("groups"),
            ),
        ),
        (
            {"label_end": [0.0, 1.0, np.nan, np.inf]},
            {"X": range(4)},
            (
                "2 of 4 rows have no date in label_end (first: row 2).",
                "a row without a date lies in no test block, and an open label has no end to purge by.",
                _DROP.format("label_end"),
            ),
        ),
        (
            {"label_end": [0, 1, 1, 3]},
            {"X": range(4)},
            (
                "1 of 4 labels end before their row's date (row 2: date 2, label_end 1).",
                "a label is known on its row's date at the earliest.",
                "check that label_end is in the order of the rows and holds the date on which a label is known",
            ),
        ),
        (
            {"label_end": HOURS},
            {"X": range(4)},
            (
                "dates of the type int64 do not compare with label_end of the type datetime64[us].",
                "label_end is compared with the dates; where groups is None, the dates are the row numbers.",
                "pass groups=<date of each row> and label_end as the same kind, best as datetime64",
            ),
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_by_which_rule_and_what_to_do(given: dict, rows: dict | None, told: tuple) -> None:
    with pytest.raises(SplitError) as caught:
        PurgedKFold(**{"n_splits": 2} | given).split(**rows or {"X": range(4)})
    what, *others = told
    if "{table}" in what:
        what = what.format(table=sizes_table(PurgedKFold(2, **given).describe(**rows)))
    assert (caught.value.what, caught.value.rule, caught.value.remedy) == (what, *others)


SPLITTERS = [PurgedKFold(2, purged_size=1), WalkForward(2, purged_size=1)]


@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda splitter: type(splitter).__name__)
def test_forgotten_groups_are_refused_where_an_index_says_that_rows_share_dates(splitter) -> None:
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2024-01-01", periods=12, name="date")
    both = pandas.MultiIndex.from_product([days, ["A", "B"]], names=["date", "asset"])
    frame = pandas.DataFrame({"x": range(24)}, index=both)
    with pytest.raises(SplitError, match=r"an index of 2 levels \(date, asset\), and groups is missing"):
        splitter.split(frame)
    with pytest.raises(SplitError, match="an index of 2 levels"):
        splitter.split(frame["x"])
    with pytest.raises(SplitError, match=r"^the index of the rows holds the same entry twice, and groups is missing"):
        splitter.split(frame.droplevel("asset"))
    one_row_a_date = frame.xs("A", level="asset")
    for turned in (one_row_a_date[::-1], one_row_a_date.to_period("D")[::-1]):
        with pytest.raises(SplitError, match=r"^the dates in the index of the rows are not in order, and") as caught:
            splitter.split(turned)
    assert caught.value.rule.endswith("in order: rows of one date would be tested and learned.")
    assert caught.value.remedy.endswith("such as groups=X.index.get_level_values('date')")
    dates = both.get_level_values("date")
    expected = [test.tolist() for _, test in splitter.split(frame, groups=dates)]
    assert [test.tolist() for _, test in splitter.split(frame.to_numpy(), groups=dates.to_numpy())] == expected
    assert [test.tolist() for _, test in splitter.split(dates)] == expected  # dates are dates, in whatever array
    with pytest.raises(SplitError, match="groups is of the type object") as caught:
        splitter.split(frame, groups=dates.tz_localize("UTC"))
    assert "tz_localize(None)" in caught.value.remedy
    assert [len(test) for _, test in splitter.split(one_row_a_date)] == [len(test) // 2 for test in expected]
    assert list(splitter.split(frame.reset_index(drop=True)))


@pytest.mark.parametrize("days", [["2024-01-31", "2024-02-01"], np.array([1, 2], object), [True, False]])
def test_what_is_neither_a_date_nor_a_number_is_refused(days) -> None:
    with pytest.raises(SplitError, match="groups is of the type "):
        PurgedKFold(2, purged_size=0).split(range(2), groups=days)
    with pytest.raises(SplitError, match="label_end is of the type "):
        WalkForward(1, label_end=days).split(range(2))


@pytest.mark.parametrize(
    "sizes",
    [{"n_splits": 1}, {"n_splits": 2.5}, {"purged_size": -1}, {"embargo_size": True}, {"lookback_size": -1}],
)
def test_sizes_that_are_no_counts_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SplitError, match="is a whole number of at least"):
        PurgedKFold(**{"n_splits": 3, "purged_size": 1} | sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda splitter: type(splitter).__name__)
def test_scikit_learn_takes_it_as_a_splitter(splitter) -> None:
    selection = pytest.importorskip("sklearn.model_selection", reason="scikit-learn comes with the ranker extra")
    dummy = pytest.importorskip("sklearn.dummy")
    scores = selection.cross_val_score(dummy.DummyRegressor(), np.zeros((20, 1)), np.arange(20.0), cv=splitter)
    assert len(scores) == splitter.get_n_splits() == 2


@pytest.mark.slow
def test_a_million_rows_need_a_few_arrays_and_no_square_matrix() -> None:
    dates = np.tile(np.arange(1000), 1000)
    folds = list(PurgedKFold(5, label_end=dates + 5, embargo_size=1).split(dates, groups=dates))
    assert [len(test) for _, test in folds] == [200_000] * 5
    assert [len(train) for train, _ in folds] == [794_000, 789_000, 789_000, 789_000, 795_000]


# Walking forward: the past alone is trained on, purged, with a gap, in a window that expands or rolls.


@st.composite
def walks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, WalkForward]:
    """Dates of the rows in any order, the ends of their labels, and a splitter."""
    dates, ends, num_dates = draw(dated_rows())
    splitter = WalkForward(
        draw(st.integers(1, min(5, num_dates - 1))),
        label_end=ends,
        embargo_size=draw(st.integers(0, 3)),
        train_size=draw(st.sampled_from([None, None, 1, 3])),
    )
    return dates, ends, splitter


def allowed_of_the_past(dates: np.ndarray, ends: np.ndarray, splitter: WalkForward, first: np.datetime64) -> list:
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
@given(walks())
def test_a_walk_trains_on_exactly_the_rows_that_a_row_by_row_check_allows(case) -> None:
    dates, ends, splitter = case
    try:
        folds = list(splitter.split(np.zeros(len(dates)), groups=dates))
    except SplitError:
        assert any(one.num_train_rows == 0 for one in splitter.describe(dates))
        return
    for train, test in folds:
        assert train.tolist() == allowed_of_the_past(dates, ends, splitter, dates[test].min())
        assert dates[train].max() < dates[test].min()
        assert ends[train].max() < dates[test].min()  # no label that was learned reaches a test date
        assert train.dtype == test.dtype == np.int64


@settings(max_examples=100, deadline=None)
@given(walks())
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
@given(walks())
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


def test_sizes_of_a_walk_that_a_user_can_expect() -> None:
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
def test_sizes_of_a_walk_that_are_no_counts_and_labels_without_a_reach_are_refused(sizes: dict, text: str) -> None:
    with pytest.raises(SplitError, match=text):
        WalkForward(**{"n_splits": 3, "purged_size": 1} | sizes)


def test_more_blocks_than_dates_are_refused() -> None:
    with pytest.raises(SplitError, match="3 distinct dates cannot be cut into 4"):
        WalkForward(3, purged_size=0).split(range(3))
