"""Other ends: schedulers, signals, limits, code; none of them is called a shortage of memory.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from reading import look

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
#: A short case has the name, text, kind and cause only.
CASES = [
    (
        "time",
        (
            "Epoch 3: loss 0.2\n"
            "slurmstepd: error: *** JOB 998 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 DUE TO "
            "TIME LIMIT ***"
        ),
        "none",
        False,
        "train",
        None,
        "walltime",
    ),
    (
        "time new",
        (
            "slurmstepd: error: *** STEP 998.0 ON gpu[03-04] CANCELLED AT 2024-03-01T10:00:00 "
            "DUE TO TIME LIMIT ***\n"
            "srun: error: gpu03: task 0: Killed"
        ),
        "none",
        "walltime",
    ),
    (
        "preempt",
        (
            "slurmstepd: error: *** JOB 998 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 DUE TO "
            "PREEMPTION ***\n"
            "srun: error: gpu03: task 0: Killed"
        ),
        "none",
        "preempted",
    ),
    (
        "preempt 2",
        ("slurmstepd: error: *** JOB 998 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 DUE to PREEMPTION ***"),
        "none",
        "preempted",
    ),
    (
        "node",
        (
            "slurmstepd: error: *** JOB 998 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 DUE TO "
            "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
        ),
        "none",
        "node_fail",
    ),
    (
        "srun node",
        (
            "srun: error: Node failure on gpu03\n"
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
            "srun: error: gpu03: task 0: Killed"
        ),
        "none",
        "node_fail",
    ),
    (
        "scancel",
        ("Epoch 3 loss 0.1\nslurmstepd: error: *** JOB 998 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 ***"),
        "none",
        False,
        "train",
        None,
        "cancelled",
    ),
    (
        "scancel killed",
        (
            "slurmstepd: error: *** STEP 998.0 ON gpu03 CANCELLED AT 2024-03-01T10:00:00 ***\n"
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
            "srun: error: gpu03: task 0: Killed\n"
            "srun: error: gpu04: task 1: Terminated"
        ),
        "none",
        "cancelled",
    ),
    ("pbs wall", ("=>> PBS: job killed: walltime 86430 exceeded limit 86400"), "none", False, None, None, "walltime"),
    (
        "lsf run",
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.\nExited with exit code 140."),
        "none",
        "walltime",
    ),
    (
        "lsf owner",
        ("TERM_OWNER: job killed by owner.\nExited with exit code 130."),
        "none",
        "cancelled",
    ),
    (
        "fork retry",
        ("bash: fork: retry: Resource temporarily unavailable\nbash: fork: Resource temporarily unavailable"),
        "none",
        "process_limit",
    ),
    ("thread", ("RuntimeError: can't start new thread"), "none", False, None, None, "process_limit"),
    (
        "openblas",
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 50 of 64: Resource "
            "temporarily unavailable\n"
            "OpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 513046 max\n"
            "Segmentation fault (core dumped)"
        ),
        "none",
        "process_limit",
    ),
    (
        "blockingio",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for b in loader:\n"
            '  File "/usr/lib/python3.8/multiprocessing/popen_fork.py", line 12, in _launch\n'
            "    self.pid = os.fork()\n"
            "BlockingIOError: [Errno 11] Resource temporarily unavailable"
        ),
        "none",
        False,
        "load",
        None,
        "process_limit",
    ),
    (
        "emfile",
        ("OSError: [Errno 24] Too many open files: '/data/img_001.png'"),
        "none",
        "open_files",
    ),
    (
        "libgomp",
        ("libgomp: Thread creation failed: Resource temporarily unavailable"),
        "none",
        "process_limit",
    ),
    (
        "disk",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    torch.save(state, path)\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/serialization.py", line 12, in '
            "save\n"
            "    _save(obj, opened_zipfile, pickle_module, pickle_protocol)\n"
            "OSError: [Errno 28] No space left on device"
        ),
        "none",
        False,
        "checkpoint",
        None,
        "disk_full",
    ),
    (
        "disk2",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in main\n'
            "    trainer.train()\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/serialization.py", line 12, in '
            "save\n"
            "    _save(obj, opened_zipfile)\n"
            "RuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter "
            "failed writing file data/176: file write failed"
        ),
        "none",
        False,
        "checkpoint",
        None,
        "disk_full",
    ),
    (
        "disk3",
        ("RuntimeError: [enforce fail at inline_container.cc:300] . unexpected pos 1073741824 vs 1073741720"),
        "none",
        "disk_full",
    ),
    ("quota", ("OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt.pt'"), "none", False, None, None, "disk_full"),
    (
        "ioerr",
        ("RuntimeError: write(): fd 29 failed with No space left on device"),
        "none",
        "disk_full",
    ),
    (
        "k8s evict disk",
        (
            "Status:         Failed\n"
            "Reason:         Evicted\n"
            "Message:        The node was low on resource: ephemeral-storage. Container train "
            "was using 30Gi, which exceeds its request of 0."
        ),
        "none",
        "disk_full",
    ),
    (
        "worker aborted",
        (
            "Traceback (most recent call last):\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/utils/data/_utils/signal_handlin'
            'g.py", line 12, in handler\n'
            "    _error_if_any_worker_fails()\n"
            "RuntimeError: DataLoader worker (pid 1777) is killed by signal: Aborted. "
        ),
        "none",
        False,
        "load",
        None,
        None,
    ),
    (
        "worker segv",
        (
            "ERROR: Unexpected segmentation fault encountered in worker.\n"
            "RuntimeError: DataLoader worker (pid 1777) is killed by signal: Segmentation fault. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give "
            "better error trace."
        ),
        "none",
        False,
        "load",
        None,
        "segfault",
    ),
    (
        "worker exit",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for i, b in enumerate(loader):\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line '
            "12, in _try_get_data\n"
            "    raise RuntimeError('DataLoader worker (pid(s) {}) exited "
            "unexpectedly'.format(pids_str)) from e\n"
            "RuntimeError: DataLoader worker (pid(s) 4111, 4112) exited unexpectedly"
        ),
        "none",
        False,
        "load",
        None,
        "worker_exited",
    ),
    (
        "worker term",
        ("RuntimeError: DataLoader worker (pid 1777) is killed by signal: Terminated. "),
        "none",
        False,
        "load",
        None,
        None,
    ),
    (
        "elastic -15",
        (
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -15) "
            "local_rank: 0 (pid: 1503) of binary: /usr/bin/python3"
        ),
        "none",
        "terminated",
    ),
    (
        "elastic -11",
        (
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) "
            "local_rank: 0 (pid: 1503) of binary: /usr/bin/python3"
        ),
        "none",
        "segfault",
    ),
    (
        "elastic -6",
        (
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) "
            "local_rank: 0 (pid: 1503) of binary: /usr/bin/python3"
        ),
        "none",
        "aborted",
    ),
    (
        "sighup",
        (
            "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, "
            "shutting down workers\n"
            "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 3030926 "
            "closing signal SIGHUP\n"
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3030830 got "
            "signal: 1"
        ),
        "none",
        "hangup",
    ),
    (
        "nccl timeout",
        (
            "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:616] [Rank 6] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=4242, OpType=ALLREDUCE, "
            "NumelIn=67108864, NumelOut=67108864, Timeout(ms)=600000) ran for 600028 "
            "milliseconds before timing out."
        ),
        "none",
        "collective_timeout",
    ),
    (
        "nccl heartbeat",
        (
            "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID "
            "0(default_pg) Rank 6] ProcessGroupNCCL's watchdog got stuck for 480 seconds without "
            "making progress in monitoring enqueued collectives."
        ),
        "none",
        "collective_timeout",
    ),
    (
        "nccl peer",
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, "
            "remote process exited or there was a network error, NCCL version 2.19.3\n"
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely."
        ),
        "none",
        "collective_timeout",
    ),
    (
        "gloo",
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
            "closed by peer [10.0.0.1]:43210"
        ),
        "none",
        "collective_timeout",
    ),
    (
        "ima",
        (
            "terminate called after throwing an instance of 'c10::Error'\n"
            "  what():  CUDA error: an illegal memory access was encountered\n"
            "Exception raised from c10_cuda_check_implementation\n"
            "frame #0: c10::Error::Error"
        ),
        "none",
        "illegal_access",
    ),
    (
        "segv",
        (
            "Fatal Python error: Segmentation fault\n"
            "\n"
            "Current thread 0x00007f (most recent call first):\n"
            '  File "train.py", line 5 in forward\n'
            "Segmentation fault (core dumped)"
        ),
        "none",
        "segfault",
    ),
    (
        "zoom",
        (
            "Zoom level 3 loaded\n"
            "Reading room_01.png\n"
            "bathroom_2.jpg: FileNotFoundError\n"
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/bathroom_2.jpg'"
        ),
        "none",
        False,
        "load",
        None,
        "missing_file",
    ),
    (
        "ran out input",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in load_data\n'
            "    d = pickle.load(f)\n"
            "EOFError: Ran out of input"
        ),
        "none",
        False,
        "load",
        None,
        None,
    ),
    (
        "import",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in <module>\n'
            "    import flash_attn\n"
            "ModuleNotFoundError: No module named 'flash_attn'"
        ),
        "none",
        "import_error",
    ),
    (
        "argparse",
        ("usage: train.py [-h] [--bs BS]\ntrain.py: error: unrecognized arguments: --max-memory 10"),
        "none",
        "config_error",
    ),
    (
        "shape",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    loss = crit(out, y)\n"
            "RuntimeError: The size of tensor a (32) must match the size of tensor b (16) at "
            "non-singleton dimension 0"
        ),
        "none",
        False,
        "train",
        None,
        None,
    ),
    (
        "keyerror",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in main\n'
            "    experiment_args = conf.load(args['exp'])\n"
            "KeyError: 'memory'"
        ),
        "none",
        None,
    ),
    (
        "hydra",
        ("omegaconf.errors.ConfigAttributeError: Key 'oom_retry' is not in struct\n    full_key: trainer.oom_retry"),
        "none",
        "config_error",
    ),
    (
        "keyboard",
        (
            "Epoch 2: 10%| | 10/100\n"
            "^CTraceback (most recent call last):\n"
            '  File "train.py", line 1, in train\n'
            "    loss.backward()\n"
            "KeyboardInterrupt"
        ),
        "none",
        False,
        "train",
        None,
        "cancelled",
    ),
    (
        "ray syserr2",
        (
            "(raylet) A worker died or was killed while executing a task by an unexpected system "
            "error. To troubleshoot the problem, check the logs for the dead worker. RayTask ID: "
            "ff Worker ID: 5 Node ID: 4 Worker IP address: 10.0.0.1 Worker port: 10003 Worker "
            "PID: 77 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
            "exits with a connection error code 2. End of file. There are some potential root "
            "causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
            "usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due "
            "to SIGSEGV or other unexpected errors."
        ),
        "none",
        None,
    ),
    (
        "dask killedworker",
        (
            "distributed.scheduler.KilledWorker: (\"('read-csv', 0)\", <WorkerState "
            "'tcp://127.0.0.1:36111', status: closed, memory: 0, processing: 5>)"
        ),
        "none",
        None,
    ),
    ("empty", (""), "none", False, None, None, None),
]


def full(case):
    """A case's text, kind, whether it was survived, phase, size and cause; a short one has only text, kind, cause."""
    return case[1:] if len(case) == 7 else (*case[1:3], False, None, None, case[3])


@pytest.mark.parametrize(
    ("text", "kind", "recovered", "phase", "tried", "cause"), [full(case) for case in CASES], ids=[c[0] for c in CASES]
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


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("RuntimeError: DataLoader timed out after 30 seconds", "hang"),
        ("Timeout (0:05:00)!\nThread 0x00007f809fc98340 (most recent call first):", "hang"),
        ("Failed: Timeout (>300.0s) from pytest-timeout.", "hang"),
        ("train.sh: line 2: 25456 Bus error               python train.py", "bus_error"),
        ("train.sh: line 2: 25456 Aborted                 (core dumped) python train.py", "aborted"),
        ("train.sh: line 2: 25456 Hangup                  python train.py", "hangup"),
        ("train.sh: line 2: 25456 Terminated              python train.py", "terminated"),
    ],
)
def test_hangs_that_somebody_watched_and_signals_as_bash_names_them(line, cause):
    found = look(f"epoch 1 step 4/10 loss 0.2\n{line}")
    assert (found.oom, found.cause, found.phase) == (False, cause, "train")


def test_a_dump_of_stacks_after_which_the_training_goes_on_is_no_hang():
    after = "\n".join(f"step {step} loss 0.1" for step in range(5, 9))
    assert look(f"step 4 loss 0.2\nTimeout (0:05:00)!\n{after}").cause == "unknown"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("job 4822.1 exceeded hard wallclock time - initiate terminate method", "walltime"),
        ("EC2 Spot Instance interruption notice received: terminate at 10:00\nTerminated", "preempted"),
        ("spot interruption detected, two minutes are left\nReceived SIGTERM", "preempted"),
        ("The instance is being preempted\nTerminated", "preempted"),
        ('{"Events": [{"EventType": "Preempt"}]}\nTerminated', "preempted"),
        ("Container killed on request. Exit code is 143", "terminated"),
        ("APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)", "segfault"),
        ("rank 3 with PID 4822 on node n1 exited on signal 11 (Segmentation fault).", "segfault"),
        ("sqlite3.OperationalError: database or disk is full", "disk_full"),
        ("RuntimeError: One of the subprocesses has abruptly died during map operation.", "worker_exited"),
        ("ValueError: The max seq len (9) is larger than the maximum number of tokens that fit (4)", "config_error"),
        ("ray.exceptions.ActorDiedError: It died.\nWorker exit type: SYSTEM_ERROR Worker exit detail", "worker_exited"),
    ],
)
def test_ends_that_other_programs_name(text, cause):
    found = look(f"epoch 1 step 4/10 loss 0.2\n{text}")
    assert (found.oom, found.cause) == (False, cause)


def test_a_device_that_fell_off_comes_before_the_launch_that_then_failed():
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4822, GPU has fallen off the bus."
    failed = "RuntimeError: CUDA error: unspecified launch failure"
    assert look(f"step 3\n{lost}\n{failed}").cause == "device_lost"
    assert look(f"step 3\n{failed}").cause == "illegal_access"


@pytest.mark.parametrize(("number", "cause"), [(31, "illegal_access"), (45, "unknown"), (48, "device_lost")])
def test_the_drivers_number_tells_a_programs_fault_from_a_lost_device(number, cause):
    assert look(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=4822, name=python").cause == cause


def test_an_assertion_between_backticks_makes_the_librarys_refusal_its_consequence():
    text = (
        "Indexing.cu:11: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    assert (look(text).oom, look(text).cause) == (False, "assertion")
