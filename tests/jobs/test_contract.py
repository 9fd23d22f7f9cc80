"""The fake backend passes the contract, and follows its scripts."""

import copy

import pytest

from jobs.contract import BackendContract, FakeBackend, FakeJob, ProcessContract, submit
from memfit.jobs import ENDED, Job, Verdict
from memfit.memory import Footprint


def job(name="a", **options):
    return Job(name, command=("true",), **options)


@pytest.fixture
def backend():
    scripts = {"a": FakeJob((10, 30, 20), settles_at=1), "b": FakeJob((5,), state="failed"), "c": FakeJob((7, 7))}
    return FakeBackend(scripts)


class TestFakeBackend(BackendContract):
    @pytest.fixture
    def make_backend(self):
        world = FakeBackend({})
        return lambda: copy.copy(world)  # another object on the same jobs

    @pytest.fixture
    def make_job(self, backend):
        lasting = FakeJob((1,) * 10_000, num_queued=1, phase="train")
        scripts = {
            "completes": FakeJob(),
            "fails": FakeJob(state="failed", exit_code=7),
            "fails once": FakeJob(ends=("failed",)),
            "runs": lasting,
            "saves": lasting,
            "is taken": FakeJob(state="preempted", exit_code=-15),
        }

        def make(name, behaviour):
            backend.scripts[name] = scripts[behaviour]
            return job(name)

        return make


def test_the_contract_has_at_most_20_tests():
    assert len([name for name in dir(ProcessContract) if name.startswith("test_")]) <= 20


def test_what_it_tells_is_a_copy(backend):
    submit(backend, job())
    backend.poll().clear()
    assert list(backend.poll()) == ["a"]


def test_a_job_that_ended_stays_as_it_ended_when_it_is_cancelled(backend):
    submit(backend, job("b"))
    backend.wait(0.1)
    backend.wait(0.1)
    backend.cancel("b")
    assert backend.poll()["b"].state == "failed"


def test_its_memory_follows_the_script_and_its_peak_never_falls_and_speaks_from_its_step_on(backend):
    submit(backend, job())
    seen = []
    while (last := backend.poll()["a"]).state not in ENDED:
        seen.append((last.used_bytes, last.peak_bytes, last.settled))
        backend.wait(0.1)
    assert seen == [(0, 0, False), (10, 10, False), (30, 30, True), (20, 30, True)]
    assert (last.state, last.used_bytes, last.footprint) == ("completed", 0, Footprint(30))


def test_a_job_stands_still_at_its_wall_and_at_the_wall_of_all_until_they_are_raised():
    backend = FakeBackend({"a": FakeJob((10, 30)), "b": FakeJob((10,) * 9)})
    submit(backend, job("b"))
    submit(backend, job("a"), 20)
    for _ in range(4):
        backend.wait(0.1)
    assert (backend.poll()["a"].stalled, backend.poll()["a"].used_bytes) == (True, 20)
    backend.cap(35)
    backend.grant("a", 100)
    backend.wait(0.1)
    assert (backend.poll()["a"].stalled, backend.used_bytes) == (True, 35)
    backend.cap(40)
    backend.wait(0.1)
    assert (backend.poll()["a"].stalled, backend.poll()["a"].used_bytes) == (False, 30)


def test_attempts_end_as_scripted_and_a_verdict_is_kept():
    backend = FakeBackend({"a": FakeJob(ends=("out_of_memory",))})
    for expected in ("out_of_memory", "completed"):
        submit(backend, job())
        backend.wait(0.1)
        backend.wait(0.1)
        assert backend.poll()["a"].state == expected
    submit(backend, job())
    backend.cancel("a", now=True, verdict=Verdict("out_of_memory", "too large"))
    ended = backend.poll()["a"]
    assert (ended.state, ended.cause, ended.asked) == ("out_of_memory", "too large", True)


def test_the_most_at_once_and_their_memory_are_remembered(backend):
    submit(backend, job())
    submit(backend, job("c"))
    for _ in range(3):
        backend.wait(0.1)
    assert (backend.most_at_once, backend.peak_bytes, backend.used_bytes) == (2, 37, 20)
