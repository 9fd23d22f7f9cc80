"""GPUs by name: the memory that CUDA reports, and what a process takes outside of torch's allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.errors import ConfigError, nearest
from memfit.estimation._interval import Interval
from memfit.units import GIB, KIB, MIB, format_bytes, parse_bytes

#: The workspace of a cuBLAS handle before Hopper, and since (aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13).
BLAS_SMALL = 2 * 4096 * KIB + 16 * 8 * KIB
BLAS_LARGE = 8 * 4096 * KIB
#: The smallest of 1,017 networks of timm took 1,731 MiB of an A100 at a batch of eight, 62 of them for its tensors, and
#: a net of one neuron 1,237 (itu-rad/GPUMemNet, Related_works/FakeTensor): 432 MiB, rounded up for larger cards.
_CUDNN = Interval(0, 512 * MIB)
_CHANNEL = 10 * MIB  # NVIDIA/nccl issues 1485 and 1685: one receiving buffer of one channel


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a size of device memory.

    Attributes:
        name: As people write it.
        total_bytes: The least memory that CUDA has been seen to report for it (``torch.cuda.mem_get_info``, "total
            capacity" in torch's message). Drivers differ by up to 1.5 %, and nvidia-smi shows more.
        compute_capability: Such as "9.0"; None if it is not known.
        context_bytes: What a training process takes outside of torch's allocator: the CUDA context, and the kernels of
            torch, cuBLAS and cuDNN that it has loaded. Communicators are not in it.
        has_nvlink: Whether several of them usually are linked by NVLink.
        cudnn_bytes: What the first convolution adds to the context: the value with kernels loaded on first use, the
            bound with all of them loaded at once.
    """

    name: str
    total_bytes: int
    compute_capability: str | None
    context_bytes: Interval
    has_nvlink: bool
    cudnn_bytes: Interval = _CUDNN

    @property
    def cublas_workspace_bytes(self) -> Interval:
        """Return the workspace of one cuBLAS handle, in bytes; the forward and the backward pass have one each."""
        if self.compute_capability is None:
            return Interval(BLAS_SMALL, BLAS_LARGE)
        return Interval(BLAS_LARGE if float(self.compute_capability) >= 9.0 else BLAS_SMALL)

    def outside_bytes(self, world_size: int) -> Interval:
        """Return what a process takes outside of torch's allocator, in bytes."""
        return self.context_bytes + self.nccl_bytes(world_size)

    def nccl_bytes(self, world_size: int) -> Interval:
        """Return what NCCL takes for a group of so many devices, in bytes, outside of torch's allocator.

        Measured with an all-reduce on A100s linked by NVLink: 544 MB in a group of two, 688 MB in a larger one
        (NVIDIA/nccl issue 964), which is 24 channels; it does not grow beyond two nodes (issue 986). Over PCIe there
        are two to four channels (log in ultralytics issue 12905). The bound has the buffers of a ring and of a tree's
        three edges for each of 32 channels, or of 8 without NVLink. All-to-all and pairwise sends take more: 3.3 GB on
        eight H100s (issue 1685).

        >>> find_gpu("A100-80GB").nccl_bytes(8).value >> 20
        688
        """
        if world_size < 2:
            return Interval()
        measured = (544 if world_size == 2 else 688) * MIB
        if self.compute_capability is None:
            return Interval(measured // 12, 4 * 32 * _CHANNEL)
        return Interval(measured, 4 * 32 * _CHANNEL) if self.has_nvlink else Interval(measured // 12, 4 * 8 * _CHANNEL)


# What processes held outside of torch's allocator, in MiB: "this process has X in use" less what "is allocated by
# PyTorch" and "reserved by PyTorch but unallocated", in public out-of-memory messages of torch 2.2 to 2.13. The bound
# is the largest that was found, also with torch before 1.13, which loads all kernels at once; where the architecture
# needs a later torch and none above a gigabyte was found, twice the value.
_CONTEXT = {
    "6.0": (300, 1343),  # as 7.0
    "7.0": (389, 1343),  # 0.37 to 0.39 GiB on a V100; nvidia-smi with an empty model on torch 1.x: 1,343 MiB
    "7.5": (154, 879),  # 0.11 to 0.20 GiB on a T4; RTX 2080 Ti, torch 1.6: pytorch issue 49877, less its tensor
    "8.0": (502, 1237),  # 0.40 to 0.53 GiB on an A100; with a net of one neuron on torch 1.x: 1,237 MiB
    "8.6": (338, 1488),  # 0.20 to 0.42 GiB on A10, A10G, 3090, A6000; RTX 3090, torch 1.7: pytorch issue 49877
    "8.9": (492, 984),  # 0.41 to 0.51 GiB on 4090, L40, L40S, RTX 6000 Ada
    "9.0": (614, 1228),  # 0.51 and 0.65 GiB on an H200, 0.75 twice on an H100
    "10.0": (717, 1434),  # 0.70 GiB on a B200
    "12.0": (600, 1434),  # 0.48 to 0.60 GiB on 5090 and RTX PRO 6000; 1.4 GiB on a 5070 Ti
}
_UNKNOWN_CONTEXT = Interval(502 * MIB, max(upper for _, upper in _CONTEXT.values()) * MIB)
# Name, MiB that CUDA reports, compute capability, NVLink; seen in a message of torch's OutOfMemoryError, in properties
# of ``torch.cuda.get_device_properties``, or as said.
_TABLE = (
    ("P100-16GB", 16280, "6.0", True),  # properties, torch 1.5
    ("V100-16GB", 16130, "7.0", True),  # properties, V100-SXM2-16GB; 16,160 on PCIe
    ("V100-32GB", 32491, "7.0", True),  # message, 31.73 GiB; 31.74 in QwenAudio/SenseVoice issue 28
    ("T4", 14909, "7.5", False),  # startup lines of unsloth, 14.563 GB, torch 2.6 to 2.11; 15,102 with older drivers
    ("Quadro RTX 6000", 24019, "7.5", False),  # startup lines of unsloth, 23.457 GB, torch 2.10
    ("A100-40GB", 40325, "8.0", True),  # message, 39.38 GiB; 39.50 in TianheWu/CoSeR issue 10
    ("A100-80GB", 81039, "8.0", True),  # message, 79.14 GiB, lianqi1008/Control-GIC issue 6
    ("A10", 22517, "8.6", False),  # message, 21.99 GiB, zai-org/CogVLM issue 236
    ("A10G", 22507, "8.6", False),  # message, 21.98 GiB, AWS g5; 22,587 by properties
    ("A40", 45416, "8.6", False),  # properties; 44.549 GB in startup lines of unsloth
    ("RTX A5000", 24114, "8.6", False),  # properties, torch 2.x
    ("RTX A6000", 48569, "8.6", False),  # startup lines of unsloth, 47.431 GB; 44.427 with ECC switched on
    ("RTX 3060", 11931, "8.6", False),  # properties, torch 2.4
    ("RTX 3090", 24154, "8.6", False),  # startup lines of unsloth, 23.588 GB, torch 2.7
    ("RTX 3090 Ti", 24114, "8.6", False),  # properties, driver 590
    ("L4", 22487, "8.9", False),  # message, 21.96 GiB, vllm-project/vllm issue 12539
    ("L40", 45465, "8.9", False),  # message, 44.40 GiB, QwenLM/Qwen3-VL issue 2097
    ("L40S", 45455, "8.9", False),  # message, 44.39 GiB; 44.42 in stepfun-ai/Step-Video-T2V issue 8
    ("RTX 4060 Ti 16GB", 15945, "8.9", False),  # startup lines of unsloth, 15.572 GB, torch 2.7
    ("RTX 4070", 11837, "8.9", False),  # message, 11.56 GiB
    ("RTX 4070 Ti SUPER", 15945, "8.9", False),  # as the RTX 4060 Ti, of the same 16 GB; 15.992 GB under Windows
    ("RTX 4080", 15945, "8.9", False),  # as the RTX 4060 Ti, of the same 16 GB; 16,049 by properties
    ("RTX 4090", 24084, "8.9", False),  # message, 23.52 GiB; 23.53 in lrzjason/T2ITrainer issue 37
    ("RTX 6000 Ada", 48508, "8.9", False),  # unslothai/unsloth-zoo pull request 1053: 50,865,307,648 bytes, without ECC
    ("H100-80GB", 81008, "9.0", True),  # properties, H100 PCIe; 81,082 to 81,090 on SXM5
    ("H100-94GB", 95252, "9.0", True),  # message, 93.02 GiB, H100 NVL; to 93.10
    ("H100-96GB", 96768, "9.0", True),  # message, 94.50 GiB
    ("H200", 143073, "9.0", True),  # message, 139.72 GiB; 143,156 by properties
    ("B200", 182630, "10.0", True),  # message, 178.35 GiB; 182,631 by properties
    ("RTX 5060 Ti 16GB", 15851, "12.0", False),  # message, 15.48 GiB
    ("RTX 5070 Ti", 15831, "12.0", False),  # message, 15.46 GiB, as the RTX 5080, of the same 16 GB
    ("RTX 5080", 15831, "12.0", False),  # message, 15.46 GiB; to 15.47
    ("RTX 5090", 32089, "12.0", False),  # message, 31.34 GiB; 31.37 in Wan-Video/Wan2.1 issue 465
    ("RTX PRO 6000", 97239, "12.0", False),  # message, 94.96 GiB; 97,250 by properties
)
GPUS = {
    name: Gpu(name, total * MIB, capability, Interval(*(one * MIB for one in _CONTEXT[capability])), nvlink)
    for name, total, capability, nvlink in _TABLE
}
_OTHER_NAMES = {
    "h100": "H100-80GB",
    "h100nvl": "H100-94GB",
    "gh200": "H100-96GB",
    "a800": "A100-80GB",
    "p100": "P100-16GB",
}
_MEMORY = re.compile(r"(\d+)g(?:i?b)?$")


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name, as people, nvidia-smi or torch write it, or an unknown one of a size (``24GiB``)."""
    key = _key(text)
    name = _OTHER_NAMES.get(key) or {_key(known): known for known in GPUS}.get(key)
    if name is not None:
        return GPUS[name]
    if re.fullmatch(r"\s*[\d.]+\s*[kmgt]i?b?\s*|\s*\d{9,}\s*(?:b\s*)?", text, re.IGNORECASE):
        total = parse_bytes(text)
        if total >= GIB:
            return Gpu(format_bytes(total), total, None, _UNKNOWN_CONTEXT, has_nvlink=False)
    sizes = [known for known in GPUS if key and _key(known).startswith(key) and _MEMORY.search(known.lower())]
    if sizes:
        what, remedy = f"'{text}' exists with more than one size of memory.", f"write {' or '.join(sizes)}, or the size"
    else:
        what = f"'{text}' is no GPU that memfit knows."
        remedy = f"{nearest(text.strip().upper(), GPUS)} or write its memory, such as 24GiB"
    raise ConfigError(what, rule="a GPU is one of memfit's table, or a size of at least 1GiB", remedy=remedy)


def _key(name: str) -> str:
    """Return the part of a name that everybody writes: 4070tisuper of NVIDIA GeForce RTX 4070 Ti SUPER."""
    words = re.split(r"[\s_\-]+", name.strip().lower())
    dropped = {"nvidia", "geforce", "tesla", "rtx", "pcie", "generation", "blackwell", "server", "workstation"}
    kept = [word for word in words if word not in dropped and not re.fullmatch(r"sxm\d?|hbm\d?e?|.*edition", word)]
    return re.sub(r"^(?:rtx|nvidia)|(?<=\d)gi?b$", "", "".join(kept))


ANY_GPU = find_gpu("1024TiB")
