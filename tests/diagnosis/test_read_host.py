"""Host memory that was refused, shared memory, and what only sounds like it.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from reading import look

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
CASES = [
    (
        "cpu alloc",
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot "
            "allocate memory)"
        ),
        "host_alloc",
        False,
        None,
        1,
        None,
    ),
    (
        "cpu alloc old",
        (
            "RuntimeError: [enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot "
            "allocate memory)"
        ),
        "host_alloc",
        False,
        None,
        1,
        None,
    ),
    (
        "cpu alloc win2",
        (
            "RuntimeError: [enforce fail at ..\\c10\\core\\CPUAllocator.cpp:72] data. "
            "DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes. Buy "
            "new RAM!"
        ),
        "host_alloc",
        False,
        None,
        1,
        None,
    ),
    (
        "lua torch",
        (
            "/root/torch/install/bin/luajit: $ Torch: not enough memory: you tried to allocate "
            "12GB. Buy new RAM! at /tmp/luarocks/lib/TH/THGeneral.c:270"
        ),
        "host_alloc",
        False,
        None,
        12,
        None,
    ),
    (
        "TH old",
        (
            "RuntimeError: $ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM! "
            "at /pytorch/aten/src/TH/THGeneral.cpp:201"
        ),
        "host_alloc",
        False,
        None,
        2,
        None,
    ),
    (
        "np",
        (
            "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3.35 GiB for an array "
            "with shape (30000, 15000) and data type float64"
        ),
        "host_alloc",
        False,
        None,
        3.35,
        None,
    ),
    (
        "np117",
        ("MemoryError: Unable to allocate array with shape (60000, 784, 10) and data type float64"),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    (
        "memerr",
        (
            "Traceback (most recent call last):\n"
            '  File "prep.py", line 12, in main\n'
            "    data = json.load(f)\n"
            '  File "/usr/lib/python3.8/json/__init__.py", line 12, in load\n'
            "    return loads(fp.read(),\n"
            "MemoryError"
        ),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    ("java heap", ("java.lang.OutOfMemoryError: Java heap space"), "host_alloc", False, None, None, None),
    (
        "node heap",
        ("FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory"),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    ("r", ("Error: cannot allocate vector of size 3.0 Gb\nExecution halted"), "host_alloc", False, None, 3, None),
    ("julia", ("ERROR: LoadError: OutOfMemoryError()"), "host_alloc", False, None, None, None),
    ("arrow", ("pyarrow.lib.ArrowMemoryError: malloc of size 1073741824 failed"), "host_alloc", False, None, 1, None),
    (
        "opencv",
        (
            "cv2.error: OpenCV(4.5.1) /tmp/pip-req-build/opencv/modules/core/src/alloc.cpp:73: "
            "error: (-4:Insufficient memory) Failed to allocate 1073741824 bytes in function "
            "'OutOfMemoryError'"
        ),
        "host_alloc",
        False,
        None,
        1,
        None,
    ),
    (
        "pandas c",
        ("pandas.errors.ParserError: Error tokenizing data. C error: out of memory"),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    (
        "fork",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for i, batch in enumerate(train_loader):\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line '
            "12, in __init__\n"
            "    w.start()\n"
            '  File "/usr/lib/python3.8/multiprocessing/popen_fork.py", line 12, in _launch\n'
            "    self.pid = os.fork()\n"
            "OSError: [Errno 12] Cannot allocate memory"
        ),
        "host_alloc",
        False,
        "load",
        None,
        None,
    ),
    (
        "win1455",
        (
            "OSError: [WinError 1455] The paging file is too small for this operation to "
            'complete. Error loading "C:\\env\\lib\\site-packages\\torch\\lib\\cudnn64_8.dll" or one '
            "of its dependencies."
        ),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    (
        "rust",
        ("memory allocation of 1073741824 bytes failed\nAborted (core dumped)"),
        "host_alloc",
        False,
        None,
        1,
        None,
    ),
    (
        "tcmalloc warn healthy",
        ("tcmalloc: large alloc 1073741824 bytes == 0x55d5 @  0x7f\nEpoch 1: loss 0.3\nEpoch 2: loss 0.2"),
        "none",
        False,
        "train",
        None,
        None,
    ),
    ("bash fork", ("bash: fork: Cannot allocate memory"), "host_alloc", False, None, None, None),
    (
        "static tls",
        ("OSError: /usr/lib/aarch64-linux-gnu/libGLdispatch.so.0: cannot allocate memory in static TLS block"),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "bus",
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm).\n"
            "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Please try to raise "
            "your shared memory limit."
        ),
        "shm",
        False,
        "load",
        None,
        None,
    ),
    (
        "shm by its path in the source",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 4, in train\n'
            '    with open("/dev/shm/cache.bin", "wb") as file: file.write(rows)\n'
            "                                                   ^^^^^^^^^^^^^^^^\n"
            "OSError: [Errno 28] No space left on device"
        ),
        "shm",
        False,
        None,
        None,
        None,
    ),
    (
        "shm write",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for x in loader:\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/multiprocessing/reductions.py", '
            "line 12, in reduce_storage\n"
            "    fd, size = storage._share_fd_cpu_()\n"
            "RuntimeError: unable to write to file </torch_913_2338>: No space left on device "
            "(28)"
        ),
        "shm",
        False,
        "load",
        None,
        None,
    ),
    (
        "nccl shm",
        (
            "node1:12:88 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No "
            "space left on device\n"
            "node1:12:88 [0] include/shm.h:48 NCCL WARN Error while creating shared memory "
            "segment nccl-shm-recv-1 (size 9637888)\n"
            "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:784, unhandled system error"
        ),
        "shm",
        False,
        "build",
        0.008976,
        None,
    ),
    (
        "nccl shm2",
        (
            "node1:12:88 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend "
            "/dev/shm/nccl-QXN6NQ to 33030532 bytes\n"
            "torch.distributed.DistBackendError: NCCL error in: "
            "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error"
        ),
        "shm",
        False,
        "build",
        0.0307621,
        None,
    ),
    (
        "semlock",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in <module>\n'
            "    q = mp.Queue()\n"
            '  File "/usr/lib/python3.9/multiprocessing/synchronize.py", line 12, in __init__\n'
            "    sl = self._semlock = _multiprocessing.SemLock(\n"
            "OSError: [Errno 28] No space left on device"
        ),
        "shm",
        False,
        None,
        None,
        None,
    ),
    (
        "pin caught",
        (
            "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\n"
            "Original Traceback (most recent call last):\n"
            '  File "/env/torch/utils/data/_utils/pin_memory.py", line 37, in do_one_step\n'
            "    data = pin_memory(data, device)\n"
            "RuntimeError: CUDA error: out of memory"
        ),
        "pinned",
        False,
        "load",
        None,
        None,
    ),
    (
        "pin old",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for x in loader:\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/utils/data/_utils/pin_memory.py"'
            ", line 12, in pin_memory\n"
            "    return data.pin_memory()\n"
            "RuntimeError: cuda runtime error (2) : out of memory at "
            "/pytorch/aten/src/THC/THCCachingHostAllocator.cpp:278"
        ),
        "pinned",
        False,
        "load",
        None,
        None,
    ),
    (
        "pin busy",
        (
            "THCudaCheck FAIL file=/pytorch/aten/src/THC/THCCachingHostAllocator.cpp line=278 "
            "error=46 : all CUDA-capable devices are busy or unavailable\n"
            "RuntimeError: cuda runtime error (46) : all CUDA-capable devices are busy or "
            "unavailable"
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "tf pinned",
        (
            "2020-01-01 10:00:00.000: W "
            "tensorflow/core/common_runtime/gpu/gpu_host_allocator.h:44] could not allocate "
            "pinned host memory of size: 2147483648"
        ),
        "pinned",
        False,
        None,
        2,
        None,
    ),
    (
        "ds pinned",
        (
            "Traceback (most recent call last):\n"
            '  File "t.py", line 12, in main\n'
            "    engine = deepspeed.initialize(model)\n"
            '  File "deepspeed/runtime/zero/stage3.py", line 12, in _create_fp32_partitions\n'
            "    t = torch.zeros(n, dtype=torch.float32).pin_memory()\n"
            "RuntimeError: CUDA error: out of memory"
        ),
        "pinned",
        False,
        "build",
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


@pytest.mark.parametrize(
    ("text", "kind", "tried"),
    [
        ("Error: model requires more system memory (21.5 GiB) than is available (15.2 GiB)", "host_alloc", 21.5),
        ("ggml_aligned_malloc: insufficient memory (attempted to allocate 2048.00 MB)", "host_alloc", 2),
        ("alloc_tensor_range: failed to allocate CPU buffer of size 4294967296", "host_alloc", 4),
        ("Requested 100000x100000 (74.5GB) array exceeds maximum array size preference (31.9GB)", "host_alloc", 74.5),
        ('Out of memory. Type "help memory" for your options.', "host_alloc", None),
        ("Failed to allocate memory for requested buffer of size 4294967296", "host_alloc", 4),
        ("ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: out of memory", "pinned", 1),
        ("WARNING: failed to allocate 1024,00 MB of pinned memory: invalid argument", "pinned", 1),
        ("failed to allocate CUDA_Host buffer of size 1073741824", "pinned", 1),
        ("ggml_vulkan: Failed to allocate pinned memory.", "pinned", None),
    ],
)
def test_other_programs_lack_host_memory_in_their_own_words(text, kind, tried):
    found = look(text)
    assert (found.kind, found.cause, found.recovered) == (kind, "out_of_memory", False)
    assert found.figures == ({} if tried is None else {"tried": pytest.approx(tried * 2**30)})
