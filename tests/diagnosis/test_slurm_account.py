"""The arithmetic with scopes: a job of sixteen ranks that was over its nodes' limit long before its validation."""

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import read_ran
from memfit.units import GIB, MIB
from reading import look

RANKS = """\
JobID|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes
273202|OUT_OF_MEMORY|0:125|{request}||||4
273202.batch|OUT_OF_MEMORY|0:125||3G|3G|1|1
273202.extern|COMPLETED|0:0||0|0|4|4
273202.0|OUT_OF_MEMORY|0:125||72.50G|71.40G|16|4
"""
SHOWN = "JobId=273202 JobName=x\n NumNodes=4 NumTasks=16\n MinMemoryNode=400G\n"


def job(text):
    return read_ran([], text).job


def sums(text):
    """The sums of memory that a diagnosis by this accounting gives."""
    return [one for one in look("Killed\n", sacct=text).arithmetic if " x " in one]


@pytest.mark.parametrize("request_text", ["256Gn", "1024G", "1T"])
def test_four_tasks_of_a_node_are_over_its_limit_in_the_steady_state(request_text):
    text = RANKS.format(request=request_text)
    assert (job(text).node_request, job(text).tasks_per_node) == (Amount(256 * GIB, "node"), 4)
    [said] = sums(text)
    assert "4 tasks x 71.40 GiB = 285.60 GiB on average, over the 256.00 GiB of a node" in said


def test_one_task_alone_is_never_held_against_the_node():
    [said] = sums(RANKS.format(request="2T"))
    assert "4 tasks x 72.50 GiB = 290.00 GiB at most, below the 512.00 GiB of a node" in said


def test_a_request_of_each_cpu_is_multiplied_by_the_cpus_of_a_node():
    text = "JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes|AllocCPUS\n7|OUT_OF_MEMORY|2Gc|||||\n7.0|OUT_OF_MEMORY||9G|10G|2|2|16\n"
    assert (job(text).node_request, job(text).tasks_per_node) == (Amount(16 * GIB, "node"), 1)
    [said] = sums(text)
    assert "below the 16.00 GiB of a node" in said and "8 CPUs" in said


def test_what_scontrol_says_of_a_node_comes_before_the_accounting():
    text = RANKS.format(request="256Gn") + "\n" + SHOWN
    assert job(text).node_request == Amount(400 * GIB, "node")
    [said] = sums(text)
    assert "below the 400.00 GiB of a node" in said


def test_uneven_tasks_count_on_the_fullest_node():
    text = "JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes\n7|FAILED|30Gn||||3\n7.0|OUT_OF_MEMORY||9G|9G|10|3\n"
    assert job(text).tasks_per_node == 4
    assert job(text + "\nJobId=7 NumNodes=3 NumTasks=10 NtasksPerN:B:S:C=8:0:*:*\n").tasks_per_node == 8


def test_a_mean_below_the_limit_and_a_largest_task_above_it_are_told_apart():
    # Real: two tasks of a node took 156 MiB each when the kernel killed one; the mean counts tasks without a sample.
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n2|FAILED|600M||||2\n2.1|OUT_OF_MEMORY||258908K|99804K|4|2\n"
    assert job(text).node_request == Amount(300 * MIB, "node")
    [said] = sums(text)
    assert "when all are as large as the largest" in said and "their mean is below it" in said


def test_a_job_killed_before_its_first_sample_gets_no_sum():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n1|OUT_OF_MEMORY|200M||||1\n1.batch|OUT_OF_MEMORY||0|0|1|1\n"
    assert sums(text) == []


def test_without_the_number_of_nodes_the_tasks_of_a_node_are_not_known_and_no_sum_is_made():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks\n7|OUT_OF_MEMORY|256Gn|||\n7.0|OUT_OF_MEMORY||72G|71G|16\n"
    assert job(text).tasks_per_node is None
    assert "how many tasks share them is not known" in sums(text)[0]


def test_without_the_number_of_nodes_a_jobs_total_is_held_against_all_of_its_tasks():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks\n7|OUT_OF_MEMORY|256G|||\n7.0|OUT_OF_MEMORY||72G|71G|16\n"
    assert job(text).request == Amount(256 * GIB, "job") and job(text).node_request is None
    assert "16 tasks x 71.00 GiB = 1.11 TiB on average, over the 256.00 GiB of the job" in sums(text)[0]


def test_a_request_without_its_unit_is_no_limit_where_one_task_held_more_than_a_share_of_it():
    # Slurm writes the job's total there; people who copy a table write what they requested of a node.
    found = look("Killed\n", sacct=RANKS.format(request="256G")).arithmetic
    assert not any("over the 64.00 GiB" in one for one in found)
    assert any("64.00 GiB of each node as the job's total, and one task held 72.50 GiB" in one for one in found)
    assert job(RANKS.format(request="256G")).request is None
    assert job(RANKS.format(request="512G")).node_request == Amount(
        128 * GIB, "node"
    )  # four tasks of 72.5 GiB, none above it


def test_the_killed_step_comes_first_and_the_last_attempt_counts():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n7|REQUEUED|1Gn||||1\n7.0|OUT_OF_MEMORY||9G|9G|1|1\n7|FAILED|1Gn||||1\n7.0|COMPLETED||3G|3G|1|1\n7.1|OUT_OF_MEMORY||2G|2G|1|1\n"
    assert job(text).task_peak == Amount(2 * GIB, "task")


@pytest.mark.parametrize(("nodes", "count"), [("gpu[001-004,7],login1", 6), ("n[1-2", None), ("None assigned", None)])
def test_a_node_list_is_counted(nodes, count):
    text = f"JobID|State|ReqMem|MaxRSS|NTasks|NodeList\n7|FAILED|6G|||{nodes}\n7.0|FAILED||1G|6|{nodes}\n"
    assert job(text).nodes == count
