"""Commands of memfit in this process, in a folder with the tiny workload."""

import re
import shutil
from pathlib import Path

import pytest

from cli.live_run import in_a_folder_of_jobs

TINY = Path(__file__).parents[1] / "pipeline" / "tiny.py"


@pytest.fixture
def memfit(memfit, tmp_path):
    """Has the tiny workload in its folder."""
    shutil.copy(TINY, tmp_path / "tiny.py")
    return memfit


def tiny_config(top="", **params):
    """The text of a config of the tiny workload."""
    lines = [f"  {name}: {value}" for name, value in {"num_epochs": 1, "n_splits": 2, **params}.items()]
    head = f"schema_version: 1\nexperiment: tiny\ntarget: tiny:TINY\nseed: 7\n{top}\nparams:\n"
    return head + "\n".join(lines) + "\n"


@pytest.fixture
def config(tmp_path):
    """Writes a config of the tiny workload."""

    def write(top="", **params):
        path = tmp_path / "config.yaml"
        path.write_text(tiny_config(top, **params))
        return path

    return write


@pytest.fixture
def folder_of_jobs(tmp_path, monkeypatch):
    """The folder of live runs, in which commands are given."""
    in_a_folder_of_jobs(tmp_path, monkeypatch)


def check_refused(done, what, remedy=""):
    """A command ended with 2 and an error of three parts that names what is wrong and what to do."""
    parts = re.search(r"(?ms)^memfit: (.+)\n  rule: (.+)\n  do:   ([^\n]+)\n\Z", done.err)
    assert parts and (done.exit_code, done.out) == (2, ""), done
    assert what in parts[1] and remedy in parts[3], done.err
