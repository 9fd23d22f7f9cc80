"""Ends of real Slurm jobs, told apart blind: by the log alone, by the accounting alone, and by both."""

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from memfit.diagnosis import diagnose

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]
PROGRAM = Path(__file__).parents[1] / "diagnosis/deaths/training.py"
COLUMNS = (
    "JobID,JobName,State,ExitCode,DerivedExitCode,ReqMem,MaxRSS,NTasks,NNodes,AllocTRES,Elapsed,Start,End,NodeList"
)
#: What each job came to, whichever of its witnesses is heard.
VERDICTS = {
    "walltime": (False, "none", "walltime"),
    "cancelled": (False, "none", "cancelled"),
    "cancelled_step": (False, "none", "cancelled"),
    "preempted": (False, "none", "preempted"),
    "node_fail": (False, "none", "node_fail"),
    "batch_memory": (True, "host_cgroup", "out_of_memory"),
    "step_memory": (True, "host_cgroup", "out_of_memory"),
    "rank_memory": (True, "host_cgroup", "out_of_memory"),
}


def program(how):
    return shlex.join([sys.executable, str(PROGRAM), how])


class Job:
    """What a job left: its log, its accounts in two forms, its state."""

    def __init__(self, cluster, number):
        self.log, self.state = cluster.log_of(number), cluster.state(number)
        self.accounts = cluster.folder / f"{number}.sacct"
        self.table = cluster.folder / f"{number}.table"
        self.accounts.write_text(cluster.call("sacct", "-P", "-j", number, "-o", COLUMNS))
        self.table.write_text(cluster.call("sacct", "-j", number))


@pytest.fixture(scope="module")
def jobs(cluster):
    """All jobs of this file, ended; they run beside each other, because a time limit is looked at twice a minute."""
    first, second = cluster.nodes
    small = ("--mem=60M", "-w", first)
    hog, wait = program("hog"), program("wait")
    by_rank = f'if [ "$SLURM_PROCID" = 1 ]; then exec {hog}; else exec {wait}; fi'
    numbers = {
        "walltime": cluster.submit(f"exec {wait}", "--time=1", *small),
        "cancelled": cluster.submit(f"exec {wait}", *small),
        "cancelled_step": cluster.submit(f"srun {wait}", *small),
        "preempted": cluster.submit(f"exec {wait}", "--mem=60M", "-w", second, "-p", "low", "-n4", "--no-requeue"),
    }
    for number in numbers.values():
        cluster.wait_for_text(number, "step 6")
    cluster.call("scontrol", "update", f"JobId={numbers['walltime']}", "EndTime=now+1seconds")
    cluster.call("scancel", numbers["cancelled"], numbers["cancelled_step"])
    cluster.wait(cluster.submit("true", "--mem=10M", "-w", second, "-n4"), numbers["preempted"])
    several = ("--mem=100M", "-N2", "--ntasks-per-node=1")
    numbers |= {
        "batch_memory": cluster.submit(hog, "--mem=100M"),
        "step_memory": cluster.submit(f"srun {hog}", "--mem=100M"),
        "rank_memory": cluster.submit(f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(by_rank)}", *several),
        "segfault": cluster.submit(f"srun {program('segfault')}", "--mem=60M"),
        "stranger": cluster.submit(f"{wait} & echo victim $!; wait $!", *small),
    }
    alone = {
        "cancelled_by_kill": cluster.submit(wait, *small),
        "node_fail": cluster.submit(f"exec {wait}", "--mem=60M", "-w", second, "--no-requeue"),
    }
    numbers |= alone
    cluster.wait_for_text(numbers["stranger"], "step 6")
    victim = next(line for line in cluster.log_of(numbers["stranger"]).read_text().splitlines() if "victim" in line)
    os.kill(int(victim.split()[1]), signal.SIGKILL)
    cluster.wait(*(number for name, number in numbers.items() if name.endswith("_memory") or name == "segfault"))
    for number in alone.values():
        cluster.wait_for_text(number, "step 6")
    cluster.call("scancel", "--batch", "--signal=KILL", numbers["cancelled_by_kill"])
    cluster.call("scontrol", "update", f"NodeName={second}", "State=DOWN", "Reason=test")
    cluster.wait(numbers["node_fail"])
    with contextlib.suppress(AssertionError):  # it may have come back by itself
        cluster.call("scontrol", "update", f"NodeName={second}", "State=RESUME")
    cluster.wait(*numbers.values(), seconds=90)
    return {name: Job(cluster, number) for name, number in numbers.items()}


def verdict(found):
    return found.oom, found.kind, found.cause


def test_a_job_has_a_step_on_each_node_and_accounts(cluster):
    job = cluster.submit("srun printenv SLURMD_NODENAME", "-N2", "--mem=50M")
    assert cluster.wait(job) == ["COMPLETED"]
    assert sorted(cluster.log_of(job).read_text().split()) == sorted(cluster.nodes)
    assert f"{job}.0|COMPLETED" in cluster.call("sacct", "-n", "-P", "-j", job, "-o", "JobID,State")


@pytest.mark.parametrize("name", VERDICTS)
def test_an_end_is_told_by_the_log_alone(jobs, name):
    found = diagnose(jobs[name].log)
    assert (*verdict(found), found.phase) == (*VERDICTS[name], "train")
    assert found.confidence in ("proved", "likely") and found.evidence[0].text in jobs[name].log.read_text()


@pytest.mark.parametrize("form", ["accounts", "table"])
@pytest.mark.parametrize("name", VERDICTS)
def test_an_end_is_told_by_the_accounts_alone(jobs, name, form):
    found = diagnose([], sacct=getattr(jobs[name], form))
    assert (*verdict(found), found.phase) == (*VERDICTS[name], "unknown")


@pytest.mark.parametrize("form", ["accounts", "table"])
@pytest.mark.parametrize("name", VERDICTS)
def test_an_end_is_told_by_both(jobs, name, form):
    found = diagnose(jobs[name].log, sacct=getattr(jobs[name], form))
    assert (*verdict(found), found.phase) == (*VERDICTS[name], "train")


def test_a_job_that_failed_is_out_of_memory_where_one_of_its_steps_was(jobs):
    assert (jobs["batch_memory"].state, jobs["step_memory"].state) == ("OUT_OF_MEMORY", "FAILED")
    found = diagnose([], sacct=jobs["step_memory"].accounts)
    assert "OUT_OF_MEMORY" in "".join(line.text for line in found.evidence) or "0:125" in found.evidence[0].text


def test_of_two_ranks_the_one_that_took_too_much_is_named_and_not_the_one_that_was_ended_with_it(jobs, cluster):
    found = diagnose(jobs["rank_memory"].log)
    assert found.where["node"] == cluster.nodes[1]


def test_a_step_that_crashed_is_told_by_the_log(jobs):
    for found in (diagnose(jobs["segfault"].log), diagnose(jobs["segfault"].log, sacct=jobs["segfault"].accounts)):
        assert verdict(found) == (False, "none", "segfault")


def test_a_cancellation_with_a_signal_of_its_own_is_no_kill_for_memory(jobs):
    assert jobs["cancelled_by_kill"].state == "FAILED"
    for accounts in (None, jobs["cancelled_by_kill"].accounts, jobs["cancelled_by_kill"].table):
        assert verdict(diagnose(jobs["cancelled_by_kill"].log, sacct=accounts)) == (False, "none", "cancelled")


def test_a_strangers_kill_in_a_job_is_not_said_to_be_for_memory(jobs):
    assert jobs["stranger"].state == "FAILED"
    for accounts in (None, jobs["stranger"].accounts, jobs["stranger"].table):
        found = diagnose(jobs["stranger"].log, sacct=accounts)
        assert found.cause == "killed" and found.confidence == "not shown"
