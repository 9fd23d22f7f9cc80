"""Why a process does nothing: its Python stacks, and what the kernel says that it waits for.

Needs the standard library only: a worker registers before it imports anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_dump_files: dict[str, IO[str]] = {}


@dataclass(frozen=True)
class Stack:
    """What a process is doing.

    Attributes:
        text: The stacks of all its Python threads as ``faulthandler`` writes them; empty if the process did not answer.
        state: The kernel's letter for its main thread (R runs, S sleeps, D waits for a device, T stopped, Z ended);
            empty if there is no such process, or no ``/proc``.
        wchan: The kernel function that its main thread sleeps in; empty if it runs or this is not shown.
        num_threads: All threads of the process, not only Python's.
    """

    pid: int
    text: str = ""
    state: str = ""
    wchan: str = ""
    num_threads: int = 0
    start: Literal["fork", "forkserver", "spawn", "exec", ""] = ""

    @property
    def frames(self) -> tuple[str, ...]:
        """The calls of the main thread, the innermost first, such as ``collect (x/polars/frame.py:7)``."""
        sections = re.split(r"\n(?=(?:Current thread|Thread) )", self.text.strip())
        chosen = next((section for section in sections if section.startswith("Current thread")), sections[-1])
        found = filter(None, map(_FRAME.match, chosen.splitlines()))
        return tuple(f"{one['function']} ({'/'.join(one['file'].split('/')[-3:])}:{one['line']})" for one in found)


def register_stack_dump(folder: Path | str) -> None:
    """Let this process write the stacks of all its threads to ``<folder>/<pid>.stack`` when it gets SIGUSR2.

    It answers even if it hangs in C and holds the interpreter's lock. It replaces what SIGUSR2 did before.

    Args:
        folder: An existing folder.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> register_stack_dump(folder)
        >>> stack = stacks_of([os.getpid()], folder)[os.getpid()]
        >>> any(frame.startswith("stacks_of ") for frame in stack.frames)
        True
    """
    file = open(Path(folder, f"{os.getpid()}.stack"), "w")  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    for old in _dump_files.values():
        old.close()
    _dump_files.clear()
    _dump_files[str(folder)] = file


def stacks_of(pids: Iterable[int], folder: Path | str, *, wait_seconds: float = 2.0) -> dict[int, Stack]:
    """Return what each process is doing now, with the Python stacks of those that registered.

    Args:
        pids: Processes of this user.
        folder: The folder that the processes gave to ``register_stack_dump``.
        wait_seconds: How long to wait for all answers together. A stopped process, or one in state D, never answers.
    """
    asked: dict[int, tuple[Path, int]] = {}
    stacks = {pid: _kernel_view(pid) for pid in pids}
    for pid in stacks:
        path = Path(folder, f"{pid}.stack")
        # Without a handler the signal would end the process.
        if path.exists() and stacks[pid].state not in ("", "Z", "X") and _catches(pid, signal.SIGUSR2):
            asked[pid] = (path, path.stat().st_size)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    texts = _read_answers(asked, time.monotonic() + wait_seconds)
    return {pid: replace(stack, text=texts.get(pid, "")) for pid, stack in stacks.items()}


def _read_answers(asked: Mapping[int, tuple[Path, int]], deadline: float) -> dict[int, str]:
    """Return what each has written; an answer is whole when it ends in a line and no longer grows."""
    texts: dict[int, str] = dict.fromkeys(asked, "")
    waiting = set(asked)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in sorted(waiting):
            path, size = asked[pid]
            text = path.read_bytes()[size:].decode(errors="replace")
            if text.endswith("\n") and text == texts[pid]:
                waiting.remove(pid)
            texts[pid] = text
    return texts


def _kernel_view(pid: int) -> Stack:
    status = _read(pid, "status")
    if not status:
        return Stack(pid)
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    wchan = _read(pid, "wchan").strip().removeprefix("0")
    own, parents = _read(pid, "cmdline"), _read(int(fields["PPid"]), "cmdline")
    ways = {"multiprocessing.forkserver": "forkserver", "multiprocessing.spawn": "spawn"}
    start = next((way for name, way in ways.items() if name in own), "fork" if own == parents else "exec")
    num_threads = int(fields.get("Threads", "0"))
    return Stack(pid, "", fields["State"].strip()[:1], wchan, num_threads, start if own else "")  # type: ignore[arg-type]


def _catches(pid: int, number: signal.Signals) -> bool:
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(pid, "status"), re.MULTILINE)
    return match is None or bool(int(match[1], 16) >> (number - 1) & 1)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def likely_cause(stacks: Mapping[int, Stack]) -> str:
    """Return in one sentence what holds most of these processes up, and where.

    Example:
        >>> text = 'Current thread 0x1 (most recent call first):\\n  File "/x/polars/frame.py", line 7 in collect\\n'
        >>> likely_cause({9: Stack(9, text, "S", "futex_do_wait", 1, "fork")})  # doctest: +ELLIPSIS
        '1 of 1: waits for a lock that no thread is left to free: ... It is in collect (x/polars/frame.py:7).'
    """
    if not stacks:
        return "no process was found."
    causes = {pid: _cause_of(stack) for pid, stack in stacks.items()}
    cause, count = Counter(causes.values()).most_common(1)[0]
    places = Counter(stack.frames[0] for pid, stack in stacks.items() if causes[pid] == cause and stack.frames)
    place = f" It is in {places.most_common(1)[0][0]}." if places else ""
    return f"{count} of {len(stacks)}: {cause}.{place}"


_STATES = {
    "": "has ended",
    "Z": "has ended",
    "T": "is stopped by a signal (SIGSTOP, Ctrl-Z)",
    "t": "is stopped by a debugger",
}
_DISK_WAITS = ("folio_wait", "wait_on_page", "io_schedule", "filemap", "rpc_wait", "nfs", "fuse", "blk_", "jbd2")
_PIPE_WAITS = ("pipe_read", "unix_stream", "sk_wait", "poll_schedule", "ep_poll", "do_select", "anon_pipe_read")


def _cause_of(stack: Stack) -> str:
    frames, wchan = stack.frames, stack.wchan
    if stack.state in _STATES and (stack.state or not stack.text):
        return _STATES[stack.state]
    if stack.state == "D" or wchan.startswith(_DISK_WAITS):
        return f"waits for a disk or a network file system ({wchan or 'state D'})"
    importing = any("importlib._bootstrap" in frame for frame in frames)
    if "futex" in wchan and stack.start == "fork" and stack.num_threads == 1:
        return (
            "waits for a lock that no thread is left to free: it was forked, fork copies locks but not the threads "
            f"that hold them ({wchan}, 1 thread)"
        )
    if "futex" in wchan:
        return f"waits for a lock{' while it imports a module' if importing else ''} ({wchan})"
    if importing:
        return "still imports modules"
    if "nanosleep" in wchan:
        return f"sleeps ({wchan})"
    if wchan.startswith(_PIPE_WAITS):
        return f"waits for data of another process or the network ({wchan})"
    if not frames:
        return f"has not reached its first line of Python (state {stack.state}{', ' + wchan if wchan else ''})"
    return "computes" if stack.state == "R" else f"sleeps in the kernel ({wchan or 'state ' + stack.state})"
