"""Which dates a model may score."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.splits import PurgedKFold
from memfit_workloads.finance import Provenance, read_provenance


class Dates:
    """What a panel is asked for here."""

    path = "panels/x"

    def __init__(self, number, fingerprint="ab"):
        self.dates = np.datetime64("2020-01-01") + np.arange(number)
        self.fingerprint = fingerprint


def of(panel, train, labels, embargo, fold=1, forward=False):
    facts = {"label_dates": labels, "embargo_size": embargo, "forward_only": forward}
    return Provenance.of_fold(fold, panel, np.asarray(train), **facts)


@pytest.mark.proves("C-43")
@given(
    num=st.integers(30, 90), n_splits=st.integers(2, 5), labels=st.integers(0, 6), embargo=st.integers(0, 6)
)  # fmt: skip
def test_a_purged_folds_test_dates_may_be_scored_and_its_training_dates_never(num, n_splits, labels, embargo):
    panel = Dates(num)
    splitter = PurgedKFold(n_splits, purged_size=labels, embargo_size=embargo)
    try:
        splits = list(splitter.split(np.arange(num)))
    except Exception:  # too few dates are the splitter's to refuse
        return
    for train, test in splits:
        allowed = of(panel, train, labels, embargo).scorable(panel)
        assert allowed[test].all()
        assert not allowed[train].any()


@given(
    num=st.integers(5, 60),
    train=st.sets(st.integers(0, 59), min_size=1),
    labels=st.integers(0, 7),
    embargo=st.integers(0, 7),
)
def test_it_is_what_its_definition_says_date_by_date(num, train, labels, embargo):
    learned = sorted(date for date in train if date < num)
    if not learned:
        return
    panel = Dates(num)
    allowed = of(panel, learned, labels, embargo).scorable(panel)
    for date in range(num):
        meets = any(abs(date - other) <= labels for other in learned)
        in_embargo = any(date + labels < other <= date + labels + embargo for other in learned)
        assert allowed[date] == (not meets and not in_embargo)


def test_a_walk_forward_scores_no_date_before_and_a_longer_panel_has_its_dates_elsewhere():
    found = of(Dates(40), range(10, 20), 2, 1, forward=True)
    assert list(np.flatnonzero(found.scorable(Dates(40)))) == list(range(22, 40))
    longer = Dates(60)
    longer.dates = longer.dates - 20
    assert list(np.flatnonzero(found.scorable(longer)) - 20) == list(range(22, 40))


def test_a_checkpoint_that_does_not_say_is_refused(tmp_path):
    from memfit.training import save_checkpoint

    save_checkpoint(tmp_path / "a.pt", {"memfit_checkpoint": 1, "model": {}})
    with pytest.raises(UsageError, match="does not say which dates"):
        read_provenance(tmp_path / "a.pt")
