"""What to do about a death: ranked by speed, with bytes where they are known."""

import re
from dataclasses import replace

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import Diagnosis, Evidence, Job, list_remedies, read_ran
from memfit.units import GIB, MIB

COSTS = (
    "none", "hardly any", "a few per cent", "5 to 15 %", "25 to 33 %", "fewer devices at once", "not known",
    "another training",
)  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
NODE = Job(
    nodes=4, tasks_per_node=4, request=Amount(256 * GIB, "node"), node_memory=Amount(513 * GIB, "node"), batch=22, workers=2,
    task_peak=Amount(int(72.5 * GIB), "task"), task_mean=Amount(int(71.4 * GIB), "task"),
)  # fmt: skip


def diagnosis(kind, phase="train", cause="out_of_memory", text="", under_memfit=False, **figures):
    return Diagnosis(
        kind != "none", False, kind, cause, phase, "proved", figures, (Evidence("a.err", 1, text),),
        under_memfit=under_memfit,
    )  # fmt: skip


def card(total=24.0, free=0.5, reserved=23.0, allocated=22.8, tried=1.0):
    sizes = {"device_total": total, "free": free, "reserved": reserved, "allocated": allocated, "tried": tried}
    return {name: int(size * GIB) for name, size in sizes.items()}


def one(found, word):
    return next(remedy for remedy in found if word in remedy.title + remedy.setting)


def test_what_helps_comes_by_its_cost_in_speed_and_what_does_not_comes_last():
    found = list_remedies(diagnosis("host_cgroup", "validate"), NODE)
    helps = [remedy.helps for remedy in found]
    assert helps == sorted(helps, reverse=True) and not all(helps)
    costs = [COSTS.index(remedy.cost) for remedy in found if remedy.helps]
    assert costs == sorted(costs)


def test_the_request_is_the_measured_peak_of_a_node_and_a_reserve_in_a_unit_that_slurm_takes():
    first = list_remedies(diagnosis("host_cgroup"), NODE)[0]
    assert first.setting == "--mem=334G"  # 4 tasks x 72.5 GiB = 290 GiB, and 15 %
    assert first.saves_bytes == (334 - 256) * GIB and first.enough is True
    assert "4 x 72.5 GiB" in first.reason and "290.00 GiB" in first.reason


def test_a_request_beyond_the_partition_asks_for_larger_nodes():
    small = Job(**{**vars(NODE), "node_memory": Amount(300 * GIB, "node"), "partition": "small"})
    first = list_remedies(diagnosis("host_cgroup"), small)[0]
    assert "larger nodes" in first.title and "a node of small has 300.00 GiB" in first.reason


def test_a_sample_far_below_the_limit_is_no_peak_and_the_request_says_so():
    sampled = Job(request=Amount(300 * MIB, "node"), task_peak=Amount(1 * MIB, "task"))
    first = list_remedies(diagnosis("host_cgroup"), sampled)[0]
    assert first.setting == "--mem=512M" and first.enough is None and "missed its peak" in first.reason


def test_a_killers_own_figures_stand_in_for_the_accounting_and_a_cut_peak_is_no_peak():
    over = diagnosis("host_cgroup", used=40 * GIB, limit=32 * GIB)
    assert list_remedies(over)[0].setting == "--mem=46G" and list_remedies(over)[0].enough
    cut = diagnosis("host_cgroup", used=32 * GIB, limit=32 * GIB)
    first = list_remedies(cut)[0]
    assert first.setting == "--mem=48G" and first.enough is None and "cut it off" in first.reason


def test_more_memory_is_advised_in_the_unit_of_the_script():
    asked = Amount(4 * GIB, "cpu")
    spread = list_remedies(diagnosis("host_cgroup"), Job(request=asked, script_request=asked))[0]
    assert (spread.title, spread.setting) == ("request 6G per cpu", "--mem-per-cpu=6G")
    assert "4.00 GiB of each CPU + 50%" in spread.reason
    step = list_remedies(diagnosis("host_cgroup"), Job(script_request=asked, step_request=Amount(GIB, "cpu")))[0]
    assert step.setting.startswith("--mem-per-cpu=1536M of srun")
    known = replace(NODE, cpus_per_task=16, script_request=asked)
    assert list_remedies(diagnosis("host_cgroup"), known)[0].setting == "--mem-per-cpu=5344M"  # 334 GiB / 64 CPUs
    whole = list_remedies(diagnosis("host_cgroup"), Job(request=Amount(32 * GIB, "job")))[0]
    assert (whole.title, whole.setting) == ("request 48G per job", "--mem of each node, 48G over all of them")


def test_nothing_measured_gives_a_request_without_bytes():
    first = list_remedies(diagnosis("host_cgroup"))[0]
    assert first.saves_bytes is None and "--sacct" in first.reason


def test_a_smaller_batch_and_persistent_workers_change_nothing_on_the_host():
    found = list_remedies(diagnosis("host_cgroup", "validate"), replace(NODE, persistent_workers=False))
    batch, persistent = one(found, "smaller batch"), one(found, "persistent_workers")
    assert not batch.helps and "Activations are in device memory" in batch.reason
    assert not persistent.helps and persistent.saves_bytes == 0 and "No change" in persistent.reason


def test_what_neither_script_nor_log_mentions_is_not_spoken_of():
    found = str(list_remedies(diagnosis("host_cgroup"), Job(request=Amount(GIB, "node"))))
    assert "batch" not in found and "persistent_workers" not in found
    printed = str(list_remedies(diagnosis("host_cgroup"), Job(request=Amount(GIB, "node"), mentioned=("batch",))))
    assert "a smaller batch" in printed


def test_a_job_under_memfit_is_told_of_memfits_settings_and_not_of_slurms():
    limit = {"used": 4 * GIB, "limit": 4 * GIB, "under_memfit": True}
    first = list_remedies(diagnosis("host_cgroup", **limit))[0]
    assert first.setting.startswith("--memory 6GiB; the budget or --limit above 6GiB")
    for found in (diagnosis("host_cgroup", **limit), diagnosis("host_kernel", under_memfit=True)):
        assert not re.search(r"--mem\b|--sacct|memfit run -- ", str(list_remedies(found)))
    assert "under memfit next time" not in str(list_remedies(diagnosis("none", cause="killed", under_memfit=True)))
    assert "under memfit next time" in str(list_remedies(diagnosis("none", cause="killed")))


def test_a_configuration_without_a_batch_asks_for_the_batch_and_not_for_itself():
    found = list_remedies(diagnosis("gpu", **card()), config=LLAMA)
    assert "--hf-config" not in str(found) and "--script" in one(found, "double the accumulation").reason


def test_persistent_workers_that_are_on_are_worth_a_change():
    on = replace(NODE, persistent_workers=True)
    assert one(list_remedies(diagnosis("host_cgroup", "validate"), on), "persistent_workers").helps


def test_fewer_workers_save_only_what_each_worker_holds_of_its_own():
    remedy = one(list_remedies(diagnosis("host_cgroup"), NODE), "loader workers")
    assert remedy.saves_bytes is None and "of its own" in remedy.reason


def test_fewer_tasks_on_a_node_are_offered_when_they_fit_the_nodes_memory():
    small = Job(**{**vars(NODE), "node_memory": Amount(256 * GIB, "node")})
    remedy = one(list_remedies(diagnosis("host_cgroup"), small), "3 tasks")
    assert remedy.enough and remedy.cost == "fewer devices at once"


@pytest.mark.parametrize(
    ("asked", "setting", "fit"),
    [
        (Amount(256 * GIB, "node"), "--mem=334G", "3 tasks"),
        (Amount(4 * GIB, "cpu"), "--mem-per-cpu=5344M", None),  # its 64 GiB of a task do not grow with fewer tasks
        (Amount(64 * GIB, "gpu"), "--mem-per-gpu=84G", None),
    ],
)
def test_a_tasks_peak_meets_a_request_of_each_node_cpu_or_gpu_in_that_ones_scope(asked, setting, fit):
    job = replace(NODE, cpus_per_task=16, gpus_per_node=4, node_memory=None, request=asked, script_request=asked)
    assert job.node_request == Amount(256 * GIB, "node")
    found = list_remedies(diagnosis("host_cgroup"), job)
    assert found[0].setting == setting and found[0].enough
    assert [one.title for one in found if "tasks per node" in one.title] == (
        [f"run {fit} per node instead of 4"] if fit else []
    )
    with pytest.raises(TypeError, match=r"72\.50 GiB of each task .* 256\.00 GiB of each node"):
        max(job.task_peak, job.node_request)


def test_segments_may_grow_only_where_the_slack_is_a_noticeable_share_of_the_card():
    wide = one(list_remedies(diagnosis("gpu_fragmentation", **card(allocated=19.0))), "expandable_segments")
    assert wide.helps and wide.saves_bytes == 4 * GIB and wide.enough is None
    thin = one(list_remedies(diagnosis("gpu_fragmentation", **card(tried=0.1))), "expandable_segments")
    assert not thin.helps and "unused; tensors hold 22.80 GiB" in thin.reason


def test_segments_that_grow_already_are_not_advised_again():
    job = Job(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert not one(list_remedies(diagnosis("gpu", **card(allocated=19.0)), job), "expandable_segments").helps


def test_memory_of_others_is_named_first_and_nobody_is_told_to_reset_the_card():
    found = list_remedies(diagnosis("gpu", **card(free=0.2, reserved=3.0, allocated=2.9)))
    assert "your own processes" in found[0].title and found[0].saves_bytes == int(24 * GIB) - int(0.2 * GIB) - 3 * GIB
    assert found[0].enough is None and "kill PID" in found[0].setting  # enough for that request; the next is not known
    assert "gpu-reset" not in str(found)


def test_the_driver_alone_is_no_foreign_process():
    found = list_remedies(diagnosis("gpu", **card(total=24.0, free=0.4, reserved=23.0)))
    assert not any("processes" in remedy.title for remedy in found)


def test_a_known_configuration_gives_each_change_its_bytes():
    job = Job(batch=8, options={"per_device_train_batch_size": "8", "bf16": "True", "max_seq_length": "1024"})
    found = list_remedies(diagnosis("gpu", **card()), job, config=LLAMA)
    half = one(found, "--per_device_train_batch_size 4 --gradient_accumulation_steps 2")
    assert half.saves_bytes > GIB and half.cost == "a few per cent"
    checkpointing = one(found, "--gradient_checkpointing")
    assert checkpointing.saves_bytes > half.saves_bytes / 2 and checkpointing.cost == "25 to 33 %"
    assert found.index(half) < found.index(checkpointing)
    assert all(remedy.saves_bytes for remedy in found if "An estimated" in remedy.reason)


def test_a_change_is_enough_by_itself_only_when_its_bound_fits_the_card():
    job = Job(batch=8, options={"per_device_train_batch_size": "8", "bf16": "True", "max_seq_length": "1024"})
    for total in (24, 80):
        figures = card(total=total, free=0.5, reserved=total - 1.0, allocated=total - 1.2)
        found = list_remedies(diagnosis("gpu", **figures), job, config=LLAMA)
        estimated = [one for one in found if "An estimated" in one.reason]
        assert len(estimated) > 3
        for remedy in estimated:
            value, bound = map(float, re.search(r"becomes ([\d.]+) GiB, at most ([\d.]+) GiB", remedy.reason).groups())
            assert remedy.enough is (True if bound <= total else False if value > total else None)


def test_a_process_that_the_message_names_is_named():
    figures = card(free=1.0, reserved=13.0, allocated=12.9)
    found = list_remedies(diagnosis("gpu", text="Process 4711 has 9.00 GiB memory in use.", **figures))
    assert "Process 4711 holds 10.00 GiB" in found[0].reason


def test_without_a_configuration_the_remedies_say_what_is_missing():
    remedy = one(list_remedies(diagnosis("gpu", **card()), Job(batch=8)), "gradient_accumulation_steps")
    assert remedy.saves_bytes is None and "--hf-config" in remedy.reason


@pytest.mark.parametrize(
    ("phase", "word"), [("validate", "inference_mode"), ("checkpoint", "map_location='cpu'"), ("build", "bfloat16")]
)
def test_what_a_device_needs_less_of_depends_on_the_phase(phase, word):
    assert one(list_remedies(diagnosis("gpu", phase, **card())), word).helps


def test_a_full_shm_gets_twice_its_size_and_at_least_2_gib():
    for before, size in ((64 * MIB, "2048m"), (4 * GIB, "8192m")):
        found = list_remedies(diagnosis("shm", "load"), Job(workers=4, shm_bytes=before))
        assert f"--shm-size={size}" in found[0].setting
        assert not one(found, "file_system").helps


def test_a_kill_that_nobody_explains_is_investigated_before_anything_is_changed():
    first = list_remedies(diagnosis("none", cause="killed"))[0]
    assert "find out who killed it" in first.title and not first.saves_bytes


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        ("walltime", "--time=18:30:00"),
        ("preempted", "--requeue"),
        ("segfault", "PYTHONFAULTHANDLER"),
        ("open_files", "file_system"),
        ("disk_full", "df -h"),
        ("collective_timeout", "the rank that stopped first"),
    ],
)
def test_other_causes_have_a_way_on_too(cause, word):
    found = list_remedies(diagnosis("none", cause=cause), Job(epochs=40, epoch_seconds=23 * 60))
    assert word in str(found)


def test_forty_epochs_of_23_minutes_do_not_need_two_days():
    [first, *_] = list_remedies(diagnosis("none", cause="walltime"), Job(epochs=40, epoch_seconds=23 * 60))
    assert "15h 20m" in first.reason and "+ 20%" in first.reason
    [longer, *_] = list_remedies(diagnosis("none", cause="walltime"), Job(epochs=40, epoch_seconds=75 * 60))
    assert longer.setting == "--time=2-12:00:00"


@pytest.mark.parametrize(
    ("job", "setting"),
    [
        (Job(batch=8), "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"),
        (Job(batch=22, options={"batch_size": "22"}), "batch_size=11 accumulate_grad_batches=2"),
    ],
)
def test_half_the_batch_is_written_in_the_scripts_words(job, setting):
    assert one(list_remedies(diagnosis("gpu", **card()), job), "halve the batch").setting == setting


def test_the_accounting_gives_the_scope_of_each_figure():
    text = (
        "JobID|State|ReqMem|MaxRSS|AveRSS|NTasks|NNodes\n"
        "7|OUT_OF_MEMORY|1T||||4\n7.batch|OUT_OF_MEMORY||2G|2G|1|1\n7.0|OUT_OF_MEMORY||72.5G|71.4G|16|4\n"
    )
    job = read_ran([], text).job
    assert (job.nodes, job.tasks_per_node, job.node_request) == (4, 4, Amount(256 * GIB, "node"))
    assert job.peak()[0].bytes == 4 * int(72.5 * GIB)
