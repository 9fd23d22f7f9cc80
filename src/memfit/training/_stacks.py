"""Why a process does nothing: its Python stacks, and what the kernel says that it waits for."""

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
from typing import IO

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_dump_files: list[IO[str]] = []


@dataclass(frozen=True)
class Stack:
    """What a process is doing.

    Attributes:
        text: The stacks of all its Python threads as ``faulthandler`` writes them; empty if the process did not answer.
        state: The kernel's letter for its main thread (R runs, S sleeps, D waits for a device, T stopped, Z ended);
            empty if there is no such process, or no ``/proc``.
        wchan: The kernel function that its main thread sleeps in; empty if it runs or this is not shown.
        num_threads: All threads of the process, not only Python's.
        is_forked: It is a copy of its parent: it runs the same command line.
    """

    text: str = ""
    state: str = ""
    wchan: str = ""
    num_threads: int = 0
    is_forked: bool = False

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
    for old in _dump_files:
        old.close()
    _dump_files[:] = [file]


def stacks_of(pids: Iterable[int], folder: Path | str, *, wait_seconds: float = 2.0) -> dict[int, Stack]:
    """Return what each process is doing now, with the Python stacks of those that registered.

    Args:
        pids: Processes of this user.
        folder: The folder that the processes gave to ``register_stack_dump``.
        wait_seconds: How long to wait for all answers together. A stopped process, or one in state D, never answers.
    """
    views = {pid: _kernel_view(pid) for pid in pids}
    paths, sizes = {pid: Path(folder, f"{pid}.stack") for pid in views}, dict[int, int]()
    for pid, path in paths.items():
        if path.exists() and views[pid].state not in ("", "Z", "X") and _catches(pid, signal.SIGUSR2):
            sizes[pid] = path.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)  # without a handler it would end the process
    texts, waiting, deadline = dict.fromkeys(views, ""), set(sizes), time.monotonic() + wait_seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in sorted(waiting):
            text = paths[pid].read_bytes()[sizes[pid] :].decode(errors="replace")
            if text.endswith("\n") and text == texts[pid]:  # whole, and no longer growing
                waiting.remove(pid)
            texts[pid] = text
    return {pid: replace(view, text=texts[pid]) for pid, view in views.items()}


def _kernel_view(pid: int) -> Stack:
    status = _read(pid, "status")
    if not status:
        return Stack()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    wchan, own = _read(pid, "wchan").strip().removeprefix("0"), _read(pid, "cmdline")
    is_forked = bool(own) and own == _read(int(fields["PPid"]), "cmdline")
    return Stack("", fields["State"].strip()[:1], wchan, int(fields.get("Threads", "0")), is_forked)


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
        >>> likely_cause({9: Stack(text, "S", "futex_do_wait", 1, is_forked=True)})  # doctest: +ELLIPSIS
        '1 of 1: waits for a lock that no thread is left to free: ... It is in collect (x/polars/frame.py:7).'
    """
    causes = {pid: _cause_of(stack) for pid, stack in stacks.items()}
    cause, count = Counter(causes.values()).most_common(1)[0]
    places = Counter(stack.frames[0] for pid, stack in stacks.items() if causes[pid] == cause and stack.frames)
    place = f" It is in {places.most_common(1)[0][0]}." if places else ""
    return f"{count} of {len(stacks)}: {cause}.{place}"


_STATES = {"": "has ended", "Z": "has ended", "T": "is stopped by a signal (SIGSTOP, Ctrl-Z)"}
_DISK_WAITS = ("folio_wait", "wait_on_page", "io_schedule", "filemap", "rpc_wait", "nfs", "fuse", "blk_", "jbd2")
_PIPE_WAITS = ("pipe_read", "unix_stream", "sk_wait", "poll_schedule", "ep_poll", "do_select", "anon_pipe_read")


def _cause_of(stack: Stack) -> str:
    state, wchan = stack.state, stack.wchan
    if state in _STATES and (state or not stack.text):
        return _STATES[state]
    if state == "D" or wchan.startswith(_DISK_WAITS):
        return f"waits for a disk or a network file system ({wchan or 'state D'})"
    if "futex" in wchan and stack.is_forked and stack.num_threads == 1:
        return (
            "waits for a lock that no thread is left to free: it was forked, fork copies locks but not the threads "
            f"that hold them ({wchan}, 1 thread)"
        )
    importing = any("importlib._bootstrap" in frame for frame in stack.frames)
    if "futex" in wchan:
        return f"waits for a lock{' while it imports a module' if importing else ''} ({wchan})"
    if importing:
        return "still imports modules"
    if wchan.startswith(_PIPE_WAITS):
        return f"waits for data of another process or the network ({wchan})"
    return "computes" if state == "R" else f"sleeps ({wchan or 'state ' + state})"
