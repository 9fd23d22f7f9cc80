"""How many at once, and the sum behind it."""

from dataclasses import replace

import pytest

from memfit.errors import DoesNotFitError, UsageError
from memfit.memory import Budget, Footprint
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


def test_memory_bounds_how_many_run_at_once(budget):
    # 48 GiB may be lent, each reserves 11.
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
        DoesNotFitError, match=r"49\.00 GiB of host memory \(declared\); 48\.00 GiB may be lent"
    ) as caught:
        plan("49GiB", 5, budget=budget)
    assert "2.00 GiB reserve" in caught.value.rule


def test_a_declared_size_carries_no_slack(budget):
    assert plan("48GiB", 1, budget=budget).num_parallel == 1


def test_what_a_measured_job_uses_already_is_lent_to_it(budget):
    taken = replace(budget, limits=(replace(budget.binding, headroom_bytes=40 * GIB), *budget.limits[1:]))
    assert plan(Footprint(10 * GIB), 5, budget=taken, in_use_bytes=10 * GIB).num_parallel == 4


@pytest.mark.parametrize("options", [{"num_jobs": 0}, {"num_jobs": 2, "max_parallel": 0}])
def test_an_empty_plan_is_refused(budget, options):
    with pytest.raises(UsageError, match="counted from 1"):
        plan("1GiB", budget=budget, **options)


def test_a_plan_survives_json(budget):
    found = plan(Footprint(4 * GIB, parts={"anonymous": 4 * GIB}), 5, budget=budget)
    assert Footprint.from_dict(found.to_dict()["footprint"]) == found.footprint
