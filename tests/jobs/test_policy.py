"""The rules of the policy, as tables; and that no mix of simulated jobs comes to a standstill."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.jobs import policy
from memfit.jobs.policy import Aside, Ended, Guess, Held
from memfit.units import MIB

CAPACITY = 6400 * MIB
KNOWN = Guess(1000 * MIB, 1500 * MIB, spread=100 * MIB, peaked=4.0, seconds=20.0)
EARLY = Guess(1000 * MIB, 1500 * MIB, spread=100 * MIB, peaked=1.0, seconds=20.0, is_early=True)


def held(used, reserved=None, guess=None, name="a", **more):
    return Held(name, used * MIB, (used if reserved is None else reserved) * MIB, guess, **more)


@pytest.mark.parametrize(
    ("job", "mib", "mib_without_walls"),
    [
        # Nothing is known: it may double while it grows, at least by the step, and by half once it stands still.
        (held(0), 400, 1200),
        (held(300), 600, 1200),
        (held(10, age=2.0), 42, 42),
        (held(300, age=2.0), 600, 1200),
        (held(300, age=2.0, still=0.99), 600, 1200),
        (held(300, age=2.0, still=1.0), 450, 750),
        (held(5000, age=2.0), 6400, 6400),
        # Similar jobs ended: their size, until it passes that or has reached its peak.
        (held(10, guess=KNOWN), 1000, 1000),
        (held(1000, guess=KNOWN), 1000, 1000),
        (held(1200, guess=KNOWN), 1500, 2100),
        (held(600, guess=KNOWN, age=6.99, still=5.0), 1000, 1000),
        (held(600, guess=KNOWN, age=7.0, still=5.0), 630, 690),
        (held(600, guess=KNOWN, age=7.0, still=0.9), 1000, 1000),
        (held(600, guess=EARLY, age=1.5, still=1.0), 630, 690),
        (held(600, guess=EARLY, age=1.5, still=0.9), 1000, 1000),
        # It waits at its limit: a quarter more, or what similar ones took.
        (held(1200, guess=KNOWN, stalled=0.0), 1500, 1500),
        (held(300, stalled=0.0, age=2.0), 375, 375),
        (held(20, stalled=0.0, age=2.0), 52, 52),
        (held(600, guess=KNOWN, stalled=0.0), 1000, 1000),
        # It ran out of memory before.
        (held(300, age=9.0, still=9.0, at_least=900 * MIB), 900, 900),
        (held(300, guess=KNOWN, at_least=1100 * MIB), 1100, 1100),
    ],
)
def test_what_a_job_is_to_hold(job, mib, mib_without_walls):
    assert round(policy.wanted(job, CAPACITY) / MIB, 3) == mib
    assert round(policy.wanted(job, CAPACITY, has_walls=False) / MIB, 3) == mib_without_walls


def test_a_guess_is_the_mean_with_what_similar_jobs_differ_by():
    one = [Ended(1000, 2.0, 10.0)]
    assert policy.guess_from([]) is None
    assert policy.guess_from(one) == Guess(1300, 1300, 1000, 2.0, 10.0, True)
    assert policy.guess_from(one, slack=0.1).size == 1400  # a tenth more, where nobody knows by how much they differ
    assert policy.guess_from(one, slack=0.1, usual=0.02).size == 1000 + 20 + 6
    assert policy.guess_from([Ended(1000, 4.0, 10.0)]).is_early is False
    two = [Ended(900, 1.0, 8.0), Ended(1100, 3.0, 12.0)]
    assert policy.guess_from(two, usual=0.0) == Guess(1021, 1100, 100, 3.0, 10.0, True)
    assert policy.guess_from(two, usual=0.3).spread == 150  # the more there are, the less counts what is usual
    # What still runs raises the mean and never lowers it: small jobs end first.
    assert policy.guess_from(two, [10], usual=0.0).size == 1000 + round(0.3 * math.sqrt(20000 / 3) / math.sqrt(3))
    assert policy.guess_from(two, [4000], usual=0.0).most == 4000
    # Without walls a job fails at its limit: it gets the most that similar ones took, a slack and their spread.
    assert policy.guess_from(two, usual=0.0, has_walls=False).size == 1100 + 110 + 100
    assert policy.guess_from(two, slack=0.3, usual=0.0, has_walls=False).size == 1100 + 330 + 100


def ended(*peaks, **params):
    return [
        (frozenset({*params.items(), ("seed", f"{params}{at}")}), Ended(peak, 1.0, 9.0))
        for at, peak in enumerate(peaks)
    ]


def test_similar_jobs_differ_within_groups_and_not_between_them():
    assert policy.usual_spread([*ended(100, 100, kind="a"), *ended(900, 900, kind="b")]) == 0.0
    assert policy.usual_spread([*ended(90, 110, kind="a"), *ended(900, 1100, kind="b")]) == pytest.approx(
        math.sqrt(0.02)
    )
    assert policy.usual_spread([*ended(100, kind="a"), *ended(900, kind="b")]) is None
    assert policy.usual_spread([*ended(100, 120, kind="a")]) is None
    assert policy.usual_spread(ended(0, 0, 0)) == 0.0


def test_names_tell_more_of_a_job_than_numbers():
    found = [*ended(100, kind="a", x="1", y="1"), *ended(900, kind="b", x="2", y="1MiB")]
    guess = lambda **params: policy.guess_for(frozenset(params.items()), found, usual=0.0).most  # noqa: E731
    assert (guess(kind="a", x="2", y="1MiB"), guess(x="2", y="1MiB"), guess()) == (100, 900, 900)
    standing = [(frozenset({("kind", "a")}), 400), (frozenset({("kind", "b")}), 5000)]
    assert policy.guess_for(frozenset({("kind", "a")}), found, standing, usual=0.0).most == 400


def test_a_job_that_took_a_quarter_more_than_any_similar_one_is_of_unknown_size_again():
    assert policy.likely(KNOWN, 1875 * MIB) == KNOWN and policy.likely(KNOWN, 1876 * MIB) is None
    assert policy.likely(None, 7) is None


@pytest.mark.parametrize(
    ("need", "jobs", "room", "follows"),
    [
        ((700, 1000), [], 800, 800),
        ((700, 1000), [], 600, 700),  # it lacks a hundred
        (None, [], 6400, 400),
        (None, [], 100, 100),
        ((700, 1000), [held(100, guess=KNOWN)], 1200, 1000),
        ((700, 1000), [held(100, guess=KNOWN)], 900, "room is kept"),
        (None, [held(100, age=3.0)], 300, 400),
    ],
)
def test_what_a_job_holds_from_its_start_on(need, jobs, room, follows):
    need = need and policy.Need(*(size * MIB for size in need))
    found = policy.start(need, need and KNOWN, jobs, room * MIB, CAPACITY)
    assert follows in found if isinstance(follows, str) else found == follows * MIB


def test_a_job_that_gave_way_three_times_runs_alone_and_one_without_walls_gets_all_there_is():
    need, jobs = policy.Need(MIB, MIB), [held(1, guess=EARLY, age=3.0, still=3.0)]
    find = lambda **more: policy.start(need, None, jobs, CAPACITY, CAPACITY, **more)  # noqa: E731
    assert (find(asides=2), find(asides=3)) == (MIB, "it gave way 3 times, so it runs alone next")
    assert policy.start(need, None, [], CAPACITY, CAPACITY, asides=3) == MIB
    assert policy.start(None, None, jobs, 5000 * MIB, CAPACITY, has_walls=False) == 5000 * MIB


def reserved_of(*jobs, free, first=None):
    found = policy.grow(jobs, free * MIB, CAPACITY, first)
    return {name: round(size / MIB) for name, size in found.reserved.items()}, round(found.free / MIB), found.short


def test_what_is_granted_and_not_used_returns_at_once():
    jobs = held(600, 1000, EARLY, "a", age=5.0, still=3.0), held(100, 1000, None, "b", is_leaving=True)
    assert reserved_of(*jobs, free=0) == ({"a": 630, "b": 1000}, 370, "")


def test_while_one_waits_a_job_that_stands_still_for_now_keeps_little_more_than_it_uses():
    calm, waiting = held(400, 600, name="calm", age=3.0, still=2.0), held(400, name="waiting", stalled=0.5)
    assert reserved_of(calm, free=0) == ({"calm": 600}, 0, "")
    assert reserved_of(calm, waiting, free=0) == ({"calm": 420, "waiting": 500}, 80, "")
    sure = held(400, 1000, KNOWN, name="sure", age=3.0, still=2.0)
    assert reserved_of(sure, waiting, free=0)[0]["sure"] == 1000


def test_of_those_that_wait_the_one_that_ends_first_grows_until_it_has_enough_and_the_others_get_the_rest():
    far = held(400, name="far", guess=KNOWN, stalled=1.0, age=5.0)
    near = held(600, name="near", guess=KNOWN, stalled=0.1, age=15.0)
    unknown = held(100, name="unknown", stalled=5.0, age=99.0)
    assert reserved_of(far, near, unknown, free=1100) == ({"far": 1000, "near": 1000, "unknown": 132}, 68, "")
    assert reserved_of(far, near, unknown, free=300) == ({"far": 400, "near": 900, "unknown": 100}, 0, "near")
    assert reserved_of(far, near, unknown, free=300, first="far") == (
        {"far": 700, "near": 600, "unknown": 100},
        0,
        "far",
    )


def test_a_job_that_grows_and_does_not_wait_yet_comes_after_those_that_wait():
    growing, waiting = held(200, name="growing", age=3.0), held(400, name="waiting", stalled=0.5, age=3.0)
    assert reserved_of(growing, waiting, free=100) == ({"growing": 200, "waiting": 500}, 0, "")
    assert reserved_of(growing, waiting, free=90) == ({"growing": 200, "waiting": 490}, 0, "waiting")


def test_one_that_took_more_than_it_has_is_short_when_nothing_is_free():
    over = held(300, 200, name="over", age=3.0)
    assert reserved_of(over, free=0) == ({"over": 300}, 0, "over")
    assert reserved_of(over, free=900) == ({"over": 600}, 600, "")


def test_limits_have_a_part_of_what_is_free_and_one_that_waits_has_all_of_it():
    calm, other = held(100, 200, name="calm"), held(100, 100, name="other")
    find = lambda *jobs, **more: {k: round(v / MIB) for k, v in policy.walls(jobs, 800 * MIB, CAPACITY, **more).items()}  # noqa: E731
    assert find(calm) == {"calm": 6400}
    assert find(calm, other) == {"calm": 300, "other": 200}
    waiting = held(150, 150, name="waiting", stalled=0.2)
    assert find(calm, waiting) == {"calm": 200, "waiting": 950}
    assert find(calm, waiting, other, first="calm") == {"calm": 200, "waiting": 950, "other": 100}
    assert find(calm, other, first="other") == {"calm": 200, "other": 900}


@pytest.mark.parametrize(
    ("guess", "size", "jobs", "room", "why"),
    [
        (KNOWN, 1000, [], 1030, ""),
        (KNOWN, 1000, [held(100, name="b", guess=KNOWN)], 1014, "room is kept"),
        (KNOWN, 1000, [held(100, name="b", guess=KNOWN)], 1015, ""),
        (KNOWN, 1000, [held(600, name="b", guess=EARLY, still=1.0)], 1010, ""),
        (KNOWN, 1000, [held(2900, name=name, guess=KNOWN) for name in "bc"], 5000, "may need what is free"),
        # Of unknown size beside others: four that grow, of which one that holds no more than an interpreter counts twice.
        (None, 400, [held(2, name="b")], 5000, ""),
        (None, 400, [held(16, name="b", age=0.05), held(2, name="c", age=9.0, still=4.9)], 5000, "b is being measured"),
        (None, 400, [held(17, name="b", age=0.05), held(2, name="c", age=9.0, still=4.9)], 5000, ""),
        (None, 400, [*(held(99, name=name, age=3.0) for name in "bc"), held(2, name="d")], 5000, "d is being measured"),
        (None, 400, [held(2, name=name, age=9.0, still=5.0) for name in "bc"], 5000, ""),
        (None, 400, [held(100, name=name, age=3.0) for name in "bcd"], 5000, ""),
        (None, 400, [held(100, name=name, age=3.0) for name in "bcde"], 5000, "is being measured"),
        (None, 400, [held(100, name=name, age=3.0, still=1.0) for name in "bcde"], 5000, ""),
        (None, 400, [held(100, name=name, guess=KNOWN) for name in "bcdef"], 5000, ""),
        (None, 400, [held(2100, name=name, age=3.0, still=2.0) for name in "bc"], 5000, ""),
        (None, 400, [held(2200, name=name, age=3.0, still=2.0) for name in "bc"], 5000, "may need what is free"),
    ],
)
def test_why_a_job_that_fits_must_not_start_yet(guess, size, jobs, room, why):
    found = policy.may_start(guess, size * MIB, jobs, room * MIB, CAPACITY)
    assert why in found and bool(why) == bool(found)


def test_without_walls_jobs_of_unknown_size_start_later():
    for still, may in ((2.9, False), (3.0, True)):  # and only once the one before stands still
        jobs = [held(100, name="b", age=12.0, still=still)]
        assert (policy.may_start(None, MIB, jobs, CAPACITY, CAPACITY, has_walls=False) == "") is may


def test_a_job_of_unknown_size_holds_at_its_start_what_others_like_it_use():
    jobs = [held(1000, name="b"), held(600, name="c"), held(5000, name="d", guess=KNOWN)]
    assert policy.first_size([], CAPACITY) == 400 * MIB
    assert policy.first_size(jobs, CAPACITY) == 1000 * MIB
    assert policy.first_size(jobs, CAPACITY, has_walls=False) == 3000 * MIB
    assert policy.first_size([held(6000)], CAPACITY) == CAPACITY


@pytest.mark.parametrize(
    ("jobs", "busy"),
    [
        ([held(1, cores=1.0)] * 3, None),  # fewer than cores
        ([held(1, cores=1.0, threads=2)] * 2, None),
        ([held(1, cores=1.6, threads=2)] * 2, "3.2"),
        ([held(1, cores=0.79)] * 4, None),
        ([held(1, cores=0.8)] * 4, "3.2"),
        ([held(1, cores=0.1)] * 30, None),
        ([held(1)] * 30, None),  # nobody knows yet
        ([held(1, guess=Guess(1, 1, cores=1.0))] * 4, "4.0"),
        ([held(1, cores=0.1, guess=Guess(1, 1, cores=1.0))] * 4, None),  # measured
    ],
)
def test_no_more_jobs_start_once_those_that_run_keep_the_cores_busy(jobs, busy):
    assert policy.why_no_core(jobs, 4) == (f"{len(jobs)} jobs keep {busy} of 4 cores busy" if busy else "")


WAITS = held(100, name="waits", stalled=1.0, at_risk=50.0)
WORKS = held(100, name="works", at_risk=20.0)


@pytest.mark.parametrize(
    ("jobs", "first", "aside"),
    [
        ([WORKS], None, None),
        ([held(100, name="x", stalled=0.5)], None, Aside("x", "x")),
        ([held(100, name="x", stalled=0.4)], None, None),
        # While others work, a wait is cheaper than a restart until it has lasted as long as what that would lose.
        ([WAITS, WORKS], None, None),
        ([held(100, name="waits", stalled=19.9), WORKS], None, None),
        ([held(100, name="waits", stalled=20.0), WORKS], None, Aside("works", "waits")),
        ([held(100, name="waits", stalled=9.9), held(1, name="new")], None, None),
        ([held(100, name="waits", stalled=10.0), held(1, name="new")], None, Aside("new", "waits")),
        # All wait: the one that loses least gives way to the oldest, unless it gave way before.
        ([held(1, name="old", stalled=0.5, age=9.0, at_risk=9.0), held(1, name="new", stalled=0.5, age=1.0)], None,
         Aside("new", "old")),
        ([held(1, name="old", stalled=0.4, age=9.0), held(1, name="new", stalled=0.4, age=1.0)], None, None),
        ([held(1, name="a", stalled=1.0, age=9.0), held(1, name="b", stalled=1.0, at_risk=1.0, asides=1),
          held(1, name="c", stalled=1.0, at_risk=5.0)], None, Aside("c", "a")),
        # One that is leaving gives its memory back first; the one that goes first does go on.
        ([held(1, name="a", stalled=9.0), held(1, name="b", stalled=9.0, is_leaving=True)], None, None),
        ([held(1, name="a", stalled=99.0), WORKS], "works", None),
        ([held(1, name="a", stalled=99.0), WORKS], "gone", Aside("works", "a")),
        ([held(1, name="a", stalled=1.0, age=5.0), held(1, name="b", stalled=1.0)], "b", Aside("a", "b")),
    ],
)  # fmt: skip
def test_which_job_gives_way(jobs, first, aside):
    assert policy.relieve(jobs, first) == aside


SIZES = st.integers(0, 400)
JOBS = st.lists(
    st.tuples(SIZES, SIZES, st.sampled_from([None, KNOWN, EARLY]), st.booleans(), st.floats(0, 30), st.floats(0, 30)),
    min_size=1,
    max_size=8,
).map(
    lambda rows: [
        held(min(used, reserved) if guess else used, reserved, guess, f"j{number}", stalled=still if stalls else None,
             age=max(age, still), still=still)
        for number, (used, reserved, guess, stalls, age, still) in enumerate(rows)
    ]
)  # fmt: skip


@given(JOBS, st.integers(0, 2000), st.booleans())
def test_nothing_is_granted_twice(jobs, free, has_walls):
    capacity = free * MIB + sum(max(job.used, job.reserved) for job in jobs)
    # What a job took above its reservation is not free any more.
    found = policy.grow(jobs, free * MIB, capacity, has_walls=has_walls)
    assert sum(found.reserved.values()) + found.free <= capacity
    assert all(found.reserved[job.id] >= min(job.used, job.reserved) for job in jobs)
    grown = [Held(**{**vars(job), "reserved": found.reserved[job.id]}) for job in jobs]
    assert sum(policy.walls(grown, found.free, capacity).values()) <= capacity + len(jobs)
    least = policy.grow(jobs, free * MIB, capacity, has_walls=has_walls, least=16 * MIB).reserved
    assert all(size >= min(16 * MIB, job.reserved) for job in jobs if (size := least[job.id]))
    assert min(policy.walls(jobs, 0, 0, least=16 * MIB).values()) >= 16 * MIB


@given(st.lists(st.tuples(SIZES, SIZES), max_size=6), st.integers(0, 1500))
def test_what_is_safe_can_be_played_out(pairs, capacity):
    pairs = [(min(pair), max(pair)) for pair in pairs]
    left, free = list(pairs), capacity - sum(used for used, _ in pairs)
    while ends := [pair for pair in left if pair[1] - pair[0] <= free]:
        left.remove(ends[0])
        free += ends[0][0]
    assert policy.is_safe(pairs, capacity) == (not left)


def simulator():
    """The benchmark, as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "policy.py"
    spec = importlib.util.spec_from_file_location("benchmark_policy", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIMULATOR = simulator()
SIM_JOBS = st.builds(
    SIMULATOR.SimJob,
    mib=st.floats(1, 1700),
    seconds=st.floats(0.2, 12),
    ramp=st.floats(0.02, 1.0),
    step=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    params=st.fixed_dictionaries({"kind": st.sampled_from("abc"), "size": st.sampled_from(["1", "2"])}),
)


@pytest.mark.slow
@pytest.mark.parametrize("has_walls", [True, False], ids=["walls", "no walls"])
@given(jobs=st.lists(SIM_JOBS, min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_no_mix_comes_to_a_standstill_and_none_takes_more_than_the_limit(has_walls, jobs):
    found = SIMULATOR.simulate(jobs, has_walls=has_walls)
    assert found.peak <= 1.0 or not has_walls  # without walls a fast one is measured late
    assert found.is_complete or not has_walls  # nor is it retried for ever


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["four kinds", "ten jobs", "step at validation"])
def test_a_mix_stays_within_its_bounds(mix):
    found = SIMULATOR.run_one(mix, 3, True)
    assert found.is_complete and found.peak <= 1.0
    assert found.ratio <= 1.6 and found.restarts <= 0.1


def test_two_large_jobs_of_unknown_size_start_side_by_side_where_both_could_double():
    starts, jobs = [], [SIMULATOR.SimJob(440, 20.0, ramp=0.4) for _ in range(2)]
    seen = lambda kind, **fields: starts.append(fields["job"]) if kind == "admit" else None  # noqa: E731
    at = {}
    SIMULATOR.simulate(jobs, limit_bytes=20480 * MIB, say=seen, on_tick=lambda backend, _: at.setdefault(len(starts), backend.now))  # fmt: skip
    assert at[2] < 5.0


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "least", "most"), [(1.0, 4, 8), (0.5, 7, 11), (0.0, 14, 99)])
def test_jobs_that_compute_run_as_many_at_once_as_cores_and_others_by_memory_alone(cores, least, most):
    waits, running = [], []
    SIMULATOR.simulate(
        [SIMULATOR.SimJob(90, 6.0, cores=cores) for _ in range(40)],
        say=lambda kind, **fields: waits.append(fields) if kind == "wait" else None,
        on_tick=lambda backend, scheduler: running.append((backend.now, len(scheduler.admission.running))),
    )
    assert least <= max(num for now, num in running if now > 12.0) <= most
    assert ("cores" in {wait["on"] for wait in waits}) == (cores > 0)
    assert all("cores busy (max_parallel: auto)" in wait["reason"] for wait in waits if wait["on"] == "cores")


@pytest.mark.slow
def test_folds_of_unknown_size_that_load_their_data_first_are_not_thrown_out():
    found = SIMULATOR.run_one("folds load their data", 2, True)
    assert (found.num_ended, found.num_early, found.restarts) == (0, 0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mix", SIMULATOR.BESIDE)
@pytest.mark.parametrize("seed", [5, 6])
def test_no_job_that_fits_alone_ends_for_good_nor_is_one_tried_again_without_end(mix, seed):
    found = SIMULATOR.simulate(SIMULATOR.make_jobs(mix, seed)[:16], mix=mix, seed=seed)
    assert found.num_ended == 0 and found.most_starts <= SIMULATOR.MOST_STARTS and found.peak <= 1.0


@pytest.mark.slow
def test_one_young_job_outlives_an_outsider():
    jobs = [SIMULATOR.SimJob(150, 5.0, ramp=0.9)]
    found = [SIMULATOR.simulate(jobs, mix="an outsider", seed=seed, limit_bytes=500 * MIB) for seed in range(6)]
    assert [one.num_ended for one in found] == [0] * 6


@pytest.mark.slow
def test_without_walls_hardly_any_job_fails_for_want_of_memory_where_all_are_alike():
    found = SIMULATOR.run_one("all alike", 3, False)
    assert found.is_complete and found.restarts <= 0.02
