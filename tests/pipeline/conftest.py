"""A config of the tiny workload in a folder of its own."""

import shutil
from pathlib import Path

import pytest

from stages_here import runs_here

#: Modules of the runs that tests start, imported from folders of their own.
collect_ignore = ["chain.py", "chain_help.py"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here():
    """Stages run in the process of the tests."""
    with runs_here():
        yield


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Writes a config for the tiny workload, with its params, and makes its folder the current one."""
    shutil.copy(Path(__file__).with_name("tiny.py"), tmp_path / "tiny.py")
    monkeypatch.chdir(tmp_path)

    def write(top: str = "", **params: object) -> Path:
        lines = [f"  {name}: {value}" for name, value in {"num_epochs": 2, **params}.items()]
        text = f"schema_version: 1\nexperiment: tiny\ntarget: tiny:TINY\nseed: 7\n{top}\nparams:\n" + "\n".join(lines)
        path = tmp_path / "config.yaml"
        path.write_text(text + "\n")
        return path

    return write
