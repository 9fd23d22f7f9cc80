"""Checks of processes and threads: forks after threads, threads times workers, what the child really sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.checks import Check
from memfit.doctor._case import Case, judge
from memfit.doctor._script import LoaderCall, Site

#: What does not survive a fork once it has been used: whether that is certain, why, and who says so.
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
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
#: Threads that libraries start beside their pools: polars for files and streams, torch for autograd.
_OTHER_THREADS = 16
_GUARD = 'if __name__ == "__main__":'
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_LOCKS = (
    "fork copies one thread and every lock: a lock that another thread held is never released, and the new process "
    "waits for ever"
)
_Start = LoaderCall | Site


def check_fork(case: Case) -> Iterator[Check]:
    """Whether processes are forked after threads were started."""
    default, says = case.start_method
    loaders = [one for one in case.loaders if _method(one, default) in ("fork", "")]
    calls = [one for one in case.script.forks if _method(one, default) in ("fork", "")]
    found = [*_after_loaders(case, loaders), *_after_calls(case, calls)]
    if not loaders and not calls:
        yield Check("fork", "ok", f"start method {default}; nothing forks here", _LOCKS, source=says)
    elif not found:
        sites = _list([*(one.site for one in loaders), *(one.site for one in calls)])
        finding = f"processes are forked at {sites}, after no library that is known not to survive it"
        yield Check("fork", "ok", finding, _LOCKS, source=_says(case, [*loaders, *calls]))
    yield from found


def _named(one: _Start) -> str | None:
    """The start method that a call names; None if it names none."""
    if isinstance(one, Site):
        return "fork" if one.name.endswith("fork") else one.more
    return one.start_method


def _method(one: _Start, default: str) -> str:
    """The start method of a call; empty if nothing tells."""
    named = _named(one)
    return default if named is None else named


def _says(case: Case, ones: Sequence[_Start]) -> str:
    """Who says how these start their processes: each call that names a start method itself, else the default."""
    own = [f"{named or 'a start method'} is named at {one.site}" for one in ones if (named := _named(one)) is not None]
    return "; ".join([*own, *([case.start_method[1]] if len(own) < len(ones) else [])])


def _guard(case: Case) -> str:
    return "" if case.script.has_guard else f", with the script's work below {_GUARD}"


def check_guard(case: Case) -> Iterator[Check]:
    """Whether a script whose processes are spawned can be imported by them."""
    starts: list[_Start] = [*case.loaders, *case.script.forks]
    spawning = [one.site for one in starts if _method(one, case.start_method[0]) in ("spawn", "forkserver")]
    if spawning and not case.script.has_guard:
        yield Check(
            "main guard",
            "problem",
            f"processes are spawned at {_list(spawning)}, and {case.script.files[0]} has no {_GUARD}",
            "a spawned process imports the script first: without it, each one would start the training anew",
            f"put what the script does into a function, and its call below {_GUARD}",
            case.script.files[0],
        )


def _after_loaders(case: Case, forking: list[LoaderCall]) -> Iterator[Check]:
    """What is unsafe in loaders that fork."""
    if not forking:
        return
    certain = [one for one in forking if case.workers_of(one) and _method(one, case.start_method[0]) == "fork"]
    named = certain or forking
    count = str(case.workers_of(named[0]) or f"{named[0].text}, not known here: --workers tells")
    is_known = _method(named[0], case.start_method[0])
    verb = "forks" if is_known else "forks, for all that can be told of its start method,"
    what = f"DataLoader(num_workers={count}) at {_list([one.site for one in named])} {verb}"
    says = _says(case, named)
    remedy = (
        f'DataLoader(..., multiprocessing_context="spawn"), or "forkserver"{_guard(case)}; memfit.data.Loader never '
        "forks the trainer. num_workers=0 is a fallback: safe, and the trainer waits for its data"
    )
    yield from _after_libraries(case, what, says, remedy, certain=bool(certain))
    if case.script.cuda is not None:
        reason = f"CUDA cannot be used in a process that was forked from one that uses it; {_LOCKS}"
        finding = f"{what}, and the GPU is used at {case.script.cuda}"
        yield Check("fork", "warning", finding, reason, remedy, f"{says}; torch, notes on multiprocessing")
    started = [one.site for one in case.script.threads if not one.name.startswith("torch.")]
    if started:
        finding = f"{what}, and threads are started at {started[0]}"
        yield Check("fork", "warning", finding, f"Python warns since 3.12; {_LOCKS}", remedy, f"{says}; os.fork")


def _after_calls(case: Case, calls: list[Site]) -> Iterator[Check]:
    """What is unsafe in other calls that fork."""
    if not calls:
        return
    what, says = f"{calls[0].name} at {_list([one.site for one in calls])} forks", _says(case, calls)
    remedy = f'multiprocessing.get_context("spawn"), or "forkserver"{_guard(case)}'
    certain = any(_method(one, case.start_method[0]) == "fork" for one in calls)
    yield from _after_libraries(case, what, says, remedy, certain=certain)
    if "torch" in case.script.imports and case.threads > 1:
        finding = f"{what} after import torch ({case.script.imports['torch']}) with {case.threads} OpenMP threads"
        reason = "once torch has computed with several threads, the first such computation in a forked process hangs"
        source = f"{says}; GCC libgomp; a DataLoader's workers set one thread and are spared"
        yield Check("fork", "warning", finding, f"{reason}; {_LOCKS}", remedy, source)


def _after_libraries(case: Case, what: str, says: str, remedy: str, *, certain: bool) -> Iterator[Check]:
    """One finding for the libraries that are there, and one for those that are not installed."""
    missing = case.interpreter.missing if case.interpreter is not None else ()
    for is_missing in (False, True):
        found = [name for name in _FORK_UNSAFE if name in case.script.imports and (name in missing) == is_missing]
        names = ", ".join(f"{name} ({case.script.imports[name]})" for name in found)
        names += ", not installed for this interpreter: the import fails first" if is_missing else ""
        reasons = "; ".join([*(f"{name}: {_FORK_UNSAFE[name][1]}" for name in found), _LOCKS])
        source = "; ".join([says, *(_FORK_UNSAFE[name][2] for name in found)])
        is_problem = certain and not is_missing and any(_FORK_UNSAFE[name][0] for name in found)
        if found:
            finding = f"{what} after import of {names}"
            yield judge("fork", finding, reasons, remedy, source, problem=is_problem, warning=True)


def check_threads(case: Case) -> Iterator[Check]:
    """Whether threads times processes fit the cores, and whether the number of threads is what was asked for."""
    cores, workers, ranks, threads = case.num_cpus, case.num_workers, case.command.num_processes, case.threads
    has_pools = any(name in case.script.imports for name in _POOLS)
    each = threads if has_pools else 1
    total = ranks * (threads + workers * each)
    parts = f"{threads} threads" + (f" + {workers} workers x {each}" if workers else "")
    parts = f"{ranks} processes x ({parts})" if ranks > 1 else parts
    parts = parts if ranks == 1 and not workers else f"{parts} = {total} threads"
    host = case.place.num_host_cpus or 0
    own = [one.site for one in case.script.threads if one.name == "torch.set_num_threads"]
    remedy = f"memfit run --threads {max(1, cores // (ranks * (1 + workers * has_pools)))} -- ..."
    if ranks * workers > cores:
        remedy = f"num_workers={max(1, cores // ranks - 1)}, and memfit run --threads 1 -- ..."
    yield judge(
        "threads",
        f"{parts} on {cores} cores ({case.place.budget.cpus_source})"
        + (f"; a library that is not told would take {host}" if host > cores else "")
        + (f"; torch.set_num_threads at {own[0]} changes it" if own else ""),
        "threads beyond the cores take turns: each step waits for the slowest, and every pool takes memory",
        remedy,
        f"OMP_NUM_THREADS={threads}; workers: {case.workers[1]}",
        warning=total > 2 * cores or ranks * max(threads, workers) > cores,
    )
    lost = {name: case.given[name] for name, new in case.added.items() if case.given.get(name, new) != new}
    if lost:
        finding = ", ".join(f"{name}={old} becomes {case.added[name]}" for name, old in lost.items())
        numbers = [old for name, old in lost.items() if name in _THREAD_VARIABLES and old.isdigit()]
        flag = f"--threads {numbers[0]}" if numbers else "--no-tight-malloc"
        reason = "memfit run fixes these for each job, whatever the shell exports"
        yield Check("overridden", "warning", finding, reason, f"memfit run {flag} -- ...", "the environment")
    yield from _late(case)
    bound = [name for name in _BINDING if case.env.get(name, "false").lower() not in ("false", "disabled", "none")]
    if bound:
        yield Check(
            "threads",
            "warning",
            f"{bound[0]}={case.env[bound[0]]} binds threads to cores",
            "every job and every worker binds its threads to the same first cores, however many others are free",
            f"unset {' '.join(bound)}",
            bound[0],
        )


def _late(case: Case) -> Iterator[Check]:
    """Thread variables that the script sets when their readers are loaded already."""
    for one in case.script.variables:
        if one.name in _THREAD_VARIABLES and one.more is not None:
            late = f"{one.name} is set at {one.site}, after import {one.more}"
            reason = "a library reads its number of threads once, when it is loaded: this changes nothing"
            remedy = "leave it out (memfit run sets it before Python starts), or move it above the first import"
            yield Check("threads", "warning", late, reason, remedy, one.site)


def check_environment(case: Case) -> Iterator[Check]:
    """Whether the command's interpreter sees what was set."""
    asked = case.interpreter
    reason = "what a library finds when it is loaded is what counts, not what was exported somewhere"
    if asked is None:
        words = " ".join(case.command.words[:2])
        finding = f"the interpreter of '{words}' cannot be told from its words" if words else "no interpreter was asked"
        yield Check("environment", "ok", finding, reason, source="the command")
        return
    if asked.error:
        what = f"{asked.executable} could not be asked: {asked.error}"
        yield Check("environment", "problem", what, reason, f"try: {asked.executable} -c pass", asked.executable)
        return
    unlike = {name: seen for name, seen in asked.env.items() if seen != case.env.get(name)}
    differ = [f"{name}={seen} and not {case.env.get(name)}" for name, seen in unlike.items()]
    seen = ", ".join(differ) or f"all {len(asked.env)} variables as set, and {asked.num_cpus} CPUs"
    finding = f"Python {'.'.join(map(str, asked.version))} sees {seen}"
    remedy = "look for what sets it: sitecustomize, usercustomize, a .pth file, a wrapper around python"
    yield judge("environment", finding, reason, remedy, asked.executable, problem=bool(differ))
    if asked.imports:
        used = {name: count for name, count in asked.threads.items() if not asked.imports.get(name, "-")}
        steps = ", ".join(f"{count} after {name}" for name, count in used.items())
        torch = "" if asked.torch_threads is None else f"; torch computes with {asked.torch_threads}"
        yield judge(
            "threads alive",
            f"threads alive: {asked.threads.get('', 0)} at the start, {steps}{torch}",
            "each process of the script starts so many, and a fork copies one of them",
            f"memfit run --threads {case.num_cpus} -- ...",
            "counted in a child",
            warning=max(asked.threads.values(), default=0) > 4 * case.num_cpus + _OTHER_THREADS,
        )


def _list(sites: list[str]) -> str:
    """The first three places, and how many more there are."""
    more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
    return ", ".join(sites[:3]) + more
