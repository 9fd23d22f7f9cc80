"""What a command is: its interpreter, its script and how many processes it starts; read from its words, never run."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(\d+))?")
#: What runs the Python behind it, from the same PATH.
_WRAPPERS = frozenset({"nohup", "nice", "ionice", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid", "srun"})
#: Options of Python's that take the next word.
_TAKE_A_WORD = re.compile(r"-[bBdEiIOPqRsStuvx]*[WX]|--check-hash-based-pycs")
#: ``-c`` and ``-m``, behind short options, and what is written in the same word.
_CODE_OR_MODULE = re.compile(r"-[bBdEiIOPqRsStuvx]*([cm])(.*)", re.S)


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
        missing: What Python is told to run and is not there, in words; empty when all is there.
        module: The module behind ``python -m`` where it is not a file of the command's folder; else empty.
        site: Where the command stands in a shell script that was followed, such as ``run.sh line 3``; else empty.
        looked_at: The shell script that was looked at and starts no Python script that is seen; else empty.
        cwd: The folder that a shell script changes to before; None when it starts where the command does.
    """

    words: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    interpreter: str | None = None
    script: Path | None = None
    code: str | None = None
    arguments: tuple[str, ...] = ()
    num_processes: int = 1
    missing: str = ""
    module: str = ""
    site: str = ""
    looked_at: str = ""
    cwd: Path | None = None


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
        rest = rest[next((at for at, word in enumerate(rest) if PYTHON.fullmatch(Path(word).name)), 0) :]
    if not rest:
        return Command(env=given)
    interpreter = _interpreter(rest[0], cwd, {**env, **given})
    if PYTHON.fullmatch(Path(rest[0]).name):
        command = _after_python(rest[1:], cwd)
    else:
        script, arguments = _first_script(rest, cwd)
        command = Command(script=script, arguments=tuple(arguments))
    return replace(command, words=tuple(rest), env=given, interpreter=interpreter, num_processes=_num_processes(rest))


def _after_python(words: list[str], cwd: Path) -> Command:
    """The script, or the text of ``-c``, behind Python's own options, and the words behind it."""
    at = 0
    while at < len(words):
        word = words[at]
        if match := _CODE_OR_MODULE.fullmatch(word):
            which_one, same_word = match.groups()
            rest = [same_word, *words[at + 1 :]] if same_word else words[at + 1 :]
            if not rest:
                return Command()
            behind = tuple(rest[1:])
            return Command(code=rest[0], arguments=behind) if which_one == "c" else _of_module(rest[0], behind, cwd)
        if word == "-":  # the program comes from standard input
            return Command()
        if not word.startswith("-"):
            return _of_file(word, tuple(words[at + 1 :]), cwd)
        at += 2 if _TAKE_A_WORD.fullmatch(word) else 1
    return Command()


def _of_module(module: str, behind: tuple[str, ...], cwd: Path) -> Command:
    """What ``python -m`` runs: a file of the command's folder, or a launcher with its script behind it."""
    if found := _module_file(module, cwd):
        return Command(script=found, arguments=behind)
    script, arguments = _first_script(list(behind), cwd)
    base = cwd.joinpath(*module.split("."))
    is_here = _is_file(cwd / module.partition(".")[0] / "__init__.py")
    try:
        missing = is_here and not any(base.parent.glob(f"{base.name}.*")) and not _is_file(base / "__main__.pyc")
        is_built = any(cwd.glob(f"{module.partition('.')[0]}.*so"))
    except (OSError, ValueError):
        missing = is_built = False
    what = f"there is no module '{module}' to run in {cwd}" if missing else ""
    return Command(script=script, arguments=tuple(arguments), module="" if is_built else module, missing=what)


def _of_file(word: str, behind: tuple[str, ...], cwd: Path) -> Command:
    """What Python runs of a path: a file, or the ``__main__.py`` of a folder."""
    path, missing = cwd / word, ""
    try:
        if path.is_dir():
            path = path / "__main__.py"
            missing = "" if path.is_file() else f"the folder '{word}' has no __main__.py"
        elif not path.exists():
            missing = f"there is no file '{word}' in {cwd}"
        is_text = path.is_file() and path.suffix != ".pyc" and not zipfile.is_zipfile(path)
    except OSError as error:  # also a word that is too long for a name
        missing, is_text = f"'{word[:80]}' cannot be read: {error.strerror}", False
    return Command(script=path if is_text else None, arguments=behind, missing=missing)


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
    if PYTHON.fullmatch(Path(program).name):
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
    if Path(path).name == "env" and word and PYTHON.fullmatch(word):
        return which(word, cwd, env)
    return path if PYTHON.fullmatch(Path(path).name) and Path(path).is_file() else None
