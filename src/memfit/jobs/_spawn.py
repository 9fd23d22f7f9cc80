"""Starts a job's process inside its group, bound to its shim."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.jobs._child import ERROR, REQUEST, RESULT
from memfit.memory import JobGroup
from memfit.rundir import write_masked

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: When memory does run out, let the kernel take a job and never the shim, the supervisor or a stranger.
_OOM_SCORE_ADJ = "500"
_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """Have orphaned grandchildren handed to this process, so that none escapes the watch (Linux only)."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(job: Mapping[str, Any], job_dir: Path, group: JobGroup | None) -> subprocess.Popen[bytes]:
    """Start the process of a job; its program runs when this returns.

    Args:
        job: ``job.json``.
        job_dir: The folder of its files.
        group: The control group that it enters before its program begins.

    Raises:
        OSError: If its program, its folder or its group cannot be had.
    """
    if job["attempt"] > 1:
        for name in (RESULT, ERROR):
            (job_dir / name).unlink(missing_ok=True)
    command = list(job["command"])
    if job["target"] is not None:
        write_masked(job_dir / REQUEST, {"target": job["target"], "arguments": job["arguments"]}, durable=False)
        command = [sys.executable, "-m", "memfit.jobs", "child", str(job_dir)]
    watcher, limit_bytes = os.getpid(), job["data_limit_bytes"]

    def become() -> None:
        if sys.platform == "linux":
            # So no later attempt runs beside a job whose watcher died.
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != watcher:  # it died before that held
                os._exit(127)
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
        if group is not None:
            group.enter()
        if limit_bytes is not None:
            _limit_data(int(limit_bytes))

    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(open(job_dir / name, "ab")) for name in ("out.log", "err.log"))
        has_stdin = job["stdin"] is not None and job["attempt"] == 1
        stdin = stack.enter_context(open(job["stdin"] if has_stdin else os.devnull, "rb"))
        try:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out,
                stderr=err,
                cwd=job["cwd"],
                env={**os.environ, **job["env"]},
                start_new_session=True,
                preexec_fn=become,
            )
        except subprocess.SubprocessError as error:  # raised in ``become``, which tells no more
            raise OSError(errno.EACCES, "it cannot enter its group", str(group.path if group else "")) from error


def _limit_data(wall_bytes: int) -> None:
    """Have allocations beyond the wall fail in the program itself; the hard limit stays."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = wall_bytes if hard == resource.RLIM_INFINITY else min(wall_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
