"""Microbatch sizes: halving, trials upward, what is remembered."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.training import MicrobatchSizes


def cost(start, stop):
    return 10 * (stop - start)


def size_for(sizes, count):
    return max(stop - start for start, stop in sizes.cut(count, cost))


def drive(sizes, fits, count, num_steps):
    """Steps as a safe step makes them; returns the size of each step and how many failed."""
    used, failures = [], 0
    for _ in range(num_steps):
        while (size := size_for(sizes, count)) > fits:
            sizes.shrink(10 * size)
            failures += 1
        sizes.succeeded(10 * size)
        used.append(size)
    return used, failures


@pytest.mark.proves("S1-14", "S4-16")
@given(count=st.integers(1, 3000), fits=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_the_first_step_halves_at_most_log2_times_and_never_below_one(count, fits):
    used, failures = drive(MicrobatchSizes(), fits, count, 1)
    assert 1 <= used[0] <= min(fits, count)
    assert failures <= (count - 1).bit_length()
    assert used[0] == count or 2 * used[0] + 1 >= min(count, fits + 1)


@pytest.mark.proves("S2-50", "S4-01")
@pytest.mark.slow
def test_it_converges_to_the_largest_size_that_fits_and_then_fails_ever_more_rarely():
    sizes = MicrobatchSizes()
    used, failures = drive(sizes, 77, 1000, 60_000)
    assert used[-1] == 77
    assert failures < 25
    assert drive(sizes, 77, 1000, 60_000)[1] <= 2


def first_part(sizes):
    """The largest part of a batch of 1000 units that cost 1 each."""
    return sizes.cut(1000, lambda start, stop: stop - start)[0][1]


@pytest.mark.parametrize(
    ("failed", "half", "limit", "trial"),
    [
        (100, 30, 30, 60),  # twice as much, as long as that is less than what failed
        (100, 49, 49, 98),
        (100, 50, 50, 75),  # else half way
        (100, None, 50, 75),
        (10, 10, 9, 9),  # nothing lies between
        (2, None, 1, 1),
    ],
)
def test_a_larger_cost_is_tried_once_after_64_quiet_steps_and_after_twice_as_many_when_that_fails(
    failed, half, limit, trial
):
    sizes = MicrobatchSizes()
    sizes.shrink(failed, half)
    for wait in (64, 128, 256):
        for _ in range(wait):
            assert first_part(sizes) == sizes.limit == limit
            assert not sizes.succeeded(limit)
        assert first_part(sizes) == trial
        sizes.shrink(max(trial, limit + 1))
        sizes.load_state_dict(sizes.state_dict() | {"failed": failed})


def test_a_trial_that_fits_is_the_new_limit_and_forgets_what_failed_below_it():
    sizes = MicrobatchSizes()
    sizes.shrink(31, 30)
    for _ in range(64):
        sizes.succeeded(30)
    assert first_part(sizes) == 30 and not sizes.succeeded(30)  # half way to 31 is no unit more
    assert first_part(sizes) == 31 and sizes.succeeded(31)
    assert sizes.state_dict() == {"limit": 31, "failed": None, "quiet": 0, "wait": 64, "retries": 0}
    for _ in range(64):
        sizes.succeeded(31)
    assert first_part(sizes) == 62  # memory is there again: it goes on to grow


def test_it_never_passes_the_largest_size_given():
    sizes = MicrobatchSizes(largest=8)
    assert (size_for(sizes, 100), size_for(sizes, 5)) == (8, 5)
    sizes.shrink(80)
    assert max(drive(sizes, 100, 100, 500)[0]) == 8


def test_a_size_of_one_stays():
    sizes = MicrobatchSizes()
    sizes.shrink(10)
    assert sizes.cut(3, cost) == [(0, 1), (1, 2), (2, 3)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_units_of_unequal_cost_are_cut_by_what_they_cost_and_a_large_one_stands_alone(costs, limit):
    def cost_of(start, stop):
        return sum(costs[start:stop])

    sizes = MicrobatchSizes()
    sizes.shrink(2 * limit)
    parts = sizes.cut(len(costs), cost_of)
    assert [unit for start, stop in parts for unit in range(start, stop)] == list(range(len(costs)))
    assert all(cost_of(*part) <= limit or part[1] - part[0] == 1 for part in parts)
    assert all(cost_of(start, next_start + 1) > limit for (start, _), (next_start, _) in itertools.pairwise(parts))


def test_allocator_retries_in_two_steps_in_a_row_shrink_before_anything_fails():
    sizes = MicrobatchSizes()
    for retries in (1, 0, 2):
        assert not sizes.succeeded(160, retries)
        assert size_for(sizes, 16) == 16
    assert sizes.succeeded(160, 1)
    assert size_for(sizes, 16) == 8


@pytest.mark.parametrize("cut", [1, 40, 65, 200])
def test_a_resume_decides_as_the_uninterrupted_run_does(cut):
    def fits_at(step):
        return random.Random(step // 50).randint(1, 40)

    def run(sizes, steps):
        return [drive(sizes, fits_at(step), 64, 1)[0][0] for step in steps]

    whole = run(MicrobatchSizes(), range(400))
    first = MicrobatchSizes()
    head = run(first, range(cut))
    second = MicrobatchSizes()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + run(second, range(cut, 400)) == whole


@pytest.mark.parametrize("state", [{"limits": 3}, {"buckets": 4, "limit": 3}])
def test_a_state_of_another_form_is_refused(state):
    with pytest.raises(UsageError, match=r"^These are no microbatch sizes: TypeError\(") as caught:
        MicrobatchSizes().load_state_dict(state)
    assert caught.value.rule == "the state is what MicrobatchSizes.state_dict() gave."
    assert caught.value.remedy == "leave it out: sizes are found anew by a few failures"
