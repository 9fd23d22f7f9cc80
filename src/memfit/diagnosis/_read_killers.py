"""The words of those who kill for memory: kernel, schedulers, containers, Ray, Dask; and of kills that name nobody."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from memfit.diagnosis._facts import Pattern, to_bytes, words

_KIB = 1 << 10
_Values = Callable[[re.Match[str], str], dict[str, Any] | None]


def _by(who: str) -> _Values:
    return lambda match, after: {"who": who}


def _slurm_limit(match: re.Match[str], after: str) -> dict[str, Any]:
    """The old watch of Slurm: used and allowed in KiB."""
    return {
        "who": "Slurm",
        "scope": match.group(1).lower(),
        "step": match.group(2),
        "used_bytes": int(match.group(3)) * _KIB,
        "limit_bytes": int(match.group(4)) * _KIB,
    }


def _slurm_kill(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"who": "Slurm", "count": int(match.group(1)), "step": match.group(2) or ""}


def _slurm_task(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"who": "Slurm", "node": match.group(1), "tasks": match.group(2)}


def _pbs(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"who": "PBS", "used_bytes": int(match.group(1)) * _KIB, "limit_bytes": int(match.group(2)) * _KIB}


def _killed_process(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """A kernel's line on its victim; its scope stands in it or in the lines around it."""
    near = match.group(0) + after[:200]
    values: dict[str, Any] = {"who": "the kernel", "pid": int(match.group("pid")), "task": match.group("task")}
    rss = re.search(r"anon-rss:(\d+)kB", near)
    if rss:
        values["used_bytes"] = int(rss.group(1)) * _KIB
    return values


def _ray(match: re.Match[str], after: str) -> dict[str, Any]:
    found = re.search(r"(?:running|\))was([\d.]+)GB(?:used)?/([\d.]+)GB", after[:1500])
    sizes = {"used_bytes": to_bytes(found[1], "GiB"), "limit_bytes": to_bytes(found[2], "GiB")} if found else {}
    return {"who": "Ray's memory monitor"} | sizes


def _raylet(match: re.Match[str], after: str) -> dict[str, Any] | None:
    return {"who": "Ray's memory monitor", "count": int(match.group(1))} if int(match.group(1)) else None


def _dask(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """Dask's nanny; a budget of 0 % is a wrong setting."""
    return {"who": "Dask's nanny"} if float(match.group(1)) > 0 else None


def _flagged(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """Docker's and Kubernetes' word, unless it is the name of a flag that is false."""
    return None if re.match(r'\\?"?[:=]"?(?:false|0)', after) else {"who": "the container's limit"}


def _grid_engine(match: re.Match[str], after: str) -> dict[str, Any]:
    """Its limit of a queue, in bytes with five places."""
    found = re.match(r"[^(]{0,100}\((\d+)[\d.]*>limit:(\d+)", after)
    return {"who": "Grid Engine"} | ({"used_bytes": int(found[1]), "limit_bytes": int(found[2])} if found else {})


def _condor(match: re.Match[str], after: str) -> dict[str, Any]:
    """Its limit, and what it measured, both in megabytes that count in 1024s."""
    unit = {"mega": "M", "kilo": "K"}[match["unit"]]
    used = re.match(r"\.(?:Peakusage|Lastmeasuredusage):(\d+)megabytes", after)
    sizes = {"used_bytes": to_bytes(used[1], "M")} if used else {}
    return {"who": "HTCondor", "limit_bytes": to_bytes(match["limit"], unit)} | sizes


def _bad_end(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """How Hydra says a process's end: as a number, or as a status that has the signal's in it."""
    code = int(match["code"] or 9)
    if code not in (9, 137):
        return None
    return ({"pid": int(match["pid"])} if match["pid"] else {}) | ({"code": 137} if code == 137 else {})


def _yarn(match: re.Match[str], after: str) -> dict[str, Any]:
    found = re.search(r"(\d+(?:\.\d+)?)([KMGT]B)of(\d+(?:\.\d+)?)([KMGT]B)(?:physical|virtual)", after[:200])
    sizes = {"used_bytes": to_bytes(found[1], found[2]), "limit_bytes": to_bytes(found[3], found[4])} if found else {}
    return {"who": "YARN"} | sizes


_SCHEDULERS: tuple[Pattern, ...] = (
    Pattern(
        "cgroup_kill",
        words(
            r"Detected (\d+) oom[-_]kill events? (?:\(s\))? in (?:Step ?Id=|step )?"
            r" ([\w.+]+?(?=cgroup|\.Some|$|\.[A-Z]|srun|slurm|[^\w.+]))"
        ),
        _slurm_kill,
    ),
    Pattern("cgroup_kill", words(r"(?<![\w.-])(\w[\w.-]{0,80}): tasks? ([\d,-]+): Out Of Memory"), _slurm_task),
    Pattern(
        "limit_kill",
        words(r"(Job|Step) ([\d.\w]+) exceeded (?:virtual )? memory limit \((\d+) > (\d+)\),? being killed"),
        _slurm_limit,
    ),
    Pattern("limit_touched", words(r"Exceeded (?:step|job) memory limit at some point"), _by("Slurm")),
    Pattern(
        "limit_kill",
        words(r"(?:srun|slurmstepd): (?:error: )? Exceeded (?:job|step) memory limit (?!at)"),
        _by("Slurm"),
    ),
    Pattern("cgroup_kill", re.compile(r"\bOUT_OF_ME(?:MORY|M|\+|MO?\+)"), _by("Slurm"), by_line=True),
    Pattern("limit_kill", words(r"job killed: (?:mem|vmem|pmem|pvmem) (\d+) kb exceeded limit (\d+) kb"), _pbs),
    Pattern(
        "limit_kill",
        words(r"PBS: job killed:[^!]{0,40}?mem | under_oom detected | Cgroup mem(?:ory|sw)? limit exceeded"),
        _by("PBS"),
    ),
    Pattern("limit_kill", words(r"job \S{1,40}? exceeded MEM usage hard limit"), _by("Moab")),
    Pattern(
        "limit_kill", words(r"TERM_MEMLIMIT | TERM_SWAP | killed after reaching LSF memory usage limit"), _by("LSF")
    ),
    Pattern("cgroup_kill", words(r"oom: Memory cgroup out of memory: killed (\d+) task"), _by("Flux")),
    Pattern(
        "limit_kill",
        words(r"Job has gone over (?:cgroup)? memory limit of (?P<limit>\d+) (?P<unit>mega|kilo)bytes"),
        _condor,
    ),
    Pattern(
        "limit_kill",
        words(r"exceed(?:s|ed) (?:job)? (?:hard|soft) limit \"?[hs]_(?:vmem|rss|data|stack)\"? of queue"),
        _grid_engine,
    ),
    Pattern("limit_kill", words(r"memory usage exceeded request_memory | PeakMemoryUsage exceeded"), _by("HTCondor")),
    Pattern(
        "limit_kill",
        words(
            r"killed by YARN for exceeding \S{0,20}?memory limits | is running beyond (?:physical"
            r"|virtual) memory limits"
        ),
        _yarn,
    ),
)

_CONTAINERS: tuple[Pattern, ...] = (
    Pattern("cgroup_kill", words(r"OOM ?Killed"), _flagged),
    Pattern("cgroup_kill", words(r"container oom (?=[0-9a-f]{12})"), _by("Docker")),
    Pattern("cgroup_kill", words(r'"(?:status|Action)":"oom"'), _by("Docker")),
    Pattern("cgroup_kill", words(r"OutOfMemoryError: Container killed due to memory usage"), _by("ECS")),
    Pattern(
        "cgroup_kill", words(r"[Cc]ontainer \S{1,80}? was OOM[- ]?killed"), lambda match, after: _flagged(match, after)
    ),
    Pattern("global_kill", words(r"low on resource: memory | had condition: \[MemoryPressure\]"), _by("the kubelet")),
    Pattern("global_kill", words(r"System OOM encountered"), _by("the kubelet")),
    Pattern(
        "disk_full",
        words(
            r"low on resource: (?:ephemeral-storage|\[?(?:DiskPressure|imagefs|nodefs)) | condition: \[DiskPressure\]"
        ),
    ),
)

_KERNEL: tuple[Pattern, ...] = (
    Pattern(
        "cgroup_kill",
        words(r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d+),? \((?P<task>[^)]{1,40})\)", flags=re.I),
        _killed_process,
    ),
    Pattern("cgroup_kill", words(r"oom-kill: constraint=CONSTRAINT_MEMCG"), _by("the kernel")),
    Pattern("cgroup_kill", words(r"Task in /\S{1,200}? killed as a result of limit of"), _by("the kernel")),
    Pattern(
        "cgroup_kill",
        words(
            r"mem_cgroup_out_of_memory | mem_cgroup_oom_synchronize | memory: usage \d+ kB, limit \d+ kB, failcnt"
            r"| Memory cgroup out of memory"
        ),
        _by("the kernel"),
    ),
    Pattern(
        "global_kill",
        words(r"oom-kill: constraint=CONSTRAINT_(?:NONE|MEMORY_POLICY|CPUSET) | ,global_oom,"),
        _by("the kernel"),
    ),
    Pattern(
        "oom_kill",
        words(
            r"(?<!cgroup)(?: Out of memory: )? Kill(?:ed)? process (?P<pid>\d+),?"
            r" (?:UID \d+,?)? \((?P<task>[^)]{1,40})\)"
        ),
        _killed_process,
    ),
    Pattern(
        "oom_kill",
        words(
            r"invoked oom-killer: | killed by the OOM killer | killed by \"?OOM[- ]Killer\"? "
            r"| Failed with result 'oom-kill'"
            r"| (?:main)? process exited, code=killed, status=9/KILL\S{0,300}? oom-kill",
            flags=re.I,
        ),
        _by("the kernel"),
    ),
    Pattern(
        "global_kill",
        words(
            r"systemd-oomd(?:\[\d+\])?: Killed | systemd-oomd killed [1-9]"
            r"| due to memory (?:pressure|used)[^!]{0,60}?for[^!]{0,120}?being [\d.]+% >"
        ),
        _by("systemd-oomd"),
    ),
    Pattern(
        "global_kill",
        words(
            r"sending SIG(?:TERM|KILL) to process \d+ (?:uid \d+)? \"[^\"]{1,40}\": (?:badness|oom_score)"
            r"| killing process \d+ \"[^\"]{1,40}\" with signal \d+: badness"
        ),
        _by("earlyoom"),
    ),
)

_CLUSTERS: tuple[Pattern, ...] = (
    Pattern(
        "global_kill",
        words(
            r"(?:Task|Actor|Worker)s? (?:\(s\))? (?:was|were) killed due to the node running low on memory", flags=re.I
        ),
        _ray,
    ),
    Pattern("global_kill", words(r"RayOutOfMemoryError:? (?:More than \d+%|Heap memory)"), _by("Ray's memory monitor")),
    Pattern(
        "global_kill",
        words(r"(?<!\d)(\d{1,9}) Workers? \(tasks / actors\) killed due to memory pressure \(OOM\)"),
        _raylet,
    ),
    Pattern("limit_kill", words(r"exceeded (\d+(?:\.\d+)?)% memory budget\. Restarting"), _dask),
    Pattern(
        "pressure",
        words(
            r"Unmanaged memory use is high | memory usage\. Pausing worker | Memory use is high but worker has no data"
        ),
        lambda match, after: {"what": "a warning of Dask's"},
    ),
)

#: What `memfit run` prints of a job's end; its run directory says more.
_MEMFIT: tuple[Pattern, ...] = (
    Pattern("cgroup_kill", words(r"ended at its wall by memfit"), _by("memfit")),
    Pattern(
        "sigkill",
        words(r"killed with SIGKILL by somebody else"),
        lambda match, after: {"killer": "stranger", "memory": False},
    ),
)

#: Killed, by whom is not said.
_UNNAMED: tuple[Pattern, ...] = (
    Pattern(
        "sigkill",
        re.compile(r"^\s*(?:Killed|已杀死|Getötet|Processus arrêté|Terminado \(killed\))\s*(?:\(core dumped\))?\s*$"),
        by_line=True,
    ),
    Pattern("sigkill", re.compile(r"(?:[%\])s│|]|it/s\]|\.{3}) ?(?:Killed|已杀死)\s*$"), by_line=True),
    Pattern("sigkill", re.compile(r"^\s*\[\d+\][+-]?\s+(?:\d+ )?Killed\b|\bzsh: killed\b|^Killed: 9"), by_line=True),
    Pattern(
        "sigkill",
        words(
            r"line \d+: (?P<pid>\d+) Killed (?=\S) | terminated by signal 9 | killed by signal 9 | Signal 9 \(SIGKILL\)"
            r"| Killed signal terminated program | SIGKILL\(-9\) | signal: 9, SIGKILL | killed by signal: 9"
            r"| interrupted by signal 9 | Negsignal\.SIGKILL | exited on signal 9 \(Killed\)"
            r"| died with <Signals\.SIGKILL: 9> | killed by SIGKILL (?!by OOM)"
        ),
        lambda match, after: {"pid": int(match["pid"])} if match["pid"] else {},
    ),
    Pattern(
        "sigkill",
        words(
            r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES =? (?:RANK \d+)? (?:PID (?P<pid>\d+))? [^=]{0,100}?"
            r" =* (?:EXIT CODE: (?P<code>\d+)(?!\d) | KILLED BY SIGNAL: 9 \()"
        ),
        _bad_end,
    ),
    Pattern("sigkill", words(r"EXIT STRING: Killed \(signal 9\)")),
    Pattern("sigkill", words(r"Exit code is 137 (?!\d)"), lambda match, after: {"code": 137}),
    Pattern(
        "sigkill",
        words(r"(?:exit|return) ?code:?=?\(? -9 (?!\d) | non-zero exit status -9 (?!\d)"),
    ),
    Pattern(
        "sigkill",
        words(
            r"exit(?:ed|s)? (?:with)? (?:status|code)?:? \(?137 (?!\d) | non-zero exit status 137 (?!\d)"
            r"| (?:exit|return) _?code\"?:?=?\(? 137 (?!\d)",
            flags=re.I,
        ),
        lambda match, after: {"code": 137},
    ),
    Pattern("sigkill", words(r"(?<![\w.-])(\w[\w.-]{0,80}): tasks? ([\d,-]+): Killed"), _slurm_task),
    Pattern(
        "sigkill",
        words(r"terminated abruptly while the future was running | A child process terminated abruptly"),
        lambda match, after: {"pool": True},
    ),
)

KILLERS: tuple[Pattern, ...] = (*_SCHEDULERS, *_CONTAINERS, *_KERNEL, *_CLUSTERS, *_MEMFIT, *_UNNAMED)
