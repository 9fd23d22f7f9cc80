"""Memory by scope (a process, task, CPU, GPU, node, job) and place, and the layout between the scopes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from memfit.units import format_bytes

Scope = Literal["process", "task", "cpu", "gpu", "node", "job"]
Place = Literal["host", "device"]  # host memory and the memory of GPUs are never added


@dataclass(frozen=True)
class Amount:
    """Memory of each thing of one scope, in bytes, on the host or on devices.

    To add or compare those of different scopes or places is a TypeError.
    """

    bytes: int
    per: Scope
    place: Place = "host"

    def __str__(self) -> str:
        name = self.per.upper() if self.per in ("cpu", "gpu") else self.per
        return f"{format_bytes(self.bytes)} of {'the' if name == 'job' else 'each'} {name}"

    def __add__(self, other: Amount) -> Amount:
        return replace(self, bytes=self.bytes + self._like(other))

    def __sub__(self, other: Amount) -> Amount:
        return replace(self, bytes=self.bytes - self._like(other))

    def __lt__(self, other: Amount) -> bool:
        return self.bytes < self._like(other)

    def __le__(self, other: Amount) -> bool:
        return self.bytes <= self._like(other)

    def _like(self, other: Amount) -> int:
        """Return another amount's bytes; TypeError if it is of another scope or place."""
        if (self.per, self.place) != (other.per, other.place):
            raise TypeError(f"{self} ({self.place}) and {other} ({other.place}) are of different scopes or places")
        return other.bytes

    def scaled(self, factor: float) -> Amount:
        """Return it times a factor, rounded up to a byte."""
        return replace(self, bytes=math.ceil(self.bytes * factor))


@dataclass(frozen=True)
class Layout:
    """How a job lies on its nodes, the fullest of them if they differ; None is unknown, and never taken for one.

    ``processes_per_task`` counts processes of one kind, such as the loader workers of a rank.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    processes_per_task: int | None = None

    def to(self, amount: Amount, scope: Scope) -> Amount | None:
        """Return the same memory in another scope, rounded up; None if a count that this takes is not known."""
        if amount.per == scope:
            return amount
        tasks = 1 if {amount.per, scope} <= {"process", "task", "cpu"} else self.tasks_per_node
        cpus = tasks * self.cpus_per_task if tasks and self.cpus_per_task else None
        processes = tasks * self.processes_per_task if tasks and self.processes_per_task else None
        of_node = {"node": 1, "job": Fraction(1, self.nodes) if self.nodes else None}
        of_node |= {"task": tasks, "cpu": cpus, "gpu": self.gpus_per_node, "process": processes}
        many, few = of_node[amount.per], of_node[scope]
        return (
            replace(amount, bytes=math.ceil(amount.bytes * Fraction(many) / few), per=scope) if many and few else None
        )
