"""The scheduler against a fake backend: no process, no clock."""

from dataclasses import replace
from pathlib import Path

import pytest

from memfit.errors import DoesNotFitError
from memfit.jobs import Job, Policy, Scheduler, StopRequest
from memfit.memory import Budget, Footprint
from memfit.testing import FakeBackend, FakeJob

GIB = 1 << 30


class FakeMachine:
    """A budget of which the fake jobs, and a neighbour, use a part."""

    def __init__(self, tmp_path: Path, backend: FakeBackend, limit: int, reserve: int = 0) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\n")
        self._budget = Budget.read(root=tmp_path, env={}, reserve_bytes=reserve)
        self._backend, self.limit, self.neighbour = backend, limit, 0
        self.in_use_seen = 0

    def read(self, in_use_bytes: int) -> Budget:
        self.in_use_seen = max(self.in_use_seen, in_use_bytes)
        free = self.limit - self._backend.used_bytes - self.neighbour
        binding = replace(self._budget.binding, limit_bytes=self.limit, headroom_bytes=free)
        return replace(self._budget, limits=(binding,))


def make(tmp_path, scripts, limit, **options):
    backend = FakeBackend(scripts)
    machine = FakeMachine(tmp_path, backend, limit, options.pop("reserve", 0))
    events = []
    phases = options.pop("phases", ())
    declared = options.pop("declared", None)
    jobs = [Job(name, command=("true",), phases=phases, footprint=declared) for name in scripts]
    scheduler = Scheduler(
        jobs,
        backend,
        machine.read,
        policy=Policy(**options),
        say=lambda kind, **fields: events.append((kind, fields)),
        sleep=backend.step,
    )
    return scheduler, backend, machine, events


def test_the_first_job_runs_alone_until_it_has_passed_its_phases(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 10, passes_phases_at=4) for i in range(1, 6)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=10_000, phases=("load", "train"))
    seen = []
    scheduler.run(on_tick=lambda: seen.append(len(backend.submitted)))
    assert seen[:4] == [1, 1, 1, 1]
    assert seen[5] == 5
    assert backend.most_at_once == 5
    waits = [fields for kind, fields in events if kind == "wait"]
    assert "fold_1 is being measured" in waits[0]["reason"]


def test_as_many_run_at_once_as_the_measured_footprint_allows(tmp_path):
    scripts = {f"fold_{i}": FakeJob((50, 100, 100, 100)) for i in range(1, 6)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=340, slack=0.1, phases=("load",))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.most_at_once == 3
    assert backend.peak_bytes <= 340


def test_what_running_jobs_have_reserved_and_not_used_yet_is_not_lent(tmp_path):
    # Each is small for long and large at the end: admission by free memory alone would start all five.
    scripts = {f"fold_{i}": FakeJob((1,) * 8 + (100,) * 2, passes_phases_at=9) for i in range(1, 6)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=230, slack=0.0, phases=("load",))
    scheduler.run()
    assert backend.most_at_once == 2
    assert backend.peak_bytes <= 230


def test_a_job_is_admitted_as_soon_as_there_is_room_and_not_when_a_batch_ends(tmp_path):
    scripts = {"a": FakeJob((100,) * 30), "b": FakeJob((100,) * 3), "c": FakeJob((100,) * 3), "d": FakeJob((100,) * 3)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=220, slack=0.0)
    backend.scripts["a"] = FakeJob((100,) * 30)
    scheduler.known = Footprint(100)
    scheduler.run()
    ends = [fields["job"] for kind, fields in events if kind == "end"]
    assert ends == ["b", "c", "d", "a"]


def test_the_reserve_is_never_lent(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 5) for i in range(1, 4)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=320, reserve=100, slack=0.0)
    scheduler.known = Footprint(100)
    scheduler.run()
    assert backend.most_at_once == 2


def test_a_users_cap_is_told_what_the_running_jobs_use(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 6) for i in range(1, 4)}
    scheduler, _, machine, _ = make(tmp_path, scripts, limit=250, slack=0.0)
    scheduler.known = Footprint(100)
    scheduler.run()
    assert machine.in_use_seen == 200


def test_a_neighbour_that_takes_memory_holds_jobs_back(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 6) for i in range(1, 5)}
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=500, slack=0.0)
    scheduler.known = Footprint(100)
    machine.neighbour = 250
    scheduler.run()
    assert backend.most_at_once == 2
    assert any("may be lent" in fields["arithmetic"] for kind, fields in events if kind == "wait")


def test_a_job_that_grows_past_its_likes_raises_the_reservation_of_those_to_come(tmp_path):
    scripts = {"a": FakeJob((100,) * 9), "b": FakeJob((100, 100, 300, 300)), "c": FakeJob((100,) * 3)}
    scheduler, _, _, events = make(tmp_path, scripts, limit=450, slack=0.0, max_parallel=2)
    scheduler.known = Footprint(100)
    scheduler.run()
    assert [f["reservation_bytes"] for kind, f in events if kind == "footprint"] == [300]
    assert [f["reservation_bytes"] for kind, f in events if kind == "admit"] == [100, 100, 300]


def test_a_declared_size_that_cannot_fit_is_refused_with_the_arithmetic(tmp_path):
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob()}, limit=2 * GIB, declared=Footprint.declared("3GiB"))
    with pytest.raises(DoesNotFitError, match=r"a needs 3\.00 GiB .* 2\.00 GiB may be lent = 2\.00 GiB free"):
        scheduler.run()
    assert backend.submitted == []
    assert DoesNotFitError.exit_code == 3


def test_force_runs_all_at_once_whatever_the_budget_says(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 3) for i in range(1, 4)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=50, force=True)
    scheduler.run()
    assert backend.most_at_once == 3
    assert all("forced" in fields["why"] for kind, fields in events if kind == "admit")


def test_a_declared_size_is_a_hint_and_the_measured_one_counts(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 5) for i in range(1, 5)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=420, slack=0.0, declared=Footprint.declared(400))
    scheduler.run()
    # Its end, or its phases, let the first job's measured 100 admit the others, not the declared 400.
    assert backend.most_at_once > 1


def test_never_more_at_once_than_the_user_allows(tmp_path):
    scripts = {f"fold_{i}": FakeJob((1,) * 4) for i in range(1, 6)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=10_000, max_parallel=2)
    scheduler.run()
    assert backend.most_at_once == 2
    assert any("max_parallel" in fields["reason"] for kind, fields in events if kind == "wait")


def test_one_at_a_time_keeps_the_order(tmp_path):
    scripts = {f"fold_{i}": FakeJob((1,) * 2) for i in (2, 3, 4, 5)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=10_000, max_parallel=1)
    scheduler.run()
    assert backend.submitted == ["fold_2", "fold_3", "fold_4", "fold_5"]
    assert backend.most_at_once == 1


def test_stop_on_failure_starts_no_more_and_asks_the_others_to_stop(tmp_path):
    scripts = {"a": FakeJob((1,) * 3, state="failed"), "b": FakeJob((1,) * 50), "c": FakeJob()}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=100, on_failure="stop", max_parallel=2)
    scheduler.known = Footprint(1)
    statuses = scheduler.run()
    assert statuses["a"].state == "failed"
    assert statuses["b"].state == "preempted"
    assert "c" not in backend.submitted


def test_continue_on_failure_runs_the_others_and_reports_all(tmp_path):
    scripts = {"a": FakeJob(state="failed"), "b": FakeJob(state="out_of_memory"), "c": FakeJob()}
    scheduler, _, _, events = make(tmp_path, scripts, limit=1000)
    statuses = scheduler.run()
    assert {name: status.state for name, status in statuses.items()} == {
        "a": "failed", "b": "out_of_memory", "c": "completed",
    }  # fmt: skip
    assert [fields["job"] for kind, fields in events if kind == "end"] == ["a", "b", "c"]


def test_when_the_first_job_fails_before_it_was_measured_the_next_one_is_measured(tmp_path):
    scripts = {"a": FakeJob((5, 5), passes_phases_at=99, state="failed"), "b": FakeJob((7,) * 4), "c": FakeJob((7,))}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, phases=("load",))
    alone = []
    scheduler.run(on_tick=lambda: alone.append(tuple(backend.submitted)))
    assert ("a", "b") in alone
    assert scheduler.known == Footprint(7)


def test_a_request_to_stop_reaches_the_running_jobs_once_and_a_second_ends_them_now(tmp_path):
    scripts = {f"fold_{i}": FakeJob((1,) * 100) for i in range(1, 4)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=100, max_parallel=1)
    stop, ticks = StopRequest(), []

    def tick() -> None:
        ticks.append(None)
        if len(ticks) == 3:
            stop.ask()

    statuses = scheduler.run(stop=stop, on_tick=tick)
    assert backend.cancelled == [("fold_1", False)]
    assert [(f["level"], f["num_running"]) for kind, f in events if kind == "stop"] == [(1, 1)]
    assert {name: status.state for name, status in statuses.items()} == {"fold_1": "preempted"}


def test_jobs_that_still_run_are_taken_over_whatever_is_free(tmp_path):
    # What they use is taken already: asking whether it fits once more would refuse a run that goes on.
    scripts = {f"fold_{i}": FakeJob((100,) * 5) for i in range(1, 4)}
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=220, slack=0.0)
    scheduler.known = Footprint(100)
    machine.neighbour = 30
    statuses = scheduler.run(still_running=["fold_2", "fold_3"])
    assert backend.submitted == ["fold_2", "fold_3", "fold_1"]
    assert backend.most_at_once == 2
    assert {status.state for status in statuses.values()} == {"completed"}
    assert [f["why"] for kind, f in events if kind == "admit"][:2] == ["it still runs and is taken over"] * 2


def test_what_is_used_is_told_before_each_job_and_after_it(tmp_path):
    scheduler, _, machine, events = make(tmp_path, {"a": FakeJob((100, 100))}, limit=1000)
    machine.neighbour = 300
    scheduler.run()
    told = {kind: (f["limit_bytes"], f["pss_bytes"]) for kind, f in events if kind in ("admit", "end")}
    assert told == {"admit": (1000, 0), "end": (1000, 0)}
    assert all(f["used_bytes"] >= 0 for kind, f in events if kind in told)
