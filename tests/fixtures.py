"""Fixtures of all tests; each conftest imports them, so that they are the same everywhere."""

import gc
import itertools
import os
import re
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest


def pytest_ignore_collect(collection_path, config):
    """Import no file none of whose tests is asked for: its marks stand in its text."""
    expression = config.option.markexpr
    if not expression or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text, names = collection_path.read_text(), ("slow", "long", "core")
    if "def test_" not in text and ">>>" not in text:
        return True  # a helper, which would be imported to look for doctests
    of_all = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", text, re.MULTILINE | re.DOTALL)
    all_have = {name for name in names if of_all and f"mark.{name}" in of_all[0]}
    some_have = {name for name in names if f"mark.{name}" in text} - all_have
    sets = [all_have.union(more) for n in range(4) for more in itertools.combinations(some_have, n)]
    with suppress(NameError, SyntaxError):  # another mark, or an expression that Python does not know
        return not any(eval(expression, {name: name in marks for name in names}) for marks in sets) or None
    return None


_V1_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_group():
    """Makes real cgroup v1 memory groups with a limit, and removes them afterwards."""
    if os.geteuid() != 0 or not (_V1_MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory")
    made = []

    def make(limit_bytes: int, parent: Path = _V1_MEMORY) -> Path:
        group = parent / f"memfit-test-{uuid.uuid4().hex[:8]}"
        group.mkdir()
        made.append(group)
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        return group

    yield make
    for group in reversed(made):
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail(f"{group} still holds processes: {(group / 'cgroup.procs').read_text().split()}")


_NUMBERS = itertools.count()
os.fsync = lambda descriptor: None  # no power is cut: this process and its forks wait for no disk


@pytest.fixture(autouse=True)
def _alone_on_the_host(tmp_path_factory, monkeypatch, _no_settings_from_outside):
    """Each test has a folder for temporary files, a list of runs and records of comparisons of its own."""
    folder = tmp_path_factory.getbasetemp() / "tmp" / str(next(_NUMBERS))  # mktemp would look at all that are there
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "claims"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def memfit(tmp_path, monkeypatch, capsys):
    """Runs a command as the program does; gives its exit code and what it wrote."""
    from memfit.cli import main

    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["memfit", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        written = capsys.readouterr()
        return SimpleNamespace(exit_code=caught.value.code or 0, out=written.out, err=written.err)

    return command


@pytest.fixture(scope="session")
def dynamo():
    """Imports what a process's first optimizer imports: once here, and not in each child that a test forks."""
    pytest.importorskip("torch._dynamo")
    gc.freeze()


@pytest.fixture
def one_thread():
    """Torch computes in one thread, as in a job."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """Tests see no MEMFIT_ variables of whoever starts them."""
    for name in [name for name in os.environ if name.startswith("MEMFIT_")]:
        monkeypatch.delenv(name)
