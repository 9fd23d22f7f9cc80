"""What to do about a death: remedies with their bytes, the cheapest in speed first, then what would change nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies_device import device_remedies
from memfit.diagnosis._remedies_host import host_remedies, shm_remedies
from memfit.diagnosis._remedies_other import other_remedies
from memfit.diagnosis._remedy import Remedy, by_cost

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis

_DEVICE = frozenset({"gpu", "gpu_fragmentation", "other_accelerator"})


def with_figures(job: Job, diagnosis: Diagnosis) -> Job:
    """A job with the use and the limit that the message of its killer gave, where nothing else tells them."""
    values = diagnosis.findings[0].values if diagnosis.findings else {}
    if any("own_kills" in one.values for one in diagnosis.findings):  # the record that memfit's own watcher left
        job = replace(job, under_memfit=True)
    if diagnosis.kind != "host_cgroup":
        return job
    told = {name: values.get(f"{name}_bytes") for name in ("used", "limit")}
    used, limit = (size if isinstance(size, int) and size > 0 else None for size in told.values())
    return job.with_known(Job(node_peak_bytes=used if limit and used else None, request_bytes=limit))


def list_remedies(
    diagnosis: Diagnosis, job: Job | None = None, *, config: Mapping[str, Any] | None = None
) -> list[Remedy]:
    """Remedies for what was diagnosed: what helps first, the cheapest in speed before the others.

    Args:
        diagnosis: What killed the job.
        job: What it asked for and what was measured of it.
        config: The model's ``config.json``: then remedies for a device come with bytes from `memfit.estimation`.
    """
    job = with_figures(job or Job(), diagnosis)
    finding = diagnosis.findings[0] if diagnosis.findings else None
    values: dict[str, Any] = dict(finding.values) if finding is not None else {}
    for name, count in diagnosis.figures.items():
        values.setdefault(f"{name.removeprefix('device_')}_bytes", count)
    if finding is not None:
        said = finding.text
        values.setdefault("pids", tuple(map(int, re.findall(r"\bProcess (\d+) has", said))))
    if diagnosis.cause == "killed":
        return list(other_remedies("killed", job))
    if diagnosis.kind in _DEVICE:
        return by_cost(list(device_remedies(values, job, phase=diagnosis.phase, config=config)))
    if diagnosis.kind in ("host_cgroup", "host_kernel", "host_alloc"):
        in_worker = finding is not None and bool(finding.values.get("worker"))
        is_limit = diagnosis.kind == "host_cgroup"
        return by_cost(_of_host(diagnosis.kind, values, job.under_memfit) + list(
            host_remedies(job, is_limit=is_limit, in_worker=in_worker, phase=diagnosis.phase)
        ))  # fmt: skip
    if diagnosis.kind == "shm":
        return by_cost(list(shm_remedies(job)))
    if diagnosis.kind == "pinned":
        return by_cost(_PINNED)
    return list(other_remedies(diagnosis.cause, job))


_PINNED = [
    Remedy(
        "pin less",
        "pin_memory=False of the DataLoader, or a smaller prefetch_factor",
        "a few per cent",
        "pinned pages cannot be given back or swapped, and torch's host allocator keeps what it has, in powers of 2",
        "host",
    ),
    Remedy(
        "a higher limit of locked memory",
        "ulimit -l unlimited",
        "none",
        "where the limit, and not the memory, ended it: ulimit -l shows it",
        "host",
    ),
]


def _of_host(kind: str, values: Mapping[str, Any], under_memfit: bool) -> list[Remedy]:
    """What is special to a machine that ran out, and to an allocation that was refused."""
    if kind == "host_kernel":
        return [
            Remedy(
                "start only what fits beside the others of this machine",
                "--max-parallel 1, or a larger --reserve (memfit run --help)"
                if under_memfit
                else "memfit run -- COMMAND (or --max-parallel 1)",
                "fewer devices at once",
                "the whole machine was out of memory, so what else ran there counts as much as this job",
                "host",
            )
        ]
    if kind != "host_alloc":
        return []
    tried = values.get("tried_bytes")
    return [
        Remedy(
            "make that array in pieces, or in a smaller type",
            "np.memmap, chunks, float32 in place of float64",
            "hardly any",
            "a single request was refused; half as wide a type needs half of it",
            "host",
            tried // 2 if isinstance(tried, int) else None,
        ),
        Remedy(
            "see which limit refused it",
            "ulimit -v; cat /proc/sys/vm/overcommit_memory; memfit budget",
            "none",
            "a refusal without a kill comes from a limit of address space, or from overcommit_memory=2",
            "host",
        ),
    ]
