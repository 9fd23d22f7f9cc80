"""Find the Python scripts that a shell script starts, in the lines that plainly do so; nothing of it is run.

Reading ends at a ``cd``, a here-document or a quote that is open at the end of its line.
"""

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
#: What may put another Python on the PATH.
_CHANGES_PATH = frozenset({"source", ".", "conda", "mamba", "micromamba", "module", "eval"})
#: Characters that a shell expands: the words with them are not known here. In a path patterns count too.
_EXPANDED = frozenset("$`")
_PATTERNS = frozenset("*?[{~")
_MOST_COMMANDS, _MOST_BYTES = 3, 1 << 20


def commands_of(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> list[Command]:
    """Return a command; of a shell script, or the text of ``bash -c``, the first Python commands that it starts."""
    command = parse_command(words, cwd=cwd, env=env)
    text, label = _shell_text(command, cwd, {**env, **command.env})
    if not label:
        return [command]
    if text is None:
        return [replace(command, missing=f"there is no file '{label}' in {cwd}")]
    started = _started(text, label, cwd, {**env, **command.env}, command.env)
    return list(islice(started, _MOST_COMMANDS)) or [replace(command, looked_at=label)]


def _shell_text(command: Command, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, str]:
    """What a shell is to run (None if it is not there), and its name; no name if no shell runs a text."""
    name, *rest = command.words or ("",)
    if Path(name).name not in _SHELLS:
        is_known = not name or PYTHON.fullmatch(Path(name).name) or command.script is not None
        program = None if is_known else which(name, cwd, env)  # a Python may itself be a shell script
        text = _read(Path(program)) if program else None
        is_shell = re.match(r"#!.*?\b(?:ba|da|z|k)?sh\b", text or "")
        return (text, os.path.normpath(name)) if is_shell else (None, "")
    at = next((at for at, word in enumerate(rest) if re.fullmatch(r"-[A-Za-z]*c", word)), len(rest))
    if rest[at + 1 :]:
        return rest[at + 1], f"{Path(name).name} -c"
    for word in (named := [word for word in rest if word[:1] not in "-+"]):
        if (text := _read(cwd / word)) is not None:
            return text, os.path.normpath(word)
    is_missing = bool(named) and not os.path.lexists(cwd / named[0]) and which(named[0], cwd, env) is None
    return None, named[0] if is_missing else ""


def _read(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return None
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _started(text: str, label: str, cwd: Path, env: Mapping[str, str], given: Mapping[str, str]) -> Iterator[Command]:
    """The commands of a shell's text that plainly start a Python script."""
    knows_python = True
    for line, words in _simple_commands(text):
        own: dict[str, str] = {}
        while words and (words[0] in _BEFORE or ASSIGNMENT.fullmatch(words[0])):
            own |= _pairs(words[:1])
            words = words[1:]
        name = words[0] if words else ""
        if name == "cd":
            return
        if name == "export":
            env, given = {**env, **_pairs(words)}, {**given, **_pairs(words)}
        knows_python = knows_python and name not in _CHANGES_PATH
        command = parse_command(words, cwd=cwd, env={**env, **own})
        program = Path(command.words[0]).name if command.words else ""
        what = str(command.script or command.missing or command.code or "")
        special = _EXPANDED if command.code is not None else _EXPANDED | _PATTERNS
        if what and not special & set(what) and (PYTHON.fullmatch(program) or program in _LAUNCHERS):
            python = command.interpreter if knows_python else None
            env_of = {**given, **own, **command.env}
            yield replace(command, env=env_of, interpreter=python, site=f"{label} line {line}")


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """The assignments among words whose values are known."""
    return dict(one.split("=", 1) for one in words if "=" in one and not _EXPANDED & set(one))


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each simple command with its line, without redirections."""
    for found in re.finditer(r"(?:\\\n|[^\n])+", text):
        lexer = shlex.shlex(found[0].replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands: list[list[str]] = [[]]
        is_open = True
        try:
            for word in lexer:
                if "<<" in word:
                    return
                if word and set(word) <= set(";&|()<>"):
                    is_open = not set(word) & set("<>")
                    commands += [[]] if is_open else []
                elif is_open:
                    commands[-1].append(word)
        except ValueError:  # a quote is open
            return
        for words in filter(None, commands):
            yield 1 + text.count("\n", 0, found.start()), words
