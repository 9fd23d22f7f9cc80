"""The arithmetic with scopes: a job of sixteen ranks that was over its nodes' limit long before its validation."""

import pytest

from memfit.diagnosis._slurm_account import account_nodes, count_names
from memfit.slurm import parse_sacct, parse_shapes

GIB, MIB = 1 << 30, 1 << 20
RANKS = """\
JobID|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes
273202|OUT_OF_MEMORY|0:125|{request}||||4
273202.batch|OUT_OF_MEMORY|0:125||3G|3G|1|1
273202.extern|COMPLETED|0:0||0|0|4|4
273202.0|OUT_OF_MEMORY|0:125||72.50G|71.40G|16|4
"""


def account(request="256Gn", **more):
    return {one.step: one for one in account_nodes(parse_sacct(RANKS.format(request=request)), **more)}["273202.0"]


@pytest.mark.parametrize("request_text", ["256Gn", "1024G", "1T"])
def test_four_tasks_of_a_node_are_over_its_limit_in_the_steady_state(request_text):
    found = account(request_text)
    assert (found.limit_bytes, found.tasks_per_node) == (256 * GIB, 4)
    assert found.steady_bytes == pytest.approx(285.6 * GIB)
    assert found.verdict == "over_in_steady_state"
    assert "4 tasks x 71.40 GiB = 285.60 GiB" in found.text
    assert "256.00 GiB of a node" in found.text


def test_one_task_alone_is_never_held_against_the_node():
    assert account("2T").verdict == "below"
    assert account("2T").worst_bytes == pytest.approx(290 * GIB)


def test_a_request_of_each_cpu_is_multiplied_by_the_cpus_of_a_node():
    text = "JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes|AllocCPUS\n7|OUT_OF_MEMORY|2Gc|||||\n7.0|OUT_OF_MEMORY||9G|10G|2|2|16\n"
    found = account_nodes(parse_sacct(text))[0]
    assert (found.limit_bytes, found.tasks_per_node, found.verdict) == (16 * GIB, 1, "below")
    assert "8 CPUs" in found.limit_source


def test_what_scontrol_and_the_script_say_of_a_node_comes_before_the_total():
    shape = parse_shapes(["JobId=273202 JobName=x", " NumNodes=4 NumTasks=16", " MinMemoryNode=400G"])[0]
    assert account("256Gn", shape=shape).limit_bytes == 400 * GIB
    assert account("256Gn", shape=shape).verdict == "below"


def test_uneven_tasks_count_on_the_fullest_node():
    text = "JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes\n7|FAILED|30Gn||||3\n7.0|OUT_OF_MEMORY||9G|9G|10|3\n"
    assert account_nodes(parse_sacct(text))[0].tasks_per_node == 4
    shape = parse_shapes(["JobId=7 NumNodes=3 NumTasks=10 NtasksPerN:B:S:C=8:0:*:*"])[0]
    assert account_nodes(parse_sacct(text), shape=shape)[0].tasks_per_node == 8


def test_a_mean_below_the_limit_and_a_largest_task_above_it_are_told_apart():
    # Real: two tasks of a node took 156 MiB each when the kernel killed one; the mean counts tasks without a sample.
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n2|FAILED|600M||||2\n2.1|OUT_OF_MEMORY||258908K|99804K|4|2\n"
    found = account_nodes(parse_sacct(text))[0]
    assert (found.limit_bytes, found.verdict) == (300 * MIB, "over_if_tasks_are_alike")


def test_a_job_killed_before_its_first_sample_gets_no_verdict():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n1|OUT_OF_MEMORY|200M||||1\n1.batch|OUT_OF_MEMORY||0|0|1|1\n"
    found = account_nodes(parse_sacct(text))[0]
    assert found.verdict == "unknown"
    assert "no sample" in found.text


def test_without_the_number_of_nodes_only_one_task_is_counted_on_one():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks\n7|OUT_OF_MEMORY|256Gn|||\n7.0|OUT_OF_MEMORY||72G|71G|16\n"
    found = account_nodes(parse_sacct(text))[0]
    assert (found.tasks_per_node, found.verdict) == (1, "below")


def test_the_killed_step_comes_first_and_the_last_attempt_counts():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n7|REQUEUED|1Gn||||1\n7.0|OUT_OF_MEMORY||9G|9G|1|1\n7|FAILED|1Gn||||1\n7.0|COMPLETED||1M|1M|1|1\n7.1|OUT_OF_MEMORY||2G|2G|1|1\n"
    assert [(one.step, one.peak_bytes) for one in account_nodes(parse_sacct(text))] == [("7.1", 2 * GIB), ("7.0", MIB)]


def test_a_node_list_is_counted():
    assert count_names("gpu[001-004,7],login1") == 6
    assert [count_names(names) for names in ("n[1-2", "n[1-+", "None assigned")] == [None, None, None]
