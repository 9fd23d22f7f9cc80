"""Checks of /dev/shm: its size against what the loader's workers put there, and what dead processes left."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.checks import Check, Verdict
from memfit.doctor._case import Case
from memfit.units import GIB, MIB, format_bytes

#: What Docker gives a container that is not told otherwise. Source: docker run reference, --shm-size.
_DOCKER_BYTES = 64 * MIB
#: Less than this in dead segments is not worth a word.
_LEAST_LOST_BYTES = 16 * MIB


def check_shm(case: Case) -> Iterator[Check]:
    """Whether /dev/shm holds what the workers have ready."""
    shm, budget = case.place.budget.shm, case.place.budget
    reason = (
        "workers hand batches over through /dev/shm: when it is full they die of a bus error; what lies there is "
        "charged to the group as memory, until it is unlinked"
    )
    if shm is None:
        verdict: Verdict = "problem" if case.num_workers else "ok"
        remedy = "mount it: docker run --shm-size=1g, or mount -t tmpfs tmpfs /dev/shm" if case.num_workers else ""
        yield Check("/dev/shm", verdict, "there is no /dev/shm", reason, remedy, "/proc/self/mountinfo")
        return
    free = shm.total_bytes if shm.free_bytes is None else shm.free_bytes
    room = f"{format_bytes(free)} free of {format_bytes(shm.total_bytes)}"
    needed = _needed_bytes(case)
    if needed is None:
        small = shm.total_bytes <= _DOCKER_BYTES or free < _DOCKER_BYTES
        verdict = "ok" if not small else "problem" if case.num_workers else "warning"
        tell = f"{room}; {case.num_workers} workers ({case.workers_source})"
        remedy = "docker run --shm-size=1g (or --ipc=host); tell the size of a batch: memfit doctor --batch 64MiB"
        yield Check("/dev/shm", verdict, tell, reason, remedy if small else "", shm.source)
        return
    ranks = case.command.num_processes
    sum_text = f"{case.num_workers} workers x {case.prefetch} batches x {format_bytes(case.setup.batch_bytes or 0)}"
    sum_text = f"{ranks} processes x {sum_text}" if ranks > 1 else sum_text
    finding = f"{sum_text} = {format_bytes(needed)}; {room}, {format_bytes(budget.lendable_bytes)} can be lent"
    least = min(free, budget.lendable_bytes)
    verdict = "problem" if needed > least else "warning" if needed > least // 2 else "ok"
    fits = least // max(1, ranks * case.prefetch * (case.setup.batch_bytes or 1))
    remedy = f"num_workers={min(fits, case.num_workers)} fits, or prefetch_factor=1"
    if needed > free:
        remedy += f"; docker run --shm-size={max(1, -(-2 * needed // GIB))}g makes it larger"
    yield Check("/dev/shm", verdict, finding, reason, "" if verdict == "ok" else remedy, shm.source)


def _needed_bytes(case: Case) -> int | None:
    """What the workers of all processes have ready at once; None when the size of a batch is not known."""
    if case.setup.batch_bytes is None or not case.num_workers:
        return None
    return case.command.num_processes * case.num_workers * case.prefetch * case.setup.batch_bytes


def check_leftovers(case: Case) -> Iterator[Check]:
    """Segments whose owners are dead."""
    segments = case.place.segments
    dead = [one for one in segments if not one.in_use]
    lost = sum(one.size_bytes for one in dead)
    reason = "they stay charged as memory after their writer's death, until somebody unlinks them"
    if not dead:
        finding = f"{len(segments)} segments of libraries, all in use" if segments else "no segment of a library"
        yield Check("leftovers", "ok", finding, reason, source="/dev/shm")
        return
    names = ", ".join(f"{one.name} ({format_bytes(one.size_bytes)})" for one in dead[:3])
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    finding = f"{format_bytes(lost)} in {len(dead)} segments that no process seen here uses: {names}{more}"
    if lost < _LEAST_LOST_BYTES:
        yield Check("leftovers", "ok", finding, reason, source="/dev/shm, /proc/*/maps")
        return
    files = " ".join(f"/dev/shm/{one.name}" for one in dead[:3])
    remedy = f"rm {files}{' ...' if more else ''} (first make sure that no other container shares this /dev/shm)"
    yield Check("leftovers", "warning", finding, reason, remedy, "/dev/shm, /proc/*/maps")


def check_sharing(case: Case) -> Iterator[Check]:
    """How torch hands tensors over, and the open files that this takes."""
    soft, hard = case.place.limits.get("open files", (None, None))
    workers = case.num_workers
    named = next((one for one in case.script.sharing if one.name), None)
    strategy = named.name if named else "file_descriptor"
    limit = "unlimited" if soft is None else str(soft)
    finding = f"{limit} open files a process; torch shares by {strategy}"
    reason = (
        "by file_descriptor each tensor that came from a worker keeps one file open as long as it lives: a list of "
        "400 batches of 3 tensors holds 1,200"
    )
    source = f"/proc/self/limits; {named.site if named else 'the default of torch on Linux'}"
    if strategy == "file_system":
        leak = "file_system needs no open files, and leaves its segments in /dev/shm when a process is killed"
        yield Check("open files", "warning", finding, leak, 'set_sharing_strategy("file_descriptor")', source)
        return
    few = soft is not None and soft < 4096 and bool(workers)
    most = "65536" if hard is None else str(hard)
    remedy = f"ulimit -n {most}; keep copies (tensor.clone()) and not the batches themselves" if few else ""
    yield Check("open files", "warning" if few else "ok", finding, reason, remedy, source)
