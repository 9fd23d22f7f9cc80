"""Checks of the command itself: whether what it runs is there, can be read, and takes the words behind it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from memfit.checks import Check
from memfit.doctor._case import Case
from memfit.doctor._command import which

_REASON = "loaders, forks and imports are found in the script's text"


def check_command(case: Case) -> Iterator[Check]:
    """Whether the program and what it is to run are there."""
    words = case.command.words
    if words and case.place.is_real and which(words[0], case.cwd, case.env) is None:
        what = f"there is no program '{words[0]}'"
        rule = "a command begins with a program on the PATH, or with the path of an executable file"
        yield Check("command", "problem", what, rule, "correct the name, or activate its environment", "PATH")
    if missing := _missing(case):
        site = case.command.site
        yield Check(
            "script",
            "warning" if site else "problem",
            missing + (f": {site}" if site else ""),
            "the command ends at once with an error" + ("; an earlier line may make it" if site else ""),
            "correct the name, install the module, or start the command in the folder that has it"
            if case.command.module
            else "correct the name, or start the command in the folder that has it",
            site or "the command",
        )


def check_script(case: Case) -> Iterator[Check]:
    """Whether the script can be read, and what was read."""
    command, script = case.command, case.script
    for error in script.errors:
        if error.more != "syntax":
            remedy = "make it readable for this user, and of a size and depth that Python itself compiles"
            yield Check("script", "warning", f"not read: {error.site}: {error.name}", _REASON, remedy, error.site)
            continue
        newer = case.interpreter is not None and case.interpreter.version[:2] > sys.version_info[:2]
        yield Check(
            "script",
            "warning" if newer else "problem",
            f"{error.site} is no Python: {error.name}",
            "it was read by another Python than the command's" if newer else "Python ends with a SyntaxError",
            f"correct {error.site}",
            error.site,
        )
    found_in = f", found in {command.site}" if command.site else ""
    if command.words and not script.files and not _missing(case):
        looked = f"; {command.looked_at} was looked at" if command.looked_at else ""
        yield Check(
            "script",
            "warning",
            f"no Python script is seen in '{' '.join(command.words)[:80]}'{looked}",
            _REASON,
            "name it: memfit doctor -- python train.py; and what its words do not tell: --workers, --batch",
            "the command",
        )
    elif script.files and not script.errors:
        more = f" and {len(script.files) - 1} modules beside it" if len(script.files) > 1 else ""
        counts = f"{len(script.imports)} imports, {len(script.loaders)} loaders"
        yield Check("script", "ok", f"{script.files[0]}{more}{found_in} read: {counts}", _REASON, "", script.files[0])


def _missing(case: Case) -> str:
    """What the command is to run and is not there, in words; empty when all is there, or nothing tells."""
    command, asked = case.command, case.interpreter
    top = command.module.partition(".")[0]
    if not command.missing and asked is not None and top and top in asked.missing:
        return f"there is no module '{command.module}', neither in {case.cwd} nor in {asked.executable}"
    return command.missing
