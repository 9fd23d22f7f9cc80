"""Accelerators that refused: every age of torch's message, other runtimes, and words that only look like them.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from reading import look

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
#: A short case has the name, text, kind and cause only.
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
        None,
    ),
    (
        "xpu native",
        (
            "RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) "
            "-5 (PI_ERROR_OUT_OF_RESOURCES)"
        ),
        "other_accelerator",
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
        None,
    ),
    (
        "tf cpu oom",
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[90000,90000] and type "
            "float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu [Op:MatMul]"
        ),
        "host_alloc",
        None,
    ),
    (
        "cublas exec",
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( "
            "handle, opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"
        ),
        "none",
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
        "assertion",
    ),
    (
        "no device",
        (
            "RuntimeError: cuda runtime error (38) : no CUDA-capable device is detected at "
            "/pytorch/torch/lib/THC/THCGeneral.c:70"
        ),
        "none",
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
        None,
    ),
    (
        "busy",
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
        "none",
        None,
    ),
    (
        "ecc",
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
            "CUDA kernel errors might be asynchronously reported at some other API call"
        ),
        "none",
        None,
    ),
    ("invalid ordinal", ("RuntimeError: CUDA error: invalid device ordinal"), "none", False, None, None, None),
    (
        "launch oor",
        ("RuntimeError: CUDA error: too many resources requested for launch"),
        "none",
        "chip_memory",
    ),
    (
        "triton",
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
            "98304, Hardware limit: 65536. Reducing block sizes or `num_stages` may help."
        ),
        "none",
        "chip_memory",
    ),
    (
        "tpu vmem",
        (
            "Compilation failure: Ran out of memory in memory space vmem. Please file a bug "
            "against XLA. Used 20.00M of 16.00M vmem."
        ),
        "none",
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
        None,
    ),
    (
        "nccl oom",
        (
            "node1:12:88 [0] misc/strongstream.cc:53 NCCL WARN Cuda failure 2 'out of memory'\n"
            "node1:12:88 [0] NCCL INFO init.cc:1501 -> 1"
        ),
        "gpu",
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
    ("text", "kind", "figures"),
    [
        (
            "Out of GPU memory trying to allocate 8.000 MiB\nEffective GPU memory usage: 99.87% (7.783 GiB/8.000 GiB)\n"
            "Memory pool usage: 6.000 GiB (7.000 GiB reserved)",
            "gpu",
            {"tried": 8 / 1024, "device_total": 8, "allocated": 6, "reserved": 7},
        ),
        ("Out of memory on device. To view more detail about available memory on the GPU, use 'gpuDevice'", "gpu", {}),
        ("ValueError: No available memory for the cache blocks. Try increasing", "gpu", {}),
        (
            "ValueError: Free memory on device cuda:0 (19.77/22.50 GiB) on startup is less than desired GPU memory",
            "gpu",
            {"device_total": 22.5},
        ),
        (
            "ValueError: (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (2.61 GiB)",
            "gpu",
            {"tried": 4},
        ),
        (
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: "
            "3,221,225,472 bytes, limit set to: 4,294,967,296 bytes).",
            "gpu",
            {"tried": 1, "allocated": 3, "device_total": 4},
        ),
        (
            "XGBoostError: Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of "
            "memory\n- Free memory: 8126464\n- Requested memory: 33554432\n\nStack trace:",
            "gpu",
            {"tried": 1 / 32},
        ),
        ("Memory allocation error on worker 0: Caching allocator\n- Requested memory: 4.0GB", "gpu", {"tried": 4}),
        (
            "ggml_backend_metal_buffer_type_alloc_buffer: insufficient memory (attempted to allocate 2048.00 MB)",
            "other_accelerator",
            {"tried": 2},
        ),
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296", "gpu", {"tried": 4}),
        ("CUDA error 2 at ggml-cuda.cu:359: out of memory", "gpu", {}),
        ("cudaMalloc retry failed: out of memory", "gpu", {}),
        ("LightGBMError: [CUDA] out of memory cuda_utils.cpp 24", "gpu", {}),
        ("[TRT] Error Code 2: OutOfMemory (Requested size was 4294967296 bytes.)", "gpu", {"tried": 4}),
        (
            "onnxruntime CUDAExecutionProvider\nFailed to allocate memory for requested buffer of size 4294967296",
            "gpu",
            {"tried": 4},
        ),
        (
            "failed to allocate 1.00G (1073741824 bytes) from device: HIP_ERROR_OutOfMemory",
            "other_accelerator",
            {"tried": 1},
        ),
        (
            "MIOpen Error: handlehip.cpp:70: Memory not available to allocate buffer: 1073741824",
            "other_accelerator",
            {"tried": 1},
        ),
        (
            "Ran out of memory in memory space hbm. Used 8.38G of 8.00G hbm. Exceeded hbm capacity by 385.25M.",
            "other_accelerator",
            {"device_total": 8},
        ),
        ("RuntimeError: No executable batch size found, reached zero.", "gpu", {}),
    ],
)
def test_other_runtimes_refuse_in_their_own_words_with_their_figures(text, kind, figures):
    found = look(text)
    assert (found.kind, found.cause, found.recovered) == (kind, "out_of_memory", False)
    assert {name: size / 2**30 for name, size in found.figures.items()} == pytest.approx(figures, rel=1e-3)


def test_a_server_that_lacks_memory_for_its_cache_is_being_built():
    assert look("ValueError: No available memory for the cache blocks.").phase == "build"


def test_a_warning_of_tensorflows_host_allocator_is_no_shortage():
    found = look("Allocation of 4294967296 exceeds 10% of free system memory.\nstep 1 loss 1\nstep 2 loss 1")
    assert (found.oom, found.recovered) == (False, True)
