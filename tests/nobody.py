"""A real second user, for what other users may do to this one."""

import os
import shutil
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest

UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def as_nobody(work):
    """Call a function in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the other user failed"


@contextmanager
def shared_folder():
    """A folder that all users may write to, as /tmp: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the last process of a job may write in it still
        shutil.rmtree(folder, ignore_errors=True)
