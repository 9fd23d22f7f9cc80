"""Read a batch script with the places of its directives, options and variables; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.amounts import Amount
from memfit.diagnosis._job import MEMORY_OPTIONS, SETTINGS, Job, read_number
from memfit.diagnosis._runs import read_text
from memfit.diagnosis._sacct import parse_request, parse_seconds

#: The long names of sbatch's short options that are read. Source: sbatch(1), Slurm 24.11.
_LONG = {"c": "cpus-per-task", "G": "gpus", "N": "nodes", "n": "ntasks", "t": "time"}
_DIRECTIVE = re.compile(
    r"\s*(?:--(?P<long>[a-z][a-z-]*)|-(?P<short>[A-Za-z]))"
    r"(?:(?:=|[ \t]+(?!-))?(?P<value>\"[^\"]*\"|'[^']*'|[^\s#]+))?(?!\S)"
)
_VALUE = r"(?:[\"'](?!\S*=))?(?P<value>(?!--)[^\s\\;&|\"']+)"
#: ``--key value``, ``--key=value``, ``--key``; ``key=value`` of Hydra and of the shell. Quotes are passed over.
_SETTING = re.compile(
    rf"(?<![\w./=-])(?:--(?P<option>[A-Za-z][\w.-]*)(?:(?:=|[ \t]+){_VALUE})?"
    rf"|[+~]*(?P<key>[A-Za-z_]\w*(?:[./]\w+)*)={_VALUE.replace('value', 'given')})"
)
_ASSIGNMENT = re.compile(
    r"\s*(?P<export>export\s+)?(?P<key>[A-Za-z_]\w*)=(?:\"[^\"]*\"|'[^']*'|[^\s;&|#]*)(?P<more>.*)"
)
_STARTS = r"\s*(?:\w+=\S+\s+)*"
_NAMES = r"python[\d.]*|torchrun|accelerate|deepspeed|apptainer|singularity|memfit|uv|poetry"
_RUNS = re.compile(rf"{_STARTS}(?:srun|mpirun|docker|podman|{_NAMES})\b")
_SRUN = re.compile(rf"{_STARTS}srun\b")
_COMPONENT = re.compile(r"#SBATCH\s+(?:hetjob|packjob)\b")
_PROGRAM = re.compile(rf"(?<=\s)(?:\S*/)?(?:{_NAMES}|bash|sh|env|\S+\.(?:py|sh))(?!\S)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A name and its value as written, with the columns of the value."""

    key: str
    value: str
    line: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """The last part of its key, with underscores: ``dataloader.params.batch-size`` is ``batch_size``."""
        return re.split(r"[./]", self.key)[-1].replace("-", "_").lower()

    @property
    def amount(self) -> Amount | None:
        """What an option of `MEMORY_OPTIONS` requests, in its own unit; None for all memory, and for no size."""
        found = parse_request(self.value)
        return Amount(found.bytes, MEMORY_OPTIONS[self.key]) if found and found.bytes else None


@dataclass(frozen=True)
class BatchScript:
    lines: tuple[str, ...]
    given: tuple[Setting, ...]  # sbatch's options
    settings: tuple[Setting, ...]  # options and overrides of its commands, and its variables
    env: dict[str, Setting]  # what a command would see: exported, or set in front of it

    @property
    def directives(self) -> dict[str, Setting]:
        """sbatch's options by long name; the last of each, as sbatch takes it."""
        return {one.key: one for one in self.given}

    @property
    def no_single_limit(self) -> str:
        """Why nobody can say from it what the tasks that died were held to; empty if one can."""
        if any(_COMPONENT.match(line) for line in self.lines):
            return "the script starts a heterogeneous job, each component with a request of its own"
        own = next((one for one in self.settings if one.key in MEMORY_OPTIONS and self._is_of_srun(one)), None)
        said = "limits its own step: raise it by hand, and as much or more of #SBATCH"
        return f"srun --{own.key}={own.value} {said}" if own else ""

    def _is_of_srun(self, setting: Setting) -> bool:
        first = self.command_of(setting.line)
        before = [*self.lines[first : setting.line], self.lines[setting.line][: setting.start]]
        return bool(_SRUN.match(self.lines[first])) and _PROGRAM.search(" ".join(before)) is None

    def find(self, *names: str) -> Setting | None:
        """Return the last setting of one of these names; of ``--name $X``, the place where X is assigned."""
        found = next((one for one in reversed(self.settings) if one.name in names), None)
        variable = _VARIABLE.fullmatch(found.value) if found else None
        assigned = (one for one in reversed(self.settings) if variable and one.key in variable.groups())
        return next((one for one in assigned if not _VARIABLE.search(one.value)), found)

    @property
    def first_command(self) -> int | None:
        return next((at for at, line in enumerate(self.lines) if _RUNS.match(line)), None)

    def command_of(self, line: int) -> int:
        """Return the index of the line on which a line's command begins, over backslashes."""
        while line > 0 and self.lines[line - 1].rstrip().endswith("\\") and not self.lines[line - 1].startswith("#"):
            line -= 1
        return line

    @property
    def job(self) -> Job:
        given = {name: one.value for name, one in self.directives.items()}
        nodes, tasks, per_node, cpus = (
            read_number(given.get(name)) for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
        )
        if not {"nodes", "ntasks", "gpus"} & given.keys():
            nodes = 1  # sbatch(1): the nodes that one task needs
        if per_node is None and tasks and nodes and tasks % nodes == 0:
            per_node = tasks // nodes
        request = next((one.amount for one in reversed(self.given) if one.key in MEMORY_OPTIONS), None)
        found = {name: self.find(*keys) for name, keys in SETTINGS.items()}
        values: dict[str, Any] = {name: read_number(one.value) for name, one in found.items() if one}
        return Job(
            nodes=nodes,
            tasks_per_node=per_node,
            cpus_per_task=cpus,
            gpus_per_node=_gpus(given, nodes, per_node),
            request=request,
            script_request=request,
            no_single_limit=self.no_single_limit,
            limit_seconds=parse_seconds(given.get("time", "")),
            env={name: one.value for name, one in self.env.items()},
            options={one.name: (self.find(one.name) or one).value for one in self.settings},
            mentioned=tuple(values),
            **values,
        )


def _gpus(given: dict[str, str], nodes: int | None, tasks_per_node: int | None) -> int | None:
    for part in given.get("gres", "").split(","):
        if part.partition(":")[0] == "gpu":
            return read_number(part.rpartition(":")[2]) or 1
    per_node, per_task, total = (
        read_number(given.get(name, "").rpartition(":")[2]) for name in ("gpus-per-node", "gpus-per-task", "gpus")
    )
    if per_task:
        return per_node or (per_task * tasks_per_node if tasks_per_node else None)
    return per_node or (total // nodes if total and nodes and total % nodes == 0 else None)


def held_to(asked: Job, ran: Job) -> Job:
    """Return a job with the memory, shape and time that it was granted, and what else its script asks for."""
    own = replace(asked, request=None, nodes=None, tasks_per_node=None, limit_seconds=None)
    return own.with_known(ran).with_known(asked)


def read_script(path: Path) -> BatchScript:
    """Return a batch script; raise a `UsageError` if it cannot be read."""
    remedy = "name the script that started the job; scontrol write batch_script JOBID keeps it for a while"
    text = read_text(path, "--script and --against take a batch script.", remedy, _MOST_BYTES)
    lines = tuple(re.split(r"\r?\n", text.removesuffix("\n")))  # no others, as for the shell
    given, settings, env = list[Setting](), list[Setting](), dict[str, Setting]()
    begun = continued = False
    for at, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            given += _directives(line, at) if not begun else ()
            continue
        begun = begun or bool(line.strip())  # sbatch looks no further than the first command
        found = [_setting(match, at) for match in _SETTING.finditer(line)]
        assigned = None if continued else _ASSIGNMENT.match(line)
        if assigned and found and (assigned["export"] or assigned["more"].strip()):
            env |= {one.key: one for one in found[:1] if one.key == assigned["key"]}
        settings += found
        continued = line.rstrip().endswith("\\")
    return BatchScript(lines, tuple(given), tuple(settings), env)


def _directives(line: str, at: int) -> Iterator[Setting]:
    """The options of an ``#SBATCH`` line, which may have several."""
    head = re.match(r"#SBATCH(?=\s)", line)
    found = _DIRECTIVE.match(line, head.end()) if head else None
    while found:
        name = found["long"] or _LONG.get(found["short"], found["short"])
        start, end = found.span("value") if found["value"] else (found.end(), found.end())
        if re.fullmatch(r"([\"']).*\1", line[start:end]):
            start, end = start + 1, end - 1
        yield Setting(name, line[start:end], at, start, end)
        found = _DIRECTIVE.match(line, found.end())


def _setting(found: re.Match[str], at: int) -> Setting:
    group = "value" if found["option"] else "given"
    start, end = found.span(group) if found[group] else (found.end(), found.end())
    return Setting(found["option"] or found["key"], found[group] or "true", at, start, end)
