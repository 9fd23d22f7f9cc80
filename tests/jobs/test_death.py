"""Each way to end, from its evidence."""

import signal

import pytest

from memfit.jobs._death import Counters, Death, explain

CALM = Counters(group=3, group_name="/jobs", host=9)


def death(returncode, **changes):
    evidence = {
        "returncode": returncode,
        "stopped_by": None,
        "counters_before": CALM,
        "counters_after": CALM,
        "error": None,
        "has_result": True,
        "peak_bytes": 5 << 30,
        "phase": "validate",
    }
    return Death(**(evidence | changes))


@pytest.mark.parametrize(
    ("evidence", "state", "words"),
    [
        (death(0), "completed", ""),
        (death(0, has_result=False), "failed", "left no result"),
        (death(75), "preempted", "goes on from there"),
        (death(-15, stopped_by="SIGTERM"), "cancelled", "SIGTERM in phase validate, as asked"),
        (death(-9, stopped_by="SIGKILL"), "cancelled", "SIGKILL"),
        (death(3, stopped_by="SIGTERM"), "cancelled", "SIGTERM"),
        (death(-9, stopped_by="SIGTERM", counters_after=Counters(4, "/jobs", 10)), "out_of_memory", "from 3 to 4"),
        (death(-9, stopped_by="SIGTERM"), "failed", "killed with SIGKILL by somebody else"),
        (death(-9, counters_after=Counters(4, "/jobs", 10)), "out_of_memory", "oom_kill counter of /jobs rose from 3 to 4"),
        (death(-9, counters_after=Counters(3, "/jobs", 10)), "out_of_memory", "probably"),
        (death(-9), "failed", "killed with SIGKILL by somebody else in phase validate at a peak of 5.00 GiB"),
        (death(-9, counters_before=Counters(None, "", None), counters_after=Counters(None, "", None)), "failed", "not readable"),
        (death(-signal.SIGSEGV), "failed", "SIGSEGV"),
        (death(-250), "failed", "signal 250"),
        (death(3), "failed", "exit code 3 in phase validate"),
        (death(1, error={"type": "ValueError", "memfit": False, "text": "ValueError: zoom", "memory": False}), "failed", "zoom"),
        (death(1, error={"type": "MemoryError", "memfit": False, "text": "MemoryError", "memory": True}), "out_of_memory", "MemoryError"),
    ],
)  # fmt: skip
def test_a_death_is_explained_from_its_evidence(evidence, state, words):
    found, cause = explain(evidence)
    assert found == state
    assert words in cause


def test_an_exit_code_of_137_alone_is_no_proof_of_the_kernel():
    assert explain(death(137))[0] == "failed"


def test_a_counter_that_rose_is_no_proof_for_a_job_that_was_not_killed():
    assert explain(death(1, counters_after=Counters(4, "/jobs", 10)))[0] == "failed"
