"""Run the commands and the Python of Markdown files, and compare what they print with what the files show.

    python tools/run_docs.py README.md [MORE.md ...]

Of each fenced ``console`` block, every line that begins with ``$ `` is a command (``> `` goes on with one that ends in
a backslash), and the lines below it are its output, stdout and stderr together. In these, ``...`` stands for any text
within a line, and alone on a line for any number of lines. A command without output below it may print anything. Every
command runs in a bash of its own and must exit with 0.

A ``python`` block is executed, all blocks of a file in one namespace; in one with ``>>>`` prompts the output is
compared. The line before a block's fence may say how the block is to be taken:

    <!-- exit: 2 -->       the block's last command exits with 2
    <!-- skip: reason -->  the block is not run, and the reason is printed
    <!-- numbers: vary --> a number in the block's output stands for any number: times, sizes, names of runs
    <!-- file: NAME -->    the block, in any language, is not run: it is written to that file of the scratch folder

A ``bash``, ``sh`` or ``shell`` block is an error unless it is skipped: what nobody runs goes stale.

Each file's blocks run in order in one scratch folder that links to what lies at the top of the repository, so that
sample files are reachable and results stay out of it. ``.venv`` there is the environment that runs this tool, and its
programs come first on PATH. Exit status: 0 all as shown, 1 something differs, 2 bad usage.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 600
NOT_LINKED = frozenset({"runs", "panels", "build", "dist"})

_FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
_DIRECTIVE = re.compile(r"\s*<!--\s*(?P<word>exit|skip|numbers|file):\s*(?P<value>.*?)\s*-->\s*")
#: A number with its sign of order: 0.4, 21:00:35, 2026-11-23; and the name of a run.
_NUMBER = re.compile(r"(?<=run_)\d+_\d+_[0-9a-f]+|\d+(?:[.:-]\d+)*")
#: What memfit says each 10 s while a command takes long: how long, on a busy machine, is no part of a page.
_BEAT = re.compile(r"[a-z][^:]* \((?:\d+m \d\d|\d\d\.\d)s\)")
_SHELLS = frozenset({"bash", "sh", "shell", "zsh"})


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, the line number of its first line, and its directive if any."""

    language: str
    lines: tuple[str, ...]
    line: int
    exit_status: int = 0
    skip: str | None = None
    file: str | None = None
    numbers_vary: bool = False


@dataclass(frozen=True)
class Command:
    """A command of a console block with the output shown below it."""

    text: str
    output: tuple[str, ...]
    line: int


class DocumentError(ValueError):
    """A Markdown file whose blocks cannot be told apart or run."""


def read_blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    lines = text.splitlines()
    blocks = []
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        directive = _DIRECTIVE.fullmatch(lines[number - 2]) if number > 1 else None
        first, indent = number, len(fence["indent"])
        closing = re.compile(rf" *{re.escape(fence['marks'][0])}{{{len(fence['marks'])},}}\s*")
        while number < len(lines) and not closing.fullmatch(lines[number]):
            number += 1
        if number == len(lines):
            raise DocumentError(f"line {first}: the block is never closed")
        body = tuple(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[first:number])
        blocks.append(_block(fence["language"], body, first + 1, directive))
        number += 1
    return blocks


def _block(language: str, body: tuple[str, ...], line: int, directive: re.Match[str] | None) -> Block:
    if directive is None:
        return Block(language, body, line)
    if directive["word"] == "exit":
        if not directive["value"].isdigit():
            raise DocumentError(f"line {line - 2}: '{directive['value']}' is no exit status")
        return Block(language, body, line, exit_status=int(directive["value"]))
    if directive["word"] == "file":
        if Path(directive["value"]).name != directive["value"]:
            raise DocumentError(f"line {line - 2}: '{directive['value']}' is no name of a file")
        return Block(language, body, line, file=directive["value"])
    if directive["word"] == "numbers":
        if directive["value"] != "vary":
            raise DocumentError(f"line {line - 2}: numbers can only vary")
        return Block(language, body, line, numbers_vary=True)
    if not directive["value"]:
        raise DocumentError(f"line {line - 2}: a skipped block needs a reason")
    return Block(language, body, line, skip=directive["value"])


def read_commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    commands: list[Command] = []
    for line, text in enumerate(block.lines, start=block.line):
        last = commands[-1] if commands else None
        if text.startswith("$ "):
            commands.append(Command(text[2:], (), line))
        elif last and not last.output and last.text.endswith("\\") and text.startswith("> "):
            commands[-1] = Command(f"{last.text}\n{text[2:]}", (), last.line)
        elif last:
            commands[-1] = Command(last.text, (*last.output, text), last.line)
        elif text.strip():
            raise DocumentError(f"line {line}: output before the first command")
    return commands


def same(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the printed lines are as shown, where ``...`` stands for anything."""
    want, got = _trimmed(shown), _trimmed(printed)
    at, star, retry = 0, -1, 0
    place = 0
    while place < len(got):
        if at < len(want) and want[at].strip() == "...":
            star, retry = at, place
            at += 1
        elif at < len(want) and _same_line(want[at], got[place]):
            at += 1
            place += 1
        elif star >= 0:
            retry += 1
            at, place = star + 1, retry
        else:
            return False
    return all(line.strip() == "..." for line in want[at:])


def _same_line(shown: str, printed: str) -> bool:
    return re.fullmatch(".*?".join(map(re.escape, shown.split("..."))), printed) is not None


def _trimmed(lines: Sequence[str]) -> list[str]:
    trimmed = [line.rstrip() for line in lines]
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


def environment() -> dict[str, str]:
    """The commands' environment: this one without memfit's variables, plain output, this Python's programs first."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120", "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def run_command(text: str, folder: Path, limit_seconds: float = LIMIT_SECONDS) -> tuple[int | None, str]:
    """A command's exit status, or None when it ran too long and was ended, and what it printed."""
    child = subprocess.Popen(
        ["bash", "-c", text],
        cwd=folder,
        env=environment() | {"XDG_STATE_HOME": str(folder / ".state")},  # not the user's record of comparisons
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = child.communicate(timeout=limit_seconds)
        status: int | None = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        printed, _ = child.communicate()
        status = None
    return status, printed.decode(errors="replace")


def check_console(block: Block, folder: Path) -> Iterator[tuple[int, str]]:
    """What differs in a console block: line number and text."""
    commands = read_commands(block)
    for command in commands:
        status, printed = run_command(command.text, folder)
        expected = block.exit_status if command is commands[-1] else 0
        title = f"$ {command.text}"
        if status is None:
            yield command.line, f"{title}\nended after {LIMIT_SECONDS} s; it had printed:\n{printed}"
            continue
        if status != expected:
            yield command.line, f"{title}\nexit status {status}, not {expected}; it printed:\n{printed}"
            continue
        lines = [line for line in printed.splitlines() if not _BEAT.fullmatch(line)]
        shown, got = _trimmed(command.output), _trimmed(lines)
        if block.numbers_vary:
            shown, got = ([_NUMBER.sub("0", line) for line in lines] for lines in (shown, got))
        if shown and not same(shown, got):
            diff = difflib.unified_diff(shown, got, "shown", "printed", lineterm="", n=1)
            yield command.line, "\n".join((title, *diff))


def check_python(block: Block, path: Path, namespace: dict[str, object]) -> Iterator[tuple[int, str]]:
    """What goes wrong in a Python block: line number and text."""
    source = "\n".join(block.lines) + "\n"
    if re.search(r"^>>> ", source, re.MULTILINE):
        test = doctest.DocTestParser().get_doctest(source, {}, str(path), str(path), block.line - 1)
        test.globs = namespace
        report = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        if runner.run(test, out=report.write, clear_globs=False).failed:
            yield block.line, report.getvalue()
        return
    printed = io.StringIO()
    try:
        code = compile("\n" * (block.line - 1) + source, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in frames if frame.filename == str(path)), None)
        line = line or getattr(error, "lineno", None) or block.line
        yield line, printed.getvalue() + traceback.format_exception_only(error)[-1]


def scratch(root: Path, folder: Path) -> None:
    """Link what lies at the top of the repository into a folder."""
    for path in sorted(root.iterdir()):
        if not path.name.startswith(".") and path.name not in NOT_LINKED:
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)


def check_file(path: Path, root: Path = ROOT) -> int:
    """Run one Markdown file's blocks and print what differs; returns how many places differ."""
    faults = ran = skipped = 0
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = read_blocks(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="docs-") as name, contextlib.chdir(name):
        folder = Path(name)
        scratch(root, folder)
        for block in blocks:
            found: Iterator[tuple[int, str]] = iter(())
            if block.file is not None:
                (folder / block.file).write_text("\n".join((*block.lines, "")))
                continue
            if block.language not in {"console", "python", "pycon", *_SHELLS}:
                continue
            if block.skip is not None:
                skipped += 1
                print(f"{path}:{block.line}: skipped: {block.skip}")
                continue
            ran += 1
            if block.language in _SHELLS:
                found = iter([(block.line, "a shell block is not run: make it console, or skip it with a reason")])
            elif block.language == "console":
                found = check_console(block, folder)
            else:
                found = check_python(block, path, namespace)
            for line, text in found:
                faults += 1
                print(f"{path}:{line}: {text.rstrip()}\n")
    print(f"{path}: {ran} blocks run, {skipped} skipped, {faults} places differ")
    return faults


def main(arguments: Sequence[str]) -> int:
    """Check the files named; returns the exit status."""
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print(__doc__)
        return 0 if set(arguments) & {"-h", "--help"} else 2
    faults = 0
    for argument in arguments:
        try:
            faults += check_file(Path(argument))
        except (OSError, UnicodeDecodeError, DocumentError) as error:
            print(f"{argument}: {error}")
            return 2
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
