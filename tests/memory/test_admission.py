"""The arithmetic of admission."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.memory import DEFAULT_SLACK, HOST, Claim, Footprint, Lendable, reservation_bytes

GIB = 1 << 30
SIZES = st.integers(0, 1 << 44)


def claim(reserved, used):
    return Claim(Counter({HOST: reserved}), Counter({HOST: used}))


CLAIMS = st.lists(st.builds(claim, SIZES, SIZES), max_size=5)


def test_a_measured_job_reserves_its_peak_and_the_slack_and_a_declared_one_what_it_declared():
    assert reservation_bytes(Footprint(10 * GIB)) == round(10 * GIB * (1 + DEFAULT_SLACK)) == 11 * GIB
    assert reservation_bytes(Footprint.declared("10GiB"), slack=0.5) == 10 * GIB


@given(SIZES, st.floats(0, 10))
def test_a_reservation_is_never_below_the_peak(private_bytes, slack):
    assert reservation_bytes(Footprint(private_bytes), slack) >= private_bytes


def test_shared_bytes_and_device_bytes_are_not_reserved_for_each_job():
    assert reservation_bytes(Footprint(100, shared_bytes=10**9, device_bytes={"GPU-1": 10**9}), slack=0) == 100


@given(SIZES, SIZES, CLAIMS)
def test_what_may_be_lent_is_what_is_free_less_the_reserve_and_what_is_promised_and_not_yet_used(free, reserve, claims):
    promised = sum(max(0, one.reserved[HOST] - one.used[HOST]) for one in claims)
    assert Lendable.now(free, reserve, claims).bytes == free - reserve - promised


@given(SIZES, SIZES, CLAIMS, st.builds(claim, SIZES, SIZES))
def test_one_more_job_never_makes_more_to_lend(free, reserve, claims, one_more):
    before = Lendable.now(free, reserve, claims).bytes
    assert Lendable.now(free, reserve, [*claims, one_more]).bytes <= before


def test_a_job_that_takes_what_it_reserved_leaves_what_may_be_lent_as_it_was():
    # What it takes is gone from the headroom and from what is promised alike.
    before = Lendable.now(10 * GIB, GIB, [claim(4 * GIB, GIB)])
    after = Lendable.now(8 * GIB, GIB, [claim(4 * GIB, 3 * GIB)])
    assert before.bytes == after.bytes == 6 * GIB


def test_a_job_that_took_more_than_it_reserved_has_nothing_left_to_take():
    assert claim(100, 300).unused == {}


@pytest.mark.parametrize(
    ("lendable", "text"),
    [
        (Lendable(8 * GIB, GIB, 0), "7.00 GiB may be lent = 8.00 GiB free - 1.00 GiB reserve - 0 B reserved"),
        (Lendable(GIB, 2 * GIB, GIB), "-2.00 GiB may be lent = 1.00 GiB free - 2.00 GiB reserve - 1.00 GiB reserved"),
    ],
)
def test_the_sum_is_told_in_words_also_when_it_is_below_zero(lendable, text):
    assert lendable.explain() == f"{text} and not yet used"
