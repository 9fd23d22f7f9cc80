"""What ended a DataLoader's worker: the signal or exit code, and what speaks for a lack of memory."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.errors import JobFailedError
from memfit.memory import memory_group, oom_kills_above
from memfit.rundir import record
from memfit.units import format_bytes
from memfit.watchdog import Stack

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (is killed by signal: |exited unexpectedly)")
_SHM_FULL = re.compile(r"</?torch_\w+>.*: No space left on device \(28\)")
_CODE = re.compile(r"exited unexpectedly with exit code (-?\d+)")
_FEWER = "lower num_workers or prefetch_factor"
_MORE_SHM = "give /dev/shm more room (docker run --shm-size=..., mount -o remount,size=... /dev/shm)"


def explain_death(error: RuntimeError, kills: Mapping[str, int], folder: Path | None) -> JobFailedError | None:
    """The error for a worker, of whatever ``DataLoader``, that has died or found ``/dev/shm`` full; None for others.

    Args:
        error: What a ``DataLoader`` raised; its iterator lies in a frame of the traceback.
        kills: What ``count_oom_kills`` gave before.
        folder: Where workers write ``<pid>.crash``.
    """
    if _SHM_FULL.search(str(error)):
        record("shm_full", room=_room())
        return JobFailedError(
            f"A batch found no room in shared memory: {_room()} now.",
            rule="workers hand their batches over in /dev/shm: up to num_workers x prefetch_factor of them at once.",
            remedy=f"{_FEWER}; {_MORE_SHM}",
        )
    match = _DIED.search(str(error))
    if match is None:
        return None
    pids = [int(pid) for pid in match["pids"].split(",")]
    code = _exit_code(error, match, pids)
    what, remedy = _cause_of(code, kills)
    record("loader_worker_died", pids=pids, exit_code=code, cause=what)
    return JobFailedError(
        f"DataLoader worker {', '.join(map(str, pids))} {what}.{_crash_of(pids, folder)}",
        rule="a batch that a worker was to make is lost with it, so the epoch cannot go on.",
        remedy=remedy,
    )


def _cause_of(code: int | None, kills: Mapping[str, int]) -> tuple[str, str]:
    """What happened, and what to do."""
    if code == -signal.SIGKILL:
        now = count_oom_kills()
        rose = [
            f"{place} ({kills[place]} -> {now[place]})" for place in now if now[place] > kills.get(place, now[place])
        ]
        what = "was killed (SIGKILL): out of memory is to be suspected, though the kernel counts no such kill here"
        if rose:
            what = f"was killed by the kernel for memory: its count of such kills rose in {', '.join(rose)}"
        return what, f"{_FEWER}, give more memory, or pack lists of objects: memfit.data.pack(objects)"
    if code == -signal.SIGBUS:
        return (
            f"ended with a bus error (SIGBUS): it touched memory of a file that is not there. {_room()}",
            f"{_FEWER}; {_MORE_SHM}; a mapped file must not be cut short while it is read",
        )
    if code is not None and code < 0:
        return f"was ended by {_signal_name(-code)}", "run with num_workers=0 to see it in this process"
    ended = "ended" if code is None else f"ended by itself with exit code {code}"
    return f"{ended} without an exception", "look for exit() or os._exit() in the data set; try num_workers=0"


def _crash_of(pids: Sequence[int], folder: Path | None) -> str:
    """Where a worker was when it crashed; the whole of it goes to standard error."""
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(folder or "", f"{pid}.crash").read_text(errors="replace")
            if frames := Stack(pid, text).frames:
                print(text, file=sys.stderr, flush=True)
                return f" It was in {' < '.join(map(str, frames[:3]))}."
    return ""


def _exit_code(error: RuntimeError, match: re.Match[str], pids: Sequence[int]) -> int | None:
    """A worker's exit code, negative for a signal, as its process or the error's text says; None if neither does."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for worker in workers_in(frame.f_locals.get("self")):  # the loader's iterator, which nothing else holds
            if worker.pid in pids:
                worker.join(1.0)
                if worker.exitcode is not None:
                    return int(worker.exitcode)
    text = str(error)
    if number := _CODE.search(text):
        return int(number[1])
    said = text[match.end() :]
    names = {signal.strsignal(number): number for number in signal.valid_signals()}
    found = [number for name, number in names.items() if name and said.startswith(name)]
    return -found[0] if found else None


def workers_in(iterator: Any) -> list[Any]:
    """The worker processes of a ``DataLoader``'s iterator; none of anything else."""
    workers = getattr(iterator, "_workers", None)
    return workers if isinstance(workers, list) else []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_oom_kills() -> dict[str, int]:
    """The kernel's counts of processes that it killed for memory, by place."""
    group = memory_group()
    kills = {str(place): number for place, number in oom_kills_above(group).items()} if group is not None else {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        kills["the machine"] = int((_PROC / "vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return kills


def _room() -> str:
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError:
        return ""
    free, total = format_bytes(usage.free), format_bytes(usage.total)
    return f"/dev/shm has {free} ({usage.free} bytes) free of {total}"
