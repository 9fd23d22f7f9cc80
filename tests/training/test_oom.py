"""Which exceptions are failed allocations: real ones, and the wording of each allocator and library."""

import errno
import gc
import inspect
import mmap
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir
from memfit.training import BySample, OomKind, Trainer, classify_oom, clean_up, device_bytes, release
from reading import look

TOO_MUCH = 1 << 46

# Texts in the form that each source writes, with numbers of our own.
MESSAGES = [
    # c10/core/impl/alloc_cpu.cpp: 2.x, Windows; c10/core/CPUAllocator.cpp 1.0
    (
        "host",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (
        "host",
        "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 524288000 bytes.",
    ),
    ("host", "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0"),
    # aten/src/ATen/MapAllocator.cpp: a loader's shared memory
    ("host", "unable to mmap 8192 bytes from file </torch_811_1203_4>: Cannot allocate memory (12)"),
    ("host", "unable to mmap 64 bytes from file <filename not specified>: Cannot allocate memory (12)"),
    ("host", "unable to write to file </torch_811_1203_4>: No space left on device (28)"),
    ("host", "unable to allocate shared memory(shm) for file </torch_811_1203_4>: No space left on device (28)"),
    ("host", "unable to open shared memory object </torch_811_1203> in read-write mode: Cannot allocate memory (12)"),
    ("host", "std::bad_alloc"),  # what() of C++'s own, as torch hands it on
    ("host", "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    # c10/cuda/CUDACachingAllocator.cpp by age: 1.0-1.3, 1.4-1.9, 1.10-2.0, 2.1, 2.2 and newer; HIP and XPU alike
    (
        "device",
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 6.10 GiB already "
        "allocated; 14.56 MiB free; 155.14 MiB cached)",
    ),
    (
        "device",
        "CUDA out of memory. Tried to allocate 1.50 GiB (GPU 1; 10.76 GiB total capacity; 8.31 GiB already "
        "allocated; 912.56 MiB free; 9.01 GiB reserved in total by PyTorch)",
    ),
    (
        "device",
        "CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; 23.69 GiB total capacity; 21.98 GiB already "
        "allocated; 0 bytes free; 22.40 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory "
        "try setting max_split_size_mb to avoid fragmentation.",
    ),
    (
        "device",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 15.77 GiB of which 1.12 GiB is "
        "free. Process 4711 has 14.65 GiB memory in use.",
    ),
    (
        "device",
        "[rank3]: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.25 GiB of which "
        "1.12 GiB is free.",
    ),
    ("device", "HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 63.98 GiB"),
    ("device", "XPU out of memory. Tried to allocate 4.25 GiB. GPU 0 has a total capacity of 15.11 GiB."),
    (
        "device",
        "Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 5.10 GiB "
        "(GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)",
    ),
    ("device", "NPU out of memory. Tried to allocate 96.00 MiB (NPU 0; 31.75 GiB total capacity)"),
    # c10/cuda/CUDAException.cpp and CUDADriverCheck; THC of 0.4; ROCm
    ("device", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    ("device", "CUDA driver error: out of memory"),
    ("device", "HIP error: out of memory"),
    ("device", "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:66"),
    ("device", "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("device", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes."),  # PJRT
    ("device", "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB"),  # Gaudi
    # aten/src/ATen/cuda/CUDABlas.cpp and the like: calls that allocate inside a library
    ("library", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("library", "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    ("library", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ("library", "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM(...)`"),
    ("library", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("library", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("library", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("library", "Unable to find a valid cuDNN algorithm to run convolution"),
    ("library", "miopenStatusAllocFailed"),
    # NCCL src/include/alloc.h and checks.h
    ("library", "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nFailed to CUDA calloc 4194304 bytes"),
    ("library", "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    # oneDNN src/common: seen with PyTorch 2.13 in convolutions and LSTMs under RLIMIT_AS
    ("host", "could not create a primitive"),
    ("host", "could not execute a primitive"),
]

NEAR_MISSES = [
    RuntimeError("zoom level 3 is out of range"),
    RuntimeError("no image named bathroom_out.png in memory"),
    RuntimeError("bloom: unexpected key in state_dict"),
    RuntimeError("oom"),
    RuntimeError("out of memory"),
    RuntimeError("unsupported memory format option Preserve"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:60] ((ptrdiff_t)nbytes) >= 0. alloc_cpu() seems to have been called"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    RuntimeError("out of resource: shared memory, Required: 98304, Hardware limit: 65536."),
    RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)"),
    RuntimeError("unable to resize file </data/weights.bin> to the right size: No space left on device (28)"),
    RuntimeError("received 0 items of ancdata"),
    RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive"),
    RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
    RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly"),
    ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    KeyError("CUDA error: out of memory"),
    KeyboardInterrupt(),
]


def raised(call):
    try:
        call()
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.proves("S1-07", "C-04")
@pytest.mark.parametrize(("kind", "text"), MESSAGES)
def test_each_known_text_of_a_failed_allocation_has_its_kind(kind, text):
    assert classify_oom(RuntimeError(text)) is OomKind(kind)


@pytest.mark.parametrize("error", [one for one in NEAR_MISSES if not isinstance(one, ValueError | KeyError)], ids=repr)
def test_the_diagnosis_of_a_log_is_not_misled_either(error):
    found = look(f"{type(error).__name__}: {error}")
    assert not found.oom or found.confidence == "likely"  # general words at the end of a log prove nothing


@pytest.mark.proves("S1-08")
@pytest.mark.parametrize("error", NEAR_MISSES, ids=repr)
def test_what_only_sounds_like_it_is_no_failed_allocation(error):
    assert classify_oom(error) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(TOO_MUCH),
        lambda: np.empty(TOO_MUCH),
        lambda: bytearray(1 << 60),
        lambda: [0] * (1 << 60),
        lambda: mmap.mmap(-1, 1 << 50),
        lambda: torch.UntypedStorage._new_shared(1 << 50),
    ],
    ids=["torch", "numpy", "bytearray", "list", "mmap", "shared memory"],
)
def test_a_real_failure_on_the_host_is_one_of_host_memory(call):
    assert classify_oom(raised(call)) is OomKind.HOST


@pytest.mark.proves("S1-07")
def test_the_type_of_a_device_failure_is_enough_whatever_it_says():
    assert classify_oom(torch.OutOfMemoryError("")) is OomKind.DEVICE


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch has it from 2.8 on")
def test_the_code_of_an_accelerator_error_is_enough_whatever_it_says():
    error = torch.AcceleratorError("unknown")
    assert classify_oom(error) is None
    error.error_code = 2
    assert classify_oom(error) is OomKind.DEVICE


def test_a_cuda_error_raised_where_memory_is_pinned_is_one_of_pinned_memory():
    pinning = raised(lambda: torch.empty(4).pin_memory("no such device")).__traceback__
    computing = raised(lambda: torch.empty(4).to("no such device")).__traceback__
    text = "CUDA error: out of memory"
    assert classify_oom(RuntimeError(text).with_traceback(pinning)) is OomKind.PINNED
    assert classify_oom(RuntimeError(text).with_traceback(computing)) is OomKind.DEVICE


class Failing(Dataset):
    """Fails in a worker as its name says."""

    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 1

    def __getitem__(self, index):
        match self.what:
            case "numpy":
                return np.empty(TOO_MUCH)
            case "torch":
                return torch.empty(TOO_MUCH)
            case "mmap":
                return mmap.mmap(-1, 1 << 50)
            case "value":
                raise ValueError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "source":
                raise RuntimeError("unsupported")  # CUDA out of memory. Tried to allocate 2.00 GiB.


@pytest.mark.parametrize(
    ("what", "kind"), [("numpy", "host"), ("torch", "host"), ("mmap", "host"), ("value", None), ("source", None)]
)
def test_an_error_relayed_from_a_loaders_worker_is_judged_by_what_was_raised_there(what, kind):
    iterator = iter(DataLoader(Failing(what), num_workers=1))
    try:
        error = raised(lambda: next(iterator))
    finally:
        iterator._shutdown_workers()  # a later worker would inherit this one's end, and wait for it
    assert "in DataLoader worker process 0" in str(error)
    assert classify_oom(error) == kind


def test_a_device_failure_relayed_from_the_pinning_thread_is_one_of_pinned_memory():
    text = (
        "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
        '  File "pin_memory.py", line 30, in do_one_step\n    data = pin_memory(data, device)\n'
        "RuntimeError: CUDA error: out of memory\n"
    )
    assert classify_oom(RuntimeError(text)) is OomKind.PINNED


def test_an_error_raised_while_a_failed_allocation_is_handled_is_another_error():
    def fail():
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as error:
            raise LookupError("something else") from error

    assert classify_oom(raised(fail)) is None


@pytest.mark.proves("S1-09", "C-03")
def test_after_release_nothing_that_failed_frames_held_is_alive():
    kept = []

    def inner():
        activations = torch.zeros(8)
        kept.append(weakref.ref(activations))
        torch.empty(TOO_MUCH)

    def outer():
        try:
            inner()
        except RuntimeError as error:
            batch = torch.zeros(8)
            kept.append(weakref.ref(batch))
            raise MemoryError("while handling") from error

    def grouped():
        errors = [raised(outer), raised(outer)]
        raise ExceptionGroup("several", errors)

    gc.disable()
    try:
        error = raised(grouped)
        assert [ref() is not None for ref in kept] == [True] * 4
        release(error)
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()
    assert [str(one.__cause__).startswith("[enforce fail") for one in error.exceptions] == [True, True]


def test_release_leaves_frames_that_still_run_and_ends_on_a_circular_chain():
    here = torch.zeros(1)
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    try:
        raise first
    except ValueError as error:
        release(error)
        assert error.__traceback__ is None
    assert here is not None


@pytest.mark.parametrize(
    ("held", "named"), [({2: 5}, ["cuda:2"]), ({}, ["cuda:1"]), ({0: 1, 3: 1}, ["cuda:0", "cuda:3"])]
)
def test_of_many_visible_gpus_only_those_that_this_process_uses_are_named(monkeypatch, held, named):
    sizes = ("memory_allocated", "max_memory_allocated", "max_memory_reserved")
    gpus = SimpleNamespace(
        __name__="torch.cuda",
        is_initialized=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: 1,
        memory_reserved=lambda number: held.get(number, 0),
        **dict.fromkeys(sizes, lambda number: held.get(number, 0)),
    )
    monkeypatch.setattr(torch, "cuda", gpus)
    assert list(device_bytes()) == named


@pytest.mark.slow
def test_clearing_reports_what_was_unreachable_and_no_device_is_woken():
    gc.collect()
    for _ in range(5):
        cycle = []
        cycle.append(cycle)
    del cycle
    assert clean_up().num_objects >= 5
    assert device_bytes() == {} or torch.cuda.is_initialized() or torch.xpu.is_initialized()


# --- what a clean-up does


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that this process is a job of."""
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run.path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    return run


class Cycle:
    """Refers to itself and holds a mebibyte."""

    def __init__(self):
        self.me = self
        self.held = torch.zeros(1 << 18)


@pytest.mark.proves("S1-01", "S4-38")
@pytest.mark.slow
def test_a_clean_up_tells_what_it_freed_and_cost(run):
    gc.collect()
    gc.disable()
    try:
        Cycle()
        done = clean_up()
    finally:
        gc.enable()
    assert not any(type(one) is Cycle for one in gc.get_objects())
    assert done.num_objects >= 2
    assert done.host_bytes >= 1 << 20
    assert done.seconds > 0
    (event,) = run.events()
    assert (event["kind"], event["num_objects"]) == ("cleanup", done.num_objects)


@pytest.mark.proves("S1-03", "S4-11")
@pytest.mark.parametrize("fails_at", [None, 4])
def test_a_training_cleans_up_after_an_out_of_memory_and_on_no_schedule(run, fails_at):
    steps = []

    def loss(model, batch):
        steps.append(len(batch))
        if len(steps) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(batch).square().sum(), len(batch)

    trainer = Trainer(torch.nn.Linear(3, 1), loss=loss, split=BySample())
    trainer.fit([torch.ones(4, 3)] * 5, num_epochs=4, preflight=False)
    assert len(steps) >= 20
    assert sum(event["kind"] == "cleanup" for event in run.events()) == (fails_at is not None)


@pytest.mark.proves("S1-31", "S4-10", "C-01")
def test_nothing_but_a_clean_up_empties_the_device_s_cache():
    package = Path(memfit.__file__).parent
    assert [path.name for path in package.rglob("*.py") if ".empty_cache()" in path.read_text()] == ["_oom.py"]
    assert inspect.getsource(clean_up).count(".empty_cache()") == 1
