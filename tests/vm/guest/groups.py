"""Control groups of the guest, and functions called in them as one user or another."""

import os
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TOP = Path("/sys/fs/cgroup")
MIB = 1 << 20
NOBODY = 65534
#: What a user who may arrange the groups below one must own. Source: cgroup-v2.rst, "Model of Delegation".
_DELEGATED = ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads")


@contextmanager
def made_group(name: str = "", *, parent: Path = TOP, owner: int = 0, **knobs: object) -> Iterator[Path]:
    """A group; ``memory_max=...`` sets its memory.max, and ``owner`` gets it as systemd delegates one."""
    group = parent / (name or f"test-{uuid.uuid4().hex[:8]}")
    group.mkdir()
    try:
        for file in _DELEGATED if owner else ():
            os.chown(group / file, owner, owner)
        for knob, value in knobs.items():
            (group / knob.replace("_", ".", 1)).write_text(str(value))
        yield group
    finally:
        (group / "cgroup.kill").write_text("1")
        for folder, _, _ in os.walk(group, topdown=False):
            _remove(Path(folder))


def _remove(group: Path) -> None:
    for _ in range(200):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"{group} still holds processes: {(group / 'cgroup.procs').read_text().split()}")


def groups_below(group: Path) -> list[str]:
    """The names of the groups below one."""
    return sorted(entry.name for entry in group.iterdir() if entry.is_dir())


def own_group() -> Path:
    """The group of this process."""
    return TOP / Path("/proc/self/cgroup").read_text().strip().removeprefix("0::/")


def events(group: Path) -> dict[str, int]:
    """What the kernel counted in a group and below it."""
    return {name: int(count) for name, count in map(str.split, (group / "memory.events").read_text().splitlines())}


def call_in(group: Path, function: Callable[..., Any], *words: Any, uid: int = 0) -> Any:
    """What a function gives that is called in a process of its own, in a group and as a user."""
    told, teller = os.pipe()
    pid = os.fork()  # and no new interpreter: importing memfit takes seconds here
    if pid == 0:
        try:
            (group / "cgroup.procs").write_text("0")
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = ("", function(*words))
        except BaseException:
            answer = (traceback.format_exc(), None)
        with open(teller, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(teller)
    with open(told, "rb") as file:
        content = file.read()
    os.waitpid(pid, 0)
    error, result = pickle.loads(content) if content else ("the process ended without a word", None)
    if error:
        pytest.fail(f"in {group.name} as user {uid}: {error}")
    return result
