"""A command as a config of one stage: its name, and what is refused before it starts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.pipeline._grid import PLACEHOLDER, fill

_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh|torchrun|Rscript|julia|node|perl|ruby")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_SCRIPT = re.compile(r"\S+\.(?:py|sh|R|jl|js|pl|rb)")


def config_of_command(command: Sequence[str], stage: str = "cmd") -> dict[str, Any]:
    """Return the config whose only stage is a command."""
    return {"experiment": _name_of(command), "stages": {stage: {"run": list(command)}}}


def check_command(command: Sequence[str], combinations: Sequence[Mapping[str, str]]) -> None:
    """Refuse a command whose program or script is not there."""
    for (program,) in dict.fromkeys(fill(command[:1], combination) for combination in combinations):
        if shutil.which(program) is None:
            path = Path(program)
            what = f"'{program}' is a folder" if path.is_dir() else f"'{program}' is not executable"
            raise UsageError(
                f"{what if path.exists() else f'there is no program {program!r}'}.",
                rule="a command begins with a program: one on the PATH, or the path of an executable file.",
                remedy="correct the name, make the file executable (chmod +x), or name what runs it: python, sh",
            )
    script = command[1] if len(command) > 1 and _PYTHON.fullmatch(command[0]) else ""
    if script.endswith(".py") and not PLACEHOLDER.search(script) and not Path(script).exists():
        raise UsageError(
            f"there is no script {script!r} in {Path.cwd()}.",
            rule="what python is given as a script is a file.",
            remedy="correct its name, or go to its folder first",
        )


def _name_of(command: Sequence[str]) -> str:
    """Name a command by its script or module, else by its program.

    >>> _name_of(["python3", "-u", "jobs/train.py", "--fold", "3"]), _name_of(["python", "-m", "a.b"])
    ('train', 'a.b')
    >>> [_name_of(words) for words in (["python", "-c", "x"], ["bash", "go.sh", "1"], ["python", "train_{fold}.py"])]
    ['python', 'go', 'train_-fold']
    >>> _name_of(["programs/my tool!"]), _name_of(["programs/..."])
    ('my-tool', 'command')
    """
    name = Path(command[0]).name
    if _INTERPRETER.fullmatch(name):
        module = dict(pairwise(command)).get("-m")
        name = module or next((Path(word).name for word in command if _SCRIPT.fullmatch(word)), name)
    name = Path(name).stem if _SCRIPT.fullmatch(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "command"
