"""What a job is told of the devices that it gets."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from memfit.jobs import Job, device_env
from memfit.memory import Device
from memfit.units import GIB

GPUS = [Device(n, f"GPU-{n}", "stand-in", 80 * GIB, 80 * GIB, 0, ()) for n in range(3)]
OWN = str(Path(sys.executable).parent / "python")


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    """This environment's torch is 2.13."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")


def env_of(job, env=None, **sizes):
    most = Counter({name.replace("_", "-"): size * GIB for name, size in sizes.items()})
    return device_env(job, [*most], most, GPUS, env=env or {})


def test_a_job_sees_its_devices_alone_and_torch_refuses_to_take_more_of_them():
    env = env_of(Job("a", target="math:sqrt"), GPU_2=20, GPU_0=40)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == env["PYTORCH_ALLOC_CONF"] == "per_process_memory_fraction:0.2500"


def test_what_the_allocator_is_told_already_stays():
    job = Job("a", target="math:sqrt", cuda_allocator="expandable_segments:True")
    setting = env_of(job, GPU_0=40)["PYTORCH_CUDA_ALLOC_CONF"]
    assert setting == "expandable_segments:True,per_process_memory_fraction:0.5000"
    own = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.1"}
    assert env_of(Job("a", target="math:sqrt"), own, GPU_0=40) == {"CUDA_VISIBLE_DEVICES": "GPU-0"}


@pytest.mark.parametrize(("command", "is_capped"), [(OWN, True), ("sh", False), ("/no/such/program", False)])
def test_a_command_is_capped_where_its_torch_is_known(command, is_capped):
    env = env_of(Job("a", command=(command,)), GPU_0=40)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in env) == is_capped


def test_a_torch_that_would_refuse_the_setting_is_not_told(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.1+cu128")
    assert env_of(Job("a", target="math:sqrt"), GPU_0=40) == {"CUDA_VISIBLE_DEVICES": "GPU-0"}
