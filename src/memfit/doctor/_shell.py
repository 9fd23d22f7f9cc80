"""Find the Python scripts that a shell script starts, in the lines that plainly do so; nothing of it is run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from memfit.doctor._command import ASSIGNMENT, PYTHON, Command, parse_command, which

_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_FIRST_LINE = re.compile(rf"#!.*\b(?:{'|'.join(_SHELLS)})\b")
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
#: Words of the shell itself before a command.
_BEFORE = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "exec", "command"})
#: Commands that may put another Python on the PATH.
_CHANGES_PATH = frozenset({"source", ".", "conda", "mamba", "micromamba", "module", "eval"})
#: Characters that a shell expands: the words with them are not known here. In a path patterns count too.
_EXPANDED = frozenset("$`")
_PATTERNS = frozenset("*?[{~")
_MOST_COMMANDS, _MOST_BYTES = 3, 1 << 20


def commands_of(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> list[Command]:
    """Return a command; of a shell script, or the text of ``bash -c``, the first Python commands that it starts."""
    command = parse_command(words, cwd=cwd, env=env)
    known = {**env, **command.env}
    text, label, arguments = _shell_text(command, cwd, known)
    if not label:
        return [command]
    if text is None:
        return [replace(command, missing=f"there is no file '{label}' in {cwd}")]
    started = _started(text, label, arguments, dict(command.env), known, cwd)
    return list(islice(started, _MOST_COMMANDS)) or [replace(command, looked_at=label)]


def _shell_text(command: Command, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, str, Sequence[str]]:
    """What a shell is to run (None if it is not there), its name and its arguments; no name if no shell runs a text."""
    words, nothing = command.words, (None, "", ())
    name = Path(words[0]).name if words else ""
    if name not in _SHELLS:
        is_known = not words or PYTHON.fullmatch(name) or command.script is not None  # a shim may be a shell script
        program = None if is_known else which(words[0], cwd, env)
        text = _read(Path(program)) if program else None
        return (text, os.path.normpath(words[0]), words[1:]) if text and _FIRST_LINE.match(text) else nothing
    rest = words[1:]
    while rest and rest[0][:1] in "-+":
        if rest[0][:1] == "-" and rest[0].endswith("c"):
            return (rest[1], f"{name} -c", rest[3:]) if rest[1:] else nothing
        rest = rest[1:]
    if not rest:
        return nothing
    if not os.path.lexists(cwd / rest[0]) and which(rest[0], cwd, env) is None:
        return None, rest[0], ()
    text = _read(cwd / rest[0])
    return nothing if text is None else (text, os.path.normpath(rest[0]), rest[1:])


def _read(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """The assignments among words whose values are known."""
    return dict(one.split("=", 1) for one in words if "=" in one and not _EXPANDED & set(one))


def _started(
    text: str, label: str, arguments: Sequence[str], given: dict[str, str], env: Mapping[str, str], cwd: Path
) -> Iterator[Command]:
    """The commands that plainly start a Python script, up to a folder, a quote or a here-document that is not plain."""
    knows_python = True
    for line, words in _simple_commands(text):
        at = next((at for at, one in enumerate(words) if not (one in _BEFORE or ASSIGNMENT.fullmatch(one))), len(words))
        own, words = _pairs(words[:at]), words[at:]
        name = words[0] if words else ""
        plain = words[1] if len(words) == 2 and not _EXPANDED & set(words[1]) else ""
        if name == "cd":
            if not plain:
                return
            cwd = cwd / plain
        elif name == "export":
            given |= _pairs(words)
        elif name in ("source", ".") and Path(plain).name == "activate":
            given["PATH"] = f"{(cwd / plain).parent}{os.pathsep}{given.get('PATH') or env.get('PATH', os.defpath)}"
        elif name in _CHANGES_PATH:
            knows_python = False
        else:
            words = [one for word in words for one in (arguments if word in ("$@", "$*", "${@}") else [word])]
            command = parse_command(words, cwd=cwd, env={**env, **given, **own})
            if _is_plain(command):
                python = command.interpreter if knows_python else None
                given_env, site = {**given, **own, **command.env}, f"{label} line {line}"
                yield replace(command, env=given_env, interpreter=python, site=site, cwd=cwd)


def _is_plain(command: Command) -> bool:
    """Whether it surely starts a Python script that is known by its name."""
    program = Path(command.words[0]).name if command.words else ""
    what = str(command.script or command.missing or command.code or "")
    special = _EXPANDED if command.code is not None else _EXPANDED | _PATTERNS
    return bool(what) and not special & set(what) and bool(PYTHON.fullmatch(program) or program in _LAUNCHERS)


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each simple command with its line, without redirections."""
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + " " + next(lines, (0, ""))[1]
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        found: list[list[str]] = [[]]
        is_open = True
        try:
            for word in lexer:
                if word and set(word) <= set(";&|()<>"):
                    if "<<" in word:
                        return
                    is_open = not set(word) & set("<>")
                    found += [[]] if is_open else []
                elif is_open:
                    found[-1].append(word)
        except ValueError:  # its quotes go on in the next line
            return
        yield from ((number, words) for words in found if words)
