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

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_dump_files: list[IO[str]] = []


@dataclass(frozen=True)
class Stack:
    """What a process is doing. ``text``: the stacks of all its Python threads as ``faulthandler`` writes them.
    ``state``: the kernel's letter for its main thread, empty if it is gone. ``wchan``: the kernel function that this
    thread sleeps in. ``num_threads``: all, not only Python's. ``is_forked``: it runs the same command line as its
    parent."""

    text: str = ""
    state: str = ""
    wchan: str = ""
    num_threads: int = 0
    is_forked: bool = False

    @property
    def frames(self) -> list[str]:
        """The calls of the main thread, the innermost first, such as ``collect (x/polars/frame.py:7)``."""
        sections = re.split(r"\n(?=(?:Current thread|Thread) )", self.text.strip())
        chosen = next((section for section in sections if section.startswith("Current thread")), sections[-1])
        found = _FRAME.findall(chosen)
        return [f"{function} ({'/'.join(file.split('/')[-3:])}:{line})" for file, line, function in found]


def register_stack_dump(folder: Path | str) -> None:
    """Let this process write the stacks of all its threads to ``<folder>/<pid>.stack`` when it gets SIGUSR2. It answers
    even if it hangs in C and holds the interpreter's lock. It replaces what SIGUSR2 did before."""
    file = open(Path(folder, f"{os.getpid()}.stack"), "w")  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    for old in _dump_files:
        old.close()
    _dump_files[:] = [file]


def stacks_of(pids: Iterable[int], folder: Path | str, *, wait_seconds: float = 2.0) -> dict[int, Stack]:
    """Return what each process of this user does now, with the Python stacks of those that registered in the folder.
    All answers together are waited for; a stopped process, or one in state D, never answers."""
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
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""


def likely_cause(stacks: Mapping[int, Stack]) -> str:
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
    is_importing = any("importlib._bootstrap" in frame for frame in stack.frames)
    if state in _STATES and (state or not stack.text):
        return _STATES[state]
    if state == "D" or wchan.startswith(_DISK_WAITS):
        return f"waits for a disk or a network file system ({wchan or 'state D'})"
    if "futex" in wchan and stack.is_forked and stack.num_threads == 1:
        return (
            "waits for a lock that no thread is left to free: it was forked, fork copies locks but not the threads "
            f"that hold them ({wchan}, 1 thread)"
        )
    if "futex" in wchan:
        return f"waits for a lock{' while it imports a module' if is_importing else ''} ({wchan})"
    if is_importing:
        return "still imports modules"
    if wchan.startswith(_PIPE_WAITS):
        return f"waits for data of another process or the network ({wchan})"
    return "computes" if state == "R" else f"sleeps ({wchan or 'state ' + state})"
