"""A place to examine: a recorded tree with files changed or added, and an interpreter that has spoken."""

import shutil
from pathlib import Path

import pytest

from memfit.doctor import Interpreter, Setup, examine

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture
def tree(tmp_path):
    """Copies a recorded tree and writes files into it, by their path below it."""

    def make(name="docker_v2", **files):
        root = tmp_path / f"tree_{name}"
        shutil.copytree(RECORDED / name, root, dirs_exist_ok=True)
        for path, text in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return root

    return make


@pytest.fixture
def diagnose(tmp_path, tree):
    """Examines a command with a script in a recorded tree; gives the checks as a dict of lists by name."""

    def run(script=None, *, words=None, setup=None, root=None, env=None, asked=None, files=None):
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        for name, text in {**(files or {}), **({"train.py": script} if script is not None else {})}.items():
            (folder / name).write_text(text)
        command = words if words is not None else ["python", "train.py"] if script is not None else []
        checks = examine(
            command,
            setup or Setup(threads=1),
            root=root or tree(),
            env={"PATH": "/nowhere", **(env or {})},
            cwd=folder,
            interpreter=asked or Interpreter("3.11", "fork"),
        )
        found = {}
        for check in checks:
            found.setdefault(check.check, []).append(check)
        return found

    return run
