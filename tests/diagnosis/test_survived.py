"""What a job survived is told from what ended it.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from memfit.diagnosis._diagnose import diagnose
from reading import look

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
CASES = [
    (
        "chain",
        (
            "[rank3]: Traceback (most recent call last):\n"
            '[rank3]:   File "train.py", line 5, in train\n'
            "[rank3]:     loss.backward()\n"
            "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 0 has a total capacity of 39.39 GiB of which 1.10 GiB is free. Process 4242 has "
            "38.20 GiB memory in use. Of the allocated memory 37.00 GiB is allocated by PyTorch, "
            "and 500.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
            "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
            "avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)\n"
            "[rank0]:[E429 14:55:49.3 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=4242, OpType=ALLREDUCE, "
            "Timeout(ms)=600000) ran for 600028 milliseconds before timing out.\n"
            "[rank0]: RuntimeError: NCCL communicator was aborted on rank 0."
        ),
        "gpu",
        False,
        "train",
        2,
        None,
    ),
    (
        "skip batch",
        (
            "INFO Iteration: 14/1184, epoch 0, Loss: 0.006\n"
            "DEBUG CUDA out of memory. Tried to allocate 422.00 MiB (GPU 0; 15.78 GiB total "
            "capacity; 13.10 GiB already allocated; 372.75 MiB free; 13.78 GiB reserved in total "
            "by PyTorch)\n"
            "WARNING CUDA OOM Error during batch execution, skipping batch.\n"
            "INFO Iteration: 15/1184, epoch 0, Loss: 0.0056\n"
            "INFO Iteration: 16/1184, epoch 0, Loss: 0.0046"
        ),
        "gpu_fragmentation",
        True,
        "train",
        0.4121094,
        None,
    ),
    (
        "fairseq warn",
        (
            "2022-08-21 00:29:47 | WARNING | fairseq.trainer | ran out of memory in "
            "forward/backward, skipping batch\n"
            "2022-08-21 00:29:50 | INFO | train_inner | epoch 001:    100 / 500 loss=9.1, "
            "num_updates=100, lr=0.1, oom=1\n"
            "2022-08-21 00:29:55 | INFO | train_inner | epoch 001:    110 / 500 loss=9.0, "
            "num_updates=110, lr=0.1, oom=1"
        ),
        "gpu",
        True,
        "train",
        None,
        None,
    ),
    (
        "fairseq warn2",
        (
            "| WARNING: ran out of memory, retrying batch\n"
            "| epoch 001:    110 / 500 loss=9.0, ppl=10.1, num_updates=110, lr=0.1, oom=0"
        ),
        "gpu",
        True,
        "train",
        None,
        None,
    ),
    (
        "fairseq oom fatal",
        (
            "2022-08-21 00:29:47 | WARNING | fairseq.trainer | OOM: Ran out of memory with "
            "exception: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 4; 79.17 GiB total "
            "capacity; 74.52 GiB already allocated; 1.14 GiB free; 75.54 GiB reserved in total "
            "by PyTorch)\n"
            "2022-08-21 00:29:47 | ERROR | fairseq.trainer | OOM during optimization, "
            "irrecoverable\n"
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB "
            "total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB reserved in "
            "total by PyTorch)"
        ),
        "gpu",
        False,
        "train",
        2,
        None,
    ),
    (
        "fsdp clone",
        (
            "{'loss': 1.317, 'learning_rate': 0.0, 'epoch': 1.0}\n"
            "{'train_runtime': 601.9, 'train_loss': 1.47, 'epoch': 1.0}\n"
            "/env/torch/distributed/fsdp/_state_dict_utils.py:312: UserWarning: Failed to "
            "clone() tensor with name lm_head.weight on rank 1. This may mean that this "
            "state_dict entry could point to invalid memory regions after returning from "
            "state_dict() call if this parameter is managed by FSDP. Please check clone "
            "implementation of lm_head.weight. Error: CUDA out of memory. Tried to allocate "
            "270.00 MiB (GPU 1; 79.35 GiB total capacity; 76.93 GiB already allocated; 72.19 MiB "
            "free; 76.98 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
            "memory\n"
            "  warnings.warn("
        ),
        "gpu",
        True,
        "checkpoint",
        0.2636719,
        None,
    ),
    (
        "accelerate find bs",
        (
            "Trying batch size 64\n"
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB "
            "total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB reserved in "
            "total by PyTorch)\n"
            "Decreasing batch size to: 32.\n"
            "Step 1 loss 0.3\n"
            "Step 2 loss 0.3\n"
            "Step 3 loss 0.2"
        ),
        "gpu",
        True,
        "train",
        2,
        None,
    ),
    (
        "yolo autobatch",
        (
            "AutoBatch: WARNING CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB "
            "total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB reserved in "
            "total by PyTorch)\n"
            "AutoBatch: Using batch-size 16 for CUDA:0 20.0G/31.75G (63%)\n"
            "  Epoch    gpu_mem       box\n"
            "   0/299    10.1G    0.09\n"
            "   1/299    10.1G    0.08"
        ),
        "gpu",
        True,
        "build",
        2,
        None,
    ),
    (
        "retry progress",
        (
            "step 10 loss 0.5\n"
            "step 11 loss 0.5\n"
            "Caught: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 "
            "GiB total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB "
            "reserved in total by PyTorch)\n"
            "step 12 loss 0.5\n"
            "step 13 loss 0.5\n"
            "step 14 loss 0.5\n"
            "step 15 loss 0.5"
        ),
        "gpu",
        True,
        "train",
        2,
        None,
    ),
    (
        "retry then die",
        (
            "step 10 loss 0.5\n"
            "Caught: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 "
            "GiB total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB "
            "reserved in total by PyTorch)\n"
            "step 11 loss 0.5\n"
            "step 12 loss 0.5\n"
            "step 13 loss 0.4\n"
            "Traceback (most recent call last):\n"
            '  File "train.py", line 5, in train\n'
            "    loss.backward()\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
            "total capacity of 39.39 GiB of which 1.10 GiB is free. Process 4242 has 38.20 GiB "
            "memory in use. Of the allocated memory 37.00 GiB is allocated by PyTorch, and "
            "500.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
            "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
            "avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        ),
        "gpu",
        False,
        "train",
        2,
        None,
    ),
    (
        "retry then ima",
        (
            "step 10 loss 0.5\n"
            "Caught: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 "
            "GiB total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB "
            "reserved in total by PyTorch)\n"
            "step 11 loss 0.5\n"
            "step 12 loss 0.5\n"
            "step 13 loss 0.4\n"
            "Traceback (most recent call last):\n"
            '  File "train.py", line 5, in train\n'
            "    loss.backward()\n"
            "RuntimeError: CUDA error: an illegal memory access was encountered"
        ),
        "none",
        True,
        "train",
        None,
        "illegal_access",
    ),
    (
        "ds flush",
        (
            "[2022-07-13 21:09:13,651] [WARNING] [stage3.py:2391:step] 2 pytorch allocator cache "
            "flushes since last step. this happens when there is high memory pressure and is "
            "detrimental to performance.\n"
            "[2022-07-13 21:09:13,651] step 5 loss 1.2"
        ),
        "none",
        True,
        "train",
        None,
        None,
    ),
    (
        "optuna",
        (
            "[I 2024-03-01 10:00:00,000] Trial 3 finished with value: 0.3\n"
            "[W 2024-03-01 10:01:00,000] Trial 4 failed with parameters: {'bs': 512} because of "
            "the following error: OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 "
            "GiB (GPU 0; 31.75 GiB total capacity; 28.20 GiB already allocated; 131.50 MiB free; "
            "28.33 GiB reserved in total by PyTorch)').\n"
            "[I 2024-03-01 10:02:00,000] Trial 5 finished with value: 0.2\n"
            "[I 2024-03-01 10:03:00,000] Trial 6 finished with value: 0.2"
        ),
        "gpu",
        True,
        None,
        2,
        None,
    ),
    (
        "rerank healthy",
        (
            "2024 [rank1] iter 10\n"
            "Memory Allocated 12 GB, Max memory reserved 14 GB, CUDA OOMs: 0\n"
            "iter 20\n"
            "RAM used 50%\n"
            "Training finished"
        ),
        "none",
        False,
        "train",
        None,
        None,
    ),
    (
        "hint",
        ("If you encounter CUDA out of memory, try reducing --batch-size.\nepoch 1 loss 1.2\nepoch 2 loss 1.1"),
        "none",
        False,
        "train",
        None,
        None,
    ),
    (
        "hint2",
        (
            "Note: training may fail with 'CUDA out of memory' on GPUs with < 24 GB\n"
            "Starting...\n"
            "epoch 1 loss 1.2\n"
            "epoch 2 loss 1.1\n"
            "Done."
        ),
        "none",
        False,
        "train",
        None,
        None,
    ),
    (
        "rematerialization",
        (
            "2023 W external/xla/xla/service/hlo_rematerialization.cc:2202] Can't reduce memory "
            "use below 12.3GiB (13207024640 bytes) by rematerialization; only reduced to 15.0GiB\n"
            "step 1 loss 3.2\n"
            "step 2 loss 3.1"
        ),
        "none",
        True,
        "train",
        None,
        None,
    ),
    (
        "healthy hf",
        (
            "{'loss': 0.88, 'learning_rate': 0.0003, 'epoch': 0.29}\n"
            "{'loss': 0.87, 'learning_rate': 0.0003, 'epoch': 0.30}\n"
        ),
        "none",
        False,
        "train",
        None,
        None,
    ),
    (
        "tf warn progress",
        (
            "Epoch 1/5\n"
            "  10/100 [==>...] - ETA: 3:57 - loss: 1.7\n"
            "2018-11-25 19:04:59: W tensorflow/core/common_runtime/bfc_allocator.cc:215] "
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 217.69MiB. The caller "
            "indicates that this is not a failure, but may mean that there could be performance "
            "gains if more memory were available.\n"
            "  11/100 [==>...] - ETA: 3:57 - loss: 1.6\n"
            "  12/100 [==>...] - ETA: 3:57 - loss: 1.5"
        ),
        "none",
        True,
        "train",
        None,
        None,
    ),
]


@pytest.mark.parametrize(
    ("text", "kind", "recovered", "phase", "tried", "cause"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_the_text_gives_kind_phase_figure_and_cause(text, kind, recovered, phase, tried, cause):
    found = look(text)
    assert (found.kind, found.recovered) == (kind, recovered)
    assert found.oom == (kind != "none")
    assert phase is None or found.phase == phase
    assert cause is None or found.cause == cause
    if tried is None:
        assert "tried" not in found.figures
    else:
        assert found.figures["tried"] / 2**30 == pytest.approx(tried, rel=1e-3)


KILL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={group},task_memcg={group},task=python,pid={pid}\n"
    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:8kB, anon-rss:4kB, file-rss:0kB\n"
)


@pytest.mark.parametrize(
    ("group", "pid", "cause"),
    [
        ("/job", 4260, "out_of_memory"),
        ("/job", 777, "killed"),
        ("/docker/" + "ab" * 32, 777, "out_of_memory"),
        ("/lxc/train", 777, "out_of_memory"),
    ],
)
def test_a_kernels_kill_of_another_process_is_not_the_jobs_but_in_a_container_numbers_differ(
    tmp_path, group, pid, cause
):
    (tmp_path / "log").write_text("epoch 1 step 3 loss 0.1\ntrain.sh: line 2:  4260 Killed   python train.py\n")
    (tmp_path / "kernel").write_text(KILL.format(group=group, pid=pid))
    found = diagnose(tmp_path / "log", kernel_log=tmp_path / "kernel")
    assert (found.cause, found.phase) == (cause, "train")


def test_where_the_kernels_log_decides_phase_and_rank_are_those_of_the_jobs_own_log(tmp_path):
    steps = "".join(f"epoch 1 step {step} loss 0.1\n" for step in range(50))
    (tmp_path / "log").write_text(
        f"{steps}torch/distributed/elastic/api.py failed (exitcode: -9) local_rank: 1 (pid: 777) of binary: python\n"
    )
    (tmp_path / "kernel").write_text(KILL.format(group="/job", pid=777))
    found = diagnose(tmp_path / "log", kernel_log=tmp_path / "kernel")
    assert (found.cause, found.phase, found.where["rank"], found.where["pid"]) == ("out_of_memory", "train", 1, 777)


REFUSED = "cuda_driver.cc:7] failed to allocate 1.00G (1073741824 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY"
COUNTED = "slurmstepd: error: Detected 1 oom_kill event in StepId=48.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("text", "recovered"),
    [
        (f"{REFUSED}: out of memory\n100/100 [======] - 5s", True),
        (f"100/100 [======] - 5s\n{REFUSED}: out of memory", False),
        ("failed to allocate 9.00 MB of pinned memory: out of memory\nmain: server is listening on port 80", True),
        ("failed to allocate 9.00 MB of pinned memory: out of memory\nfailed to initialize the context", False),
        ("RuntimeError: CUDA error: out of memory\nUvicorn running on port 80", False),
        ("Decreasing batch size to: 64.\nRuntimeError: No executable batch size found, reached zero.", False),
        (f"Epoch 1\n{COUNTED}\nEpoch 2\nEpoch 3\nEpoch 4\nTraining finished.", True),
        (f"Epoch 1\n{COUNTED}\nEpoch 2\nEpoch 3\nEpoch 4", False),
        (f"Epoch 1\n{COUNTED}\nTraining finished.", False),
        ("WARNING - Attempting to copy inputs of <function iou at 0x7f> to CPU due to CUDA OOM\niter 3\niter 4", True),
        ("Decreasing batch size to: 64.\nstep 10\nstep 20", True),
        ("Batch size 512 failed, trying batch size 256\nstep 10\nstep 20", True),
    ],
)
def test_a_shortage_is_survived_where_the_log_goes_on_to_say_so(text, recovered):
    assert (look(text).oom, look(text).recovered) == (True, recovered)


def test_what_somebody_asks_in_a_log_of_a_conversation_is_not_the_logs_own_death():
    said = "my training stops with torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    chat = f"Sample 9/10\n{{}}{said}\nassistant: Use a smaller batch.\nSample 10/10\nEvaluation finished in 31 s"
    for name in ("user: ", "Human> ", '{"role": "user", "content": '):
        found = look(chat.format(name))
        assert (found.oom, found.cause) == (False, "completed")
    assert look(said).oom
