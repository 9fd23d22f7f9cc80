"""GPUs by name, and what a process takes of them beside torch's allocator."""

import re

import pytest

from memfit.errors import ConfigError
from memfit.estimation import GPUS, find_gpu

MIB, GIB = 1 << 20, 1 << 30

#: As nvidia-smi and torch write them, and as people do.
SPELLINGS = {
    "A100-40GB": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100-40", "A100 40GB"],
    "A100-80GB": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a100_80gb"],
    "H100-80GB": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "H100", "h100-80"],
    "H100-94GB": ["NVIDIA H100 NVL"],
    "H100-96GB": ["H100 96", "GH200"],
    "H200": ["NVIDIA H200", "h200"],
    "B200": ["NVIDIA B200"],
    "A10": ["NVIDIA A10"],
    "A10G": ["NVIDIA A10G"],
    "T4": ["Tesla T4"],
    "V100-16GB": ["Tesla V100-SXM2-16GB", "V100 16"],
    "V100-32GB": ["Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "3090", "rtx3090"],
    "RTX 4070 Ti SUPER": ["NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super", "4070TiSuper"],
    "RTX 4090": ["NVIDIA GeForce RTX 4090", "RTX4090", "4090"],
    "RTX 5090": ["NVIDIA GeForce RTX 5090"],
    "RTX A6000": ["NVIDIA RTX A6000", "a6000"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "RTX PRO 6000": ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Workstation Edition"],
    "L4": ["NVIDIA L4"],
    "L40S": ["NVIDIA L40S"],
}


def test_a_gpu_is_found_as_nvidia_smi_and_torch_and_people_write_it():
    spellings = {name: [name, name.lower(), f"NVIDIA {name}", *SPELLINGS.get(name, [])] for name in GPUS}
    assert {name: {find_gpu(one).name for one in every} for name, every in spellings.items()} == {
        name: {name} for name in GPUS
    }


#: What is printed on the box, in GB, of those whose name does not say it.
PRINTED = {"T4": 16, "Quadro RTX 6000": 24, "A10": 24, "A10G": 24, "A40": 48, "RTX A5000": 24, "RTX A6000": 48}
PRINTED |= {"RTX 3060": 12, "RTX 3090": 24, "RTX 3090 Ti": 24, "L4": 24, "L40": 48, "L40S": 48, "RTX 4070": 12}
PRINTED |= {"RTX 4070 Ti SUPER": 16, "RTX 4080": 16, "RTX 4090": 24, "RTX 6000 Ada": 48, "H200": 141, "B200": 192}
PRINTED |= {"RTX 5070 Ti": 16, "RTX 5080": 16, "RTX 5090": 32, "RTX PRO 6000": 96}


def test_what_the_table_says_is_plausible():
    """CUDA reports less than is printed on the box and not much less; contexts and workspaces are of a known size."""
    for name, gpu in GPUS.items():
        said = PRINTED.get(name) or int(re.split(r"[- ]", name)[-1].removesuffix("GB"))
        assert 0.9 * said < gpu.total_bytes / GIB < 1.02 * said, name
        assert 0.1 * GIB < gpu.context_bytes.value < gpu.context_bytes.upper < 1.5 * GIB, name
        # aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13): ":4096:2:16:8 default, 32MiB for Hopper and Blackwell"
        workspace = 32 if float(gpu.compute_capability) >= 9 else 8.125
        assert gpu.cublas_workspace_bytes.value == gpu.cublas_workspace_bytes.upper == workspace * MIB, name


def test_totals_are_those_that_torch_has_printed():
    # github.com/QwenAudio/SenseVoice issue 28: "GPU 0 has a total capacty of 31.74 GiB"; unslothai/unsloth-zoo pull
    # request 1053: 50,865,307,648 bytes; startup lines of unsloth with torch 2.6 to 2.11: "Tesla T4. Max memory: 14.563".
    assert find_gpu("V100-32GB").total_bytes <= 31.74 * GIB
    assert 0 <= 50_865_307_648 - find_gpu("RTX 6000 Ada").total_bytes < MIB
    assert 0 <= 14.563 * GIB - find_gpu("T4").total_bytes < 4 * MIB


def test_a_size_is_an_unknown_gpu_with_the_widest_bounds():
    gpu = find_gpu("24GiB")
    assert (gpu.total_bytes, gpu.compute_capability) == (24 * GIB, None)
    assert find_gpu("25769803776").total_bytes == find_gpu("24 gib").total_bytes == 24 * GIB
    for known in GPUS.values():
        assert known.context_bytes.upper <= gpu.context_bytes.upper
        assert known.cublas_workspace_bytes.upper <= gpu.cublas_workspace_bytes.upper
        assert known.nccl_bytes(8).upper <= gpu.nccl_bytes(8).upper


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RTX 4091", "did you mean 'RTX 4090'?"),
        ("h300", "did you mean 'H200'?"),
        ("A100", "write A100-40GB or A100-80GB"),
        ("V100", "write V100-16GB or V100-32GB"),
        ("24", "such as 24GiB"),
        ("512MiB", "such as 24GiB"),
        ("", "such as 24GiB"),
        ("abacus", "L40S"),
    ],
)
def test_an_unknown_name_is_an_error_that_says_what_to_write(text, said):
    with pytest.raises(ConfigError) as raised:
        find_gpu(text)
    assert said in raised.value.remedy
    assert repr(text) in raised.value.what
    assert "1GiB" in raised.value.rule


#: What torch's messages say of a process: in use, allocated and reserved but unallocated, in GiB.
SEEN = [
    ("A100-40GB", 25.24, 14.25, 12.87, 912.01 / 1024),  # TianheWu/CoSeR issue 10
    ("RTX 5090", 4.45, 26.89, 25.95, 343.86 / 1024),  # TrajectoryCrafter issue 20
    ("RTX 5090", 0.02, 31.34, 30.74, 19.41 / 1024),  # Wan-Video/Wan2.1 issue 465
    ("A100-80GB", 61.76, 17.37, 14.34, 2.53),  # Kwai-Keye/Keye issue 11
    ("L40", 33.26, 11.13, 10.25, 394.5 / 1024),  # QwenLM/Qwen3-VL issue 2097
    ("L40S", 0.12, 44.29, 43.88, 0.0),  # stepfun-ai/Step-Video-T2V issue 8
    ("RTX 4090", 0.04, 23.48, 22.72, 257.71 / 1024),  # huggingface/lora-fast issue 1
    ("V100-32GB", 0.39, 31.34, 29.76, 637.51 / 1024),  # QwenAudio/SenseVoice issue 28
    ("A10", 0.07, 21.91, 21.69, 1.55 / 1024),  # zai-org/CogVLM issue 236
]


def test_what_processes_held_beside_torch_is_within_the_bound():
    for name, free_gib, in_use, allocated, unallocated in SEEN:
        gpu = find_gpu(name)
        assert (in_use - allocated - unallocated) * GIB <= gpu.context_bytes.upper, name
        assert in_use + free_gib == pytest.approx(gpu.total_bytes / GIB, rel=0.01)


def test_communicators_take_nothing_alone_and_what_was_measured_in_groups():
    # github.com/NVIDIA/nccl issue 964: 544 MB in a group of two A100s, 688 MB in a larger one, each group anew.
    gpu = find_gpu("A100-80GB")
    assert [gpu.nccl_bytes(size).value // MIB for size in (1, 2, 3, 8, 512)] == [0, 544, 688, 688, 688]
    assert gpu.nccl_bytes(8).upper >= 1600e6 - gpu.context_bytes.value  # issue 864: 1.6 GB with the context


def test_without_nvlink_communicators_take_less():
    assert find_gpu("RTX 4090").nccl_bytes(4).upper < find_gpu("H100").nccl_bytes(4).value
