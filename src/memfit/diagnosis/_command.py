"""What a command is: its interpreter, its script and how many processes it starts; read from its words, never run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(\d+))?")
#: What runs the Python behind it, from the same PATH.
_WRAPPERS = frozenset({"nohup", "nice", "ionice", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid", "srun"})
#: Options of Python's that take the next word.
_TAKE_A_WORD = frozenset({"-W", "-X", "--check-hash-based-pycs"})


@dataclass(frozen=True)
class Command:
    """A command as far as its words tell.

    Attributes:
        words: The command, without a leading ``env``, its assignments and wrappers such as ``nice``.
        env: What a leading ``env`` assigns.
        interpreter: The Python that runs it, or None when the words do not tell.
        script: The Python file that it runs, or None.
        code: The text behind ``python -c``, or None.
        arguments: The words behind the script.
        num_processes: How many processes of the script one launcher (torchrun, accelerate) starts on this host.
    """

    words: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    interpreter: str | None = None
    script: Path | None = None
    code: str | None = None
    arguments: tuple[str, ...] = ()
    num_processes: int = 1


def parse_command(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Command:
    """What a command is; an empty one when there are no words.

    Args:
        words: The command.
        cwd: The folder that it starts in.
        env: Its environment, for PATH.

    >>> command = parse_command(["env", "A=1", "python", "-c", "import torch"], cwd=Path("/"), env={"PATH": ""})
    >>> command.env, command.code
    ({'A': '1'}, 'import torch')
    """
    rest, given = list(words), {}
    if rest[:1] == ["env"]:
        rest = rest[1:]
        while rest and _ASSIGNMENT.fullmatch(rest[0]):
            name, _, value = rest.pop(0).partition("=")
            given[name] = value
    if rest and Path(rest[0]).name in _WRAPPERS:
        rest = rest[next((at for at, word in enumerate(rest) if _PYTHON.fullmatch(Path(word).name)), 0) :]
    if not rest:
        return Command(env=given)
    interpreter = _interpreter(rest[0], cwd, {**env, **given})
    code, arguments, script = None, rest[1:], None
    if _PYTHON.fullmatch(Path(rest[0]).name):
        script, code, arguments = _after_python(rest[1:], cwd)
    else:
        script, arguments = _first_script(rest, cwd)
    return Command(tuple(rest), given, interpreter, script, code, tuple(arguments), _num_processes(rest))


def _after_python(words: list[str], cwd: Path) -> tuple[Path | None, str | None, list[str]]:
    """The script, or the text of ``-c``, behind Python's own options, and the words behind it."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "-c" and at + 1 < len(words):
            return None, words[at + 1], words[at + 2 :]
        if word == "-m" and at + 1 < len(words):
            module, behind = words[at + 1], words[at + 2 :]
            if found := _module_file(module, cwd):
                return found, None, behind
            script, arguments = _first_script(behind, cwd)  # the module is a launcher
            return script, None, arguments
        if not word.startswith("-"):
            path = cwd / word
            return (path if _is_file(path) else None), None, words[at + 1 :]
        at += 2 if word in _TAKE_A_WORD else 1
    return None, None, []


def _module_file(module: str, cwd: Path) -> Path | None:
    base = cwd.joinpath(*module.split("."))
    return next((one for one in (base.with_suffix(".py"), base / "__main__.py") if _is_file(one)), None)


def _first_script(words: list[str], cwd: Path) -> tuple[Path | None, list[str]]:
    """The first Python file among the words, as a launcher has its script behind its own options."""
    for at, word in enumerate(words):
        if word.endswith(".py") and _is_file(cwd / word):
            return cwd / word, words[at + 1 :]
    return None, []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a word that is too long for a name
        return False


def _num_processes(words: list[str]) -> int:
    """How many processes a launcher starts on this host; 1 when nothing says more.

    >>> _num_processes(["torchrun", "--nproc-per-node", "4", "train.py"]), _num_processes(["python", "train.py"])
    (4, 1)
    """
    for at, word in enumerate(words):
        if match := _PROCESSES.fullmatch(word):
            count = match.group(1) or next(iter(words[at + 1 :]), "")
            return max(1, int(count)) if count.isdigit() else 1
    return 1


def which(program: str, cwd: Path, env: Mapping[str, str]) -> str | None:
    """The path of a program, from the command's folder and PATH; None when it is not there."""
    if os.sep in program:
        return str(cwd / program) if os.access(cwd / program, os.X_OK) else None
    return shutil.which(program, path=env.get("PATH", os.defpath))


def _interpreter(program: str, cwd: Path, env: Mapping[str, str]) -> str | None:
    """The Python that runs a program: itself, or the one of its first line."""
    found = which(program, cwd, env)
    if found is None or not Path(found).is_file():
        return None
    if _PYTHON.fullmatch(Path(program).name):
        return found
    try:
        with open(found, "rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return None
    shebang = re.match(r"#!\s*(\S+)(?:\s+(\S+))?", first)
    if shebang is None:
        return None
    path, word = shebang.groups()
    if Path(path).name == "env" and word and _PYTHON.fullmatch(word):
        return which(word, cwd, env)
    return path if _PYTHON.fullmatch(Path(path).name) and Path(path).is_file() else None
