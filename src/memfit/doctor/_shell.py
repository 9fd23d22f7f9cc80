"""The Python scripts that a shell script starts, of the lines that say so plainly; nothing of it is run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from memfit.doctor._command import ASSIGNMENT, PYTHON, Command, parse_command, which

_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
#: Words of the shell's own that may stand before a command.
_BEFORE = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "exec", "command"})
_TAKE_A_WORD = frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})
_HERE = re.compile(r"<<-?\s*[\'\"]?([A-Za-z_]\w*)")
#: What a shell expands: a word that holds it is not known here; in a path also a pattern.
EXPANDED = frozenset("$`")
_PATTERNS = frozenset("*?[{~")
_MOST_COMMANDS = 3
#: What a shell runs: its name, its text (None when its file is not there) and the words behind it.
_Text = tuple[str, str | None, list[str]]
_MOST_BYTES = 1 << 20
#: The most lines of one command.
_MOST_LINES = 200


def commands_of(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> list[Command]:
    """A command; of a shell script, or the text of ``bash -c``, the first Python commands that it starts."""
    command = parse_command(words, cwd=cwd, env=env)
    shell = _shell_text(command, cwd, {**env, **(command.env)})
    if shell is None:
        return [command]
    label, text, arguments = shell
    if text is None:
        return [replace(command, missing=f"there is no file '{label}' in {cwd}")]
    given = dict(command.env)
    state = _Shell(cwd, {**env, **given}, given)
    found = list(islice(_started(text, arguments, label, state), _MOST_COMMANDS))
    return found or [replace(command, looked_at=label)]


def _shell_text(command: Command, cwd: Path, env: Mapping[str, str]) -> _Text | None:
    """What a shell is to run; None when no shell runs a text that can be read."""
    words = list(command.words)
    if not words:
        return None
    if Path(words[0]).name not in _SHELLS:
        is_known = PYTHON.fullmatch(Path(words[0]).name) or command.script is not None  # a shim may be a shell script
        program = None if is_known else which(words[0], cwd, env)
        return _file(words[0], Path(program), words[1:], only_shell=True) if program else None
    at = 1
    while at < len(words) and words[at][:1] in "-+":
        if re.fullmatch(r"-[A-Za-z]*c", words[at]) and at + 1 < len(words):
            return f"{Path(words[0]).name} -c", words[at + 1], words[at + 3 :]
        at += 2 if words[at] in _TAKE_A_WORD else 1
    if at == len(words):
        return None
    is_there = os.path.lexists(cwd / words[at]) or which(words[at], cwd, env) is not None
    return _file(words[at], cwd / words[at], words[at + 1 :]) if is_there else (words[at], None, words[at + 1 :])


def _file(label: str, path: Path, arguments: list[str], *, only_shell: bool = False) -> _Text | None:
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return None
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    first = re.match(r"#!\s*(\S+)(?:[ \t]+(?:-S[ \t]+)?(\S+))?", text)
    names = {Path(one).name for one in first.groups() if one} if first else set()
    return None if only_shell and not names & _SHELLS else (os.path.normpath(label), text, arguments)


@dataclass
class _Shell:
    """What the lines so far have changed: the folder (None if unknown), the environment and what they exported."""

    cwd: Path | None
    env: dict[str, str]
    given: dict[str, str]
    knows_python: bool = True

    def run(self, words: list[str]) -> bool:
        """Apply a command that changes the shell; False for another one."""
        name, rest = words[0], words[1:]
        plain = rest[0] if len(rest) == 1 and not EXPANDED & set(rest[0]) else ""
        if name == "cd":
            self.cwd = self.cwd / plain if self.cwd is not None and plain else None
        elif name == "export":
            self._export(rest)
        elif name in ("source", ".") and Path(plain).name == "activate" and self.cwd is not None:
            self._export([f"PATH={(self.cwd / plain).parent}{os.pathsep}{self.env.get('PATH', os.defpath)}"])
        elif name in ("source", ".", "conda", "mamba", "micromamba", "module", "eval"):
            self.knows_python = False  # it may put another Python on the PATH
        else:
            return False
        return True

    def _export(self, pairs: Sequence[str]) -> None:
        found = dict(one.split("=", 1) for one in pairs if "=" in one and not EXPANDED & set(one))
        self.env |= found
        self.given |= found


def _started(text: str, arguments: list[str], label: str, state: _Shell) -> Iterator[Command]:
    """The Python commands of a shell's text, in order."""
    for line, words in _simple_commands(text):
        while words and words[0] in _BEFORE:
            words = words[1:]
        at = next((at for at, word in enumerate(words) if not ASSIGNMENT.fullmatch(word)), len(words))
        assigned, words = words[:at], words[at + 1 :] if words[at : at + 1] == ["exec"] else words[at:]
        if words and not state.run(words) and state.cwd is not None:
            command = _python(_expanded(words, arguments), assigned, state.cwd, state)
            if command is not None:
                yield replace(command, site=f"{label} line {line}", cwd=state.cwd)


def _python(words: list[str], assigned: list[str], cwd: Path, state: _Shell) -> Command | None:
    """A command that plainly starts a Python script; None for another one."""
    own = dict(one.split("=", 1) for one in assigned if not EXPANDED & set(one))
    command = parse_command(words, cwd=cwd, env={**state.env, **own})
    program = Path(command.words[0]).name if command.words else ""
    what = str(command.script or command.missing or command.code or "")
    special = EXPANDED if command.code is not None else EXPANDED | _PATTERNS
    if not what or special & set(what) or not (PYTHON.fullmatch(program) or program in _LAUNCHERS):
        return None
    given = {**state.given, **own, **command.env}
    return replace(command, env=given, interpreter=command.interpreter if state.knows_python else None)


def _expanded(words: list[str], arguments: list[str]) -> list[str]:
    """The words with the shell script's own arguments in the place of ``$@`` and ``$1``."""
    found = []
    for word in words:
        if word in ("$@", "$*", "${@}"):
            found += arguments
        elif re.fullmatch(r"\$[1-9]", word) and int(word[1:]) <= len(arguments):
            found.append(arguments[int(word[1:]) - 1])
        else:
            found.append(word)
    return found


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each simple command with its line; what stands behind ``>`` is left out, and here-documents."""
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
