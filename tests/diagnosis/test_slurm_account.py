"""The arithmetic with scopes: a job of sixteen ranks that was over its nodes' limit long before its validation."""

import pytest

from memfit.diagnosis._sacct import Request, lines_of, parse_sacct
from memfit.diagnosis._scontrol import parse_node_limits, parse_shapes
from memfit.diagnosis._slurm_account import account_nodes, count_names, request_bytes
from memfit.diagnosis._training_account import (
    batch_sizes_of,
    check_batch,
    check_rate,
    count_steps,
    effective_batch,
    judge_change,
    predict_seconds,
)

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
    shape = parse_shapes(lines_of("JobId=273202 JobName=x\n NumNodes=4 NumTasks=16\n MinMemoryNode=400G"))[0]
    assert account("256Gn", shape=shape).limit_bytes == 400 * GIB
    assert account("256Gn", shape=shape).verdict == "below"
    assert (
        account("999G", asked=Request(64 * GIB, "cpu"), tasks_per_node=4).limit_bytes == 999 * GIB // 4
    )  # no CPUs told


def test_uneven_tasks_count_on_the_fullest_node():
    text = "JobID|State|ReqMem|AveRSS|MaxRSS|NTasks|NNodes\n7|FAILED|30Gn||||3\n7.0|OUT_OF_MEMORY||9G|9G|10|3\n"
    assert account_nodes(parse_sacct(text))[0].tasks_per_node == 4
    assert account_nodes(parse_sacct(text), tasks_per_node=8)[0].tasks_per_node == 8


def test_a_mean_below_the_limit_and_a_largest_task_above_it_are_told_apart():
    # Real: two tasks of a node took 156 MiB each when the kernel killed one; the mean counts tasks without a sample.
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n2|FAILED|600M||||2\n2.1|OUT_OF_MEMORY||258908K|99804K|4|2\n"
    found = account_nodes(parse_sacct(text))[0]
    assert (found.limit_bytes, found.verdict) == (300 * MIB, "over_if_tasks_are_alike")
    assert any("lower bound" in note for note in found.notes)
    assert any("since Slurm 21.08" in note for note in found.notes)


def test_a_job_killed_before_its_first_sample_gets_no_verdict():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n1|OUT_OF_MEMORY|200M||||1\n1.batch|OUT_OF_MEMORY||0|0|1|1\n"
    found = account_nodes(parse_sacct(text))[0]
    assert found.verdict == "unknown"
    assert "no sample" in found.text


def test_without_the_number_of_nodes_only_one_task_is_counted_on_one():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks\n7|OUT_OF_MEMORY|256Gn|||\n7.0|OUT_OF_MEMORY||72G|71G|16\n"
    found = account_nodes(parse_sacct(text))[0]
    assert (found.tasks_per_node, found.verdict) == (1, "below")
    assert any("number of nodes is not told" in note for note in found.notes)


def test_the_killed_step_comes_first_and_the_last_attempt_counts():
    text = "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n7|REQUEUED|1Gn||||1\n7.0|OUT_OF_MEMORY||9G|9G|1|1\n7|FAILED|1Gn||||1\n7.0|COMPLETED||1M|1M|1|1\n7.1|OUT_OF_MEMORY||2G|2G|1|1\n"
    assert [(one.step, one.peak_bytes) for one in account_nodes(parse_sacct(text))] == [("7.1", 2 * GIB), ("7.0", MIB)]


def test_a_node_list_is_counted():
    assert count_names("gpu[001-004,7],login1") == 6
    assert count_names("n[1-2") is None


def test_a_request_is_made_from_the_measured_peak_and_held_to_the_partition():
    limits = parse_node_limits(lines_of("PARTITION MEMORY\npublic 525312\n"))
    wanted, said = request_bytes(account(), limits=limits)
    assert wanted == 334 * GIB  # 4 x 72.5 and 15 %
    assert "within the 513.00 GiB of public" in said
    wanted, said = request_bytes(account(), reserve=1.0, limits=limits)
    assert "MORE THAN" in said


@pytest.mark.parametrize(("batch", "steps"), [(22, 242), (20, 266), (18, 296), (11, 484)])
def test_steps_of_an_epoch_follow_from_samples_ranks_and_batch(batch, steps):
    assert count_steps(85_109, 16, batch) == steps
    assert batch in batch_sizes_of(steps, 85_109, 16)


@pytest.mark.parametrize("num_samples", [1, 7, 100, 85_109])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batch_that_ran_is_always_among_those_found(num_samples, drop_last):
    for world in (1, 3, 16):
        for batch in range(1, 40):
            steps = count_steps(num_samples, world, batch, drop_last=drop_last)
            assert not steps or batch in batch_sizes_of(steps, num_samples, world) or batch > -(-num_samples // world)


def test_the_batch_that_really_ran_is_told_from_the_last_step():
    for wanted, in_force in ((18, False), (20, False), (22, True)):
        check = check_batch(85_109, 16, global_step=9_680, num_epochs=40, wanted=wanted)
        assert (check.ran, check.in_force, check.num_epochs) == ((22,), in_force, 40)
    assert "a batch of 20 would take 266" in check_batch(85_109, 16, num_steps=242, wanted=20).text
    assert check_batch(85_109, 16, global_step=9_681, num_epochs=40) is None


def test_a_bars_rate_is_held_against_the_clock():
    check = check_rate(242, 0.21, 22 * 60 + 54)
    assert check.bar_seconds / 60 == pytest.approx(19.2, abs=0.05)
    assert check.ratio == pytest.approx(1.19, abs=0.01)
    assert "19 min by the bar's rate, 23 min by the clock" in check.text


def test_the_time_of_all_epochs_is_reckoned():
    assert predict_seconds(40, 23 * 60) / 3600 == pytest.approx(15.3, abs=0.05)
    assert predict_seconds(40, 1000, 100, done=39) == 1100


def test_effective_batches_are_compared():
    assert (effective_batch(22, 16), effective_batch(20, 16)) == (352, 320)
    assert effective_batch(11, 16, 2) == effective_batch(22, 16)


@pytest.mark.parametrize(
    ("setting", "old", "new", "effect"),
    [
        ("dataloader.params.persistent_workers", None, False, "none"),
        ("persistent_workers", True, False, "some"),
        ("dataloader.params.batch_size", 22, 20, "not_host"),
        ("--per-device-train-batch-size", 22, 20, "not_host"),
        ("trainer.params.accumulate_grad_batches", None, 2, "not_host"),
        ("num_workers", 2, 1, "some"),
        ("mem", "256GB", "400GB", "limit"),
        ("batch_size", 22, 22, "none"),
    ],
)
def test_a_change_is_judged_by_what_it_does_for_the_host(setting, old, new, effect):
    assert judge_change(setting, old, new, account=account()).effect == effect


def test_ending_the_workers_between_epochs_does_not_help_a_node_that_was_over_before():
    assert (
        "over its limit in the steady state before"
        in judge_change("persistent_workers", True, False, account=account()).text
    )
