"""The scheduler against a fake backend: no process, no clock."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.contract import FakeBackend, FakeJob, ListSource
from memfit.errors import DoesNotFitError
from memfit.jobs import Job, JobStatus, LocalAdmission, Policy, Scheduler, StopRequest, Submission, Verdict
from memfit.jobs._reservation import Reservation
from memfit.memory import HOST, Budget, Device, Footprint, Others

GIB, MIB = 1 << 30, 1 << 20


class FakeMachine:
    """A budget of which the fake jobs, and a neighbour, use a part."""

    def __init__(self, tmp_path: Path, backend: FakeBackend, limit: int, reserve: int = 0) -> None:
        (tmp_path / "proc").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\n")
        self._budget = Budget.read(root=tmp_path, env={}, reserve_bytes=reserve)
        self._backend, self.limit, self.neighbour, self.num_cpus = backend, limit, 0, 64
        self.in_use_seen = 0

    def read(self, in_use_bytes: int) -> Budget:
        self.in_use_seen = max(self.in_use_seen, in_use_bytes)
        free = self.limit - self._backend.used_bytes - self.neighbour
        binding = replace(self._budget.binding, limit_bytes=self.limit, headroom_bytes=free)
        return replace(self._budget, limits=(binding,), num_cpus=self.num_cpus)


def others_of(num: int, used: int, unused: int) -> Others:
    return Others(num, Counter({HOST: used}), Counter({HOST: unused}))


def like(params):
    """A job that shares these parameters."""
    return Job("known", command=("true",), params=params)


def make(tmp_path, scripts, limit, **options):
    backend = FakeBackend(scripts)
    machine = FakeMachine(tmp_path, backend, limit, options.pop("reserve", 0))
    events = []
    phases = options.pop("phases", ())
    declared, params = options.pop("declared", None), options.pop("params", {})
    claims = options.pop("claims", None)
    mapped = options.pop("mapped", 0)
    stages, num_gpus, gpu = options.pop("stages", {}), options.pop("num_gpus", 0), options.pop("gpu", None)
    jobs = [
        Job(
            name,
            command=("true",),
            phases=phases,
            footprint=declared,
            params=params.get(name, {}),
            stage=stages.get(name, ""),
            num_devices=num_gpus,
            device_bytes=gpu and gpu * GIB,
            mapped_bytes=mapped,
        )
        for name in scripts
    ]
    source = options.pop("source", None) or ListSource(jobs)
    say = options.pop("say", lambda kind, **fields: events.append((kind, fields)))
    is_shared = options.pop("is_shared", True)
    policy = Policy(**options)
    admission = LocalAdmission(machine.read, policy=policy, claims=claims, now=backend.clock, is_shared=is_shared)
    scheduler = Scheduler(source, backend, admission, say=say)
    return scheduler, backend, machine, events


def test_the_first_job_runs_alone_until_it_has_passed_its_phases(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 10, settles_at=4) for i in range(1, 6)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=10_000, phases=("load", "train"))
    seen = []
    scheduler.run(on_tick=lambda: seen.append(len(backend.submitted)))
    assert seen[:4] == [1, 1, 1, 1]
    assert seen[5] == 5
    assert backend.most_at_once == 5
    waits = [fields for kind, fields in events if kind == "wait"]
    assert "fold_1 is being measured" in waits[0]["reason"]


def test_as_many_run_at_once_as_the_measured_footprint_allows(tmp_path):
    scripts = {f"fold_{i}": FakeJob((50, 100, 100, 100), settles_at=1) for i in range(1, 6)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=340, slack=0.1, phases=("load",))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.most_at_once == 3
    assert backend.peak_bytes <= 340


def test_what_running_jobs_have_reserved_and_not_used_yet_is_not_lent(tmp_path):
    # Each is small for long and large at the end: admission by free memory alone would start all five.
    scripts = {f"fold_{i}": FakeJob((1,) * 8 + (100,) * 2, settles_at=9) for i in range(1, 6)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=230, slack=0.0, phases=("load",))
    scheduler.run()
    assert backend.most_at_once == 2
    assert backend.peak_bytes <= 230


def test_a_job_is_admitted_as_soon_as_there_is_room_and_not_when_a_batch_ends(tmp_path):
    scripts = {"a": FakeJob((100,) * 30), "b": FakeJob((100,) * 3), "c": FakeJob((100,) * 3), "d": FakeJob((100,) * 3)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=220, slack=0.0)
    backend.scripts["a"] = FakeJob((100,) * 30)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    ends = [fields["job"] for kind, fields in events if kind == "end"]
    assert ends == ["b", "c", "d", "a"]


def test_the_reserve_is_never_lent(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 5) for i in range(1, 4)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=320, reserve=100, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert backend.most_at_once == 2


@pytest.mark.parametrize(("mapped", "most_at_once"), [(0, 4), (100, 3), (10_000, 3)])
def test_jobs_side_by_side_leave_room_for_the_page_cache_of_what_they_map(tmp_path, mapped, most_at_once):
    scripts = {f"fold_{i}": FakeJob((100,) * 5) for i in range(1, 6)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=400, slack=0.0, mapped=mapped)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.most_at_once == most_at_once  # of a panel that is larger than the limit, a quarter of the limit


def test_what_a_job_maps_never_keeps_it_from_running_alone(tmp_path):
    scheduler, backend, _, _ = make(
        tmp_path, {"a": FakeJob((390,) * 3), "b": FakeJob((390,) * 3)}, limit=400, mapped=300
    )
    scheduler.admission.forecast.learn(like({}), Footprint(390))
    assert {status.state for status in scheduler.run().values()} == {"completed"}
    assert backend.most_at_once == 1


def test_a_users_cap_is_told_what_the_running_jobs_use(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 6) for i in range(1, 4)}
    scheduler, _, machine, _ = make(tmp_path, scripts, limit=250, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert machine.in_use_seen == 200


def test_a_neighbour_that_takes_memory_holds_jobs_back(tmp_path):
    scripts = {f"fold_{i}": FakeJob((100,) * 6) for i in range(1, 5)}
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=500, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    machine.neighbour = 250
    scheduler.run()
    assert backend.most_at_once == 2
    assert any("available = " in fields["arithmetic"] for kind, fields in events if kind == "wait")
    assert "memory" in {fields["on"] for kind, fields in events if kind == "wait"}


def test_a_job_that_grows_past_its_likes_raises_the_reservation_of_those_to_come(tmp_path):
    scripts = {"a": FakeJob((100,) * 9), "b": FakeJob((100, 100, 300, 300)), "c": FakeJob((100,) * 3)}
    scheduler, _, _, events = make(tmp_path, scripts, limit=450, slack=0.0, max_parallel=2)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert [f["reservation_bytes"] for kind, f in events if kind == "footprint"] == [300]
    assert [f["reservation_bytes"] for kind, f in events if kind == "admit"] == [100, 100, 300]


@pytest.mark.parametrize(("declared", "is_refused"), [(970, True), (951, True), (950, False)])
def test_a_declared_size_that_leaves_less_than_a_twentieth_is_refused_as_tight(tmp_path, declared, is_refused):
    options = {"limit": 1000 * MIB, "declared": Footprint.declared(declared * MIB)}
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob()}, refuse_tight=True, **options)
    if is_refused:
        with pytest.raises(
            DoesNotFitError, match=rf"a is tight, as declared: {declared}\.0 MiB of 1000\.0 MiB"
        ) as caught:
            scheduler.run()
        assert caught.value.remedy.endswith("accept it: --accept-tight") and backend.submitted == []
    else:
        assert scheduler.run()["a"].state == "completed"
    scheduler, backend, _, _ = make(tmp_path / "accepted", {"a": FakeJob()}, **options)
    assert scheduler.run()["a"].state == "completed"


def test_a_job_of_which_the_like_was_measured_may_use_the_last_per_cent(tmp_path):
    options = {"limit": 1000 * MIB, "declared": Footprint.declared(970 * MIB), "refuse_tight": True}
    scheduler, _, _, _ = make(tmp_path, {"a": FakeJob()}, **options)
    scheduler.admission.forecast.learn(like({}), Footprint(970 * MIB))
    assert scheduler.run()["a"].state == "completed"


def test_a_declared_size_that_fits_is_not_tight_beside_other_jobs(tmp_path):
    scripts = {name: FakeJob((90 * MIB,) * 5) for name in "ab"}
    scheduler, backend, _, _ = make(
        tmp_path, scripts, limit=200 * MIB, declared=Footprint.declared(98 * MIB), refuse_tight=True
    )
    scheduler.run()
    assert backend.most_at_once == 2


def test_a_declared_size_that_cannot_fit_is_refused_with_the_arithmetic(tmp_path):
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob()}, limit=2 * GIB, declared=Footprint.declared("3GiB"))
    with pytest.raises(DoesNotFitError, match=r"a needs 3\.00 GiB .* 2\.00 GiB available = 2\.00 GiB free"):
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
    assert any(fields["on"] == "max_parallel" for kind, fields in events if kind == "wait")


def test_one_at_a_time_keeps_the_order(tmp_path):
    scripts = {f"fold_{i}": FakeJob((1,) * 2) for i in (2, 3, 4, 5)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=10_000, max_parallel=1)
    scheduler.run()
    assert backend.submitted == ["fold_2", "fold_3", "fold_4", "fold_5"]
    assert backend.most_at_once == 1


def test_stop_on_failure_starts_no_more_and_asks_the_others_to_stop(tmp_path):
    scripts = {"a": FakeJob((1,) * 3, state="failed"), "b": FakeJob((1,) * 50), "c": FakeJob()}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=100, on_failure="stop", max_parallel=2)
    scheduler.admission.forecast.learn(like({}), Footprint(1))
    statuses = scheduler.run()
    assert statuses["a"].state == "failed"
    assert statuses["b"].state == "preempted"
    assert "c" not in backend.submitted


def test_a_bug_in_the_first_job_to_end_starts_no_more_and_lets_those_that_run_end(tmp_path):
    scripts = {"a": FakeJob((1,) * 3, state="failed"), "b": FakeJob((1,) * 6), "c": FakeJob()}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=100, on_failure="first", max_parallel=2)
    scheduler.admission.forecast.learn(like({}), Footprint(1))
    assert {name: status.state for name, status in scheduler.run().items()} == {"a": "failed", "b": "completed"}
    assert (backend.submitted, backend.cancelled) == (["a", "b"], [])
    assert [fields["reason"] for fields in of_kind(events, "stop")] == [
        "a, the first to end, failed by an error of its own"
    ]


@pytest.mark.parametrize("first", ["completed", "out_of_memory", "timeout", "node_fail", "preempted"])
def test_what_is_no_bug_in_the_first_job_to_end_lets_the_others_start(tmp_path, first):
    scripts = {"a": FakeJob(state=first), "b": FakeJob(state="failed"), "c": FakeJob()}
    scheduler, _, _, _ = make(tmp_path, scripts, limit=1000, on_failure="first", max_parallel=1, retries=0)
    found = {name: status.state for name, status in scheduler.run().items()}
    assert found == {"a": first, "b": "failed", "c": "completed"}


def test_continue_on_failure_runs_the_others_and_reports_all(tmp_path):
    scripts = {"a": FakeJob(state="failed"), "b": FakeJob(state="out_of_memory"), "c": FakeJob()}
    scheduler, _, _, events = make(tmp_path, scripts, limit=1000, retries=0)
    statuses = scheduler.run()
    assert {name: status.state for name, status in statuses.items()} == {
        "a": "failed", "b": "out_of_memory", "c": "completed",
    }  # fmt: skip
    assert [fields["job"] for kind, fields in events if kind == "end"] == ["a", "b", "c"]


def test_when_the_first_job_fails_before_it_was_measured_the_next_one_is_measured(tmp_path):
    scripts = {"a": FakeJob((5, 5), settles_at=99, state="failed"), "b": FakeJob((7,) * 4), "c": FakeJob((7,))}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, phases=("load",))
    alone = []
    scheduler.run(on_tick=lambda: alone.append(tuple(backend.submitted)))
    assert ("a", "b") in alone
    assert scheduler.admission.forecast.predict(Job("d", command=("true",))) == Footprint(7)


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
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    machine.neighbour = 30
    backend.submit([Submission(Job(name, command=("true",))) for name in ("fold_2", "fold_3")])  # by an earlier one
    statuses = scheduler.run(still_running=backend.adopt(scripts))
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
    [start] = [f["text"] for kind, f in events if kind == "admit"]
    assert start == "a started. Measuring its memory (700 B free)"
    [end] = [f["text"] for kind, f in events if kind == "end"]
    assert end.startswith("a completed") and end.endswith(", peak 100 B")


def of_kind(events, kind):
    return [fields for name, fields in events if name == kind]


def test_a_job_that_outgrows_its_reservation_gets_more_from_what_is_free(tmp_path):
    scripts = {"a": FakeJob((100,) * 3), "b": FakeJob((100, 150, 250, 400, 400))}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=1000, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    statuses = scheduler.run()
    assert statuses["b"].state == "completed"
    assert backend.submitted == ["a", "b"]
    grown = [fields["to_bytes"] for fields in of_kind(events, "grow") if fields["job"] == "b"]
    assert grown and grown == sorted(grown) and grown[-1] >= 400


def test_every_grant_stays_within_the_capacity_and_leaves_room_for_a_burst(tmp_path):
    scripts = {name: FakeJob((100,) * 4) for name in "ab"}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    seen = []
    scheduler.run(on_tick=lambda: seen.append(dict(backend.grants)))
    assert all(grant <= 1000 for grants in seen for grant in grants.values())
    # 800 are free beside the two reservations, and each may burst into an eighth of them at once.
    assert seen[2]["a"] == 200
    assert all(sum(grants.values()) <= 1000 for grants in seen[1:])
    assert backend.total_bytes == 1000


def test_while_a_job_wants_more_than_is_free_no_other_is_admitted_and_a_neighbours_end_lets_it_go_on(tmp_path):
    scripts = {"a": FakeJob((100,) * 12), "b": FakeJob((100, 100, 260, 260, 260)), "c": FakeJob((100,) * 3)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=320, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    backend.scripts["c"] = FakeJob((100,) * 2)
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.cancelled == []
    assert backend.submitted.count("b") == 1
    assert backend.peak_bytes <= 320
    assert of_kind(events, "grow")


def test_when_all_that_run_wait_at_their_walls_the_cheapest_steps_aside_and_comes_again_with_more(tmp_path):
    scripts = {"a": FakeJob((100, 150, 200, 300, 300)), "b": FakeJob((100, 150, 200, 300, 300))}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=400, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert len(of_kind(events, "aside")) == 1
    assert backend.peak_bytes <= 400
    again = of_kind(events, "retry")
    assert [fields["reason"] for fields in again] == ["it gave way to other jobs"]
    assert len(backend.submitted) == 3


def test_a_job_that_wants_more_than_the_whole_budget_is_ended_with_the_arithmetic(tmp_path):
    scripts = {"big": FakeJob((100, 2000)), "small": FakeJob((100, 100))}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=1000, slack=0.0)
    statuses = scheduler.run()
    assert statuses["big"].state == "out_of_memory"
    assert "needs more than the" in statuses["big"].cause
    assert statuses["small"].state == "completed"
    assert all("gave way" in fields["reason"] for fields in of_kind(events, "retry"))
    assert backend.peak_bytes <= 1000


def test_out_of_memory_is_tried_again_with_more_and_only_so_often(tmp_path):
    scripts = {"once": FakeJob((100,), ends=("out_of_memory",)), "always": FakeJob((100,), state="out_of_memory")}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=10_000, slack=0.0, retries=2)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    statuses = scheduler.run()
    assert statuses["once"].state == "completed"
    assert statuses["always"].state == "out_of_memory"
    assert backend.submitted.count("once") == 2
    assert backend.submitted.count("always") == 3
    mine = [fields for fields in of_kind(events, "retry") if fields["job"] == "always"]
    assert mine[0]["reservation_bytes"] < mine[1]["reservation_bytes"]
    assert "ran out of memory" in mine[0]["reason"]


def run_one(tmp_path, job, *, limit=10_000, **fields):
    """Run one job whose status also has these fields; its starts, its events."""
    scheduler, backend, _, events = make(tmp_path, {"a": job}, limit=limit, slack=0.0)
    poll = backend.poll
    backend.poll = lambda: {name: replace(status, **fields) for name, status in poll().items()}
    scheduler.run()
    return backend.submitted.count("a"), events


def test_a_retry_gets_no_more_than_there_is_and_a_job_that_had_it_all_is_not_tried_again(tmp_path):
    num_starts, events = run_one(tmp_path, FakeJob((9000,), state="out_of_memory"), evidence={"data_limit_bytes": 8000})
    assert num_starts == 1
    assert "the whole budget is" in of_kind(events, "end")[0]["why_final"]
    scheduler, _, _, events = make(tmp_path / "b", {"a": FakeJob((7000,), ends=("out_of_memory",))}, limit=10_000)
    scheduler.admission.forecast.learn(like({}), Footprint(7000))
    assert scheduler.run()["a"].state == "completed"
    assert [fields["reservation_bytes"] for fields in of_kind(events, "retry")] == [10_000]


def test_an_allocation_refused_at_the_limit_is_a_lack_of_memory_whatever_the_exit_code_says(tmp_path):
    scheduler, backend, _, events = make(tmp_path, {"a": FakeJob((100,), ends=("failed",))}, limit=10_000, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    poll = backend.poll
    backend.poll = lambda: {name: replace(status, wants_more=True) for name, status in poll().items()}
    assert scheduler.run()["a"].state == "completed"
    assert "ran out of memory" in of_kind(events, "retry")[0]["reason"]


@pytest.mark.parametrize("state", ["preempted", "cancelled", "out_of_memory"])
def test_an_end_that_was_asked_for_is_an_end(tmp_path, state):
    assert run_one(tmp_path, FakeJob(state=state), asked=True)[0] == 1


def test_a_job_without_a_gpu_that_ran_out_of_device_memory_is_shown_the_flag(tmp_path):
    _, events = run_one(tmp_path, FakeJob(state="out_of_memory"), evidence={"place": "device"})
    assert "--num-gpus 1" in of_kind(events, "end")[0]["why_final"]


@pytest.mark.parametrize(("state", "num_starts"), [("failed", 1), ("timeout", 1), ("node_fail", 3), ("preempted", 2)])
def test_what_was_not_a_lack_of_memory_is_tried_again_only_when_the_job_was_not_at_fault(tmp_path, state, num_starts):
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob((100,), state=state)}, limit=1000)
    assert scheduler.run()["a"].state == state
    assert backend.submitted.count("a") == num_starts


@pytest.mark.parametrize(("saves", "num_starts"), [(False, 4), (True, 6)])
def test_on_a_cluster_three_preemptions_in_a_row_without_a_checkpoint_end_a_job(tmp_path, saves, num_starts):
    job = FakeJob((100,), ends=("preempted",) * 5)
    scheduler, backend, _, _ = make(tmp_path, {"a": job}, limit=1000, is_shared=False)
    poll, saved = backend.poll, {"started": 1.0, "checkpointed": 2.0} if saves else {}
    backend.poll = lambda: {name: replace(status, **saved) for name, status in poll().items()}
    assert scheduler.run()["a"].state == ("completed" if saves else "preempted")
    assert backend.submitted.count("a") == num_starts


def test_jobs_that_share_more_parameters_speak_for_each_other(tmp_path):
    scripts = {"s1": FakeJob((10,) * 3), "l1": FakeJob((500,) * 3), "s2": FakeJob((10,) * 3), "l2": FakeJob((500,) * 3)}
    params = {name: {"size": name[0], "seed": name[1]} for name in scripts}
    scheduler, _, _, events = make(tmp_path, scripts, limit=1100, slack=0.0, params=params, max_parallel=1)
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    reserved = {fields["job"]: fields["reservation_bytes"] for fields in of_kind(events, "admit")}
    assert reserved["s2"] == 10
    assert reserved["l2"] == 500


def test_a_smaller_job_may_pass_one_that_does_not_fit_yet_but_not_for_ever(tmp_path):
    scripts = {"a": FakeJob((100,) * 20), "large": FakeJob((950,) * 2)} | {f"s{i}": FakeJob((10,)) for i in range(200)}
    params = {name: {"kind": name.rstrip("0123456789")} for name in scripts}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, slack=0.0, params=params, max_parallel=3)
    for kind, size in (("a", 100), ("large", 950), ("s", 10)):
        scheduler.admission.forecast.learn(like({"kind": kind}), Footprint(size))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    place = backend.submitted.index("large")
    assert 1 < place < 150
    assert backend.peak_bytes <= 1000


def make_sized(tmp_path, sizes, **options):
    """Jobs of one step whose sizes are known; the budget is 100."""
    scripts = {name: FakeJob((size,) * 2) for name, size in sizes.items()}
    params = {name: {"n": name} for name in sizes}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=100, slack=0.0, params=params, **options)
    for name, size in sizes.items():
        scheduler.admission.forecast.learn(like({"n": name}), Footprint(size))
    scheduler.run()
    return backend.submitted, events


@pytest.mark.parametrize(
    ("largest_first", "order"),
    [(False, ["s1", "s2", "s3", "large", "middle"]), (True, ["large", "s1", "middle", "s2", "s3"])],
)
def test_the_largest_that_fits_starts_first_only_where_the_order_is_free(tmp_path, largest_first, order):
    sizes = {"s1": 25, "s2": 25, "s3": 25, "large": 75, "middle": 50}
    submitted, events = make_sized(tmp_path, sizes, largest_first=largest_first)
    assert submitted == order
    first = of_kind(events, "wait")[0]
    assert (first["job"], first["on"]) == ("s2" if largest_first else "large", "memory")


def test_a_small_job_that_two_larger_ones_passed_starts_as_soon_as_it_fits(tmp_path):
    sizes = {"small": 20} | {f"large{i}": 90 for i in range(5)}
    submitted, _ = make_sized(tmp_path, sizes, largest_first=True)
    assert submitted == ["large0", "large1", "small", "large2", "large3", "large4"]


def test_a_job_of_unknown_size_counts_as_the_largest(tmp_path):
    scripts, params = {"a": FakeJob((10,)), "b": FakeJob((10,))}, {name: {"kind": name} for name in "ab"}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=100, params=params, stages={"b": "b"}, largest_first=True)
    scheduler.admission.forecast.learn(like({"kind": "a"}), Footprint(10))
    scheduler.run()
    assert backend.submitted == ["b", "a"]


def test_of_jobs_on_gpus_the_one_that_needs_more_there_is_the_larger(tmp_path):
    scheduler, _, _, _ = make(tmp_path, {"a": FakeJob()}, limit=100)
    known = Footprint(9)
    one = Job("one", command=("true",), footprint=known, num_devices=1, device_bytes=2 * GIB)
    two = replace(one, num_devices=2, device_bytes=GIB)
    jobs = [replace(one, num_devices=0, device_bytes=None), one, replace(one, device_bytes=3 * GIB), two]
    sizes = [scheduler.admission.size(Reservation(job, JobStatus(job.id, "pending"))) for job in jobs]
    assert sizes == sorted(sizes)


def test_a_neighbour_may_grow_into_the_reserve_without_holding_jobs_back(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 8) for i in range(6)}
    scheduler, backend, machine, _ = make(tmp_path, scripts, limit=700, slack=0.0, reserve=400)
    scheduler.admission.forecast.learn(like({}), Footprint(100))

    def grow() -> None:
        machine.neighbour = min(300, machine.neighbour + 100)

    scheduler.run(on_tick=grow)
    assert backend.most_at_once == 3
    assert backend.peak_bytes <= 300


def test_when_a_neighbour_takes_the_whole_reserve_the_cheapest_gives_way_before_the_kernel_ends_one(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 12, checkpoint_bytes=7) for i in range(3)}
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=400, slack=0.0, reserve=80)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    granted, give = [], backend.grant

    def grow() -> None:
        machine.neighbour = 100 if 0.5 < backend.now < 1.0 else 0

    def note(job_id, grant) -> None:
        if job_id in backend.grants:
            granted.append((job_id, grant - backend.grants[job_id]))
        give(job_id, grant)

    backend.grant = note

    statuses = scheduler.run(on_tick=grow)
    assert {status.state for status in statuses.values()} == {"completed"}
    aside = of_kind(events, "aside")
    assert len(aside) == 1 and "is left of" in aside[0]["reason"]
    assert (aside[0]["job"], 7 + 10) in granted  # the room to write its checkpoint, and an eighth of the reserve
    assert len(backend.submitted) == 4


def test_the_room_for_the_largest_checkpoint_is_never_lent(tmp_path):
    scripts = {"a": FakeJob((100, 150, 200, 300, 300), checkpoint_bytes=50), "b": FakeJob((100, 150, 200, 300, 300))}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=450, slack=0.0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.peak_bytes <= 450
    assert "50 B reserve" in of_kind(events, "admit")[-1]["why"]


class FakeClaims:
    def __init__(self, unused: int, num: int = 1) -> None:
        self.now, self.written, self.is_deciding = others_of(num, 0, unused), [], False
        self.all_unused: list[Counter] = []

    def others(self):
        return self.now

    @contextmanager
    def deciding(self):
        assert not self.is_deciding  # the host's lock is not to be taken twice
        self.is_deciding = True
        yield self.now
        self.is_deciding = False

    def write(self, *, used, unused) -> None:
        self.written.append((used[HOST], unused[HOST]))
        self.all_unused.append(unused)


def test_what_other_supervisors_have_lent_is_not_lent_again_and_they_are_told(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 4) for i in range(4)}
    claims = FakeClaims(unused=750)
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, slack=0.0, claims=claims)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert backend.most_at_once == 2
    assert max(used for used, _ in claims.written) == 200
    assert max(unused for _, unused in claims.written) == 200
    assert claims.written[-1] == (0, 0)


def test_what_other_runs_take_of_what_they_lent_leaves_the_reserve_whole(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 8) for i in range(8)}
    claims = FakeClaims(unused=400)
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=1000, slack=0.0, reserve=200, claims=claims)
    scheduler.admission.forecast.learn(like({}), Footprint(100))

    def others_grow() -> None:
        if backend.now >= 0.3:
            machine.neighbour, claims.now = 400, others_of(1, 400, 0)

    scheduler.run(on_tick=others_grow)
    assert backend.most_at_once == 4
    assert "200 B reserve" in of_kind(events, "admit")[-1]["why"]


def test_reservations_are_made_and_grow_only_while_no_other_run_decides_and_are_told_within(tmp_path):
    claims = FakeClaims(unused=0)
    scripts = {f"j{i}": FakeJob((50, 100, 200, 200, 200)) for i in range(2)}
    seen = []
    say = lambda kind, **fields: seen.append((kind, claims.is_deciding))  # noqa: E731
    scheduler, _, _, _ = make(tmp_path, scripts, limit=450, slack=0.0, claims=claims, say=say)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert {("admit", True), ("grow", True)} <= set(seen)
    assert not {("admit", False), ("grow", False)} & set(seen)
    assert max(used for used, _ in claims.written) == 400


def test_the_wall_above_all_jobs_covers_what_was_lent_before_the_job_starts_beside_another_run(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 8) for i in range(4)}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=420, slack=0.0, claims=FakeClaims(unused=0))
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    caps, submit = [], backend.submit
    backend.cap = caps.append

    def note(batch):
        assert caps[-1] >= sum(slot.reserved[HOST] for slot in scheduler.admission.running.values())
        submit(batch)

    backend.submit = note
    scheduler.run()
    assert backend.most_at_once == 4


def test_the_wall_above_all_jobs_stays_above_what_was_lent_when_other_runs_take_too_much(tmp_path):
    claims = FakeClaims(unused=0)
    scripts = {f"j{i}": FakeJob((20,) * 8) for i in range(2)}
    scheduler, backend, machine, _ = make(tmp_path, scripts, limit=500, slack=0.0, claims=claims)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    caps = []
    backend.cap = caps.append

    def others_take_too_much() -> None:
        if len(backend.submitted) == 2:
            machine.neighbour, claims.now = 400, others_of(1, 400, 0)

    scheduler.run(on_tick=others_take_too_much)
    assert min(caps[3:-1]) >= 200


def test_what_other_runs_may_have_taken_of_what_they_reserved_is_no_growth_of_outsiders(tmp_path):
    claims = FakeClaims(unused=300)
    scheduler, _, machine, _ = make(tmp_path, {"a": FakeJob()}, limit=1000, claims=claims)
    budget = scheduler.admission.budget
    budget.read(Counter())
    machine.neighbour = 300  # the kernel says it before the other run does
    budget.read(Counter())
    assert budget.outsiders_bytes == 0
    machine.neighbour, claims.now = 500, others_of(1, 300, 0)
    budget.read(Counter())
    assert budget.outsiders_bytes == 200


def test_what_other_runs_took_since_the_last_reading_is_not_free(tmp_path):
    scheduler, _, _, _ = make(tmp_path, {"a": FakeJob()}, limit=1000, claims=FakeClaims(unused=300))
    admission = scheduler.admission
    assert admission.rooms()[HOST].bytes == 700
    admission.budget.others = others_of(1, 200, 100)  # as told at a decision, before the budget is read again
    assert admission.rooms()[HOST].bytes == 700


def use_gpus(scheduler, backend, gpus, name="GPU"):
    """Have GPUs of so many GiB, each with so many taken by strangers; jobs take theirs as their scripts say."""
    read = scheduler.admission.budget.read_budget

    def look(in_use):
        used = sum((Counter(one.device_used_bytes) for one in backend.poll().values()), Counter())
        devices = [
            Device(
                n, f"{name}-{n}", "stand-in", total * GIB, (total - taken) * GIB - used[f"{name}-{n}"], taken * GIB, ()
            )
            for n, (total, taken) in enumerate(gpus)
        ]
        return replace(read(in_use), devices=tuple(devices))

    scheduler.admission.budget.read_budget = look


def make_gpu(tmp_path, scripts, gpus, *, num=1, declared=None, **options):
    scheduler, backend, _, events = make(tmp_path, scripts, 1000, slack=0.0, num_gpus=num, gpu=declared, **options)
    use_gpus(scheduler, backend, gpus)
    scheduler.admission.forecast.learn(like({}), Footprint(1))
    return scheduler, backend, events


def test_jobs_share_gpus_while_what_they_declare_fits_beside_what_strangers_take(tmp_path):
    scripts = {f"j{i}": FakeJob((1,) * 30) for i in range(6)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 55), (80, 69)], declared=10)
    scheduler.run()
    given = [[*fields["devices"]] for fields in of_kind(events, "admit")][:3]
    assert given == [["GPU-0"], ["GPU-0"], ["GPU-1"]]
    assert backend.most_at_once == 3
    assert backend.jobs["j0"].env["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def test_two_jobs_with_two_gpus_each_run_on_four_and_a_third_waits(tmp_path):
    scripts = {f"j{i}": FakeJob((1,) * 9, device_bytes=(50 * GIB,) * 9) for i in range(3)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)] * 4, num=2, declared=50)
    statuses = scheduler.run()
    assert [[*fields["devices"]] for fields in of_kind(events, "admit")][:2] == [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]]
    assert backend.most_at_once == 2
    assert of_kind(events, "wait")[0]["on"] == "device"
    assert {status.state for status in statuses.values()} == {"completed"}


def test_what_a_job_was_measured_to_take_of_its_gpu_counts_for_its_like(tmp_path):
    scripts = {f"j{i}": FakeJob((1,) * 9, device_bytes=(30 * GIB,) * 9, settles_at=4) for i in range(4)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)])
    scheduler.run()
    first, *others = of_kind(events, "admit")
    assert first["devices"] == {"GPU-0": 80 * GIB - 256 * MIB}  # of unknown size: it has the GPU to itself
    assert {size for one in others for size in one["devices"].values()} == {30 * GIB}
    assert backend.most_at_once == 2


def test_a_job_that_outgrows_its_like_on_the_host_says_what_it_takes_of_its_gpu_once_that_is_settled(tmp_path):
    scripts = {f"j{i}": FakeJob((9,) * 40, device_bytes=(30 * GIB,) * 40, settles_at=9) for i in range(2)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)])
    scheduler.run()
    assert backend.most_at_once == 2
    assert of_kind(events, "admit")[1]["devices"] == {"GPU-0": 30 * GIB}


def test_a_job_of_unknown_size_takes_a_gpu_of_its_own_beside_others(tmp_path):
    scripts = {f"j{i}": FakeJob((1,) * 9, device_bytes=(GIB,) * 9, settles_at=99) for i in range(3)}
    scheduler, backend, _ = make_gpu(tmp_path, scripts, [(80, 0), (80, 0)])
    scheduler.run()
    assert backend.most_at_once == 2
    assert [backend.jobs[name].env["CUDA_VISIBLE_DEVICES"] for name in ("j0", "j1")] == ["GPU-0", "GPU-1"]


def test_a_reservation_on_a_gpu_grows_with_its_job_and_holds_others_back(tmp_path):
    scripts = {
        "a": FakeJob((1,) * 40, device_bytes=(10 * GIB, 40 * GIB, *[70 * GIB] * 38), settles_at=99),
        "b": FakeJob((1,) * 3),
    }
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)], declared=20, params={"a": {}, "b": {}})
    policy = scheduler.admission.policy
    scheduler.admission.policy = replace(policy, max_parallel=1)

    def open_up():
        if backend.now > 1.0:
            scheduler.admission.policy = policy

    scheduler.run(on_tick=open_up)
    grown = of_kind(events, "grow_device")
    assert grown[0]["from_bytes"] == 20 * GIB and grown[-1]["to_bytes"] >= 70 * GIB
    assert "GPU 0" in grown[0]["why"]
    assert backend.most_at_once == 1


@pytest.mark.parametrize(
    ("gpus", "num", "declared", "words"),
    [
        ([], 1, 1, "it needs 1 GPU and 0 are here"),
        ([(80, 0)] * 2, 3, None, "it needs 3 GPUs and 2 are here"),
        (
            [(80, 30), (80, 0)],
            2,
            60,
            r"60\.00 GiB on 2 GPUs \(as declared\); 49\.75 GiB available on GPU 0 \(GPU-0\) = 50\.00 GiB free",
        ),
    ],
)
def test_a_job_that_no_gpus_here_can_hold_is_refused_with_the_arithmetic(tmp_path, gpus, num, declared, words):
    scheduler, backend, _ = make_gpu(tmp_path, {"a": FakeJob()}, gpus, num=num, declared=declared)
    with pytest.raises(DoesNotFitError, match=words):
        scheduler.run()
    assert backend.submitted == []


def test_a_declared_size_that_leaves_hardly_anything_of_its_gpu_is_refused_as_tight(tmp_path):
    options = {"declared": Footprint.declared(1), "num_gpus": 1, "gpu": 78, "refuse_tight": True}
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob()}, 1000, **options)
    use_gpus(scheduler, backend, [(80, 0)])
    with pytest.raises(DoesNotFitError, match=r"a is tight on its GPU, as declared: 78\.00 GiB of 79\.75 GiB"):
        scheduler.run()
    assert backend.submitted == []


def test_a_job_that_needs_several_gpus_is_refused_where_only_mig_instances_are(tmp_path):
    scheduler, backend, _ = make_gpu(tmp_path, {"a": FakeJob()}, [], num=2, declared=10)
    use_gpus(scheduler, backend, [(40, 0)] * 4, name="MIG")
    with pytest.raises(DoesNotFitError, match=r"2 GPUs and 0 whole ones .* a process can use only one MIG instance"):
        scheduler.run()
    assert backend.submitted == []


def test_a_job_that_needs_one_gpu_may_have_a_mig_instance(tmp_path):
    scheduler, backend, _ = make_gpu(tmp_path, {"a": FakeJob()}, [], declared=10)
    use_gpus(scheduler, backend, [(40, 0)], name="MIG")
    assert scheduler.run()["a"].state == "completed"
    assert backend.jobs["a"].env["CUDA_VISIBLE_DEVICES"] == "MIG-0"


def test_a_job_waits_for_a_gpu_that_another_run_holds(tmp_path):
    claims = FakeClaims(0)
    claims.now = Others(1, Counter(), Counter({"GPU-0": 50 * GIB}))
    scheduler, backend, events = make_gpu(tmp_path, {"a": FakeJob()}, [(80, 0)], declared=40, claims=claims)

    def others_end():
        if backend.now > 10:
            claims.now = Others()

    assert scheduler.run(on_tick=others_end)["a"].state == "completed"
    assert "another run" in of_kind(events, "wait")[0]["reason"]
    assert claims.all_unused[0] == {}
    assert max(unused["GPU-0"] for unused in claims.all_unused) == 40 * GIB


def test_what_a_job_told_before_it_ended_is_not_taken_for_more_than_its_gpu_has(tmp_path):
    scripts = {"a": FakeJob((1, 1), device_bytes=(10 * GIB,) * 2, settles_at=9, ends=("out_of_memory",) * 2)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 20)], declared=20)
    poll, read = backend.poll, scheduler.admission.budget.read
    backend.poll = lambda: {name: replace(one, evidence={"place": "device"}) for name, one in poll().items()}
    late = Counter({"GPU-0": 5 * GIB})
    scheduler.admission.budget.read = lambda in_use: read(in_use + late if backend.now < 2 else in_use)
    assert scheduler.run()["a"].state == "completed"
    assert of_kind(events, "admit")[-1]["devices"] == {"GPU-0": 60 * GIB - 256 * MIB}


def test_a_job_that_is_taken_over_keeps_what_it_uses_of_its_gpus(tmp_path):
    scripts = {"a": FakeJob((1,) * 9, device_bytes=(30 * GIB,) * 9, settles_at=99), "b": FakeJob((1,) * 3)}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)], declared=60)
    earlier = Job("a", command=("true",), env={"CUDA_VISIBLE_DEVICES": "GPU-0"})
    backend.submit([Submission(earlier)])
    scheduler.run(still_running=["a"])
    assert backend.most_at_once == 1
    assert of_kind(events, "wait")[0]["on"] == "device"


def test_a_job_that_ran_out_of_device_memory_comes_again_with_more_until_it_had_all_of_a_gpu(tmp_path):
    scripts = {"a": FakeJob((1, 1), device_bytes=(10 * GIB,) * 2, settles_at=9, state="out_of_memory")}
    scheduler, backend, events = make_gpu(tmp_path, scripts, [(80, 0)], declared=20)
    poll, told = backend.poll, {"evidence": {"place": "device"}}
    backend.poll = lambda: {name: replace(status, **told) for name, status in poll().items()}
    assert scheduler.run()["a"].state == "out_of_memory"
    assert [next(iter(fields["devices"].values())) // GIB for fields in of_kind(events, "admit")] == [20, 30, 79]
    assert "gives one job 79.75 GiB" in of_kind(events, "end")[0]["why_final"]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 2)), min_size=1, max_size=12
    ),
    st.integers(100, 300),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_jobs_do_the_budget_holds_and_every_job_that_fits_completes(tmp_path_factory, jobs, limit, hinted):
    scripts = {f"j{i}": FakeJob(tuple(sizes)) for i, (sizes, _) in enumerate(jobs)}
    params = {f"j{i}": {"kind": str(kind)} for i, (_, kind) in enumerate(jobs)}
    declared = Footprint.declared(20) if hinted else None
    scheduler, backend, _, _ = make(
        tmp_path_factory.mktemp("machine"), scripts, limit=limit, params=params, declared=declared, slack=0.1
    )
    statuses = scheduler.run()
    assert {status.state for status in statuses.values()} == {"completed"}
    assert backend.now < 2000
    assert backend.peak_bytes <= limit


def test_a_cap_of_the_users_own_is_not_lessened_by_what_other_runs_lent(tmp_path):
    scripts = {f"j{i}": FakeJob((100,) * 4) for i in range(3)}
    scheduler, backend, machine, _ = make(tmp_path, scripts, limit=1000, slack=0.0, claims=FakeClaims(unused=500))

    def read(in_use):
        budget = machine.read(in_use)
        cap = replace(budget.binding, name="cap", scope="job", limit_bytes=300, headroom_bytes=300 - in_use)
        return replace(budget, limits=(cap, *budget.limits))

    scheduler.admission.budget.read_budget = read
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    scheduler.run()
    assert backend.most_at_once == 3


def test_a_job_alone_at_its_wall_goes_on_when_another_run_ends(tmp_path):
    claims = FakeClaims(unused=500)
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob((100, 800, 800))}, limit=1000, claims=claims)

    def other_run_ends() -> None:
        if backend.now > 0.3:
            claims.now = Others()

    assert scheduler.run(on_tick=other_run_ends)["a"].state == "completed"
    assert backend.submitted == ["a"]


def test_what_another_run_has_is_waited_for_and_no_reason_to_give_a_job_up(tmp_path):
    claims = FakeClaims(unused=500)
    scheduler, backend, _, events = make(tmp_path, {"a": FakeJob((100, 800, 800))}, limit=1000, claims=claims)

    def other_run_ends() -> None:
        if backend.now > 9:
            claims.now = Others()

    assert scheduler.run(on_tick=other_run_ends)["a"].state == "completed"
    assert of_kind(events, "aside")[0]["reason"] == "another run on this host has the memory that it needs"
    assert backend.now > 9


def test_a_job_larger_than_its_own_cap_is_ended_and_not_asked_to_wait_for_another_run(tmp_path):
    scripts = {"big": FakeJob((100, 2000)), "small": FakeJob((100, 100))}
    scheduler, _, machine, events = make(tmp_path, scripts, limit=5000, claims=FakeClaims(unused=500))

    def read(in_use):
        budget = machine.read(in_use)
        cap = replace(budget.binding, name="cap", scope="job", limit_bytes=1000, headroom_bytes=1000 - in_use)
        return replace(budget, limits=(cap, *budget.limits))

    scheduler.admission.budget.read_budget = read
    statuses = scheduler.run()
    assert {name: status.state for name, status in statuses.items()} == {"big": "out_of_memory", "small": "completed"}
    assert not any("another run" in fields["reason"] for fields in of_kind(events, "aside"))


def test_another_run_that_holds_next_to_nothing_is_not_waited_for(tmp_path):
    claims = FakeClaims(unused=10)
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob((100, 2000))}, limit=1000, claims=claims)
    assert scheduler.run()["a"].state == "out_of_memory"
    assert backend.submitted == ["a"]


def test_the_last_retry_has_the_whole_budget_to_itself(tmp_path):
    scripts = {"a": FakeJob((100,), ends=("out_of_memory",) * 2), "b": FakeJob((100,) * 9)}
    scheduler, backend, machine, events = make(tmp_path, scripts, limit=10_000, slack=0.0, retries=2)
    scheduler.admission.forecast.learn(like({}), Footprint(100))

    def others_take_a_little() -> None:
        machine.neighbour = 100 if backend.submitted.count("a") == 2 else 0

    statuses = scheduler.run(on_tick=others_take_a_little)
    assert {status.state for status in statuses.values()} == {"completed"}
    assert [fields["reservation_bytes"] for fields in of_kind(events, "admit")][-1] >= 9_900
    assert of_kind(events, "admit")[-1]["num_running"] == 1


def test_a_job_that_is_stopped_while_it_waits_for_another_start_is_recorded_so(tmp_path):
    scripts = {"a": FakeJob((100,), ends=("out_of_memory",)), "b": FakeJob((950,) * 20)}
    params = {"a": {"kind": "a"}, "b": {"kind": "b"}}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=1050, slack=0.0, params=params)
    for kind, size in (("a", 100), ("b", 950)):
        scheduler.admission.forecast.learn(like({"kind": kind}), Footprint(size))
    statuses = scheduler.run(stopped=lambda job: "by hand" if job == "a" and of_kind(events, "retry") else "")
    recorded = backend.poll()["a"]
    assert (recorded.state, recorded.cause, recorded.attempt) == ("cancelled", "by hand", 1)
    assert (statuses["a"].state, statuses["b"].state) == ("cancelled", "completed")


@pytest.mark.parametrize("state", ["node_fail", "out_of_memory"])
def test_a_job_that_stepped_aside_comes_again_however_it_ended(tmp_path, state):
    scripts = {"a": FakeJob((100, 150, 200, 300, 300)), "b": FakeJob((100, 150, 200, 300, 300))}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=400, slack=0.0, retries=0)
    scheduler.admission.forecast.learn(like({}), Footprint(100))
    cancel = backend.cancel
    backend.cancel = lambda job_id, *, now=False, verdict=None: cancel(job_id, verdict=Verdict(state, "meanwhile"))
    assert {status.state for status in scheduler.run().values()} == {"completed"}


def test_a_stop_while_a_job_waits_to_be_started_again_leaves_it_pending(tmp_path):
    scripts = {"a": FakeJob((100,), ends=("out_of_memory",)), "b": FakeJob((950,) * 50)}
    params = {"a": {"kind": "a"}, "b": {"kind": "b"}}
    scheduler, _, _, events = make(tmp_path, scripts, limit=1050, slack=0.0, params=params)
    for kind, size in (("a", 100), ("b", 950)):
        scheduler.admission.forecast.learn(like({"kind": kind}), Footprint(size))
    stop = StopRequest()

    def tick() -> None:
        if of_kind(events, "retry"):
            stop.ask()

    statuses = scheduler.run(stop=stop, on_tick=tick)
    assert {name: status.state for name, status in statuses.items()} == {"a": "pending", "b": "preempted"}


def test_what_others_like_it_took_is_no_reason_to_refuse_a_job(tmp_path):
    scripts = {f"j{i}": FakeJob((20 * i,)) for i in range(1, 5)} | {"j9": FakeJob((60,) * 3)}
    params = {name: {"x": name[1:]} for name in scripts}
    scheduler, _, _, events = make(tmp_path, scripts, limit=100, slack=0.0, params=params, max_parallel=1)
    assert {status.state for status in scheduler.run().values()} == {"completed"}
    assert any("similar jobs took 180 B" in fields["text"] for fields in of_kind(events, "admit"))


def test_numbers_too_large_for_a_line_are_names(tmp_path):
    params = {"a": {"x": "1e200"}, "b": {"x": "1e300"}, "c": {"x": "nan"}, "d": {"x": "2"}, "e": {"x": "inf"}}
    scheduler, _, _, _ = make(tmp_path, {name: FakeJob((5,)) for name in params}, limit=100, params=params)
    assert {status.state for status in scheduler.run().values()} == {"completed"}


def test_a_budget_that_is_smaller_than_its_reserve_is_refused_and_no_other_run_is_waited_for(tmp_path):
    scheduler, backend, _, _ = make(tmp_path, {"a": FakeJob((100,))}, limit=100, reserve=200)
    with pytest.raises(DoesNotFitError):
        scheduler.run()
    assert backend.submitted == []


def test_without_walls_a_job_that_needs_what_another_run_holds_is_tried_again_with_more(tmp_path):
    claims = FakeClaims(unused=800)
    scripts = {"a": FakeJob((995,), ends=("out_of_memory",))}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=2000, reserve=200, claims=claims)
    done = []

    def the_other_run_ends() -> None:
        if of_kind(events, "retry") and not done:
            done.append(claims.__init__(unused=0))

    assert scheduler.run(on_tick=the_other_run_ends)["a"].state == "completed"
    assert backend.submitted == ["a", "a"]


class Chain:
    """A source whose second stage follows from the first; it notes what it hears."""

    def __init__(self, *batches: list[Job]) -> None:
        self.batches, self.open, self.heard, self.asked = list(batches), set(), [], []

    def next(self, num_free):
        self.asked.append(num_free)
        if self.open or not self.batches:
            return []
        batch = self.batches.pop(0)
        self.open = {job.id for job in batch}
        return batch

    def ended(self, status):
        self.open.remove(status.job_id)
        self.heard.append((status.job_id, status.state, status.cause))

    @property
    def is_done(self):
        return not self.batches


def of_stage(stage, *names):
    return [Job(name, command=("true",), stage=stage, unit=number) for number, name in enumerate(names)]


def test_a_source_hands_over_jobs_when_those_that_they_need_have_ended(tmp_path):
    source = Chain(of_stage("fold", "fold_1", "fold_2"), of_stage("judge", "judge"))
    scripts = {"fold_1": FakeJob((5,) * 3), "fold_2": FakeJob((5,), ends=("node_fail",)), "judge": FakeJob((5,))}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, source=source, max_parallel=2)
    assert {status.state for status in scheduler.run().values()} == {"completed"}
    assert backend.submitted.index("judge") == len(backend.submitted) - 1
    assert sorted(source.heard) == [(name, "completed", "") for name in ("fold_1", "fold_2", "judge")]
    assert source.asked[0] == 2 and max(source.asked) == 2


def test_a_source_hears_of_every_job_that_is_given_up_when_the_run_stops(tmp_path):
    source = Chain(of_stage("fold", "a", "b", "c"), of_stage("judge", "judge"))
    scripts = {name: FakeJob((5,) * 9) for name in ("a", "b", "c", "judge")}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, source=source, max_parallel=1)
    stop = StopRequest()
    statuses = scheduler.run(stop=stop, on_tick=stop.ask)
    asked = "the run was asked to stop"
    assert sorted(source.heard) == [("a", "preempted", "as asked"), ("b", "pending", asked), ("c", "pending", asked)]
    assert list(statuses) == ["a"] == backend.submitted


def test_a_bug_in_the_first_job_of_a_stage_leaves_the_jobs_of_other_stages_alone(tmp_path):
    source = Chain(of_stage("fold", "a", "b") + of_stage("other", "c", "d"))
    scripts = {"a": FakeJob(state="failed"), "b": FakeJob(), "c": FakeJob(), "d": FakeJob(state="failed")}
    options = {"limit": 1000, "source": source, "max_parallel": 1, "on_failure": "first"}
    scheduler, backend, _, events = make(tmp_path, scripts, **options)
    scheduler.run()
    assert backend.submitted == ["a", "c", "d"]
    reason = "a, the first to end, failed by an error of its own"
    assert ("b", "pending", reason) in source.heard
    assert [fields["reason"] for fields in of_kind(events, "stop")] == [reason]


def test_jobs_of_a_stage_whose_first_job_failed_are_not_started_when_they_come_later(tmp_path):
    source = Chain(of_stage("trial", "a"), of_stage("trial", "b"))
    scripts = {"a": FakeJob(state="failed"), "b": FakeJob()}
    scheduler, backend, _, _ = make(tmp_path, scripts, limit=1000, source=source, on_failure="first")
    scheduler.run()
    assert backend.submitted == ["a"]
    assert [state for _, state, _ in source.heard] == ["failed", "pending"]


def test_a_stage_of_which_a_job_completed_before_goes_on_after_a_bug(tmp_path):
    scripts = {"a": FakeJob(state="failed"), "b": FakeJob()}
    proven = {"on_failure": "first", "proven_stages": frozenset({""})}
    scheduler, _, _, _ = make(tmp_path, scripts, limit=1000, max_parallel=1, **proven)
    assert {name: status.state for name, status in scheduler.run().items()} == {"a": "failed", "b": "completed"}


def test_jobs_speak_for_those_of_their_own_stage_alone(tmp_path):
    stages = {"p": "prepare", "f1": "fold", "f2": "fold"}
    scripts = {"p": FakeJob((500,) * 2), "f1": FakeJob((10,) * 3), "f2": FakeJob((10,) * 3)}
    scheduler, _, _, events = make(tmp_path, scripts, limit=1100, slack=0.0, stages=stages, max_parallel=1)
    scheduler.run()
    reserved = {fields["job"]: fields["reservation_bytes"] for fields in of_kind(events, "admit")}
    assert reserved == {"p": None, "f1": None, "f2": 10}


def test_a_job_in_the_backends_queue_blocks_nobody(tmp_path):
    scripts = {"a": FakeJob((10,) * 3, num_queued=5), "b": FakeJob((10,) * 3), "c": FakeJob((10,) * 3)}
    scheduler, backend, _, events = make(tmp_path, scripts, limit=1000)
    seen = []
    statuses = scheduler.run(on_tick=lambda: seen.append(backend.poll()["a"].pending_reason))
    assert {status.state for status in statuses.values()} == {"completed"}
    assert seen[0] == "Priority"
    ends = [fields["job"] for fields in of_kind(events, "end")]
    assert ends[0] == "b"  # it was measured although a, which came first, is of unknown size
