"""One real memory limit for the processes started under it: a control group that is removed at the end."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self


def find_parent() -> Path | None:
    """Return where this user may make a group with a memory limit, or None."""
    for path, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "cgroup.subtree_control"),
    ):
        controls = Path(path, name)
        if controls.exists() and os.access(path, os.W_OK) and (name[0] == "m" or "memory" in controls.read_text()):
            return Path(path)
    return None


class Limited:
    """A real memory control group with a limit.

    Args:
        parent: The group to make it in; see `find_parent`.
        limit_bytes: The limit.

    Raises:
        OSError: If the kernel refuses the group.
    """

    def __init__(self, parent: Path, limit_bytes: int) -> None:
        self.path = parent / f"memfit-bench-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self.v1 = (self.path / "memory.limit_in_bytes").exists()
        (self.path / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(limit_bytes))

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command inside of the group."""
        enter = ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs; exec "$@"', "sh", *command]
        return subprocess.Popen(enter, text=True, **options)

    @property
    def peak_bytes(self) -> int:
        """The charged peak, page cache included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())

    @property
    def num_oom_kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        text = (self.path / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(100):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.path} still holds {(self.path / 'cgroup.procs').read_text().split()}")
