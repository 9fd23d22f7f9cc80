"""Checks of settings: torch's allocator, malloc, preloaded allocators, what was left from debugging, the packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._case import Case
from memfit.estimation import allocator_faults

#: As torch 2.13 reads them: the first one that is set counts. Source: c10/cuda/CUDAAllocatorConfig.h.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")
#: Variables that make a run slow or large, with the values that do, why, and who says so.
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


def check_allocator(case: Case) -> Iterator[Check]:
    """torch's caching allocator: contradictions, and settings that come too late."""
    given = [(name, case.env[name]) for name in ALLOCATOR_VARIABLES if case.env.get(name)]
    reason = "torch reads the settings once, when it is imported or first allocates"
    if not given:
        yield Check("torch allocator", "ok", "default settings", reason, source=" and ".join(ALLOCATOR_VARIABLES[::2]))
    for name, text in given:
        faults = allocator_faults(text)
        if not faults:
            yield Check("torch allocator", "ok", text, reason, source=name)
        for fault in faults:
            source = f"{name}; {fault.source}"
            yield Check("torch allocator", fault.verdict, fault.finding, fault.reason, fault.remedy, source)
    if len({text for _, text in given}) > 1:
        yield Check(
            "torch allocator",
            "problem",
            " and ".join(f"{name}={text}" for name, text in given),
            f"torch 2.13 takes {given[0][0]}; its other name is the newer one",
            f"unset {' '.join(name for name, _ in given[1:])}",
            "c10/cuda/CUDAAllocatorConfig.h (torch 2.13)",
        )
    for one in case.script.variables:
        if one.name in ALLOCATOR_VARIABLES and one.more is not None:
            late = f"{one.name} is set at {one.site}, after import {one.more}"
            remedy = f"set it before Python starts: {one.name}=... memfit run -- ..."
            yield Check("torch allocator", "warning", late, reason, remedy, one.site)


def check_malloc(case: Case) -> Iterator[Check]:
    """glibc's allocator, and what replaces it."""
    env, reason = case.env, "with glibc's defaults freed memory stays with the process: resident does not follow live"
    tight = {name: env[name] for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")
             if name in env}  # fmt: skip
    preloaded = [word for word in re.split(r"[:\s]+", env.get("LD_PRELOAD", "")) if word]
    missing = [word for word in preloaded if "/" in word and not (case.place.root / word.lstrip("/")).exists()]
    if missing:
        what = "the loader prints an error for every process and goes on without it"
        yield Check("preload", "problem", f"LD_PRELOAD: {missing[0]} is not there", what, "unset LD_PRELOAD",
                    "LD_PRELOAD")  # fmt: skip
    other = next((name for name in _ALLOCATORS for word in preloaded if name in Path(word).name), None)
    if other is not None:
        why = "glibc's MALLOC_ variables do nothing then; it keeps freed memory by rules of its own"
        remedy = "unset LD_PRELOAD"
        if other == "jemalloc":
            remedy = "export MALLOC_CONF=dirty_decay_ms:0,muzzy_decay_ms:0, or unset LD_PRELOAD"
        well = other == "jemalloc" and "decay_ms:0" in env.get("MALLOC_CONF", "")
        yield Check("malloc", "ok" if well else "warning", f"{other} is preloaded", why, "" if well else remedy,
                    "LD_PRELOAD")  # fmt: skip
        return
    tunables = re.findall(
        r"glibc\.malloc\.(mmap_threshold|trim_threshold|arena_max)=\w+", env.get("GLIBC_TUNABLES", "")
    )
    if tunables:
        why = "GLIBC_TUNABLES wins over the MALLOC_ variables that memfit sets (measured with glibc 2.36)"
        told = f"GLIBC_TUNABLES sets {', '.join(tunables)}"
        yield Check("malloc", "warning", told, why, "unset GLIBC_TUNABLES", "GLIBC_TUNABLES")
    else:
        told = ", ".join(f"{name}={value}" for name, value in tight.items()) or "glibc's defaults"
        yield Check("malloc", "ok", told, reason, source="memfit run" if case.setup.tight_malloc else "the environment")


def check_debugging(case: Case) -> Iterator[Check]:
    """Variables that were left from debugging."""
    found = False
    for name, (pattern, reason, source) in _DEBUGGING.items():
        value = case.env.get(name, "")
        if re.fullmatch(pattern, value, re.I):
            found = True
            yield Check("debugging", "warning", f"{name}={value}", reason, f"unset {name}", source)
    if not found:
        yield Check("debugging", "ok", "no variable of a debugger is set", "they cost time or memory in every run",
                    source="the environment")  # fmt: skip


def check_packages(case: Case) -> Iterator[Check]:
    """torch and its companion packages as the command's interpreter has them."""
    asked = case.interpreter
    if asked is None or asked.error:
        return
    reason = "a package that does not match torch breaks when it is imported, often by something else that imports it"
    torch, vision = asked.packages.get("torch"), asked.packages.get("torchvision")
    wanted = "torch" in case.script.imports
    if torch is None:
        verdict = "problem" if wanted else "ok"
        where = f" (import at {case.script.imports['torch']})" if wanted else ""
        remedy = f"{asked.executable} -m pip install torch" if wanted else ""
        yield Check("packages", "problem" if verdict == "problem" else "ok", f"torch is not installed{where}", reason,
                    remedy, asked.executable)  # fmt: skip
        return
    if asked.imports.get("torch"):
        yield Check("packages", "problem", f"import torch fails: {asked.imports['torch']}", reason,
                    "install torch anew in a fresh environment", asked.executable)  # fmt: skip
    mismatch = vision and vision_mismatch(torch, vision)
    if mismatch:
        yield Check("packages", "warning", f"torch {torch} with torchvision {vision}: {mismatch}", reason,
                    "pip uninstall torchvision, or install both from one index", asked.executable)  # fmt: skip
    absent = [name for name in asked.missing if name != "torch" and name in case.script.imports]
    if absent:
        sites = ", ".join(f"{name} ({case.script.imports.get(name)})" for name in absent[:5])
        remedy = f"{asked.executable} -m pip install {' '.join(absent[:5])}"
        why = "the import fails, unless the script catches it"
        yield Check("packages", "warning", f"not to be found: {sites}", why, remedy, asked.executable)
    broken = {name: error for name, error in asked.imports.items() if error and name not in ("torch", *absent)}
    for name, error in broken.items():
        yield Check("packages", "problem", f"import {name} fails: {error}", reason,
                    f"{asked.executable} -m pip install --force-reinstall {name}", asked.executable)  # fmt: skip
    if not mismatch and not broken and not absent and not asked.imports.get("torch"):
        names = ", ".join(f"{name} {version}" for name, version in asked.packages.items() if version)
        yield Check("packages", "ok", names, reason, source=asked.executable)


def vision_mismatch(torch: str, vision: str) -> str:
    """Why a torchvision does not go with a torch, or empty.

    torchvision 0.(n + 15) is made for torch 2.n, and both for the same device.

    >>> vision_mismatch("2.13.0+cpu", "0.28.0+cpu"), vision_mismatch("2.13.0", "0.27.0")
    ('', 'it is made for torch 2.12')
    >>> vision_mismatch("2.13.0+cpu", "0.28.0")
    "built for another device ('' and not 'cpu'): its operators are missing"

    Source: pytorch/vision README, installation.
    """
    numbers = re.match(r"2\.(\d+)", torch), re.match(r"0\.(\d+)", vision)
    if numbers[0] and numbers[1] and int(numbers[1].group(1)) - 15 != int(numbers[0].group(1)):
        return f"it is made for torch 2.{int(numbers[1].group(1)) - 15}"
    builds = torch.partition("+")[2], vision.partition("+")[2]
    if builds[0] != builds[1] and "cpu" in builds:
        return f"built for another device ('{builds[1]}' and not '{builds[0]}'): its operators are missing"
    return ""
