"""Check a command: forks after threads, threads times workers, torch's allocator, settings that come too late."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from memfit.checks import Check
from memfit.doctor._case import REAL_ROOT, Case, judge
from memfit.doctor._command import which
from memfit.doctor._script import Start
from memfit.estimation import ALLOCATOR_VARIABLES, allocator_faults
from memfit.jobs import thread_env
from memfit.units import format_count, list_some

#: Libraries that do not survive a fork once they were used: whether that is certain, why, and the source.
_FORK_UNSAFE: dict[str, tuple[bool, str, str]] = {
    "polars": (True, "once it has been used, its Rayon threads are not there in a forked process, and the first "
               "query waits for them for ever, with POLARS_MAX_THREADS=1 too",
               "docs.pola.rs, user guide, multiprocessing"),
    "grpc": (True, "its threads and locks are copied without their owners", "grpc/doc/fork_support.md"),
    "jax": (True, "it is multithreaded, and says itself that os.fork may deadlock", "jax, RuntimeWarning at fork"),
    "tensorflow": (True, "its thread pools are not there in the forked process", "tensorflow issue 5448"),
    "cv2": (False, "its thread pool may be copied while a lock is held", "opencv issue 5150"),
    "sklearn": (False, "GNU OpenMP's threads are not there in the forked process",
                "scikit-learn FAQ, why do I sometimes get a crash/freeze with n_jobs > 1"),
    "lightgbm": (False, "GNU OpenMP's threads are not there in the forked process", "LightGBM FAQ, hangs"),
    "numba": (False, "its OpenMP threading layer ends a forked process", "numba docs, threading layers"),
}  # fmt: skip
#: What starts a pool of threads in every process that uses it, a DataLoader's workers too.
_POOLS = ("polars", "numpy", "scipy", "sklearn", "numexpr", "pandas", "numba", "cv2")
_THREAD_VARIABLES = thread_env(1)
_GUARD = 'if __name__ == "__main__":'
_LOCKS = (
    "fork copies one thread and every lock: a lock that another thread held is never released, and the new process "
    "waits for ever"
)


def check_command(case: Case) -> Iterator[Check]:
    command, script, asked = case.command, case.script, case.interpreter
    program = command.interpreter or "Python"
    if command.words and case.root == REAL_ROOT and which(command.words[0], case.cwd, case.env) is None:
        finding = f"there is no program '{command.words[0]}'"
        reason = "a command begins with a program on the PATH, or with the path of an executable file"
        yield Check("command", "problem", finding, reason, "correct the name, or activate its environment", "PATH")
    if asked is not None and asked.error:
        finding, remedy = f"{program} gave no answer: {asked.error}", f"try: {program} -c pass"
        yield Check("command", "problem", finding, "the command runs in it", remedy, program)
    reason = "loaders, forks and imports are found in the script's text"
    for error in script.errors:
        remedy = f"correct {error.site}: it must be readable, and Python must compile it"
        yield Check("script", "warning", f"not read: {error.site}: {error.name}", reason, remedy, error.site)
    if command.words and not script.files:
        finding = f"no Python script is seen in '{' '.join(command.words)[:80]}'"
        remedy = "name the Python command and a file that is there: memfit doctor -- python train.py"
        yield Check("script", "warning", finding, reason, remedy, "the command")
    elif script.files and not script.errors:
        more = f" and {format_count(len(script.files) - 1, 'module')} beside it" if len(script.files) > 1 else ""
        found = f"{format_count(len(script.imports), 'import')}, {format_count(len(script.loaders), 'loader')}"
        yield Check("script", "ok", f"{script.files[0]}{more} read: {found}", reason, "", script.files[0])


def _method(case: Case, one: Start) -> str:
    return case.start_method[0] if one.method is None else one.method


def _list(starts: Sequence[Start]) -> str:
    return list_some([one.site for one in starts], 3)


def check_fork(case: Case) -> Iterator[Check]:
    loaders = [one for one in case.loaders if _method(case, one) in ("fork", "")]
    calls = [one for one in case.script.forks if _method(case, one) in ("fork", "")]
    found = [*_after_loaders(case, loaders), *_after_calls(case, calls)]
    default, source = case.start_method
    if not loaders and not calls:
        yield Check("fork", "ok", f"start method {default}; nothing forks here", _LOCKS, source=source)
    elif not found:
        starts = [*loaders, *calls]
        finding = f"processes are forked at {_list(starts)}, after no library that is known not to survive it"
        yield Check("fork", "ok", finding, _LOCKS, source=_source(case, starts))
    yield from found


def _source(case: Case, starts: Sequence[Start]) -> str:
    """Where their start methods are from: the calls that name one, else the default."""
    own = [f"{one.method or 'a start method'} is named at {one.site}" for one in starts if one.method is not None]
    return "; ".join([*own, *([case.start_method[1]] if len(own) < len(starts) else [])])


def check_guard(case: Case) -> Iterator[Check]:
    """Whether a script whose processes are spawned can be imported by them."""
    starts = [*case.loaders, *case.script.forks]
    spawning = [one for one in starts if _method(case, one) in ("spawn", "forkserver")]
    if spawning and not case.script.has_guard:
        file = case.script.files[0]
        finding = f"processes are spawned at {_list(spawning)}, and {file} has no {_GUARD}"
        reason = "a spawned process imports the script first: without it, each one would start the training anew"
        remedy = f"put what the script does into a function, and its call below {_GUARD}"
        yield Check("main guard", "problem", finding, reason, remedy, file)


def _after_loaders(case: Case, forking: list[Start]) -> Iterator[Check]:
    if not forking:
        return
    certain = [one for one in forking if case.workers_of(one) and _method(case, one) == "fork"]
    named = certain or forking
    count = str(case.workers_of(named[0]) or f"{named[0].workers_text}, not known here: --workers gives it")
    verb = "forks" if _method(case, named[0]) else "forks, for all that can be told of its start method,"
    what = f"DataLoader(num_workers={count}) at {_list(named)} {verb}"
    remedy = (
        f'DataLoader(..., multiprocessing_context="spawn"), or "forkserver"{_with_guard(case)}; memfit.data.Loader '
        "never forks the trainer. num_workers=0 is a fallback: safe, and the trainer waits for its data"
    )
    source = _source(case, named)
    yield from _after_libraries(case, what, source, remedy, certain=bool(certain))
    if case.script.cuda is not None:
        reason = f"CUDA cannot be used in a process that was forked from one that uses it; {_LOCKS}"
        finding = f"{what}, and the GPU is used at {case.script.cuda}"
        yield Check("fork", "warning", finding, reason, remedy, f"{source}; torch, notes on multiprocessing")


def _with_guard(case: Case) -> str:
    return "" if case.script.has_guard else f", with the script's work below {_GUARD}"


def _after_calls(case: Case, calls: list[Start]) -> Iterator[Check]:
    if not calls:
        return
    what, source = f"{calls[0].name} at {_list(calls)} forks", _source(case, calls)
    remedy = f'multiprocessing.get_context("spawn"), or "forkserver"{_with_guard(case)}'
    certain = any(_method(case, one) == "fork" for one in calls)
    yield from _after_libraries(case, what, source, remedy, certain=certain)
    if "torch" in case.script.imports and case.threads > 1:
        finding = f"{what} after import torch ({case.script.imports['torch']}) with {case.threads} OpenMP threads"
        reason = "once torch has computed with several threads, the first such computation in a forked process hangs"
        source += "; GCC libgomp; a DataLoader's workers set one thread and are spared"
        yield Check("fork", "warning", finding, f"{reason}; {_LOCKS}", remedy, source)


def _after_libraries(case: Case, what: str, source: str, remedy: str, *, certain: bool) -> Iterator[Check]:
    if found := [name for name in _FORK_UNSAFE if name in case.script.imports]:
        finding = f"{what} after import of {', '.join(f'{name} ({case.script.imports[name]})' for name in found)}"
        reason = "; ".join([*(f"{name}: {_FORK_UNSAFE[name][1]}" for name in found), _LOCKS])
        sources = "; ".join([source, *(_FORK_UNSAFE[name][2] for name in found)])
        is_problem = certain and any(_FORK_UNSAFE[name][0] for name in found)
        yield judge("fork", finding, reason, remedy, sources, problem=is_problem, warning=True)


def check_threads(case: Case) -> Iterator[Check]:
    """Whether threads times processes fit the cores, and whether the number of threads is what was set."""
    cores, ranks, threads = case.budget.num_cpus, case.command.num_processes, case.threads
    workers, origin = case.workers
    has_pools = any(name in case.script.imports for name in _POOLS)
    each = threads if has_pools else 1
    total = ranks * (threads + workers * each)
    finding = format_count(threads, "thread") + (f" + {format_count(workers, 'worker')} x {each}" if workers else "")
    finding = f"{ranks} processes x ({finding})" if ranks > 1 else finding
    finding += f" = {total} threads" if ranks > 1 or workers else ""
    finding += f" on {format_count(cores, 'core')} ({case.budget.cpus_source})"
    remedy = f"memfit run --set threads_per_job={max(1, cores // (ranks * (1 + workers * has_pools)))} -- ..."
    if ranks * workers > cores:
        remedy = f"num_workers={max(1, cores // ranks - 1)}, and memfit run --set threads_per_job=1 -- ..."
    reason = "threads beyond the cores take turns: each step waits for the slowest, and every pool takes memory"
    is_many = total > 2 * cores or ranks * max(threads, workers) > cores
    source = f"OMP_NUM_THREADS={threads}; workers: {origin}"
    yield judge("threads", finding, reason, remedy, source, warning=is_many)
    reason = "a library reads its number of threads once, when it is loaded: this changes nothing"
    remedy = "leave it out (memfit run sets it before Python starts), or move it above the first import"
    yield from _too_late(case, "threads", _THREAD_VARIABLES, reason, remedy)


def _too_late(case: Case, check: str, names: Container[str], reason: str, remedy: str) -> Iterator[Check]:
    for one in case.script.variables:
        if one.name in names and one.more is not None:
            finding = f"{one.name} is set at {one.site}, after import {one.more}"
            yield Check(check, "warning", finding, reason, remedy.replace("NAME", one.name), one.site)


def check_allocator(case: Case) -> Iterator[Check]:
    """torch's caching allocator: contradictions, and settings that come too late."""
    given = {name: case.env[name] for name in ALLOCATOR_VARIABLES if case.env.get(name)}
    reason = "torch reads the settings once, when it is imported or first allocates"
    if not given:
        yield Check("torch allocator", "ok", "default settings", reason, source=" and ".join(ALLOCATOR_VARIABLES[::2]))
    for name, text in given.items():
        faults = allocator_faults(text) or [Check("torch allocator", "ok", text, reason)]
        yield from (replace(fault, source=f"{name}; {fault.source}".rstrip("; ")) for fault in faults)
    if len(set(given.values())) > 1:
        first, *others = given
        finding = " and ".join(f"{name}={text}" for name, text in given.items())
        why, source = f"torch 2.13 takes {first}; its other name is the newer one", "c10/cuda/CUDAAllocatorConfig.h"
        yield Check("torch allocator", "problem", finding, why, f"unset {' '.join(others)}", source)
    remedy = "set it before Python starts: NAME=... memfit run -- ..."
    yield from _too_late(case, "torch allocator", ALLOCATOR_VARIABLES, reason, remedy)
