"""What a job records in the run that its process belongs to."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from memfit.rundir._events import EventWriter
from memfit.rundir._folder import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir


class _Current:
    """This process's event file, opened at its run's first event; a forked child opens its own."""

    writer: EventWriter | None = None
    said = False


def current_run() -> tuple[RunDir, str] | None:
    """The run directory and job id that this process belongs to, or None outside a run."""
    path, job_id = os.environ.get(RUN_DIR_VARIABLE), os.environ.get(JOB_ID_VARIABLE)
    return (RunDir(Path(path)), job_id) if path and job_id else None


def record(kind: str, **fields: Any) -> None:
    """Append an event of this job to the run directory; do nothing outside a run.

    The live view shows the field ``text`` behind the job's name. An event of another rank than 0 says so in ``rank``.
    A full disk loses events, says so once, and never fails the job.
    """
    current = current_run()
    if current is None:
        return
    try:
        events_dir, job_id, writer = current[0].events_dir, current[1], _Current.writer
        if writer is None or (writer.pid, writer.path.parent, writer.job_id) != (os.getpid(), events_dir, job_id):
            if writer is not None and writer.pid == os.getpid():  # a fork may have another file at that descriptor
                writer.close()
            _Current.writer = None
            writer = _Current.writer = EventWriter(events_dir, job_id)
        if (rank := os.environ.get("RANK", "0")) != "0" and rank.isdecimal():
            fields = {"rank": int(rank), **fields}
        if "text" in fields:
            fields["text"] = f"{job_id} {fields['text']}"
        writer.write(kind, **fields)
    except OSError as error:
        if not _Current.said:
            _Current.said = True
            print(f"memfit: events of this job are not recorded from here on: {error}", file=sys.stderr, flush=True)


_phase_now: str | None = None


def phase(name: str) -> contextlib.ExitStack:
    """Mark the phase that this job enters, so that its peak memory is known by phase.

    Outside of a run nothing is recorded.

    Args:
        name: ``load``, ``build``, ``train``, ``validate``, ``checkpoint``, or a name of yours.

    Returns:
        What ends the phase in a ``with`` block: the phase before it goes on.

    Example:
        >>> phase("train")  # doctest: +ELLIPSIS
        <contextlib.ExitStack object at ...>
        >>> with phase("validate"):
        ...     print("train goes on after this block")
        train goes on after this block
    """
    global _phase_now
    before, _phase_now = _phase_now, name
    if current_run() is not None:
        record("phase", phase=name, **read_devices())
    ends = contextlib.ExitStack()
    if before is not None:
        ends.callback(phase, before)
    return ends


def read_devices() -> dict[str, list[dict[str, int]]]:
    """Return what torch holds on each of this process's devices, in bytes, and what of it tensors take; nothing before
    torch has used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    cuda = torch.cuda
    sizes = {"bytes": cuda.memory_reserved, "peak_bytes": cuda.max_memory_reserved}
    sizes["allocated_bytes"] = cuda.memory_allocated
    return {"devices": [{name: read(n) for name, read in sizes.items()} for n in range(cuda.device_count())]}
