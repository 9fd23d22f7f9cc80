"""Memory by scope (a task, a CPU, a GPU, a node, a whole job), and the layout that turns one scope into another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from memfit.units import format_bytes

Scope = Literal["task", "cpu", "gpu", "node", "job"]


@dataclass(frozen=True)
class Amount:
    """Memory of each thing of one scope.

    >>> str(Amount(4 << 30, "cpu")), str(Amount(4 << 30, "job").scaled(1.5))
    ('4.00 GiB of each CPU', '6.00 GiB of the job')
    """

    bytes: int
    per: Scope

    def __str__(self) -> str:
        name = (
            "the job" if self.per == "job" else f"each {self.per.upper() if self.per in ('cpu', 'gpu') else self.per}"
        )
        return f"{format_bytes(self.bytes)} of {name}"

    def scaled(self, factor: float) -> Amount:
        """Return it times a factor, rounded up to a byte."""
        return Amount(math.ceil(self.bytes * factor), self.per)


@dataclass(frozen=True)
class Layout:
    """How a job lies on its nodes, the fullest of them if they differ; None is unknown, and never taken for one."""

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None

    def to(self, amount: Amount, scope: Scope) -> Amount | None:
        """Return the same memory in another scope, rounded up; None if a count that this takes is not known.

        >>> Layout(nodes=2, tasks_per_node=4, cpus_per_task=8).to(Amount(4 << 30, "cpu"), "node")
        Amount(bytes=137438953472, per='node')
        >>> Layout(cpus_per_task=8).to(Amount(4 << 30, "cpu"), "node") is None  # how many tasks a node has is not known
        True
        """
        if amount.per == scope:
            return amount
        tasks = 1 if {amount.per, scope} == {"task", "cpu"} else self.tasks_per_node
        cpus = tasks * self.cpus_per_task if tasks and self.cpus_per_task else None
        job = Fraction(1, self.nodes) if self.nodes else None
        of_node = {"node": 1, "job": job, "task": tasks, "cpu": cpus, "gpu": self.gpus_per_node}
        many, few = of_node[amount.per], of_node[scope]
        return Amount(math.ceil(amount.bytes * Fraction(many) / few), scope) if many and few else None
