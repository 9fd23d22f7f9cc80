"""The arithmetic of admission."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.memory import (
    DEFAULT_SLACK,
    HOST,
    Budget,
    Device,
    Footprint,
    Lendable,
    bounds_of,
    count_fitting,
    keep_cache,
    reservation_bytes,
    rooms_of,
    why_tight,
)

GIB, MIB = 1 << 30, 1 << 20
SIZES = st.integers(0, 1 << 44)


def test_a_measured_job_reserves_its_peak_and_the_slack_and_a_declared_one_what_it_declared():
    assert reservation_bytes(Footprint(10 * GIB)) == round(10 * GIB * (1 + DEFAULT_SLACK)) == 11 * GIB
    assert reservation_bytes(Footprint.declared("10GiB"), slack=0.5) == 10 * GIB


@given(SIZES, st.floats(0, 10))
def test_a_reservation_is_never_below_the_peak(private_bytes, slack):
    assert reservation_bytes(Footprint(private_bytes), slack) >= private_bytes


def test_shared_bytes_and_device_bytes_are_not_reserved_for_each_job():
    assert reservation_bytes(Footprint(100, shared_bytes=10**9, device_bytes={"GPU-1": 10**9}), slack=0) == 100


def budget_of(tmp_path, *limits, device=None):
    """A budget of 100 GiB under further limits: (scope, limit, free), in GiB."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 104857600 kB\n")
    budget, ids = Budget.read(root=tmp_path, env={}, reserve_bytes=GIB), {"group": "1:7", "job": ""}
    found = [
        replace(budget.binding, scope=scope, id=ids[scope], limit_bytes=size * GIB, headroom_bytes=free * GIB)
        for scope, size, free in limits
    ]
    devices = (Device(0, "GPU-0", "stand-in", 80 * GIB, device * GIB, 0, ()),) if device is not None else ()
    return replace(budget, limits=(*found, *budget.limits), devices=devices)


@pytest.mark.proves("S0-24")
def test_each_place_offers_what_is_free_less_its_reserve_and_what_is_reserved_and_not_used(tmp_path):
    rooms = rooms_of(budget_of(tmp_path, device=60), unused={HOST: 5 * GIB, "GPU-0": 20 * GIB})
    assert rooms[HOST].bytes == 94 * GIB
    assert rooms["GPU-0"].bytes == 40 * GIB - 256 * MIB


def test_the_smallest_limit_decides_and_what_jobs_give_back_may_bring_another(tmp_path):
    budget = budget_of(tmp_path, ("group", 50, 10), ("group", 20, 15))
    assert rooms_of(budget)[HOST].bytes == 9 * GIB
    assert rooms_of(budget, {HOST: 30 * GIB})[HOST].bytes == 19 * GIB  # all of the second limit


@pytest.mark.parametrize(("scope", "others", "size"), [
    ("job", {HOST: 40}, 29), ("group", {HOST: 40}, 29), ("group", {HOST: 40, "1:7": 20}, 9),
])  # fmt: skip
def test_other_runs_take_of_the_limits_that_they_share_alone(tmp_path, scope, others, size):
    taken = {limit: taken * GIB for limit, taken in others.items()} | {"GPU-0": 10 * GIB}
    rooms = rooms_of(budget_of(tmp_path, (scope, 30, 30), device=60), others=taken)
    assert rooms[HOST].bytes == size * GIB
    assert rooms["GPU-0"].bytes == 50 * GIB - 256 * MIB


def test_a_place_that_is_free_offers_no_more_than_it_has(tmp_path):
    rooms = rooms_of(budget_of(tmp_path, device=60), {"GPU-0": 50 * GIB})
    assert rooms["GPU-0"].headroom_bytes == 80 * GIB


@pytest.mark.proves("S0-24")
@pytest.mark.parametrize(
    ("lendable", "text"),
    [
        (Lendable(8 * GIB, GIB, 0), "7.00 GiB available = 8.00 GiB free - 1.00 GiB reserve - 0 B reserved"),
        (Lendable(GIB, 2 * GIB, GIB), "-2.00 GiB available = 1.00 GiB free - 2.00 GiB reserve - 1.00 GiB reserved"),
    ],
)
def test_the_sum_is_told_in_words_also_when_it_is_below_zero(lendable, text):
    assert lendable.explain() == f"{text} and not yet used"


def fill(rooms, needed, num_devices, on_device):
    """How many jobs of one size find a place when each takes the devices with the most room left."""
    host, left, num = rooms[HOST].bytes, [room.bytes for place, room in rooms.items() if place != HOST], 0
    while host >= needed:
        left.sort(reverse=True)
        if num_devices and (len(left) < num_devices or left[num_devices - 1] < on_device):
            break
        left = [size - on_device * (place < num_devices) for place, size in enumerate(left)]
        host, num = host - needed, num + 1
    return num


SMALL = st.integers(-5, 40)


@given(SMALL, st.lists(SMALL, max_size=4), st.integers(1, 12), st.integers(0, 3), st.integers(1, 12))
def test_as_many_jobs_fit_as_find_a_place_one_by_one(host, devices, needed, num_devices, on_device):
    rooms = {HOST: Lendable(host, 0, 0)} | {f"GPU-{n}": Lendable(size, 0, 0) for n, size in enumerate(devices)}
    assert count_fitting(rooms, needed, num_devices, on_device) == fill(rooms, needed, num_devices, on_device)


@pytest.mark.parametrize(
    ("host", "devices", "job", "fitting"),
    [
        (100, [], (30,), 3),
        (89, [], (30,), 2),
        (90, [], (30,), 3),
        (-1, [], (30,), 0),
        (100, [], (10, 1, 5), 0),
        (100, [50], (10, 1, 25), 2),
        (100, [50], (10, 2, 25), 0),
        (100, [90, 20], (10, 2, 10), 2),  # the second device decides, whatever the first has
        (100, [90, 20, 20], (10, 2, 10), 4),
        (15, [90, 90], (10, 1, 10), 1),  # the host decides
    ],
)
def test_the_host_and_each_device_bound_how_many_fit(host, devices, job, fitting):
    rooms = {HOST: Lendable(host, 0, 0)} | {f"GPU-{n}": Lendable(size, 0, 0) for n, size in enumerate(devices)}
    assert count_fitting(rooms, *job) == fitting


@pytest.mark.parametrize(("mapped", "kept"), [(0, 1), (3, 3), (24, 24), (25, 25), (80, 25)])
def test_room_for_mapped_files_is_kept_up_to_a_quarter_of_the_limit(tmp_path, mapped, kept):
    budget = budget_of(tmp_path)
    room = keep_cache(budget, rooms_of(budget)[HOST], mapped * GIB)
    assert room.reserve_bytes == kept * GIB


@pytest.mark.parametrize(
    ("upper", "limit", "is_tight"),
    [(95, 100, False), (96, 100, True), (100, 100, True), (101, 100, False), (0, 0, True)],
)
def test_a_peak_that_leaves_less_than_a_twentieth_is_tight(upper, limit, is_tight):
    assert bool(why_tight(upper, limit)) == is_tight


def test_the_limits_at_one_place_are_shown_apart(tmp_path):
    budget = budget_of(tmp_path, ("group", 50, 10), ("job", 20, 15), device=60)
    found = bounds_of(budget, unused={HOST: 2 * GIB}, others={HOST: 4 * GIB, "1:7": 3 * GIB}, reserve_bytes=0)
    assert [(place, limit, room.bytes // GIB) for place, limit, room in found] == [
        (HOST, "1:7", 5), (HOST, "", 13), (HOST, HOST, 94), ("GPU-0", "GPU-0", 59),
    ]  # fmt: skip
