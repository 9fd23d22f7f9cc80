"""Check a command and its settings: program, script, allocators, variables left from debugging, packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._case import Case, judge
from memfit.doctor._command import which
from memfit.doctor._frameworks import framework_of
from memfit.estimation import ALLOCATOR_VARIABLES, allocator_faults
from memfit.units import format_count

_TIGHT_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")
_TUNABLE = re.compile(r"glibc\.malloc\.(mmap_threshold|trim_threshold|arena_max)=\w+")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")
#: Variables that make a run slow or large: the values that do, the reason, the source.
_DEBUGGING = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (r"1|true", "every allocation goes to the driver and waits for the GPU",
                                       "torch notes, CUDA semantics"),
    "CUDA_LAUNCH_BLOCKING": (r"1", "every kernel is waited for", "CUDA programming guide"),
    "PYTHONMALLOC": (r"(?:pymalloc_|malloc_)?debug|malloc", "Python's small objects take more memory and time",
                     "Python docs, PYTHONMALLOC"),
    "PYTHONTRACEMALLOC": (r"[1-9]\d*", "each allocation of Python's keeps a stack", "Python docs, tracemalloc"),
    "MALLOC_PERTURB_": (r"[1-9]\d*", "glibc writes every freed block full", "mallopt(3)"),
    "TORCH_SHOW_DISPATCH_TRACE": (r"1", "every operator is printed", "torch"),
}  # fmt: skip


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


def check_malloc(case: Case) -> Iterator[Check]:
    """glibc's allocator, and what replaces it."""
    env = case.env
    preloaded = [word for word in re.split(r"[:\s]+", env.get("LD_PRELOAD", "")) if word]
    missing = [word for word in preloaded if "/" in word and not (case.place.root / word.lstrip("/")).exists()]
    if missing:
        reason = "the loader prints an error for every process and goes on without it"
        finding = f"LD_PRELOAD: {missing[0]} is not there"
        yield Check("preload", "problem", finding, reason, "unset LD_PRELOAD", "LD_PRELOAD")
    other = next((name for name in _ALLOCATORS for word in preloaded if name in Path(word).name), None)
    tunables = ", ".join(_TUNABLE.findall(env.get("GLIBC_TUNABLES", "")))
    if other is not None:
        reason = "glibc's MALLOC_ variables do nothing then; it keeps freed memory by rules of its own"
        is_tuned = other == "jemalloc" and "decay_ms:0" in env.get("MALLOC_CONF", "")
        remedy = "export MALLOC_CONF=dirty_decay_ms:0,muzzy_decay_ms:0, or " if other == "jemalloc" else ""
        remedy += "unset LD_PRELOAD"
        yield judge("malloc", f"{other} is preloaded", reason, remedy, "LD_PRELOAD", warning=not is_tuned)
    elif tunables:
        reason = "GLIBC_TUNABLES wins over the MALLOC_ variables that memfit sets (measured with glibc 2.36)"
        finding = f"GLIBC_TUNABLES sets {tunables}"
        yield Check("malloc", "warning", finding, reason, "unset GLIBC_TUNABLES", "GLIBC_TUNABLES")
    else:
        finding = ", ".join(f"{name}={env[name]}" for name in _TIGHT_MALLOC if name in env) or "glibc's defaults"
        reason = "with glibc's defaults the process keeps freed memory: resident does not follow live memory"
        source = "memfit run" if case.setup.tight_malloc else "the environment"
        yield Check("malloc", "ok", finding, reason, source=source)


def check_debugging(case: Case) -> Iterator[Check]:
    """Variables that were left from debugging."""
    found = [name for name, (pattern, *_) in _DEBUGGING.items() if re.fullmatch(pattern, case.env.get(name, ""), re.I)]
    for name in found:
        _, reason, source = _DEBUGGING[name]
        yield Check("debugging", "warning", f"{name}={case.env[name]}", reason, f"unset {name}", source)
    if not found:
        reason = "they cost time or memory in every run"
        yield Check("debugging", "ok", "no variable of a debugger is set", reason, source="the environment")


def check_packages(case: Case) -> Iterator[Check]:
    """Whether the command's interpreter has torch and what the script imports; `pip check` says what does not match."""
    asked, sites = case.interpreter, case.script.imports
    if asked is None or asked.error:
        return
    reason = "an import that fails ends the script, unless the script catches it"
    pip, source = f"{asked.executable} -m pip install", asked.executable
    if asked.packages.get("torch") is None:
        finding = "torch is not installed" + (f" (import at {sites['torch']})" if "torch" in sites else "")
        yield judge("packages", finding, reason, f"{pip} torch", source, problem="torch" in sites)
        return
    if absent := [name for name in asked.missing if name != "torch" and name in sites][:5]:
        finding = f"not to be found: {', '.join(f'{name} ({sites[name]})' for name in absent)}"
        yield Check("packages", "warning", finding, reason, f"{pip} {' '.join(absent)}", source)
    else:
        names = ", ".join(f"{name} {version}" for name, version in asked.packages.items() if version)
        yield Check("packages", "ok", names, reason, source=source)


def check_framework(case: Case) -> Iterator[Check]:
    """Which framework the script trains with, and what memfit can do for it."""
    if found := framework_of(case.script):
        framework, site = found
        reason = "memfit can show its steps, save at a stop and resume it exactly, each with one line"
        steps = f"watch: {framework.watch}; stop: {framework.stop}; exact: {framework.exact}"
        yield Check("framework", "ok", f"{framework.name}. {steps}", f"{reason} ({framework.page})", source=site)
