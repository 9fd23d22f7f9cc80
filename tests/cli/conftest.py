"""Commands of memfit in this process, in a folder with the tiny workload."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.cli import main

TINY = Path(__file__).parents[1] / "pipeline" / "tiny.py"


@pytest.fixture
def memfit(tmp_path, monkeypatch, capsys):
    """Runs a command as the program does; gives its exit code and what it wrote."""
    shutil.copy(TINY, tmp_path / "tiny.py")
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["memfit", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        written = capsys.readouterr()
        return SimpleNamespace(exit_code=caught.value.code or 0, out=written.out, err=written.err)

    return command


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
