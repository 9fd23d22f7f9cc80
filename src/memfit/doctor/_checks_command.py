"""Check the command itself: whether its program and its script are there and can be read."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from memfit.checks import Check
from memfit.doctor._case import Case
from memfit.doctor._command import which


def check_command(case: Case) -> Iterator[Check]:
    """Whether the program and its script are there."""
    command, asked = case.command, case.interpreter
    if command.words and case.place.is_real and which(command.words[0], case.cwd, case.env) is None:
        finding = f"there is no program '{command.words[0]}'"
        reason = "a command begins with a program on the PATH, or with the path of an executable file"
        yield Check("command", "problem", finding, reason, "correct the name, or activate its environment", "PATH")
    missing = command.missing
    if asked is not None and command.module and command.module.partition(".")[0] in asked.missing:
        missing = f"there is no module '{command.module}', neither in {case.cwd} nor in {asked.executable}"
    if missing:
        install = "install the module, " if command.module else ""
        remedy = f"correct the name, {install}or start in the folder that has it"
        yield Check("script", "problem", missing, "the command ends at once with an error", remedy, "the command")
    else:
        yield from _check_script(case)


def _check_script(case: Case) -> Iterator[Check]:
    """Whether the script can be read, and what was read."""
    command, script = case.command, case.script
    reason = "loaders, forks and imports are found in the script's text"
    for error in script.errors:
        if error.more == "syntax":
            is_newer = case.interpreter is not None and case.interpreter.version[:2] > sys.version_info[:2]
            why = "it was read by another Python than the command's" if is_newer else "Python ends with a SyntaxError"
            finding, remedy = f"{error.site} is no Python: {error.name}", f"correct {error.site}"
            yield Check("script", "warning" if is_newer else "problem", finding, why, remedy, error.site)
        else:
            remedy = "make it readable for this user, and of a size and depth that Python itself compiles"
            yield Check("script", "warning", f"not read: {error.site}: {error.name}", reason, remedy, error.site)
    if command.words and not script.files:
        finding = f"no Python script is seen in '{' '.join(command.words)[:80]}'"
        remedy = "name the Python command, not a shell script: memfit doctor -- python train.py"
        yield Check("script", "warning", finding, reason, remedy, "the command")
    elif script.files and not script.errors:
        more = f" and {len(script.files) - 1} modules beside it" if len(script.files) > 1 else ""
        finding = f"{script.files[0]}{more} read: {len(script.imports)} imports, {len(script.loaders)} loaders"
        yield Check("script", "ok", finding, reason, "", script.files[0])
