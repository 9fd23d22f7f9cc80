"""Check a command and its settings: program, script, torch's allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from memfit.checks import Check
from memfit.doctor._case import Case
from memfit.doctor._command import which
from memfit.estimation import ALLOCATOR_VARIABLES, allocator_faults
from memfit.units import format_count


def check_command(case: Case) -> Iterator[Check]:
    command, asked = case.command, case.interpreter
    if command.words and case.place.is_real and which(command.words[0], case.cwd, case.env) is None:
        finding = f"there is no program '{command.words[0]}'"
        reason = "a command begins with a program on the PATH, or with the path of an executable file"
        yield Check("command", "problem", finding, reason, "correct the name, or activate its environment", "PATH")
    if asked is not None and asked.error:
        finding, remedy = f"{asked.executable} gave no answer: {asked.error}", f"try: {asked.executable} -c pass"
        yield Check("command", "problem", finding, "the command runs in it", remedy, asked.executable)
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
        more = f" and {format_count(len(script.files) - 1, 'module')} beside it" if len(script.files) > 1 else ""
        found = f"{format_count(len(script.imports), 'import')}, {format_count(len(script.loaders), 'loader')}"
        finding = f"{script.files[0]}{more} read: {found}"
        yield Check("script", "ok", finding, reason, "", script.files[0])


def check_allocator(case: Case) -> Iterator[Check]:
    """torch's caching allocator: contradictions, and settings that come too late."""
    given = {name: case.env[name] for name in ALLOCATOR_VARIABLES if case.env.get(name)}
    reason = "torch reads the settings once, when it is imported or first allocates"
    if not given:
        yield Check("torch allocator", "ok", "default settings", reason, source=" and ".join(ALLOCATOR_VARIABLES[::2]))
    for name, text in given.items():
        faults = allocator_faults(text)
        if not faults:
            yield Check("torch allocator", "ok", text, reason, source=name)
        for fault in faults:
            yield replace(fault, source=f"{name}; {fault.source}")
    if len(set(given.values())) > 1:
        first, *others = given
        finding = " and ".join(f"{name}={text}" for name, text in given.items())
        why, source = f"torch 2.13 takes {first}; its other name is the newer one", "c10/cuda/CUDAAllocatorConfig.h"
        yield Check("torch allocator", "problem", finding, why, f"unset {' '.join(others)}", source)
    for one in case.script.variables:
        if one.name in ALLOCATOR_VARIABLES and one.more is not None:
            late = f"{one.name} is set at {one.site}, after import {one.more}"
            remedy = f"set it before Python starts: {one.name}=... memfit run -- ..."
            yield Check("torch allocator", "warning", late, reason, remedy, one.site)
