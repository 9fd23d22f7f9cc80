"""How many at once, and the sum behind it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import DoesNotFitError, UsageError
from memfit.memory import HOST, Budget, Device, Footprint, Lendable, count_fitting
from memfit.planning import plan

GIB = 1 << 30


@pytest.fixture
def budget(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {50 << 20} kB\nSwapTotal: 0 kB\n")
    return Budget.read(root=tmp_path, env={}, reserve_bytes=2 * GIB)


def test_all_run_at_once_when_all_fit(budget):
    found = plan(Footprint(4 * GIB), 5, budget=budget)
    assert (found.num_parallel, found.limited_by) == (5, "jobs")


@pytest.mark.proves("S0-09")
def test_memory_bounds_how_many_run_at_once(budget):
    # 48 GiB available, each reserves 11.
    found = plan(Footprint(10 * GIB), 5, budget=budget, slack=0.1)
    assert (found.num_parallel, found.limited_by, found.reservation_bytes) == (4, "memory", round(11 * GIB))
    assert found.capacity_bytes == 48 * GIB
    assert "4 of 5 at once (no more fit)" in found.explain()


def test_a_users_number_bounds_it_too(budget):
    found = plan("4GiB", 5, budget=budget, max_parallel=2)
    assert (found.num_parallel, found.limited_by, found.num_fitting) == (2, "max_parallel", 12)


def test_a_panel_that_all_map_is_not_counted_for_each(budget):
    assert plan(Footprint(4 * GIB, shared_bytes=40 * GIB), 5, budget=budget).num_parallel == 5


def test_what_does_not_fit_even_alone_is_refused_with_the_arithmetic(budget):
    with pytest.raises(
        DoesNotFitError, match=r"49\.00 GiB of host memory \(declared\); 48\.00 GiB available"
    ) as caught:
        plan("49GiB", 5, budget=budget)
    assert "2.00 GiB reserve" in caught.value.rule


def test_a_declared_size_carries_no_slack(budget):
    assert plan("48GiB", 1, budget=budget).num_parallel == 1


def test_what_a_measured_job_uses_already_is_lent_to_it(budget):
    taken = replace(budget, limits=(replace(budget.binding, headroom_bytes=40 * GIB), *budget.limits[1:]))
    assert plan(Footprint(10 * GIB), 5, budget=taken, in_use={HOST: 10 * GIB}).num_parallel == 4


@pytest.mark.parametrize("options", [{"num_jobs": 0}, {"num_jobs": 2, "max_parallel": 0}])
def test_an_empty_plan_is_refused(budget, options):
    with pytest.raises(UsageError, match="counted from 1"):
        plan("1GiB", budget=budget, **options)


def test_a_plan_survives_json(budget):
    found = plan(Footprint(4 * GIB, parts={"anonymous": 4 * GIB}), 5, budget=budget)
    assert Footprint.from_dict(found.to_dict()["footprint"]) == found.footprint


def with_gpus(budget, *free):
    return replace(
        budget, devices=tuple(Device(n, f"GPU-{n}", "x", 10 * GIB, size, 0, ()) for n, size in enumerate(free))
    )


def test_what_a_job_takes_of_a_gpu_bounds_how_many_run_at_once(budget):
    # Of 10 and 7 GiB 256 MiB each are kept back; 3.3 fit twice and twice.
    footprint = Footprint(GIB, device_bytes={"GPU-0": 3 * GIB})
    found = plan(footprint, 9, budget=with_gpus(budget, 10 * GIB, 7 * GIB))
    assert (found.num_parallel, found.limited_by, found.num_devices) == (4, "memory", 1)
    assert found.device_reservation_bytes == round(3.3 * GIB)
    assert found.device_capacity_bytes == {"GPU-0": 9.75 * GIB, "GPU-1": 6.75 * GIB}
    assert "3.30 GiB on 1 GPU, of 9.75 GiB, 6.75 GiB" in found.explain()


def test_a_job_of_two_gpus_takes_a_part_of_each(budget):
    footprint = Footprint(GIB, device_bytes={"GPU-0": 4 * GIB, "GPU-1": 2 * GIB})
    assert plan(footprint, 9, budget=with_gpus(budget, *[10 * GIB] * 4)).num_parallel == 4
    assert plan(footprint, 9, budget=with_gpus(budget, *[10 * GIB] * 2)).num_parallel == 2


def test_what_the_measured_job_holds_of_its_gpu_is_lent_to_it(budget):
    footprint = Footprint(GIB, device_bytes={"GPU-0": 4 * GIB})
    found = plan(footprint, 9, budget=with_gpus(budget, 6 * GIB), in_use={"GPU-0": 4 * GIB})
    assert (found.num_parallel, found.device_capacity_bytes) == (2, {"GPU-0": 9.75 * GIB})


def test_jobs_that_ask_for_no_gpu_are_counted_by_host_memory_alone(budget):
    footprint = Footprint(GIB, device_bytes={"GPU-0": 4 * GIB})
    assert plan(footprint, 9, budget=with_gpus(budget, 5 * GIB), num_devices=0).num_parallel == 9


@pytest.mark.parametrize(("free", "why"), [((5 * GIB,), "on GPU 0 .GPU-0. = 5.00 GiB free"), ((), "no GPU is here")])
def test_a_job_that_fits_no_gpu_is_refused_with_the_arithmetic(budget, free, why):
    footprint = Footprint(GIB, device_bytes={"GPU-0": 6 * GIB})
    with pytest.raises(DoesNotFitError, match=rf"one job needs 6.00 GiB on 1 GPU .measured.; .*{why}"):
        plan(footprint, 5, budget=with_gpus(budget, *free))


@given(st.lists(st.integers(0, 60), max_size=5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 40))
def test_as_many_are_counted_as_fit_one_after_the_other(free, size, num_devices, host):
    rooms = {HOST: Lendable(host, 0, 0)} | {f"GPU-{n}": Lendable(one, 0, 0) for n, one in enumerate(free)}
    left, placed = Counter({place: room.bytes for place, room in rooms.items()}), 0
    while True:  # each on the devices with the most room, as jobs are admitted
        chosen = [place for place, _ in left.most_common() if place != HOST][:num_devices]
        if left[HOST] < 1 or len(chosen) < num_devices or any(left[place] < size for place in chosen):
            break
        left -= Counter({HOST: 1, **dict.fromkeys(chosen, size)})
        placed += 1
    assert count_fitting(rooms, 1, num_devices, size) == placed
