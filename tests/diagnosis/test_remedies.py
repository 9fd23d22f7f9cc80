"""What to do about a death: ranked by speed, with bytes where they are known, in the words of who is there."""

import re
from dataclasses import replace

import pytest

from memfit.amounts import Amount
from memfit.diagnosis import REMEDIES, Diagnosis, Evidence, Job, diagnose, list_remedies
from memfit.units import GIB, MIB

KINDS, PHASES = ("host_kernel", "host_alloc", "pinned"), ("validate", "checkpoint", "build")
COSTS = ("none", "hardly any", "a few per cent", "25 to 33 %", "fewer devices at once", "not known")
NODE = Job(
    nodes=4, tasks_per_node=4, request=Amount(256 * GIB, "node"), batch=22, workers=2,
    task_peak=Amount(int(72.5 * GIB), "task"), task_mean=Amount(int(71.4 * GIB), "task"),
)  # fmt: skip
EPOCHS = Job(epochs=40, epoch_seconds=23 * 60)
PER_CPU = Amount(4 * GIB, "cpu")


def diagnosis(kind, phase="train", cause="out_of_memory", text="", under_memfit=False, whom=(), **figures):
    return Diagnosis(
        kind != "none", False, kind, cause, phase, "proved", figures, (Evidence("a.err", 1, text),),
        whom=(*whom, *(["memfit"] if under_memfit else [])),
    )  # fmt: skip


def card(total=24.0, free=0.5, reserved=23.0, allocated=22.8, tried=1.0):
    sizes = {"device_total": total, "free": free, "reserved": reserved, "allocated": allocated, "tried": tried}
    return {name: int(size * GIB) for name, size in sizes.items()}


def one(found, word):
    return next(remedy for remedy in found if word in remedy.title + remedy.setting)


@pytest.mark.proves("S3-41")
def test_what_helps_comes_by_its_cost_in_speed_and_what_does_not_comes_last():
    found = list_remedies(diagnosis("host_cgroup", "validate"), NODE)
    helps = [remedy.helps for remedy in found]
    assert helps == sorted(helps, reverse=True) and not all(helps)
    costs = [COSTS.index(remedy.cost) for remedy in found if remedy.helps]
    assert costs == sorted(costs)


OVER, CUT = {"used": 40 * GIB, "limit": 32 * GIB}, {"used": 32 * GIB, "limit": 32 * GIB}


@pytest.mark.proves("S3-13", "S3-18")
@pytest.mark.parametrize(
    ("job", "figures", "setting", "enough", "why"),
    [
        (NODE, {}, "--mem=334G", True, "4 x 72.5 GiB (MaxRSS of a task) = 290.00 GiB"),  # and 15 %
        (Job(request=Amount(300 * MIB, "node"), task_peak=Amount(MIB, "task")), {}, "--mem=512M", None, "missed its peak"),
        # a killer's own figures stand in for the accounting; a peak that was cut off is none
        (Job(), OVER, "--mem=46G (Slurm), docker run --memory 46G", True, "40.0 GiB (the node's own count)"),
        (Job(), CUT, "--mem=48G (Slurm), docker run --memory 48G", None, "cut it off"),
        (Job(), {}, "--mem=SIZE (Slurm), docker run --memory SIZE", None, "--sacct"),
        # in the unit of the script
        (Job(request=PER_CPU, script_request=PER_CPU), {}, "--mem-per-cpu=6G", None, "4.00 GiB of each CPU + 50%"),
        (replace(NODE, cpus_per_task=16, script_request=PER_CPU), {}, "--mem-per-cpu=5344M", True, "290.00 GiB"),
        (replace(NODE, gpus_per_node=4, script_request=Amount(GIB, "gpu")), {}, "--mem-per-gpu=84G", True, "290.00 GiB"),
        (Job(request=Amount(32 * GIB, "job")), {}, "--mem of each node, 48G over all of them", None, "+ 50%"),
    ],
)  # fmt: skip
def test_the_request_is_the_measured_peak_and_a_reserve_or_half_as_much_again(job, figures, setting, enough, why):
    first = list_remedies(diagnosis("host_cgroup", **figures), job)[0]
    assert first.setting.startswith(setting) and first.enough is enough and why in first.reason
    assert (first.saves_bytes is None) == (not job.limit and not figures)


@pytest.mark.parametrize(
    ("whom", "under_memfit", "said", "never"),
    [
        ("slurm", False, "--mem=46G", "docker"),
        ("dask", False, "memory_limit='46GiB'", r"--mem\b"),
        ("pbs", False, "-l mem=46gb", r"--mem\b"),
        ("lsf", False, "#BSUB -M 46GB", r"--mem\b"),
        ("kubernetes", False, "resources.limits.memory: 46Gi", r"--mem\b"),
        ("", True, "--memory 46GiB; the budget or --limit above 46GiB", r"--mem\b|--sacct|memfit run -- "),
    ],
)
def test_more_memory_is_asked_for_in_the_words_of_who_set_the_limit(whom, under_memfit, said, never):
    found = list_remedies(diagnosis("host_cgroup", whom=(whom,), under_memfit=under_memfit, **OVER))
    assert found[0].setting.startswith(said) and not re.search(never, str(found))


def test_a_job_under_memfit_is_told_of_memfits_settings():
    for found in (diagnosis("host_kernel", under_memfit=True), diagnosis("none", cause="killed", under_memfit=True)):
        assert not re.search(r"--mem\b|--sacct|memfit run -- ", str(list_remedies(found)))
    assert "memfit resume RUN" in str(list_remedies(diagnosis("none", cause="preempted", under_memfit=True)))
    assert "memfit run -- " in str(list_remedies(diagnosis("none", cause="killed")))


@pytest.mark.proves("S3-15", "S3-19", "S3-25")
@pytest.mark.parametrize(
    ("kind", "job", "whom", "said", "never"),
    [
        ("host_cgroup", NODE, (), "Activations are in device memory", "persistent_workers"),
        ("host_cgroup", NODE, (), "'use 1 loader workers', setting='num_workers=1'", "fewer loader workers"),
        ("host_cgroup", Job(request=Amount(GIB, "node")), (), "--mem", "batch|loader workers"),
        ("host_cgroup", Job(mentioned=("batch",)), ("loader",), "a smaller batch", "--hf-config"),
        ("host_cgroup", NODE, (), "run 3 tasks per node instead of 4", ""),
        # the memory of a task does not grow with fewer tasks where a CPU's was requested
        ("host_cgroup", replace(NODE, cpus_per_task=16, script_request=PER_CPU), (), "--mem-per-cpu", "tasks per node"),
        ("shm", Job(workers=4), (), "--shm-size=2g", "max_map_count"),
        ("shm", Job(), ("maps",), "vm.max_map_count", "--shm-size|loader workers"),
        ("gpu", Job(batch=8), (), "batch_size 4, gradients accumulated over 2 batches", "--per_device"),
        ("gpu", Job(), (), "batch_size N/2, gradients accumulated over twice as many batches", "--per_device"),
        ("gpu", Job(batch=22, options={"batch_size": "22"}), (), "batch_size=11 accumulate_grad_batches=2", ""),
        ("gpu", Job(batch=8), ("transformers",),
         "--per_device_train_batch_size 4 --gradient_accumulation_steps 2", "checkpoint.checkpoint"),
        ("gpu", Job(nodes=1, gpus_per_node=2), (), "Each of 2 devices holds a part", ""),
    ],
)  # fmt: skip
def test_what_the_job_and_its_log_show_decides_what_is_spoken_of(kind, job, whom, said, never):
    found = str(list_remedies(diagnosis(kind, whom=whom, **(card() if kind == "gpu" else {})), job))
    assert said in found and not (never and re.search(never, found))


def test_a_tasks_peak_is_never_held_against_a_node():
    with pytest.raises(TypeError, match=r"72\.50 GiB of each task .* 256\.00 GiB of each node"):
        max(NODE.task_peak, NODE.node_request)


def test_segments_may_grow_only_where_the_slack_is_a_noticeable_share_of_the_card():
    wide = one(list_remedies(diagnosis("gpu_fragmentation", **card(allocated=19.0))), "segments")
    assert wide.helps and wide.saves_bytes == 4 * GIB and wide.enough is None
    thin = one(list_remedies(diagnosis("gpu_fragmentation", **card(tried=0.1))), "expandable_segments")
    assert not thin.helps and "unused; tensors hold 22.80 GiB" in thin.reason
    on = Job(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert not one(list_remedies(diagnosis("gpu", **card(allocated=19.0)), on), "expandable_segments").helps


@pytest.mark.proves("S4-44", "C-24")
def test_memory_of_others_is_named_first_and_nobody_is_told_to_reset_the_card():
    found = list_remedies(diagnosis("gpu", **card(free=0.2, reserved=3.0, allocated=2.9)))
    assert "your own processes" in found[0].title and found[0].saves_bytes == int(24 * GIB) - int(0.2 * GIB) - 3 * GIB
    assert found[0].enough is None and "kill PID" in found[0].setting  # enough for that request; the next is not known
    assert "gpu-reset" not in str(found)
    figures = card(free=1.0, reserved=13.0, allocated=12.9)
    found = list_remedies(diagnosis("gpu", text="Process 4711 has 9.00 GiB memory in use.", **figures))
    assert "Process 4711 holds 10.00 GiB" in found[0].reason
    driver = list_remedies(diagnosis("gpu", **card(total=24.0, free=0.4, reserved=23.0)))
    assert not any("processes" in remedy.title for remedy in driver)


@pytest.mark.parametrize(
    ("phase", "word"), [("validate", "inference_mode"), ("checkpoint", "map_location='cpu'"), ("build", "bfloat16")]
)
def test_what_a_device_needs_less_of_depends_on_the_phase(phase, word):
    assert one(list_remedies(diagnosis("gpu", phase, **card())), word).helps


@pytest.mark.proves("S3-24")
@pytest.mark.parametrize(
    ("cause", "word"),
    [
        ("walltime", "--time=18:30:00"),
        ("walltime", "from any checkpoint"),
        ("walltime", "40 epochs x 23m 00s = 15h 20m; + 20% = 18h 30m"),
        ("preempted", "on its signal"),
        ("segfault", "PYTHONFAULTHANDLER"),
        ("aborted", "the message above the abort"),
        ("bus_error", "df -h FILE /dev/shm"),
        ("worker_exited", "num_workers=0"),
        ("limit_touched", "--mem"),
        ("open_files", "ulimit -n"),
        ("disk_full", "df -h"),
        ("collective_timeout", "the rank that stopped first"),
        ("killed", "find out who killed it"),
    ],
)
def test_other_causes_have_a_way_on_too(cause, word):
    assert word in str(list_remedies(diagnosis("none", cause=cause), EPOCHS)[:2])


@pytest.mark.parametrize(
    ("text", "said", "never"),
    [
        ("RuntimeError: CUDA error: invalid device ordinal", "--nproc_per_node", "that the line names"),
        ("ImportError: libgomp.so.1: cannot allocate memory in static TLS block", "LD_PRELOAD", "pip install"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.", "--exclude", "torch build"),
        ("RuntimeError: unable to mmap 2048 bytes from file <filename not specified>: Cannot allocate memory (12)",
         "vm.max_map_count", "--shm-size"),
        ("AssertionError: loss is NaN at step 4", "read the condition", "CUDA"),
        ("systemd-oomd[812]: Killed /user.slice/app.slice/vte.scope due to memory pressure for /user.slice being 71.2% > "
         "50.00% for > 20s with reclaim activity", "systemd-run", "--max-parallel"),
        ("distributed.nanny - WARNING - Worker process 81943 was killed by signal 15", "memory_limit=", "--mem"),
        ("RuntimeError: CUDA error: out of memory", "see who holds memory of the device", "loader"),
        ("RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 0 bytes already "
         "allocated; 0 bytes reserved in total by PyTorch)", "would fit: others, or a limit", "PYTORCH_XPU"),
        ("slurmstepd: error: x\ndistributed.nanny - WARNING - Worker exceeded 95% memory budget. Restarting",
         "memory_limit='SIZE'", "--mem=SIZE"),
        ("distributed.nanny.memory - WARNING - Worker tls://10.0.0.84:34937 (pid=957) exceeded 0% memory budget. "
         "Restarting...", "memory.terminate", "the line names"),
    ],
)  # fmt: skip
def test_the_deciding_line_chooses_among_the_rows_of_its_cause(tmp_path, text, said, never):
    (tmp_path / "a.log").write_text(f"epoch 1 step 3 loss 0.3\n{text}\n")
    found = str(list_remedies(diagnose(tmp_path / "a.log")))
    assert said in found and never not in found


@pytest.mark.parametrize(("key", "remedy"), [(key, one) for key, rows in REMEDIES.items() for one in rows if one.whom])
def test_a_row_for_some_is_advised_where_they_speak_and_nowhere_else(key, remedy):
    kind, phase = (key, "train") if key in KINDS else ("gpu", key) if key in PHASES else ("none", "train")
    cause = "out_of_memory" if kind != "none" else key
    words = remedy.whom.split()
    there = tuple(word for word in words if not word.startswith("-"))
    others = [(word.lstrip("-"),) for word in words if word.startswith("-")]
    for whom in (there, *([()] if there else others)):
        found = list_remedies(diagnosis(kind, phase, cause, whom=whom, **(card() if kind == "gpu" else {})))
        assert (remedy in found) == (whom == there)
