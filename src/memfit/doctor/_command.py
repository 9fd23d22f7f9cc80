"""Read from a command's words its interpreter, its script and how many processes it starts; nothing is run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)
_PROCESSES = re.compile(r"\0--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)[=\0](\d+)(?=\0)")
#: What runs the Python behind it, from the same PATH.
_WRAPPERS = frozenset({"nohup", "nice", "ionice", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid", "srun"})
#: Options of Python's that take the next word.
_TAKE_A_WORD = re.compile(r"-[bBdEiIOPqRsStuvx]*[WX]|--check-hash-based-pycs")
#: ``-c`` and ``-m``, behind short options, and what is written in the same word.
_CODE_OR_MODULE = re.compile(r"-[bBdEiIOPqRsStuvx]*([cm])(.*)", re.S)


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...] = ()  # without a leading ``env``, its assignments and wrappers such as ``nice``
    env: Mapping[str, str] = field(default_factory=dict)  # what a leading ``env`` assigns
    interpreter: str | None = None  # the Python that runs it
    script: Path | None = None
    code: str | None = None  # the text behind ``python -c``
    num_processes: int = 1  # that a launcher (torchrun, accelerate) starts on this host


def parse_command(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Command:
    rest, given = list(words), {}
    if rest[:1] == ["env"]:
        rest = rest[1:]
        while rest and _ASSIGNMENT.fullmatch(rest[0]):
            name, _, value = rest.pop(0).partition("=")
            given[name] = value
    if rest and (rest[0].startswith("-") or Path(rest[0]).name in _WRAPPERS):  # options of ``env`` too
        rest = next((rest[at:] for at, word in enumerate(rest) if _PYTHON.fullmatch(Path(word).name)), list(words))
    if not rest:
        return Command(env=given)
    is_python = _PYTHON.fullmatch(Path(rest[0]).name)
    command = _after_python(rest[1:], cwd) if is_python else Command(script=_first_script(rest, cwd))
    interpreter = _interpreter(rest[0], cwd, {**env, **given})
    options = _PROCESSES.search("\0".join(("", *rest, "")))
    count = max(1, int(options[1])) if options else 1
    return replace(command, words=tuple(rest), env=given, interpreter=interpreter, num_processes=count)


def _after_python(words: list[str], cwd: Path) -> Command:
    at = 0
    while at < len(words) and words[at] != "-":  # a program from standard input is not known
        word = words[at]
        if match := _CODE_OR_MODULE.fullmatch(word):
            rest = [match[2], *words[at + 1 :]] if match[2] else words[at + 1 :]
            if not rest:
                break
            return Command(code=rest[0]) if match[1] == "c" else Command(script=_of_module(rest[0], rest[1:], cwd))
        if not word.startswith("-"):  # a folder or a zip archive is not read
            return Command(script=_first_script([word], cwd))
        at += 2 if _TAKE_A_WORD.fullmatch(word) else 1
    return Command()


def _of_module(module: str, behind: list[str], cwd: Path) -> Path | None:
    """What ``python -m`` runs: a file of the command's folder, or a launcher with its script behind it."""
    base = "/".join(module.split("."))
    return _first_script([f"{base}.py", f"{base}/__main__.py", *behind], cwd)


def _first_script(words: list[str], cwd: Path) -> Path | None:
    """The first Python file among the words, as behind the options of a launcher."""
    for word in words:
        with suppress(OSError, ValueError):  # a word that is too long for a name, or has a NUL
            if word.endswith(".py") and (cwd / word).is_file():
                return cwd / word
    return None


def which(program: str, cwd: Path, env: Mapping[str, str]) -> str | None:
    """Return the path of a program, from the command's folder and PATH; None if it is not there."""
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
    first = ""
    with suppress(OSError), open(found, "rb") as file:
        first = file.readline(512).decode(errors="replace")
    words = first[2:].split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env" and len(words) > 1 and _PYTHON.fullmatch(words[1]):
        return which(words[1], cwd, env)
    return words[0] if words and _PYTHON.fullmatch(Path(words[0]).name) and Path(words[0]).is_file() else None
