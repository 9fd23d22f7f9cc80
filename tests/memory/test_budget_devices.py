"""GPUs, through a stand-in for NVML: what CUDA sees, and who else is there."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.memory import Budget, device_reader, read_devices, select_visible, visible_uuids

RECORDED = Path(__file__).parents[1] / "recorded"
GIB = 1 << 30


class FakeNvml:
    """As many of nvidia-ml-py's names as memfit uses, over plain records."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    def __init__(self, gpus, *, library=True):
        self.gpus, self.has_library, self.open = gpus, library, 0

    def nvmlInit(self):
        if not self.has_library:
            raise self.NVMLError_LibraryNotFound("NVML Shared Library Not Found")
        self.open += 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu):
        return gpu["uuid"]

    def nvmlDeviceGetName(self, gpu):
        return gpu.get("name", b"NVIDIA H200")

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=80 * GIB, free=80 * GIB - gpu.get("used", 0), used=gpu.get("used", 0))

    def nvmlDeviceGetMigMode(self, gpu):
        if "parts" not in gpu:
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, number):
        if number >= len(gpu["parts"]):
            raise self.NVMLError("Not Found")
        return gpu["parts"][number]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.get("processes", [])]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def proc(tmp_path):
    """A /proc with this process (100), its child (101) and another user's process (300)."""
    for pid, parent, name, uid in ((100, 1, "memfit", 0), (101, 100, "fold", 0), (300, 1, "jupyter", 4242)):
        folder = tmp_path / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "status").write_text(
            f"Name:\t{name}\nPid:\t{pid}\nPPid:\t{parent}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
        )
    (tmp_path / "proc/self").symlink_to("100")
    return tmp_path


@pytest.mark.proves("S4-43")
def test_foreign_processes_are_named_and_the_own_tree_is_not_foreign(proc):
    gpu = {"uuid": "GPU-a", "used": 15 * GIB, "processes": [(101, 4 * GIB), (300, 9 * GIB), (999, None)]}
    [device], note = read_devices(FakeNvml([gpu]), root=proc, env={})
    assert (device.total_bytes, device.free_bytes, device.foreign_bytes) == (80 * GIB, 65 * GIB, 11 * GIB)
    assert [(one.pid, one.name, one.used_bytes, one.user) for one in device.processes] == [
        (300, "jupyter", 9 * GIB, "uid 4242"),
        (999, "not visible from here (another container or user)", None, ""),
    ]
    assert (device.name, note) == ("NVIDIA H200", "")


def test_without_the_drivers_library_there_are_no_devices_and_a_reason():
    budget = Budget.read(root=RECORDED / "bare_host_v2", env={}, nvml=FakeNvml([], library=False))
    assert budget.devices == ()
    assert budget.notes == ("no GPUs: NVML Shared Library Not Found",)


def test_the_library_is_opened_once(proc):
    nvml = FakeNvml([{"uuid": "GPU-a"}])
    for _ in range(2):
        read_devices(nvml, root=proc, env={})
    assert nvml.open == 1


def test_the_budget_holds_the_devices_that_cuda_may_see():
    nvml = FakeNvml([{"uuid": "GPU-a"}, {"uuid": "GPU-b"}])
    budget = Budget.read(root=RECORDED / "bare_host_v2", env={"CUDA_VISIBLE_DEVICES": "GPU-b"}, nvml=nvml)
    assert [(device.index, device.uuid) for device in budget.devices] == [(1, "GPU-b")]


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"SLURM_JOB_GPUS": "0,2", "SLURM_STEP_GPUS": "2"}, ["GPU-c"]),  # a cluster that sets no CUDA_VISIBLE_DEVICES
        ({"SLURM_JOB_GPUS": "5,6,7"}, ["GPU-a", "GPU-b", "GPU-c"]),  # the kernel shows the job those three alone
        ({}, ["GPU-a", "GPU-b", "GPU-c"]),
    ],
)
def test_of_the_gpus_that_slurm_granted_the_budget_and_the_job_see_the_same(proc, env, seen):
    nvml = FakeNvml([{"uuid": f"GPU-{letter}"} for letter in "abc"])
    assert [one.uuid for one in read_devices(nvml, root=proc, env=env)[0]] == seen
    assert list(visible_uuids(env, nvml)) == seen
    assert visible_uuids({"CUDA_VISIBLE_DEVICES": "0,1"}, FakeNvml([], library=False)) == ("0", "1")


def test_a_gpu_in_instances_is_shown_by_them(proc):
    parts = [{"uuid": "MIG-1"}, {"uuid": "MIG-2"}]
    nvml = FakeNvml([{"uuid": "GPU-a", "parts": parts}, {"uuid": "GPU-b"}])
    found = {
        visible: [device.uuid for device in read_devices(nvml, root=proc, env={"CUDA_VISIBLE_DEVICES": visible})[0]]
        for visible in ("MIG-2", "0,1", "")
    }
    assert found == {"MIG-2": ["MIG-2"], "0,1": ["MIG-1", "GPU-b"], "": []}
    assert [device.uuid for device in read_devices(nvml, root=proc, env={})[0]] == ["MIG-1", "MIG-2", "GPU-b"]


def test_numbers_are_doubted_where_cuda_may_count_otherwise(proc):
    nvml = FakeNvml([{"uuid": "GPU-a", "name": "NVIDIA T4"}, {"uuid": "GPU-b", "name": "NVIDIA H200"}])
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in read_devices(nvml, root=proc, env=env)[1]
    assert read_devices(nvml, root=proc, env={**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[1] == ""


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("2", []),
        ("1,7,0", [1]),
        ("GPU-", []),
        ("GPU-b,GPU-a", [1, 0]),
        ("1,GPU-b", []),
        ("-1", []),
        (" 0 , 1 ", [0, 1]),
    ],
)
def test_cudas_list_ends_at_its_first_entry_that_names_no_single_device(visible, chosen):
    assert select_visible([(0, "GPU-a"), (1, "GPU-b")], visible) == chosen


def test_device_bytes_are_those_of_the_trees_processes():
    gpus = [{"uuid": "GPU-a", "processes": [(10, 5), (11, 7), (12, None), (99, 9)]}, {"uuid": "GPU-b"}]
    read = device_reader(FakeNvml(gpus))
    assert (read({10, 11, 12}), read({50})) == ({"GPU-a": 12}, {})


def test_what_a_tree_takes_of_a_gpu_in_instances_is_told_by_instance():
    parts = [{"uuid": "MIG-1", "processes": [(10, 5)]}, {"uuid": "MIG-2"}]
    assert device_reader(FakeNvml([{"uuid": "GPU-a", "parts": parts}]))({10}) == {"MIG-1": 5}


def test_a_machine_without_a_driver_has_no_device_reader():
    assert device_reader(FakeNvml([], library=False)) is None


@pytest.mark.proves("S2-54")
@pytest.mark.parametrize(
    "tree, limit, limit_bytes, num_cpus",
    [("bare_host_v2", "MemAvailable", 2048 * GIB, 256), ("slurm_v2", "memory.max", 500 * GIB, 32)],
)
def test_on_a_host_of_2_tib_256_cores_and_an_80_gib_gpu_the_enforced_limit_counts(
    tree, limit, limit_bytes, num_cpus, tmp_path
):
    host = shutil.copytree(RECORDED / tree, tmp_path / "tree")
    kib = {"MemTotal": 2048 * GIB >> 10, "MemFree": 1800 * GIB >> 10, "MemAvailable": 1900 * GIB >> 10}
    lines = (host / "proc/meminfo").read_text().splitlines()
    lines = [line for line in lines if line.partition(":")[0] not in kib]
    (host / "proc/meminfo").write_text("\n".join([*lines, *(f"{name}: {size} kB" for name, size in kib.items())]))
    status = host / "proc/self/status"
    status.write_text(re.sub(r"Cpus_allowed_list:.*", "Cpus_allowed_list:\t0-255", status.read_text()))
    env = {}
    for wall in host.glob("sys/fs/cgroup/**/job_42/**/memory.max"):
        wall.write_text(f"{500 * GIB}\n")
        env = {"SLURM_JOB_ID": "42", "SLURM_CPUS_ON_NODE": "32"}
    nvml = FakeNvml([{"uuid": "GPU-a", "name": b"NVIDIA A100-SXM4-80GB", "used": 2 * GIB}])
    budget = Budget.read(root=host, env=env, nvml=nvml)
    assert (budget.binding.name, budget.limit_bytes, budget.num_cpus) == (limit, limit_bytes, num_cpus)
    assert [(one.name, one.total_bytes, one.free_bytes) for one in budget.devices] == [
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, 78 * GIB)
    ]
