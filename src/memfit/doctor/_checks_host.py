"""Check the host and its groups: budget, /dev/shm, limits of a process, folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._case import Case, judge
from memfit.memory import systemd_scope_command
from memfit.units import GIB, MIB, format_bytes, format_count, list_some

_OTHER_THREADS = 8  # threads that a process has beside its pools: Python's own, a queue's feeder, pin_memory, NCCL's
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_DOCKER_BYTES = 64 * MIB  # Docker's default. Source: docker run reference, --shm-size.
_LEAST_LOST_BYTES = 16 * MIB  # smaller segments of dead processes are no warning


def check_budget(case: Case) -> Iterator[Check]:
    """Which limit is the smallest, and whether anything is left of it."""
    budget, binding = case.place.budget, case.place.budget.binding
    free, limit = budget.lendable_bytes, binding.limit_bytes
    finding = f"{format_bytes(free)} is free of {format_bytes(limit)}, by {binding.name}; "
    finding = "; ".join((f"{finding}reserve {format_bytes(budget.reserve_bytes)}", *budget.notes))
    reason = "the smallest limit kills, not the host's total, and the memory of others counts"
    remedy = "memfit budget shows every limit; memfit ps what runs here"
    yield judge("budget", finding, reason, remedy, binding.source, problem=free == 0, warning=free < limit // 10)


def check_walls(case: Case) -> Iterator[Check]:
    """Whether memfit can give each job a group of its own, and what a kill in this group takes along."""
    budget = case.place.budget
    none = budget.permission == "none"
    scope = systemd_scope_command(env=case.env, root=case.place.root)
    finding = budget.promise if none else budget.promise.partition(";")[0]
    reason = "a group of its own holds a job back at its limit; without one a burst hits the other jobs"
    remedy = " ".join((*scope, "memfit run -- ...")) if scope else "run as root, or ask for a delegated group"
    yield judge("job limits", finding, reason, remedy, budget.cgroup or "no control group", warning=none)
    for path, text in case.place.group_files("memory.oom.group"):
        if text == "1":
            finding = f"memory.oom.group is 1 in {Path(path).parent}"
            reason = "at that group's limit the kernel kills every process in it, memfit's supervisor too; "
            remedy = "keep jobs away from that limit: memfit run --reserve 1GiB -- ..."
            yield Check("job limits", "warning", finding, reason + "Kubernetes sets it since 1.28", remedy, path)


def check_limits(case: Case) -> Iterator[Check]:
    """The limits of a process: how many there may be, address space, open files."""
    place, limits, source = case.place, case.place.limits, "/proc/self/limits"
    wanted = case.command.num_processes * (1 + case.num_workers) * (case.threads + _OTHER_THREADS)
    bounds = [(limits.get("processes", (None, None))[0], "RLIMIT_NPROC (ulimit -u)")]
    paths = (f"proc/sys/kernel/{name}" for name in ("threads-max", "pid_max"))
    bounds += [(place.number(path), f"/{path}") for path in paths]
    bounds += [(int(text), path) for path, text in place.group_files("pids.max") if text.isdigit()]
    if known := [(most, named) for most, named in bounds if most is not None]:
        least, named = min(known)
        finding = f"about {wanted} threads at most, {least} allowed"
        reason = "beyond it no thread starts: RuntimeError: can't start new thread, or a BlockingIOError at fork"
        remedy = "memfit run --set threads_per_job=1 -- ..., fewer workers, or docker run --pids-limit=-1"
        is_few, is_tight = wanted > least, 2 * wanted > least
        yield judge("processes", finding, reason, remedy, named, problem=is_few, warning=is_tight)
    if limits:
        yield from _address_space(case, source)
    soft, hard = limits.get("open files", (None, None))
    finding = f"{'unlimited' if soft is None else soft} open files a process"
    reason = "torch keeps a file open for each tensor from a worker while it lives: 400 batches of 3 tensors hold 1,200"
    remedy = f"ulimit -n {hard or 65536}; keep copies (tensor.clone()), not the batches themselves"
    yield judge("open files", finding, reason, remedy, source, warning=bool(soft and soft < 4096 and case.num_workers))


def _address_space(case: Case, source: str) -> Iterator[Check]:
    reason = "it counts what may be touched, not what is: CUDA maps more than the device and the host hold"
    is_limited = False
    for row, name in (("address space", "RLIMIT_AS (ulimit -v)"), ("data size", "RLIMIT_DATA (ulimit -d)")):
        soft, hard = case.place.limits.get(row, (None, None))
        if soft is not None:
            is_limited = True
            is_small = soft < GIB or (row == "address space" and bool(case.place.budget.devices))
            remedy = f"ulimit -{name[-2]} {'unlimited' if hard is None else hard // 1024}"
            finding = f"{name} is {format_bytes(soft)}"
            yield judge("address space", finding, reason, remedy, source, problem=is_small, warning=True)
    if not is_limited:
        yield Check("address space", "ok", "no limit on address space or data", reason, source=source)


def check_folders(case: Case) -> Iterator[Check]:
    """The file systems of the folders for temporary files and for runs, and what is free there."""
    temp = case.cwd / (case.env.get("TMPDIR") or "/tmp")
    yield _folder(case, "temp folder", temp, "set TMPDIR to a folder on a disk: export TMPDIR=/var/tmp")
    runs = case.cwd / case.setup.runs_dir
    while not (case.place.root / str(runs).lstrip("/")).exists() and runs != runs.parent:
        runs = runs.parent
    yield _folder(case, "run folder", runs, "memfit run --runs-dir FOLDER -- ...")


def _folder(case: Case, name: str, path: Path, remedy: str) -> Check:
    kind, free = case.place.kind_of(path), case.place.free_bytes(path)
    is_closed, is_memory = case.place.is_real and not os.access(path, os.W_OK), kind in _IN_MEMORY
    finding = f"{path} is on {kind or 'an unknown file system'}"
    finding += "" if free is None else f", {format_bytes(free)} free"
    finding += "; it cannot be written to" if is_closed else "; it goes with the container" if kind == "overlay" else ""
    reason = "files there are memory, charged to the group that wrote them; " if is_memory else ""
    reason += "checkpoints and intermediate files go there: a full disk ends a run as surely as full memory"
    warning = is_memory or (free is not None and free < GIB)
    source = "/proc/self/mountinfo, statvfs"
    return judge(name, finding, reason, remedy, source, problem=is_closed or free == 0, warning=warning)


def check_shm(case: Case) -> Iterator[Check]:
    """Whether /dev/shm holds the batches that workers keep ready."""
    shm, usable, workers = case.place.budget.shm, case.place.budget.lendable_bytes, case.num_workers
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
        finding = f"{room}; {parts} ({case.workers[1]})"
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


def check_leftovers(case: Case) -> Iterator[Check]:
    """Segments of /dev/shm whose owners are dead."""
    segments = case.place.segments
    dead = [one for one in segments if not one.in_use]
    lost = sum(one.size_bytes for one in dead)
    finding = f"{len(segments)} segments of libraries, all in use" if segments else "no segment of a library"
    if dead:
        names = list_some([f"{one.name} ({format_bytes(one.size_bytes)})" for one in dead], 3)
        finding = f"{format_bytes(lost)} in {len(dead)} segments that no process seen here uses: {names}"
    files = " ".join(f"/dev/shm/{one.name}" for one in dead[:3])
    remedy = (
        f"rm {files}{' ...' if len(dead) > 3 else ''} (first make sure that no other container shares this /dev/shm)"
    )
    reason = "they stay charged as memory after their writer's death, until somebody unlinks them"
    is_large = lost >= _LEAST_LOST_BYTES
    yield judge("leftovers", finding, reason, remedy, "/dev/shm, /proc/*/maps", warning=is_large)
