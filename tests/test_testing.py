"""The fake backend keeps what the contract asks of a backend, as far as that needs no process."""

import pytest

from memfit.errors import UsageError
from memfit.jobs import ENDED, Job
from memfit.memory import Footprint
from memfit.testing import BackendContract, FakeBackend, FakeJob


def job(name="a", **options):
    return Job(name, command=("true",), **options)


@pytest.fixture
def backend():
    return FakeBackend({"a": FakeJob((10, 30, 20)), "b": FakeJob((5,), state="failed"), "c": FakeJob((7, 7))})


def test_what_the_contract_asks_without_a_process_holds(backend):
    BackendContract().test_a_job_that_was_never_submitted_cannot_be_cancelled(backend)


def test_a_job_never_runs_twice_at_once(backend):
    backend.submit(job())
    with pytest.raises(UsageError, match="a runs"):
        backend.submit(job())
    assert backend.submitted == ["a"]


def test_an_ended_job_can_be_submitted_again_and_starts_anew(backend):
    backend.submit(job("b"))
    backend.step()
    assert backend.poll()["b"].state == "failed"
    backend.submit(job("b"))
    assert (backend.poll()["b"].state, backend.poll()["b"].used_bytes) == ("running", 5)
    assert backend.submitted == ["b", "b"]


def test_only_what_was_submitted_is_told(backend):
    assert backend.poll() == {}
    backend.submit(job("c"))
    assert list(backend.poll()) == ["c"]


def test_what_it_tells_is_a_copy(backend):
    backend.submit(job())
    backend.poll().clear()
    assert list(backend.poll()) == ["a"]


@pytest.mark.parametrize(("now", "state"), [(False, "preempted"), (True, "cancelled")])
def test_a_cancelled_job_ends_and_uses_nothing_more(backend, now, state):
    backend.submit(job())
    backend.cancel("a", now=now)
    assert (backend.poll()["a"].state, backend.used_bytes) == (state, 0)
    backend.step()
    assert backend.poll()["a"].state == state


def test_a_job_that_ended_stays_as_it_ended_when_it_is_cancelled(backend):
    backend.submit(job("b"))
    backend.step()
    backend.cancel("b")
    assert backend.poll()["b"].state == "failed"


def test_its_memory_follows_the_script_and_its_peak_never_falls(backend):
    backend.submit(job())
    seen = []
    while backend.poll()["a"].state not in ENDED:
        seen.append((backend.poll()["a"].used_bytes, backend.poll()["a"].peak_bytes))
        backend.step()
    assert seen == [(10, 10), (30, 30), (20, 30)]
    last = backend.poll()["a"]
    assert (last.state, last.used_bytes, last.footprint) == ("completed", 0, Footprint(30))


def test_phases_are_passed_at_their_step():
    backend = FakeBackend({"a": FakeJob((1, 1, 1), passes_phases_at=2)})
    backend.submit(job(phases=("load", "train")))
    seen = [backend.poll()["a"].num_phases_passed]
    for _ in range(2):
        backend.step()
        seen.append(backend.poll()["a"].num_phases_passed)
    assert seen == [0, 0, 2]


def test_the_most_at_once_and_their_memory_are_remembered(backend):
    backend.submit(job())
    backend.submit(job("c"))
    backend.step()
    backend.step()
    assert (backend.most_at_once, backend.peak_bytes, backend.used_bytes) == (2, 37, 20)
