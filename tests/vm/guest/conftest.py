"""What the tests in the guest share."""

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _readable_by_everybody():
    """Any user may run this interpreter: what is changed here is the guest's own view of the machine's folders."""
    if os.uname().nodename != "guest":
        pytest.fail("these tests belong into the guest: make test-vm")
    for start in (sys.executable, os.path.realpath(sys.executable), __file__):
        for folder in Path(start).parents:
            if folder.stat().st_mode & 0o005 != 0o005:
                folder.chmod(folder.stat().st_mode | 0o005)
