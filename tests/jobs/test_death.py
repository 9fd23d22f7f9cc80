"""Each way to end, from its evidence."""

import signal

import pytest

from memfit.jobs import Counters, Death, explain_death, memory_place

CALM = Counters({"/jobs": 3}, host=9)
OWN = Counters({"job-a": 0}, is_own=True)
OWN_ROSE = Counters({"job-a": 1}, is_own=True)
OWN_CALM = {"counters_before": OWN, "counters_after": OWN}


def death(returncode, **changes):
    evidence = {
        "returncode": returncode,
        "stopped_by": None,
        "counters_before": CALM,
        "counters_after": CALM,
        "error": None,
        "is_done": True,
        "peak_bytes": 5 << 30,
        "phase": "validate",
    }
    return Death(**(evidence | changes))


@pytest.mark.proves("S0-01", "S3-01", "C-07")
@pytest.mark.parametrize(
    ("evidence", "state", "words"),
    [
        (death(0), "completed", ""),
        (death(0, is_done=False), "failed", "left no result"),
        (death(0, is_done=False, stopped_by="SIGTERM", is_asked=True), "preempted", "nothing shows that it was done"),
        (death(0, is_done=False, stopped_by="SIGTERM"), "preempted", "nothing shows that it was done"),
        (death(0, is_done=False, stopped_by="SIGTERM", is_asked=True, starved="too large"), "out_of_memory", "too large"),
        (death(75), "preempted", "goes on from there"),
        (death(-15), "preempted", "SIGTERM from outside memfit in phase validate"),
        (death(-2), "preempted", "SIGINT from outside memfit"),
        (death(1, stopped_by="SIGTERM"), "preempted", "a signal from outside memfit"),
        (death(-15, stopped_by="SIGTERM", is_asked=True), "cancelled", "SIGTERM in phase validate, as asked"),
        (death(-9, stopped_by="SIGKILL", is_asked=True), "cancelled", "SIGKILL"),
        (death(3, stopped_by="SIGTERM", is_asked=True), "cancelled", "SIGTERM"),
        (death(-9, stopped_by="SIGTERM", is_asked=True, counters_after=Counters({"/jobs": 4}, host=10)), "out_of_memory", "from 3 to 4"),
        (death(-9, stopped_by="SIGTERM", is_asked=True), "failed", "killed with SIGKILL by somebody else"),
        (death(-9, counters_after=Counters({"/jobs": 4}, host=10)), "out_of_memory", "oom_kill counter of /jobs rose from 3 to 4"),
        (death(-9, counters_after=Counters({"/jobs": 3}, host=10)), "out_of_memory", "probably"),
        (death(-9, counters_before=OWN, counters_after=OWN_ROSE), "out_of_memory", "oom_kill counter of job-a rose from 0 to 1"),
        (death(-9, **OWN_CALM), "failed", "the oom_kill counter of its own group stayed at 0"),
        (death(1, counters_before=OWN, counters_after=OWN_ROSE), "out_of_memory", "the kernel killed a process of it"),
        (death(0, counters_before=OWN, counters_after=OWN_ROSE), "completed", ""),
        (death(1, last_words="Traceback:\n  x\nMemoryError\n"), "out_of_memory", "it said: MemoryError"),
        (death(1, last_words="no MemoryError here\n"), "failed", "exit code 1"),
        (death(1, last_words="OSError: [Errno 12] Cannot allocate memory\n"), "failed", "exit code 1"),
        (death(1, last_words="OSError: [Errno 12] Cannot allocate memory\n", refused="its limit"), "out_of_memory", "refused memory at its limit"),
        (death(-6, last_words="what():  std::bad_alloc\n", refused="its limit"), "out_of_memory", "SIGABRT"),
        (death(-7, refused="its limit"), "out_of_memory", "SIGBUS"),
        (death(-7), "failed", "SIGBUS"),
        (death(-7, met_above="run"), "out_of_memory", "run has met its limit"),
        (death(1, last_words="OSError: [Errno 12] Cannot allocate memory\n", met_above="run"), "out_of_memory", "run has met its limit"),
        (death(126, last_words="env: bash: Argument list too long\n", met_above="run"), "out_of_memory", "run has met its limit"),
        (death(126, last_words="env: bash: Argument list too long\n"), "failed", "exit code 126"),
        (death(1, last_words="ValueError: out of memory slots\n", met_above="run"), "failed", "exit code 1"),
        (death(-9, stopped_by="SIGKILL", is_asked=True, starved="too large"), "out_of_memory", "too large"),
        (death(0, stopped_by="SIGTERM", is_asked=True, starved="too large"), "completed", ""),
        (death(-9), "failed", "killed with SIGKILL by somebody else in phase validate at a peak of 5.00 GiB"),
        (death(-9, counters_before=Counters(), counters_after=Counters()), "failed", "not readable"),
        (death(-signal.SIGSEGV), "failed", "SIGSEGV"),
        (death(-250), "failed", "signal 250"),
        (death(3), "failed", "exit code 3 in phase validate"),
        (death(137), "failed", "exit code 137"),  # alone it is no proof of the kernel
        (death(1, counters_after=Counters({"/jobs": 4}, host=10)), "failed", "exit code 1"),  # it was not killed
        (death(1, error={"type": "ValueError", "memfit": False, "text": "ValueError: zoom", "memory": False}), "failed", "zoom"),
        (death(1, error={"type": "MemoryError", "memfit": False, "text": "MemoryError", "memory": True}), "out_of_memory", "MemoryError"),
    ],
)  # fmt: skip
def test_a_death_is_explained_from_its_evidence(evidence, state, words):
    found, cause, _ = explain_death(evidence)
    assert found == state
    assert words in cause


@pytest.mark.parametrize(
    ("evidence", "who"),
    [
        (death(0), "job"),
        (death(7), "job"),
        (death(75), "platform"),
        (death(75, is_asked=True), "user"),
        (death(-15), "platform"),
        (death(-15, stopped_by="SIGTERM", is_asked=True), "user"),
        (death(0, stopped_by="SIGTERM", is_asked=True), "job"),
        (death(0, is_done=False, stopped_by="SIGTERM", is_asked=True), "user"),
        (death(0, is_done=False, stopped_by="SIGTERM"), "platform"),
    ],
)
def test_who_ended_a_job_is_told(evidence, who):
    assert explain_death(evidence)[2] == who


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"last_words": "torch.OutOfMemoryError: CUDA out of memory.\n"}, "device"),
        ({"error": {"type": "OutOfMemoryError", "memfit": False, "text": "x", "memory": True}}, "device"),
        ({"error": {"type": "MemoryError", "memfit": False, "text": "x", "memory": True}}, "host"),
        ({"last_words": "MemoryError\n"}, "host"),
    ],
)
def test_a_device_that_was_full_is_told_from_a_host_that_was(changes, place):
    assert memory_place(death(1, **changes)) == place
