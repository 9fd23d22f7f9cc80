"""Accelerators that refused: every age of torch's message, other runtimes, and words that only look like them.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from memfit.diagnosis._diagnose import diagnose_streams
from memfit.diagnosis._text import Stream, clean

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
CASES = [
    (
        "frag",
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU "
            "1; 23.70 GiB total capacity; 15.20 GiB already allocated; 300.00 MiB free; 21.50 "
            "GiB reserved in total by PyTorch)"
        ),
        "gpu_fragmentation",
        False,
        None,
        0.5,
        None,
    ),
    (
        "npu",
        (
            "RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 32.00 GiB total "
            "capacity; 29.00 GiB already allocated; 29.10 GiB current active; 500.00 MiB free; "
            "30.00 GiB reserved in total by PyTorch)"
        ),
        "other_accelerator",
        False,
        None,
        1,
        None,
    ),
    (
        "hip",
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a "
            "total capacity of 15.98 GiB of which 30.00 MiB is free. Of the allocated memory "
            "15.00 GiB is allocated by PyTorch, and 400.00 MiB is reserved by PyTorch but "
            "unallocated."
        ),
        "other_accelerator",
        False,
        None,
        0.0625,
        None,
    ),
    (
        "hip error",
        (
            "RuntimeError: HIP error: out of memory\n"
            "HIP kernel errors might be asynchronously reported at some other API call"
        ),
        "other_accelerator",
        False,
        None,
        None,
        None,
    ),
    (
        "xpu new",
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 500.00 MiB. GPU 0 has "
            "a total capacity of 11.60 GiB. Of the allocated memory 11.00 GiB is allocated by "
            "PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
        ),
        "other_accelerator",
        False,
        None,
        0.4882812,
        None,
    ),
    (
        "xpu ur",
        ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        "other_accelerator",
        False,
        None,
        None,
        None,
    ),
    (
        "xpu native",
        (
            "RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) "
            "-5 (PI_ERROR_OUT_OF_RESOURCES)"
        ),
        "other_accelerator",
        False,
        None,
        None,
        None,
    ),
    (
        "mps",
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 8.50 GiB, other "
            "allocations: 500.00 MiB, max allowed: 9.07 GiB). Tried to allocate 256.00 MiB on "
            "private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
        ),
        "other_accelerator",
        False,
        None,
        0.25,
        None,
    ),
    ("mps buffer", ("RuntimeError: Invalid buffer size: 24.00 GiB"), "other_accelerator", False, None, 24, None),
    (
        "tpu buffer",
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Error allocating device "
            "buffer: Attempting to allocate 15.65G. That was not possible. There are 11.08G "
            "free.; (0x0x0_HBM0)"
        ),
        "other_accelerator",
        False,
        None,
        15.65,
        None,
    ),
    (
        "tpu load",
        (
            "RuntimeError: RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve "
            "10.20G at the bottom of memory. That was not possible. There are 9.00G free, 0B "
            "reserved, and 9.00G reservable."
        ),
        "other_accelerator",
        False,
        None,
        10.2,
        None,
    ),
    (
        "jax req",
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate "
            "request for 176.00MiB (184549376B) on device ordinal 0"
        ),
        "other_accelerator",
        False,
        None,
        0.171875,
        None,
    ),
    (
        "jax gpu",
        (
            "2024-01-01 10:00:00.000000: W external/xla/xla/tsl/framework/bfc_allocator.cc:497] "
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 4.44GiB (rounded to "
            "4831838464)requested by op \n"
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while "
            "trying to allocate 4831838208 bytes."
        ),
        "gpu",
        False,
        None,
        4.5,
        None,
    ),
    (
        "jax bytes",
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while "
            "trying to allocate 4831838208 bytes.\n"
            "BufferAssignment OOM Debugging.\n"
            "BufferAssignment stats:\n"
            "             parameter allocation:  372.76MiB\n"
        ),
        "other_accelerator",
        False,
        None,
        4.5,
        None,
    ),
    (
        "cudaMallocAsync",
        (
            "E1103 18:23:55.103160 3413767 gpu_cudamallocasync_allocator.cc:361] gpu_async_1 "
            "cuMemAllocAsync failed to allocate 1217595446400 bytes: RESOURCE_EXHAUSTED: : "
            "CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
            " Reported by CUDA: Free memory/Total memory: 22635544576/85095874560"
        ),
        "gpu",
        False,
        None,
        1133.9741,
        None,
    ),
    (
        "tf oom",
        (
            "2018-04-10 16:52:37.495888: W tensorflow/core/common_runtime/bfc_allocator.cc:275] "
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 118.28MiB.  Current "
            "allocation summary follows.\n"
            "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating "
            "tensor with shape[16,4000,512] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
        ),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "tf cpu oom",
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[90000,90000] and type "
            "float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu [Op:MatMul]"
        ),
        "host_alloc",
        False,
        None,
        None,
        None,
    ),
    (
        "cublas exec",
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( "
            "handle, opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "cublas notinit",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    out = model(x)\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/nn/functional.py", line 12, in '
            "linear\n"
            "    output = input.matmul(weight.t())\n"
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
            "`cublasCreate(handle)`"
        ),
        "none",
        False,
        "train",
        None,
        None,
    ),
    ("cudnn exec", ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "none", False, None, None, None),
    ("cudnn init", ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), "none", False, None, None, None),
    ("cudnn alloc", ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu", False, None, None, None),
    (
        "cusolver alloc",
        ("RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "assert",
        (
            "../aten/src/ATen/native/cuda/IndexKernel.cu:92: operator(): block: [30,0,0], "
            'thread: [64,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "index out of '
            'bounds"` failed.\n'
            "RuntimeError: CUDA error: device-side assert triggered\n"
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`"
        ),
        "none",
        False,
        None,
        None,
        "assertion",
    ),
    (
        "no device",
        (
            "RuntimeError: cuda runtime error (38) : no CUDA-capable device is detected at "
            "/pytorch/torch/lib/THC/THCGeneral.c:70"
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "initialization error",
        (
            "THCudaCheck FAIL file=/pytorch/aten/src/THC/THCGeneral.cpp line=50 error=3 : "
            "initialization error\n"
            "RuntimeError: cuda runtime error (3) : initialization error at "
            "/pytorch/aten/src/THC/THCGeneral.cpp:50"
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "busy",
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "ecc",
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
            "CUDA kernel errors might be asynchronously reported at some other API call"
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    ("invalid ordinal", ("RuntimeError: CUDA error: invalid device ordinal"), "none", False, None, None, None),
    (
        "launch oor",
        ("RuntimeError: CUDA error: too many resources requested for launch"),
        "none",
        False,
        None,
        None,
        "chip_memory",
    ),
    (
        "triton",
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
            "98304, Hardware limit: 65536. Reducing block sizes or `num_stages` may help."
        ),
        "none",
        False,
        None,
        None,
        "chip_memory",
    ),
    (
        "tpu vmem",
        (
            "Compilation failure: Ran out of memory in memory space vmem. Please file a bug "
            "against XLA. Used 20.00M of 16.00M vmem."
        ),
        "none",
        False,
        None,
        None,
        None,
    ),
    (
        "cupy",
        (
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes "
            "(allocated so far: 9,000,000,000 bytes)."
        ),
        "gpu",
        False,
        None,
        1,
        None,
    ),
    (
        "cupy old",
        ("cupy.cuda.memory.OutOfMemoryError: out of memory to allocate 1073741824 bytes (total 9000000000 bytes)"),
        "gpu",
        False,
        None,
        1,
        None,
    ),
    (
        "rmm",
        (
            "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: "
            "/opt/rapids/include/rmm/mr/device/cuda_memory_resource.hpp:70: "
            "cudaErrorMemoryAllocation out of memory"
        ),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "paddle",
        (
            "ResourceExhaustedError: \n"
            "\n"
            "Out of memory error on GPU 0. Cannot allocate 1.500000GB memory on GPU 0, "
            "23.100000GB memory has been allocated and available memory is only 600.000000MB."
        ),
        "gpu",
        False,
        None,
        1.5,
        None,
    ),
    (
        "mxnet",
        (
            "mxnet.base.MXNetError: [10:00:00] src/storage/./pooled_storage_manager.h:157: "
            "cudaMalloc failed: out of memory"
        ),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "caffe",
        (
            "F0303 09:50:12.085932  3744 syncedmem.cpp:71] Check failed: error == cudaSuccess (2 "
            "vs. 0)  out of memory\n"
            "*** Check failure stack trace: ***"
        ),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "ggml",
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5000.00 MiB on device 0: "
            "cudaMalloc failed: out of memory"
        ),
        "gpu",
        False,
        None,
        4.8828125,
        None,
    ),
    (
        "trt",
        ("[TRT] [E] 1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)"),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "nccl oom",
        (
            "node1:12:88 [0] misc/strongstream.cc:53 NCCL WARN Cuda failure 2 'out of memory'\n"
            "node1:12:88 [0] NCCL INFO init.cc:1501 -> 1"
        ),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "nccl calloc",
        (
            "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
            "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes"
        ),
        "gpu",
        False,
        None,
        0.0058594,
        None,
    ),
    (
        "1EB",
        ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory."),
        "gpu",
        False,
        None,
        None,
        None,
    ),
    (
        "oom line only",
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB "
            "total capacity; 28.20 GiB already allocated; 131.50 MiB free; 28.33 GiB reserved in "
            "total by PyTorch)"
        ),
        "gpu",
        False,
        None,
        2,
        None,
    ),
]


def look(text):
    lines = [line for number, raw in enumerate(text.split("\n"), 1) for line in clean(raw, "log", number)]
    return diagnose_streams([Stream(lines)])


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
