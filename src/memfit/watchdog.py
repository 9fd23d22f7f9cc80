"""Why a process does nothing: its Python stacks, and what the kernel says that it waits for.

A worker calls ``register_stack_dump`` as early as it can; from then on the process that started it can ask for its
stacks, even if the worker hangs in C with the interpreter's lock held. Nothing but the standard library is needed.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

_PROC = Path("/proc")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_dump_files: dict[str, IO[str]] = {}

Start = Literal["fork", "forkserver", "spawn", "exec", ""]


@dataclass(frozen=True)
class Frame:
    """A Python call: file, line and function."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-3:])}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """What a process is doing.

    Attributes:
        pid: The process.
        text: The stacks of all its Python threads as ``faulthandler`` writes them; empty if the process did not answer
            or had registered nothing.
        state: The kernel's letter for its main thread (R runs, S sleeps, D waits for a device, T stopped, Z ended);
            empty if there is no such process, or no ``/proc``.
        wchan: The kernel function that its main thread sleeps in; empty if it runs or this is not shown.
        num_threads: Threads of the process, those that Python does not know included.
        start: How it came to be, as far as its command line tells.
    """

    pid: int
    text: str = ""
    state: str = ""
    wchan: str = ""
    num_threads: int = 0
    start: Start = ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls of the main thread, the innermost first."""
        sections = re.split(r"\n(?=(?:Current thread|Thread) )", self.text.strip())
        chosen = next((section for section in sections if section.startswith("Current thread")), sections[-1])
        found = (_FRAME.match(line) for line in chosen.splitlines())
        return tuple(Frame(match["file"], match["line"], match["function"]) for match in found if match)


def register_stack_dump(folder: Path | str) -> None:
    """Let this process write the stacks of all its threads to ``<folder>/<pid>.stack`` whenever SIGUSR2 comes.

    Call it in the process that is to be watched. The file is opened at once, so it may be called before anything else
    is imported. What SIGUSR2 did before in this process is replaced.

    Args:
        folder: A folder that is there.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> register_stack_dump(folder)
        >>> stack = stacks_of([os.getpid()], folder)[os.getpid()]
        >>> any(frame.function == "stacks_of" for frame in stack.frames)
        True
    """
    file = open(Path(folder, f"{os.getpid()}.stack"), "w")  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    for old in _dump_files.values():
        old.close()
    _dump_files.clear()
    _dump_files[str(folder)] = file


def stacks_of(pids: Iterable[int], folder: Path | str, *, wait_seconds: float = 2.0) -> dict[int, Stack]:
    """What each process is doing now; those that registered are asked for their Python stacks.

    Args:
        pids: Processes of this user.
        folder: The one that the processes gave to ``register_stack_dump``.
        wait_seconds: How long to wait for the answers of all of them together. A process that the kernel holds in a
            device's queue, or that is stopped, never answers.

    Returns:
        A ``Stack`` for each pid.
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
    return {pid: Stack(**{**vars(stack), "text": texts.get(pid, "")}) for pid, stack in stacks.items()}


def _read_answers(asked: Mapping[int, tuple[Path, int]], deadline: float) -> dict[int, str]:
    """What each has written since; an answer is whole when it ends in a line and stays as it is."""
    texts: dict[int, str] = dict.fromkeys(asked, "")
    open_ones = set(asked)
    while open_ones and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in sorted(open_ones):
            path, size = asked[pid]
            text = path.read_bytes()[size:].decode(errors="replace")
            if text and text.endswith("\n") and text == texts[pid]:
                open_ones.remove(pid)
            texts[pid] = text
    return texts


def _kernel_view(pid: int) -> Stack:
    """State, wait channel, threads and start of a process, before it is disturbed."""
    status = _read(_PROC / str(pid) / "status")
    if not status:
        return Stack(pid)
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "").strip()[:1]
    wchan = _read(_PROC / str(pid) / "wchan").strip()
    start = _start_of(pid, int(fields.get("PPid", "0")))
    return Stack(pid, "", state, "" if wchan == "0" else wchan, int(fields.get("Threads", "0")), start)


def _start_of(pid: int, parent: int) -> Start:
    own, parents = (_read(_PROC / str(number) / "cmdline") for number in (pid, parent))
    if "multiprocessing.forkserver" in own:
        return "forkserver"
    if "multiprocessing.spawn" in own:
        return "spawn"
    return "" if not own else "fork" if own == parents else "exec"


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; assumed where there is no ``/proc``."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(_PROC / str(pid) / "status"), re.MULTILINE)
    return match is None or bool(int(match[1], 16) >> (number - 1) & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def likely_cause(stacks: Mapping[int, Stack]) -> str:
    """In one sentence, what holds most of these processes up, and where.

    Example:
        >>> text = 'Current thread 0x1 (most recent call first):\\n  File "/x/polars/frame.py", line 7 in collect\\n'
        >>> likely_cause({9: Stack(9, text, "S", "futex_do_wait", 1, "fork")})  # doctest: +ELLIPSIS
        '1 of 1: waits for a lock that no thread is left to free: ... It is in collect (x/polars/frame.py:7).'
    """
    if not stacks:
        return "no process was found."
    causes = {pid: _cause_of(stack) for pid, stack in stacks.items()}
    cause, count = Counter(causes.values()).most_common(1)[0]
    places = Counter(str(stack.frames[0]) for pid, stack in stacks.items() if causes[pid] == cause and stack.frames)
    place = f" It is in {places.most_common(1)[0][0]}." if places else ""
    return f"{count} of {len(stacks)}: {cause}.{place}"


_DISK_WAITS = ("folio_wait", "wait_on_page", "io_schedule", "filemap", "rpc_wait", "nfs", "fuse", "blk_", "jbd2")
_PIPE_WAITS = ("pipe_read", "unix_stream", "sk_wait", "poll_schedule", "ep_poll", "do_select", "anon_pipe_read")


def _cause_of(stack: Stack) -> str:
    frames, wchan = stack.frames, stack.wchan
    by_state = {
        "": "has ended",
        "Z": "has ended",
        "T": "is stopped by a signal (SIGSTOP, Ctrl-Z)",
        "t": "is stopped by a debugger",
    }
    if stack.state in by_state and (stack.state or not stack.text):
        return by_state[stack.state]
    if stack.state == "D" or wchan.startswith(_DISK_WAITS):
        return f"waits for a disk or a network file system ({wchan or 'state D'})"
    importing = any("importlib._bootstrap" in frame.file for frame in frames)
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
        return f"has not come to its first line of Python yet (state {stack.state}{', ' + wchan if wchan else ''})"
    return "computes" if stack.state == "R" else f"sleeps in the kernel ({wchan or 'state ' + stack.state})"
