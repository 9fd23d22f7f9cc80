"""``machine.yaml``: what it describes, what it refuses, and what this machine and Slurm's allocation are as one."""

import dataclasses

import pytest

from memfit.errors import ConfigError, UsageError
from memfit.memory import Budget, Device
from memfit.planning import Machine

GIB = 1 << 30
#: Report 3's nodes.
NODES = "nodes: 4\ntasks_per_node: 4\ncpus_per_task: 16\ngpus_per_task: 1\nnode_memory: 256GB\ngpu: L40S\n"


@pytest.fixture
def read(tmp_path):
    """Reads a machine from its text."""

    def read_text(text):
        (tmp_path / "machine.yaml").write_text(text)
        return Machine.read(tmp_path / "machine.yaml")

    return read_text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (NODES + "foo: 1\n", "foo is no setting"),
        (NODES.replace("nodes: 4", "nodes: 0"), "nodes"),
        (NODES.replace("L40S", "L400"), "is no GPU that memfit knows"),
        ("node_memory: 1GiB\ngpu: L40S\n", "give gpu and gpus_per_task together"),
        ("node_memory: 1GiB\ngpus_per_task: 1\n", "give gpu and gpus_per_task together"),
        ("node_memory: 1GiB\nshm: 2GiB\n", "shm must not be larger than node_memory"),
        ("nodes: 2\n", "node_memory is missing"),
        (NODES.replace("tasks_per_node: 4", "tasks_per_node: 1048576"), "a node must have at most 1024 GPUs"),
    ],
)
def test_what_is_no_machine_is_refused_in_three_parts(read, text, what):
    with pytest.raises(ConfigError, match=what) as caught:
        read(text)
    assert caught.value.exit_code == 2 and caught.value.rule and caught.value.remedy
    assert "--set" not in caught.value.remedy  # there is only the file


@pytest.mark.proves("S3-09")
def test_ranks_fill_a_node_before_the_next_and_more_than_there_are_tasks_are_refused(read):
    machine = read(NODES)
    shapes = {ranks: machine.layout(ranks) for ranks in (1, 4, 5, 16)}
    assert {ranks: (one.nodes, one.tasks_per_node) for ranks, one in shapes.items()} == {
        1: (1, 1), 4: (1, 4), 5: (2, 4), 16: (4, 4),
    }  # fmt: skip
    assert shapes[16].gpus_per_node == 4
    with pytest.raises(UsageError, match="17 ranks were asked for, and the machine has 4 x 4 tasks"):
        machine.layout(17)


def test_its_budget_is_that_of_one_node(read):
    budget = read(NODES + "shm: 64GiB\n").budget("machine.yaml")
    assert (budget.lendable_bytes, budget.binding.source, budget.num_cpus) == (256 * 10**9, "machine.yaml", 64)
    assert [one.name for one in budget.devices] == ["L40S"] * 4 and budget.shm.total_bytes == 64 * GIB


def test_this_machine_in_an_allocation_of_slurm_is_described_and_read_back(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100000000 kB\nMemAvailable: 90000000 kB\n")
    env = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "65536", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "2(x4)",
           "SLURM_CPUS_PER_TASK": "3"}  # fmt: skip
    devices = tuple(Device(n, f"GPU-{n}", "NVIDIA L40S", 45 * GIB, 45 * GIB, 0, ()) for n in range(4))
    found = Machine.here(dataclasses.replace(Budget.read(root=tmp_path, env=env), devices=devices), env)
    assert found == Machine(
        nodes=4, tasks_per_node=2, cpus_per_task=3, gpus_per_task=2, node_memory=64 * GIB, gpu="L40S"
    )
    alone = Machine.here(dataclasses.replace(Budget.read(root=tmp_path, env={}), num_cpus=6), {})
    assert (alone.nodes, alone.tasks_per_node, alone.cpus_per_task, alone.gpu) == (1, 1, 6, None)
