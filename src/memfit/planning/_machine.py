"""A machine, or the allocation of a job, as a file describes it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from memfit import config
from memfit.amounts import Layout
from memfit.config import ByteSize, Settings
from memfit.errors import ConfigError, UsageError
from memfit.estimation import find_gpu
from memfit.memory import Budget, Device, Limit, SharedMemory
from memfit.planning._estimate import find_this_gpu


def _known(text: str) -> str:
    try:
        find_gpu(text)
    except ConfigError as error:
        raise ValueError(f"must be a GPU's name or its memory: {error.what} {error.remedy}") from None
    return text


Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Machine(Settings):
    """The nodes that a training gets, all alike; ``machine.yaml``."""

    nodes: Count = 1
    tasks_per_node: Count = 1  # the tasks of each, of one rank each
    cpus_per_task: Count = 1
    gpus_per_task: Annotated[int, Field(ge=0, le=64)] = 0
    node_memory: Annotated[ByteSize, Field(ge=1)]  # what the job may use on each node: ``sbatch --mem``, or all
    gpu: Annotated[str, AfterValidator(_known)] | None = None  # the name of its GPUs, or the memory of one
    shm: ByteSize | None = None  # what /dev/shm of a node holds; None if it may hold as much as the node

    @model_validator(mode="after")
    def _is_possible(self) -> Machine:
        if (self.gpu is None) != (self.gpus_per_task == 0):
            raise ValueError("give gpu and gpus_per_task together, or neither: gpu: L40S, gpus_per_task: 1")
        if self.gpus_per_task * self.tasks_per_node > 1024:
            raise ValueError("a node must have at most 1024 GPUs: gpus_per_task x tasks_per_node")
        if self.shm is not None and self.shm > self.node_memory:
            raise ValueError("shm must not be larger than node_memory: what lies in /dev/shm takes the node's memory")
        return self

    @classmethod
    def read(cls, file: Path) -> Machine:
        return config.resolve(cls, file=file, env={}).value

    @classmethod
    def here(cls, budget: Budget, env: Mapping[str, str] = os.environ) -> Machine:
        """Describe this machine, and the allocation of Slurm if this process is in one."""
        gpus, nodes = len(budget.devices), _number(env, "SLURM_NNODES") or 1
        tasks = _number(env, "SLURM_NTASKS_PER_NODE") or math.ceil((_number(env, "SLURM_NTASKS") or 0) / nodes)
        tasks = tasks or max(1, gpus)
        memory = budget.limit_bytes
        return cls(
            nodes=nodes,
            tasks_per_node=tasks,
            cpus_per_task=_number(env, "SLURM_CPUS_PER_TASK") or max(1, budget.num_cpus // tasks),
            gpus_per_task=gpus // tasks,
            node_memory=memory,
            gpu=find_this_gpu(budget)[0] if gpus >= tasks else None,
            shm=min(budget.shm.total_bytes, memory) if budget.shm else None,
        )

    def layout(self, num_ranks: int) -> Layout:
        """Return how so many ranks lie on it, a node filled before the next."""
        if num_ranks > self.nodes * self.tasks_per_node:
            raise UsageError(
                f"{num_ranks} ranks were asked for, and the machine has {self.nodes} x {self.tasks_per_node} tasks.",
                rule="each rank is one task: nodes x tasks_per_node of the machine, at most.",
                remedy=f"ask for fewer: --nproc {self.nodes * self.tasks_per_node}; or describe a larger machine",
            )
        tasks = min(num_ranks, self.tasks_per_node)
        nodes = math.ceil(num_ranks / self.tasks_per_node)
        return Layout(nodes, tasks, self.cpus_per_task, tasks * self.gpus_per_task)

    def budget(self, name: str) -> Budget:
        """Return the budget of one of its nodes that nobody else uses; ``name`` says where it is described."""
        size = self.node_memory
        devices = []
        if self.gpu is not None:
            gpu = find_gpu(self.gpu)
            devices = [
                Device(index, f"GPU {index} of {name}", gpu.name, gpu.total_bytes, gpu.total_bytes, 0, ())
                for index in range(self.gpus_per_task * self.tasks_per_node)
            ]
        return replace(
            Budget.read(),
            limits=(Limit("node_memory", name, size, 0, size, "job"),),
            reserve_bytes=0,
            reserve_note="none: the machine is described",
            devices=tuple(devices),
            num_cpus=self.cpus_per_task * self.tasks_per_node,
            cpus_source=name,
            shm=None if self.shm is None else SharedMemory(self.shm, self.shm, name),
        )


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number that a variable of Slurm's begins with.

    >>> _number({"SLURM_NTASKS_PER_NODE": "4(x2)"}, "SLURM_NTASKS_PER_NODE")
    4
    """
    found = re.match(r"\d+", env.get(name, ""))
    return int(found[0]) if found else None
