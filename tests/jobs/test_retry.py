"""Whether a job that ended is restarted, by the cause of its end."""

from collections import Counter

import pytest

from memfit.jobs import JobStatus
from memfit.jobs._retry import Retry, decide

CAPACITY = 10_000


def of(host, device=0):
    return Counter({"host": host, "device": device})


def after(state, **fields):
    return decide(JobStatus("a", state, **fields), had=of(1000, 200), capacity=of(CAPACITY, 1000))


def test_a_lack_of_memory_gets_more_of_it():
    assert after("out_of_memory", peak_bytes=1200).needed["host"] == 1800


def test_more_is_never_more_than_there_is():
    assert after("out_of_memory", peak_bytes=9000).needed["host"] == CAPACITY


def test_the_last_retry_has_the_whole_budget():
    again = decide(JobStatus("a", "out_of_memory", peak_bytes=10), had=of(20), capacity=of(CAPACITY), is_last=True)
    assert again.needed["host"] == CAPACITY


def test_what_had_the_whole_budget_is_not_tried_again():
    assert "the whole budget is" in after("out_of_memory", peak_bytes=CAPACITY)


def test_an_allocation_refused_at_the_wall_is_a_lack_of_memory_whatever_the_exit_code_says():
    assert isinstance(after("failed", peak_bytes=1000, wants_more=True), Retry)


def test_its_own_fault_is_never_tried_again():
    assert after("failed", peak_bytes=1000) == "its own fault is not tried again"
    assert after("timeout") == "its own fault is not tried again"


@pytest.mark.parametrize("state", ["node_fail", "preempted"])
def test_what_came_from_outside_is_tried_again_as_it_was(state):
    again = after(state, peak_bytes=5000)
    assert isinstance(again, Retry) and not again.needed


@pytest.mark.parametrize("state", ["preempted", "cancelled", "out_of_memory"])
def test_an_end_that_was_asked_for_is_an_end(state):
    assert after(state, asked=True) == "its end was asked for"


def test_a_lack_of_device_memory_gets_more_on_the_device_and_not_on_the_host():
    again = after("out_of_memory", peak_bytes=1200, evidence={"place": "device"})
    assert again.needed == {"device": 300}


def test_a_job_that_was_given_no_device_is_told_to_ask_for_one():
    status = JobStatus("a", "out_of_memory", evidence={"place": "device"})
    assert "--num-gpus 1" in decide(status, had=of(1000), capacity=of(CAPACITY))


def test_a_job_that_had_all_of_a_device_is_not_tried_again():
    status = JobStatus("a", "out_of_memory", evidence={"place": "device"})
    again = decide(status, had=of(1, 1000), capacity=of(CAPACITY, 1000))
    assert "gives one job 1000 B" in again
