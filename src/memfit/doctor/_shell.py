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
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
#: Words of the shell itself before a command.
_BEFORE = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "exec", "command"})
_TAKE_A_WORD = frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})
_HERE = re.compile(r"<<-?\s*[\'\"]?([A-Za-z_]\w*)")
#: Characters that a shell expands: the words with them are not known here. In a path patterns count too.
_EXPANDED = frozenset("$`")
_PATTERNS = frozenset("*?[{~")
_MOST_COMMANDS, _MOST_LINES, _MOST_BYTES = 3, 200, 1 << 20


def commands_of(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> list[Command]:
    """Return a command; of a shell script, or the text of ``bash -c``, the first Python commands that it starts."""
    command = parse_command(words, cwd=cwd, env=env)
    known = {**env, **command.env}
    text, label, at = _shell_text(command, cwd, known)
    if not label:
        return [command]
    if text is None:
        return [replace(command, missing=f"there is no file '{label}' in {cwd}")]
    started = _started(text, list(command.words[at:]), label, _Shell(cwd, known, dict(command.env)))
    return list(islice(started, _MOST_COMMANDS)) or [replace(command, looked_at=label)]


def _shell_text(command: Command, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, str, int]:
    """What a shell is to run (None if it is not there), its name, and the index of its first argument.

    The name is empty if no shell runs a text that can be read.
    """
    words = command.words
    name = Path(words[0]).name if words else ""
    if words and name not in _SHELLS:
        is_known = PYTHON.fullmatch(name) or command.script is not None  # a shim may be a shell script
        program = None if is_known else which(words[0], cwd, env)
        text = _read(Path(program)) if program else None
        first = re.match(r"#!\s*(\S+)(?:[ \t]+(?:-S[ \t]+)?(\S+))?", text or "")
        shells = {Path(one).name for one in first.groups() if one} & _SHELLS if first else ()
        return (text, os.path.normpath(words[0]), 1) if shells else (None, "", 0)
    at = 1
    while at < len(words) and words[at][:1] in "-+":
        if re.fullmatch(r"-[A-Za-z]*c", words[at]) and at + 1 < len(words):
            return words[at + 1], f"{name} -c", at + 3
        at += 2 if words[at] in _TAKE_A_WORD else 1
    if at >= len(words):
        return None, "", 0
    if not os.path.lexists(cwd / words[at]) and which(words[at], cwd, env) is None:
        return None, words[at], 0
    text = _read(cwd / words[at])
    return text, os.path.normpath(words[at]) if text is not None else "", at + 1


def _read(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


class _Shell:
    """What the lines so far have changed: the folder (None if unknown), the environment and what they exported."""

    def __init__(self, cwd: Path, env: dict[str, str], given: dict[str, str]) -> None:
        self.cwd: Path | None = cwd
        self.env, self.given, self.knows_python = env, given, True

    def run(self, words: list[str]) -> bool:
        """Apply a command that changes the shell; False for another one."""
        name, rest = words[0], words[1:]
        plain = rest[0] if len(rest) == 1 and not _EXPANDED & set(rest[0]) else ""
        pairs = _pairs(rest) if name == "export" else {}
        if name == "cd":
            self.cwd = self.cwd / plain if self.cwd is not None and plain else None
        elif name in ("source", ".") and Path(plain).name == "activate" and self.cwd is not None:
            pairs = {"PATH": f"{(self.cwd / plain).parent}{os.pathsep}{self.env.get('PATH', os.defpath)}"}
        elif name in ("source", ".", "conda", "mamba", "micromamba", "module", "eval"):
            self.knows_python = False  # it may put another Python on the PATH
        elif name != "export":
            return False
        self.env, self.given = {**self.env, **pairs}, {**self.given, **pairs}
        return True


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """The assignments among words whose values are known."""
    return dict(one.split("=", 1) for one in words if "=" in one and not _EXPANDED & set(one))


def _started(text: str, arguments: list[str], label: str, shell: _Shell) -> Iterator[Command]:
    """The commands of a shell's text that plainly start a Python script."""
    for line, words in _simple_commands(text):
        while words and words[0] in _BEFORE:
            words = words[1:]
        at = next((at for at, word in enumerate(words) if not ASSIGNMENT.fullmatch(word)), len(words))
        own, words = _pairs(words[:at]), words[at + 1 :] if words[at : at + 1] == ["exec"] else words[at:]
        if not words or shell.run(words) or shell.cwd is None:
            continue
        command = parse_command(_expanded(words, arguments), cwd=shell.cwd, env={**shell.env, **own})
        program = Path(command.words[0]).name if command.words else ""
        what = str(command.script or command.missing or command.code or "")
        special = _EXPANDED if command.code is not None else _EXPANDED | _PATTERNS
        if what and not special & set(what) and (PYTHON.fullmatch(program) or program in _LAUNCHERS):
            given = {**shell.given, **own, **command.env}
            python = command.interpreter if shell.knows_python else None
            yield replace(command, env=given, interpreter=python, site=f"{label} line {line}", cwd=shell.cwd)


def _expanded(words: list[str], arguments: list[str]) -> list[str]:
    """The words, with the script's own arguments for ``$@`` and ``$1``."""
    found = []
    for word in words:
        is_one = re.fullmatch(r"\$[1-9]", word) and int(word[1:]) <= len(arguments)
        one = [arguments[int(word[1:]) - 1]] if is_one else [word]
        found += arguments if word in ("$@", "$*", "${@}") else one
    return found


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each simple command with its line; redirections and here-documents are left out."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        first, line = at + 1, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1] + " " + lines[at]
        at += 1
        if here := _HERE.search(line):
            while at < len(lines) and lines[at].strip() != here.group(1):
                at += 1
            at += 1
        found = _split(line)
        while found is None and at < len(lines) and at - first < _MOST_LINES:  # its quotes go on in the next line
            line, at = f"{line}\n{lines[at]}", at + 1
            found = _split(line)
        for words in found or []:
            yield first, words


def _split(line: str) -> list[list[str]] | None:
    """The simple commands of one line; None when its quotes are open at the end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    is_open = True
    try:
        for word in lexer:
            if word and set(word) <= set(";&|()<>"):
                is_open = not set(word) & set("<>")
                found += [[]] if is_open else []
            elif is_open:
                found[-1].append(word)
    except ValueError:
        return None
    return [words for words in found if words]
