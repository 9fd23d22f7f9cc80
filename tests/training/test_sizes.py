"""Microbatch sizes: halving, trials upward, what is remembered."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.training import MicrobatchSizes, find_longest


def drive(sizes, fits, count, num_steps):
    """Steps as a safe step makes them; returns the size of each step and how many failed."""
    used, failures = [], 0
    for _ in range(num_steps):
        while (size := sizes.size_for("k", count)) > fits:
            sizes.shrink("k", size)
            failures += 1
        sizes.succeeded("k", size)
        used.append(size)
    return used, failures


@given(count=st.integers(1, 3000), fits=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_the_first_step_halves_at_most_log2_times_and_never_below_one(count, fits):
    used, failures = drive(MicrobatchSizes(), fits, count, 1)
    assert 1 <= used[0] <= min(fits, count)
    assert failures <= (count - 1).bit_length()
    assert used[0] == count or 2 * used[0] >= min(count, fits + 1)


def test_it_converges_to_the_largest_size_that_fits_and_then_fails_ever_more_rarely():
    sizes = MicrobatchSizes()
    used, failures = drive(sizes, 77, 1000, 60_000)
    assert used[-1] == 77
    assert failures < 25
    assert drive(sizes, 77, 1000, 60_000)[1] <= 2


def test_it_grows_back_when_memory_is_there_again():
    sizes = MicrobatchSizes()
    drive(sizes, 3, 64, 10)
    used, failures = drive(sizes, 64, 64, 2000)
    assert used[-1] == 64 and failures == 0


def test_it_never_passes_the_largest_size_given():
    sizes = MicrobatchSizes(largest=8)
    assert (sizes.size_for("k", 100), sizes.size_for("k", 5)) == (8, 5)
    sizes.shrink("k", 8)
    assert max(drive(sizes, 100, 100, 500)[0]) == 8


def test_a_size_of_one_stays():
    sizes = MicrobatchSizes()
    sizes.shrink("k", 1)
    assert sizes.size_for("k", 5) == 1


def test_shapes_are_told_apart_up_to_a_power_of_two_and_by_type_but_not_by_their_number_of_samples():
    key = MicrobatchSizes().bucket
    assert key(torch.zeros(3, 100)) == key(torch.zeros(7, 65)) == key({"x": torch.zeros(1, 128)})
    assert len({key(torch.zeros(3, 100)), key(torch.zeros(3, 64)), key(torch.zeros(3, 100).half())}) == 3
    sizes = MicrobatchSizes()
    sizes.shrink(key(torch.zeros(8, 100)), 8)
    assert (sizes.size_for(key(torch.zeros(8, 128)), 8), sizes.size_for(key(torch.zeros(8, 64)), 8)) == (4, 8)


class Graphs:
    """A batch that is no container, as those of torch-geometric."""

    def __init__(self, nodes):
        self.store = {"x": torch.zeros(nodes, 4)}


def test_objects_are_told_apart_by_their_type_and_bytes():
    key = MicrobatchSizes().bucket
    assert key(Graphs(10)) == key(Graphs(15)) != key(Graphs(1000))
    assert key([Graphs(10)] * 2) == key([Graphs(10)] * 7) != key([Graphs(1000)] * 2)
    assert key({"graphs": Graphs(10), "x": torch.zeros(3, 4)}) == "Graphs[256] float32[:,4]"
    assert find_longest([Graphs(10), Graphs(1000), Graphs(20)]).batch.store["x"].shape == (1000, 4)


def test_what_has_no_size_counts_nothing():
    key, batch = MicrobatchSizes().bucket, Graphs(10)
    known = key(batch)
    batch.edges, batch.kind = torch.eye(4).to_sparse(), torch.Tensor
    assert key(batch) == known
    assert find_longest([torch.eye(4).to_sparse(), torch.eye(4)]).batch.layout == torch.strided


def test_allocator_retries_in_two_steps_in_a_row_shrink_before_anything_fails():
    sizes = MicrobatchSizes()
    for retries in (1, 0, 2):
        sizes.note_alloc_retries("k", 16, retries)
        assert sizes.size_for("k", 16) == 16
    sizes.note_alloc_retries("k", 16, 1)
    assert sizes.size_for("k", 16) == 8


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


@pytest.mark.parametrize("state", [{}, {"buckets": {"k": {"sise": 3}}}, {"buckets": 4}])
def test_a_state_of_another_form_is_refused(state):
    with pytest.raises(UsageError, match="no microbatch sizes"):
        MicrobatchSizes().load_state_dict(state)
