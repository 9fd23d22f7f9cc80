"""Fixtures that several packages' tests share, and a check that no test leaves a process behind."""

import functools
import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from fixtures import (
    _alone_on_the_host,
    _no_settings_from_outside,
    dynamo,
    memfit,
    memory_group,
    one_thread,
    pytest_ignore_collect,
)

__all__ = [
    "_alone_on_the_host",
    "_no_settings_from_outside",
    "dynamo",
    "memfit",
    "memory_group",
    "one_thread",
    "pytest_ignore_collect",
]

# In the background of a shell Ctrl-C is ignored, and so it would be in all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _patient, max_examples=40)
settings.register_profile("thorough", _patient, max_examples=400)  # HYPOTHESIS_PROFILE=thorough make test
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

#: Processes that a test starts inherit this variable; its value is another one in each session.
_SESSION = "TEST_SESSION_ID"
#: So long a process may take to end after the last test, in seconds.
_GRACE = 10.0
_LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        os.environ[_SESSION] = uuid.uuid4().hex
        os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # none is here, and each process would look for them
        os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="memfit-tests-state-")  # not the user's own


def pytest_collection_modifyitems(config, items):
    """Let workers begin with what takes longest, so that none works alone at the end: a cluster's tests above all."""

    def rank(item):
        marks = (item.get_closest_marker(name) is None for name in ("slurm", "long", "slow", "core"))
        return *marks, _group_of(item.nodeid) == item.nodeid

    items.sort(key=rank if hasattr(config, "workerinput") else lambda item: ())  # else as they were asked for
    for item in items:  # a report goes from a worker to the session with these, and not with its marks
        item.user_properties += [("proves", name) for mark in item.iter_markers("proves") for name in mark.args]


def pytest_collection_finish():
    """Take what the collection imported out of every later garbage collection: with torch that is 0.4 s each."""
    gc.collect()
    gc.freeze()


#: Files whose tests share what a session makes once; of clusters there are two, whose tests wait beside each other.
_TOGETHER = {
    ("tests/slurm/test_backend.py", "tests/slurm/test_runs.py"): "runs",
    "tests/slurm/": "slurm",
    ("systems/tests/finance/test_stages.py", "systems/tests/finance/test_verb.py"): "finance",
}


@functools.cache
def _group_of_file(name):
    """Return what a file's tests stay together by: its own name if it makes something once for all of them, or None."""
    if group := next((group for start, group in _TOGETHER.items() if name.startswith(start)), None):
        return group
    path = Path(__file__).parents[1] / name
    return name if path.is_file() and 'scope="module"' in path.read_text() else None


def _group_of(nodeid):
    return _group_of_file(nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out tests one by one, and those that share something as one, which xdist's own loadgroup no longer does."""
    from xdist.scheduler import LoadScopeScheduling  # absent without xdist

    class BySharing(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group_of(nodeid)

    return BySharing(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session):
    """Fail the session if a process of its tests is still there, and end that process."""
    if hasattr(session.config, "workerinput"):
        return
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)
    deadline = time.monotonic() + _GRACE
    while (left := _started_here()) and time.monotonic() < deadline:
        time.sleep(0.1)
    session.config.stash[_LEFT] = [line for _, line in left]
    for process, _ in left:
        with suppress(psutil.Error):  # it has just ended
            process.kill()
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr.startswith("proves") and not config.option.collectonly:
        import ledger  # a copy of this file elsewhere has no pages

        stats = terminalreporter.stats
        passed, failed = (
            {
                name
                for kind in kinds
                for report in stats.get(kind, [])
                for key, name in report.user_properties
                if key == "proves"
            }
            for kinds in (("passed",), ("failed", "error"))
        )
        terminalreporter.write_line(ledger.summary(passed, failed))
    if lines := config.stash.get(_LEFT, []):
        terminalreporter.section("processes that tests left behind (ended now)", red=True)
        terminalreporter.write_line("\n".join(lines))


def _started_here():
    """Return the processes of this session's tests, each with a line that names its test and its command.

    A child that was forked and ran no other program has no test in its environment.
    """
    own = psutil.Process()
    below = own.children(recursive=True)
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            command, environ = process.cmdline(), process.environ()
            is_here = environ.get(_SESSION) == os.environ[_SESSION] or process in below
            # Python's own helpers end with the process that they serve.
            is_helper = process.ppid() == own.pid and "from multiprocessing." in " ".join(command)
            if process != own and is_here and not is_helper and process.status() != psutil.STATUS_ZOMBIE:
                test = environ.get("PYTEST_CURRENT_TEST", "unknown test")
                found.append((process, f"{test}: process {process.pid}: {' '.join(command)[:200]}"))
    return found
