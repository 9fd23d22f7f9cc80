"""A diagnosis from files: folders, packed and mixed logs, its fields, and bytes of any kind."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.diagnosis import diagnose
from memfit.errors import UsageError
from reading import look

OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 31.75 GiB total capacity; 20.20 GiB already"
    " allocated; 131.50 MiB free; 22.33 GiB reserved in total by PyTorch)"
)
CHAIN = f"""2024-03-01 10:00:00 starting
2024-03-01 10:05:00 step 10 loss 0.5
2024-03-01 10:06:00 step 11 loss 0.5
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 7, in train
[rank3]:     loss.backward()
[rank3]: {OOM}
[rank0]:[E429 11:06:10 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(Seq=7)
"""


@pytest.mark.proves("S3-04")
def test_the_first_failure_is_the_cause_and_the_timeout_an_hour_later_is_a_consequence(tmp_path):
    (tmp_path / "job.out").write_text(f"{CHAIN}[rank2]: {OOM}\n")  # the last line follows from nothing
    found = diagnose(tmp_path / "job.out")
    assert (found.oom, found.kind, found.phase, found.recovered) == (True, "gpu_fragmentation", "train", False)
    assert (found.where["rank"], found.where["device"]) == (3, 3)
    moments = [("start", 1), ("last progress", 3), ("failure", 7), ("consequence", 8)]
    assert [(one.what, one.line) for one in found.timeline] == moments
    assert found.timeline[0].time == "2024-03-01 10:00:00"
    assert [(one.file, one.line) for one in found.evidence] == [(str(tmp_path / "job.out"), 7)]


EPOCH = """2025-10-16 14:11:10 training starts, max_epochs=40
Epoch 0:   0%|          | 0/242 [00:00<?, ?it/s]
Epoch 0:  50%|#####     | 121/242 [11:27<11:27, 0.18it/s, loss=9.1]
Epoch 0: 100%|##########| 242/242 [22:54<00:00, 0.18it/s, loss=5.19]
Training completed
"""
OOM_KILL = (
    "slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0. Some of the step tasks have been OOM Killed."
)


def test_the_end_of_a_bar_has_the_time_of_the_line_before_it():
    times = {one.what: one.time for one in look(EPOCH + OOM_KILL).timeline}
    assert times["start"] == "2025-10-16 14:11:10"
    assert times["last progress"] == times["failure"] == "2025-10-16 14:11:10"
    stamped = EPOCH.replace("Epoch 0:  50%", "2025-10-16 14:22:37 | Epoch 0:  50%") + OOM_KILL
    assert look(stamped).timeline[-1].time == "2025-10-16 14:22:37"


def test_a_log_that_says_it_is_done_too_early_is_doubted_beside_the_kill_too(tmp_path):
    said = "the log says that it is done after 1 of 40 epochs"
    assert (look(EPOCH).cause, look(EPOCH).arithmetic[0]) == ("incomplete", said)
    assert look(EPOCH + OOM_KILL).arithmetic == (said,)
    (tmp_path / "job.out").write_text(EPOCH)
    (tmp_path / "job.err").write_text(OOM_KILL)
    found = diagnose(tmp_path)
    assert (found.kind, found.arithmetic) == ("host_cgroup", (said,))


def test_the_arithmetic_names_memory_of_others_with_its_scope():
    sentences = look(CHAIN).arithmetic
    assert any("Memory of others on GPU 3: 31.75 GiB total - 131.5 MiB free - 22.33 GiB" in text for text in sentences)


def test_the_json_has_every_key_and_is_plain():
    found = json.loads(json.dumps(look(CHAIN).to_dict()))
    keys = {"oom", "recovered", "kind", "cause", "phase", "confidence", "evidence", "remedies"}
    assert keys | {"where", "timeline", "arithmetic", "checks"} <= found.keys()
    assert (found["device_total_gib"], found["tried_gib"], found["reserved_gib"]) == (31.75, 2.0, 22.33)
    assert found["evidence"][0].keys() == {"file", "line", "text"}


def test_a_folder_of_logs_is_read_whole_packed_ones_too(tmp_path):
    (tmp_path / "job.out").write_text("step 1 loss 0.5\nstep 2 loss 0.4\n")
    (tmp_path / "job.err.gz").write_bytes(gzip.compress(OOM.encode()))
    (tmp_path / "notes.md").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.")
    found = diagnose(tmp_path)
    assert (found.kind, found.evidence[0].file) == ("gpu_fragmentation", str(tmp_path / "job.err.gz"))


@pytest.mark.proves("S3-01")
def test_the_kernel_s_log_and_the_scheduler_s_account_count_too(tmp_path):
    (tmp_path / "job.out").write_text("step 1 loss 0.5\nKilled\n")
    (tmp_path / "dmesg").write_text(
        "Mar  1 10:00:00 node7 kernel: Memory cgroup out of memory: Killed process 77 (python)"
        " total-vm:9kB, anon-rss:8kB\n"
    )
    (tmp_path / "sacct").write_text("JobID State ExitCode\n9 OUT_OF_ME+ 0:125\n")
    assert diagnose(tmp_path / "job.out").cause == "killed"
    killed = diagnose(tmp_path / "job.out", kernel_log=tmp_path / "dmesg")
    assert (killed.kind, killed.cause, killed.where["host"], killed.where["pid"]) == (
        "host_cgroup",
        "out_of_memory",
        "node7",
        77,
    )
    assert diagnose(tmp_path / "job.out", sacct=tmp_path / "sacct").kind == "host_cgroup"


def test_a_path_that_is_not_there_and_a_folder_without_logs_say_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="Cannot read"):
        diagnose(tmp_path / "missing.log")
    with pytest.raises(UsageError, match="No log in"):
        diagnose(tmp_path)


def test_nothing_said_is_unknown_and_healthy_is_completed():
    unknown, healthy = look("hello\n"), look("epoch 1 loss 0.5\nepoch 2 loss 0.4\nTraining finished\n")
    assert (unknown.cause, unknown.confidence, unknown.oom) == ("unknown", "not shown", False)
    assert unknown.checks
    assert (healthy.cause, healthy.oom) == ("completed", False)


ONE_OF_FORTY = """max_epochs: 40
Epoch 0: 100%|##########| 242/242 [22:54<00:00,  0.21it/s, loss=5.19]
"""


def test_a_claim_of_success_after_one_epoch_of_forty_is_incomplete():
    found = look(f"{ONE_OF_FORTY}Training completed\n")
    assert (found.oom, found.kind, found.cause) == (False, "none", "incomplete")
    assert found.arithmetic[0] == "the log says that it is done after 1 of 40 epochs"
    assert [one.line for one in found.evidence] == [2, 3]


def test_two_logs_of_one_job_are_one_story(tmp_path):
    (tmp_path / "job.out").write_text(
        "[2025-10-16 14:11:10] Starting training, max_epochs: 40\n[2025-10-16 14:34:04] Training completed\n"
    )
    (tmp_path / "job.err").write_text(ONE_OF_FORTY.partition("\n")[2] + OOM_KILL)
    found = diagnose([tmp_path / "job.out", tmp_path / "job.err"])
    assert found.arithmetic[0] == "the log says that it is done after 1 of 40 epochs"
    assert ("says it is done", "2025-10-16 14:34:04") in [(one.what, one.time) for one in found.timeline]


@pytest.mark.parametrize(
    "text",
    [
        f"{ONE_OF_FORTY}Early stopping: valid_loss did not improve\nTraining completed after early stopping\n",
        f"{ONE_OF_FORTY}EarlyStopping: val_loss did not improve for 3 epochs\nTraining complete.\n",
        f"{ONE_OF_FORTY}Monitored metric val_loss. Signaling Trainer to stop.\nTraining finished.\n",
        f"{ONE_OF_FORTY}No improvement for 3 epochs, stopping.\nTraining completed\n",
        f"{ONE_OF_FORTY}`Trainer.fit` stopped: `max_steps=242` reached.\n",
        ONE_OF_FORTY.replace("Epoch 0", "Epoch 39") + "Training completed\n",
        ONE_OF_FORTY.replace("40", "1") + "Training completed\n",
        "max_epochs: 40\nTraining completed\n",
    ],
)
def test_a_claim_with_a_reason_or_at_the_last_epoch_is_believed(text):
    assert look(text).cause == "completed"


@pytest.mark.proves("S3-06")
def test_success_is_proved_by_an_end_marker_with_status_0_and_doubted_by_any_other_status(tmp_path):
    log, sacct = tmp_path / "job.out", tmp_path / "sacct"
    log.write_text("epoch 1 loss 0.5\nTraining finished\n")
    for row, cause, confidence in (
        ("7|COMPLETED|0:0", "completed", "proved"),
        ("7|FAILED|1:0", "incomplete", "likely"),
    ):
        sacct.write_text(f"JobID|State|ExitCode\n{row}\n")
        found = diagnose(log, sacct=sacct)
        assert (found.cause, found.confidence, found.oom) == (cause, confidence, False)
    assert "exit status 1" in found.arithmetic[0] and found.evidence[-1].text == "7|FAILED|1:0"
    alone = diagnose(log)
    assert (alone.cause, alone.confidence) == ("completed", "likely") and "does not prove" in alone.checks[0]


@pytest.mark.proves("S3-06")
def test_an_empty_checkpoint_beside_a_log_makes_its_success_doubtful(tmp_path):
    (tmp_path / "job.out").write_text("epoch 1 loss 0.5\nTraining finished\n")
    (tmp_path / "last.ckpt").write_bytes(b"")
    found = diagnose(tmp_path)
    assert (found.cause, found.arithmetic) == ("incomplete", ("checkpoints that cannot be loaded: last.ckpt",))
    (tmp_path / "last.ckpt").write_bytes(b"x")
    assert diagnose(tmp_path).cause == "completed"


def test_a_checkpoint_that_a_warning_hides_is_to_be_checked():
    warning = (
        "{'loss': 1.3, 'epoch': 1.0}\n/env/torch/distributed/fsdp/_state_dict_utils.py:312:"
        " UserWarning: Failed to clone()"
        " tensor with name head.weight on rank 1. Error: CUDA out of memory. Tried to allocate"
        " 270.00 MiB (GPU 1; 79.35 GiB"
        " total capacity; 76.93 GiB already allocated; 72.19 MiB free; 76.98 GiB reserved in total by PyTorch)\n"
    )
    found = look(warning)
    assert (found.kind, found.recovered, found.phase) == ("gpu", True, "checkpoint")
    assert "checkpoint" in found.checks[0]


@pytest.mark.parametrize("cut", range(20, len(OOM), 17))
def test_a_message_that_is_cut_anywhere_never_gives_a_wrong_figure(cut):
    found = look(OOM[:cut])
    for name, size in found.figures.items():
        whole = look(OOM).figures[name]
        assert size == whole or not OOM[:cut].rstrip().endswith(")")
        assert size <= whole


_WORDS = st.sampled_from(
    [
        OOM,
        "Traceback (most recent call last):",
        '  File "train.py", line 1, in train',
        "Killed",
        "step 3",
        "[rank1]: boom",
        "0: x",
        "slurmstepd: error: Detected 9 oom_kill events in StepId=",
        "MPS backend out of memory (MPS allocated: ., max allowed: 1.1.1 GB)",
        "exceeded .% memory budget. Restarting",
        "oom=1e-9",
        f"RuntimeError: CUDA out of memory. Tried to allocate {'9' * 5000} GiB",
        f"MemoryError: Unable to allocate {'9' * 400} GiB for an array with shape (9,)",
        f"Worker (pid={'9' * 5000}) exceeded 95% memory budget. Restarting",
        "100%|####| 9/9 [00:01]",
        "\r",
        "│ x │",
    ]
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=3000))
def test_bytes_of_any_kind_are_diagnosed_without_an_error(raw):
    for head in (b"", b"\x1f\x8b\x08", b"\xff\xfe", b"[rank0]: "):
        json.dumps(look(head + raw).to_dict())


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(_WORDS, st.text(max_size=40)), max_size=25))
def test_messages_torn_and_mixed_are_diagnosed_without_an_error(pieces):
    found = look("\n".join(pieces).encode("utf-8", errors="replace").decode())
    assert found.oom == (found.kind != "none")
    assert found.confidence in ("proved", "likely", "not shown")


def test_a_kill_that_nothing_links_to_the_job_explains_no_other_end(tmp_path):
    (tmp_path / "dmesg").write_text(
        "Memory cgroup out of memory: Killed process 991 (java) total-vm:9kB, anon-rss:8kB\n"
    )
    for text, cause in (
        ("step 1 loss 0.5\nSegmentation fault (core dumped)\n", "segfault"),
        ("step 1 loss 0.5\nTraining finished.\n", "completed"),
    ):
        (tmp_path / "job.out").write_text(text)
        assert diagnose(tmp_path / "job.out", kernel_log=tmp_path / "dmesg").cause == cause
    (tmp_path / "job.out").write_text("step 1 loss 0.5\nKilled\n")
    found = diagnose(tmp_path / "job.out", kernel_log=tmp_path / "dmesg")
    assert (found.kind, found.confidence) == ("host_cgroup", "likely")


@pytest.mark.proves("S3-28")
@pytest.mark.parametrize(
    "line",
    [
        "Epoch 3/9 ━━━━━━━━╸      120/242 0:01:09 • 0:01:12 1.68it/s",
        "Epoch: [3][ 120/242]  loss 0.3",
        "       3/9      4.1G     0.05     0.02",
    ],
)
def test_counters_of_rich_torchvision_and_yolo_are_progress(line):
    found = look(f"hello\n{line}\n{OOM}")
    assert [(one.line, one.text) for one in found.timeline if one.what == "last progress"] == [(2, line)]


#: What two nodes with two ranks left, with the error of a broken sum as long as the console is wide.
RANKS_KILLED = """epoch 1/3 step 20/40 loss 0.196
epoch 1/3 step 30/40 loss 0.093
epoch 1/3 step 40/40 loss 0.060
validation: loading the table
slurmstepd-n0: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed by the \
cgroup out-of-memory handler.
slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed by the \
cgroup out-of-memory handler.
[rank3]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33451. \
This is typically caused by a remote worker crashing.
[rank1]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:56494. \
This is typically caused by a remote worker crashing.
srun: error: n1: task 2: Out Of Memory
"""
RANKS_SACCT = """JobID|JobName|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes
1|ranks|FAILED|1:0|1800M||||2
1.0|python|OUT_OF_MEMORY|0:125||578996K|251052K|4|2
"""


def test_a_kill_at_the_first_validation_names_the_task_and_its_node_and_that_nothing_was_saved(tmp_path):
    (tmp_path / "sacct.txt").write_text(RANKS_SACCT)

    def found(text):
        (tmp_path / "slurm-1.out").write_text(text)
        return diagnose(tmp_path / "slurm-1.out", sacct=tmp_path / "sacct.txt")

    one = found(RANKS_KILLED)
    assert (one.kind, one.phase, one.where["rank"], one.where["node"]) == ("host_cgroup", "validate", 2, "n1")
    assert "MaxRSS is one task's, and samples can miss the peak" in one.arithmetic[0]
    assert (
        "what ranks 1, 3 say of a collective follows" in one.notes[0] and "No line names a checkpoint" in one.notes[1]
    )
    assert len(found(f"saved last.pt\n{RANKS_KILLED}").notes) == 1
