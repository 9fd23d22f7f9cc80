"""The caching allocator, against PyTorch's own tests of it and against what must always hold."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import ConfigError, UsageError
from memfit.estimation import Allocator, AllocatorSettings, Event, Replay, Trace, replay

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def parse(text):
    return AllocatorSettings.parse(text)


def filled(*sizes, text="", **options):
    """An allocator with blocks 0, 1, 2 ... of these sizes."""
    allocator = Allocator(parse(text), **options)
    for number, size in enumerate(sizes):
        assert allocator.allocate(number, size)
    return allocator


def lifetimes(*words):
    """A trace from words such as "f a 30": in the forward pass, a is born with 30 MiB; without a size it dies."""
    phases, numbers, events = {"w": "build", "f": "forward", "b": "backward", "s": "step"}, {}, []
    for word in words:
        phase, name, *size = word.split()
        number = numbers.setdefault(name, len(numbers))
        events.append(Event(number, int(float(size[0]) * MIB) if size else 0, phases[phase]))
    return Trace(events, {})


def segments(allocator):
    """Address, size and whether it is given out of each block that has memory, for each segment, by address."""
    pools = (allocator._small, allocator._large)
    every = [*allocator._blocks.values(), *(one[-1] for pool in pools for one in (*pool.free, *pool.unmapped))]
    found = []
    for one in sorted((block for block in every if block.previous is None), key=lambda block: block.address):
        chain = []
        while one is not None:
            chain += [(one.address, one.size, one.allocated)] if one.mapped else []
            one = one.next
        found += [chain] if chain else []
    return found


# Sizes, as the constants of c10/core/AllocatorConfig.h and CUDACachingAllocator.cpp (torch 2.13) and their comments say.


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # torch.zeros(1): memory_allocated() 512, memory_reserved() 2,097,152
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left over is too little for a block of its own
        (GIB + MIB, GIB + 2 * MIB, GIB + 2 * MIB),
    ],
)
def test_a_request_is_rounded_to_512_bytes_and_takes_a_segment_of_2_or_20_mib_or_a_multiple_of_2(
    num_bytes, allocated, reserved
):
    allocator = filled(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_requests_share_a_segment_of_2_mib_and_large_ones_of_20():
    assert filled(*[MIB] * 2).reserved_bytes == 2 * MIB
    assert filled(*[MIB] * 3).reserved_bytes == 4 * MIB
    assert filled(*[9 * MIB] * 2).reserved_bytes == 20 * MIB
    assert filled(*[9 * MIB] * 3).reserved_bytes == 40 * MIB


def test_what_is_left_of_a_large_block_is_used_if_it_is_over_a_mebibyte_and_given_along_if_not():
    assert filled(9 * MIB, 9 * MIB, 2 * MIB).reserved_bytes == 20 * MIB
    assert filled(10 * MIB - 512, 9 * MIB).allocated_bytes == 19 * MIB - 512  # 1 MiB and 512 bytes are left
    assert filled(10 * MIB - 512, 9 * MIB + 512).allocated_bytes == 20 * MIB
    assert filled(MIB, MIB - 512).allocated_bytes == 2 * MIB - 512  # among small blocks 512 bytes are enough


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = filled(40 * MIB, 30 * MIB, 20 * MIB)
    for number in range(3):
        allocator.free(number)
    assert allocator.allocate(3, 25 * MIB)
    [sizes] = [[size for _, size, _ in chain] for chain in segments(allocator) if any(used for *_, used in chain)]
    assert sizes == [25 * MIB, 5 * MIB]


def test_free_neighbours_become_one_block_again():
    allocator = filled(5 * MIB, 5 * MIB, 5 * MIB)
    for number in (0, 2, 1):
        allocator.free(number)
    assert [[size for _, size, _ in chain] for chain in segments(allocator)] == [[20 * MIB]]


def test_streams_share_no_blocks():
    trace = lifetimes("f a 30", "f b 30", "f a", "f c 30")
    assert replay(trace).reserved_bytes == 60 * MIB
    assert replay(dataclasses.replace(trace, streams={2: 7})).reserved_bytes == 90 * MIB
    assert replay(dataclasses.replace(trace, streams={0: 7, 2: 7})).reserved_bytes == 60 * MIB


# PyTorch's own tests: c10/test/core/AllocatorConfig_test.cpp and test/test_cuda.py (main, 2026).


def test_out_of_memory_retry_of_test_cuda():
    total = 15_637_086_208  # a T4's
    allocator = filled(total // 2, capacity_bytes=total)
    assert not allocator.allocate(1, total // 2)  # rounded up to 2 MiB, two halves are more than the whole
    allocator.free(0)
    assert allocator.allocate(1, total // 2)


# Expandable segments.


def test_an_expandable_segment_grows_by_pages_of_20_mib_and_of_2_for_small_blocks():
    allocator = filled(30 * MIB, 1, text="expandable_segments:True")
    assert allocator.reserved_bytes == 42 * MIB
    assert allocator.allocate(2, 5 * MIB)
    assert allocator.reserved_bytes == 42 * MIB
    assert allocator.allocate(3, 6 * MIB)  # 5 MiB are left, and the block goes on behind them
    assert allocator.reserved_bytes == 62 * MIB


def test_a_block_that_can_grow_is_taken_last():
    allocator = filled(50 * MIB, 30 * MIB, 20 * MIB, text="expandable_segments:True")
    allocator.free(0)
    allocator.free(2)  # behind it there are only addresses
    assert allocator.allocate(3, 15 * MIB)
    [sizes] = [[size // MIB for _, size, _ in chain] for chain in segments(allocator)]
    assert sizes == [15, 35, 30, 20]


def test_an_expandable_segment_lets_a_growing_batch_use_what_a_smaller_one_left():
    words = []
    for batch in (10, 11, 12, 13):
        words += [f"f {batch}x{layer} {batch * layer}" for layer in range(2, 8)]
        words += [f"b {batch}x{layer}" for layer in range(2, 8)]
    trace = lifetimes(*words)
    plain, expandable = replay(trace), replay(trace, parse("expandable_segments:True"))
    assert expandable.reserved_bytes == -(-13 * 27 // 20) * 20 * MIB
    assert plain.reserved_bytes > 1.2 * expandable.reserved_bytes


def test_release_takes_whole_free_pages_and_leaves_the_rest_of_an_expandable_segment():
    allocator = filled(30 * MIB, 50 * MIB, 20 * MIB, text="expandable_segments:True")
    allocator.free(1)
    allocator.release()
    assert allocator.reserved_bytes == 100 * MIB - 40 * MIB  # from 40 to 80 MiB no byte was used
    assert allocator.allocate(3, 50 * MIB)
    assert allocator.reserved_bytes == 100 * MIB  # the pages are put back into the gap


def test_where_memory_ends_within_a_block_expandable_segments_still_fit():
    trace = lifetimes("f a 30", "f b 30", "f c 30", "f a", "f c", "b d 58")
    assert replay(trace, capacity_bytes=100 * MIB).num_retries == 1
    found = replay(trace, parse("expandable_segments:True"), capacity_bytes=140 * MIB)
    assert (found.num_retries, found.fits) == (0, True)


# Running out.


def test_after_it_ran_out_nothing_more_is_counted():
    found = replay(lifetimes("f a 30", "f b 30", "b a", "s c 10"), capacity_bytes=50 * MIB)
    assert (found.fits, found.allocated_bytes, found.num_retries) == (False, {"forward": 30 * MIB}, 1)


def test_what_is_cached_is_given_back_before_giving_up_and_that_is_counted():
    found = replay(lifetimes("f a 30", "f a", "f b 40", "f b", "b c 60"), capacity_bytes=64 * MIB)
    assert (found.fits, found.num_retries) == (True, 2)


def test_a_segment_with_one_living_byte_cannot_be_given_back():
    trace = lifetimes("f a 18", "f b 1.5", "f a", "f c 30")
    assert not replay(trace, capacity_bytes=40 * MIB).fits
    assert replay(trace, capacity_bytes=50 * MIB).fits


def test_blocks_above_max_split_size_are_never_cut_and_only_given_for_what_is_nearly_as_large():
    text = "max_split_size_mb:64"
    for size, reserved in ((30, 130), (75, 176), (80, 180), (81, 100)):
        allocator = filled(100 * MIB, text=text)
        allocator.free(0)
        assert allocator.allocate(1, size * MIB)
        assert allocator.reserved_bytes == reserved * MIB
    assert allocator.allocated_bytes == 100 * MIB
    allocator = filled(64 * MIB, text=text)
    allocator.free(0)
    assert allocator.allocate(1, 30 * MIB)
    assert allocator.reserved_bytes == 94 * MIB


# Phases.


def test_each_phase_has_its_peak_with_what_was_there_at_its_start():
    found = replay(lifetimes("w w 30", "f a 40", "f b 50", "b a", "b b", "s c 10", "s c", "f d 12", "b d"))
    peaks = {phase: one // MIB for phase, one in found.allocated_bytes.items()}
    assert peaks == {"build": 30, "forward": 120, "backward": 120, "step": 40}
    assert found.reserved_bytes == 120 * MIB


def test_an_empty_trace_takes_nothing():
    assert replay(Trace([], {})) == Replay({}, 0)


# Settings.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_split_size_mb:19", "at least 20"),
        ("backend:cudaMallocAsync", "only torch's own"),
        ("roundup_power2_divisions:[64:1,>:4]", "memfit does not model roundup_power2_divisions"),
    ],
)
def test_what_torch_refuses_and_what_is_not_modelled_is_an_error(text, said):
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert isinstance(raised.value, UsageError)
    assert said in str(raised.value)
    assert raised.value.rule and raised.value.remedy


def test_settings_are_read_as_torch_reads_them():
    found = parse(" max_split_size_mb : 128, large_segment_size_mb:40,max_non_split_rounding_mb:50,"
                  "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,pinned_use_background_threads:True,")  # fmt: skip
    assert found == AllocatorSettings(False, 128 * MIB, 50 * MIB, 40 * MIB, 0.9)
    assert parse("") == AllocatorSettings()
    assert parse("large_segment_size_mb:12,max_split_size_mb:15").large_segment_size == 12 * MIB
    assert parse("expandable_segments:False,expandable_segments:True").expandable_segments


def test_a_larger_large_segment_is_what_middling_requests_get():
    assert filled(3 * MIB, text="large_segment_size_mb:40,max_split_size_mb:64").reserved_bytes == 40 * MIB
    assert filled(3 * MIB, text="large_segment_size_mb:32,expandable_segments:True").reserved_bytes == 32 * MIB


# What must always hold.

TEXTS = [
    *("", "expandable_segments:True", "max_split_size_mb:20"),
    *("max_split_size_mb:40", "large_segment_size_mb:11", "expandable_segments:True,max_split_size_mb:32"),
]
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 60 * MIB))
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1), st.integers(0, 10**6)), max_size=120)


def check(allocator):
    chains = segments(allocator)
    blocks = sorted(block for chain in chains for block in chain)
    assert all(start + size <= after for (start, size, _), (after, *_) in pairwise(blocks))
    assert sum(size for _, size, _ in blocks) == allocator.reserved_bytes
    assert sum(size for _, size, used in blocks if used) == allocator.allocated_bytes
    assert allocator.reserved_bytes >= allocator.allocated_bytes
    for chain in chains:  # no two free neighbours: they would be one block
        for (start, size, used), (after, _, other) in pairwise(chain):
            assert used or other or start + size < after
    return chains


@settings(max_examples=120, deadline=None)
@given(STEPS, st.sampled_from(TEXTS), st.sampled_from([None, 90 * MIB, 300 * MIB]))
def test_blocks_never_overlap_and_the_sums_are_those_of_the_segments(steps, text, capacity):
    allocator = Allocator(parse(text), capacity)
    sizes = {}
    for number, (born, size, stream, pick) in enumerate(steps):
        if born or not sizes:
            if allocator.allocate(number, size, stream):
                sizes[number] = size
            else:
                assert allocator.reserved_bytes + allocator.segment_size(allocator.round(size)) + 40 * MIB > capacity
                for chain in segments(allocator):  # everything that could be given back was
                    assert allocator.settings.expandable_segments or any(used for *_, used in chain)
        else:
            allocator.free(list(sizes)[pick % len(sizes)])
            del sizes[list(sizes)[pick % len(sizes)]]
        assert capacity is None or allocator.reserved_bytes <= capacity
        assert allocator.allocated_bytes >= sum(sizes.values())
        check(allocator)
    for number in sizes:
        allocator.free(number)
    check(allocator)
    assert allocator.allocated_bytes == 0
    allocator.release()
    assert (allocator.reserved_bytes, segments(allocator)) == (0, [])


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from(TEXTS))
def test_a_capacity_of_the_peak_is_enough_and_changes_nothing(steps, text):
    events, alive = [], []
    for number, (born, size, _, pick) in enumerate(steps):
        if born or not alive:
            alive.append(number)
            events.append(Event(number, size, "forward"))
        else:
            events.append(Event(alive.pop(pick % len(alive)), 0, "forward"))
    free = replay(Trace(events, {}), parse(text))
    bound = replay(Trace(events, {}), parse(text), capacity_bytes=free.reserved_bytes)
    assert bound.fits
    assert (bound.allocated_bytes, bound.reserved_bytes) == (free.allocated_bytes, free.reserved_bytes)
