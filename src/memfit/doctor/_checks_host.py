"""Check the host and its groups: /dev/shm, limits of a process, budget, folders in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._case import Case, judge
from memfit.memory import systemd_scope_command
from memfit.units import GIB, MIB, format_bytes, format_count

_OTHER_THREADS = 8  # threads that a process has beside its pools: Python's own, a queue's feeder, pin_memory, NCCL's
_DOCKER_BYTES = 64 * MIB  # Docker's default. Source: docker run reference, --shm-size.


def check_budget(case: Case) -> Iterator[Check]:
    budget, binding = case.budget, case.budget.binding
    free, limit = budget.lendable_bytes, binding.limit_bytes
    finding = f"{format_bytes(free)} is free of {format_bytes(limit)}, by {binding.name}; "
    finding = "; ".join((f"{finding}reserve {format_bytes(budget.reserve_bytes)}", *budget.notes))
    reason = "the smallest limit kills, not the host's total, and the memory of others counts"
    remedy = "memfit budget shows every limit; memfit ps what runs here"
    yield judge("budget", finding, reason, remedy, binding.source, problem=free == 0, warning=free < limit // 10)


def check_walls(case: Case) -> Iterator[Check]:
    """Whether memfit can give each job a group of its own, and what a kill in this group takes along."""
    budget = case.budget
    none = budget.permission == "none"
    scope = systemd_scope_command(env=case.env, root=case.root)
    finding = budget.promise if none else budget.promise.partition(";")[0]
    reason = "a group of its own holds a job back at its limit; without one a burst hits the other jobs"
    remedy = " ".join((*scope, "memfit run -- ...")) if scope else "run as root, or ask for a delegated group"
    yield judge("job limits", finding, reason, remedy, budget.cgroup or "no control group", warning=none)
    for path, text in case.group_files("memory.oom.group"):
        if text == "1":
            finding = f"memory.oom.group is 1 in {Path(path).parent}"
            reason = "at that group's limit the kernel kills every process in it, memfit's supervisor too; "
            remedy = "keep jobs away from that limit: memfit run --reserve 1GiB -- ..."
            yield Check("job limits", "warning", finding, reason + "Kubernetes sets it since 1.28", remedy, path)


def check_limits(case: Case) -> Iterator[Check]:
    workers, limits = case.workers[0], case.limits
    wanted = case.command.num_processes * (1 + workers) * (case.threads + _OTHER_THREADS)
    bounds = [(limits.get("processes", (None, None))[0], "RLIMIT_NPROC (ulimit -u)")]
    paths = (f"proc/sys/kernel/{name}" for name in ("threads-max", "pid_max"))
    bounds += [(case.number(path), f"/{path}") for path in paths]
    bounds += [(int(text), path) for path, text in case.group_files("pids.max") if text.isdigit()]
    if known := [(most, named) for most, named in bounds if most is not None]:
        least, named = min(known)
        finding = f"about {wanted} threads at most, {least} allowed"
        reason = "beyond it no thread starts: RuntimeError: can't start new thread, or a BlockingIOError at fork"
        remedy = "memfit run --set threads_per_job=1 -- ..., fewer workers, or docker run --pids-limit=-1"
        is_few, is_tight = wanted > least, 2 * wanted > least
        yield judge("processes", finding, reason, remedy, named, problem=is_few, warning=is_tight)
    soft, hard = limits.get("open files", (None, None))
    finding = f"{'unlimited' if soft is None else soft} open files a process"
    reason = "torch keeps a file open for each tensor from a worker while it lives: 400 batches of 3 tensors hold 1,200"
    remedy = f"ulimit -n {hard or 65536}; keep copies (tensor.clone()), not the batches themselves"
    is_low = bool(soft and soft < 4096 and workers)
    yield judge("open files", finding, reason, remedy, "/proc/self/limits", warning=is_low)


def check_folders(case: Case) -> Iterator[Check]:
    reason = "files there are memory, charged to the group that wrote them"
    temp, runs = case.cwd / (case.env.get("TMPDIR") or "/tmp"), case.cwd / case.setup.runs_dir
    for name, path, remedy in (
        ("temp folder", temp, "set TMPDIR to a folder on a disk: export TMPDIR=/var/tmp"),
        ("run folder", runs, "memfit run --runs-dir FOLDER -- ..."),
    ):
        lies = case.is_in_memory(path)
        finding = f"{path} {'lies' if lies else 'does not lie'} in memory"
        yield judge(name, finding, reason, remedy, "/proc/self/mountinfo", warning=lies)


def check_shm(case: Case) -> Iterator[Check]:
    shm, usable, (workers, origin) = case.budget.shm, case.budget.lendable_bytes, case.workers
    reason = (
        "workers hand batches over through /dev/shm: when it is full they die of a bus error; files there are "
        "charged to the group as memory, until they are unlinked"
    )
    if shm is None:
        remedy = "mount it: docker run --shm-size=1g, or mount -t tmpfs tmpfs /dev/shm"
        yield judge("/dev/shm", "there is no /dev/shm", reason, remedy, "/proc/self/mountinfo", problem=workers > 0)
        return
    free = shm.total_bytes if shm.free_bytes is None else shm.free_bytes
    room = f"{format_bytes(free)} free of {format_bytes(shm.total_bytes)}"
    batch, parts = case.setup.batch_bytes, format_count(workers, "worker")
    if batch is None or not workers:
        is_small = shm.total_bytes <= _DOCKER_BYTES or free < _DOCKER_BYTES
        finding = f"{room}; {parts} ({origin})"
        remedy = "docker run --shm-size=1g (or --ipc=host); give the size of a batch: memfit doctor --batch 64MiB"
        is_full = is_small and workers > 0
        yield judge("/dev/shm", finding, reason, remedy, shm.source, problem=is_full, warning=is_small)
        return
    ranks = case.command.num_processes
    needed, least = ranks * workers * case.prefetch * batch, min(free, usable)
    parts = f"{ranks} processes x {parts}" if ranks > 1 else parts
    parts += f" x {case.prefetch} batches x {format_bytes(batch)} = {format_bytes(needed)}"
    remedy = f"num_workers={min(least // max(1, ranks * case.prefetch * batch), workers)} fits, or prefetch_factor=1"
    if needed > free:
        remedy += f"; docker run --shm-size={max(1, -(-2 * needed // GIB))}g makes it larger"
    finding = f"{parts}; {room}; {format_bytes(usable)} of the budget is free"
    yield judge("/dev/shm", finding, reason, remedy, shm.source, problem=needed > least, warning=needed > least // 2)
