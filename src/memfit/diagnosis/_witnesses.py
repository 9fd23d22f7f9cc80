"""All that others than the job's own log say of its death, in one hearing: accounting, kernel, containers, memfit.

The facts' ``stream`` is -1 until `Heard.placed` gives them one of their own, in which no line around them tells a
phase. A fact of a kernel's log or
of an accounting with many jobs has ``linked`` among its values: True where a number in the job's own log names it,
None where nothing could tell, False where the log names others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.diagnosis._containers import ContainerEnd, container_facts, parse_documents, parse_lines
from memfit.diagnosis._facts import Fact
from memfit.diagnosis._kernel_log import KernelKill, find_kills, kernel_facts, read_kernel_lines
from memfit.diagnosis._runs import find_run, run_facts
from memfit.diagnosis._sacct import Request, Row, lines_of, parse_sacct, parse_sacct_lines, sacct_facts
from memfit.diagnosis._scontrol import Limit, parse_node_limits, parse_seff, parse_shapes
from memfit.diagnosis._slurm_account import NodeAccount, account_nodes
from memfit.diagnosis._text import Line, Stream

_NOWHERE = -1
#: So far apart nothing is taken for the echo or the end of something else.
_APART = 100
_JOB_IDS = re.compile(
    r"(?:StepId=|\b[Ss]tep |\bJOB |\bJob |SLURM_JOB_ID=|Job ID: ?|slurm-|JobId=|/job0*)(\d+(?:_\d+)?)"
)
_PIDS = re.compile(r"\bpid\(?s?\)?\W{1,3}(\d{2,8})\b|: line \d+: +(\d{2,8}) Killed|\bPID (\d{2,8})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Heard:
    """What was heard.

    Attributes:
        facts: Good ends, then the kernel's, the containers' and the accounting's; of a run directory, in time.
        accounts: The memory of each step of the job on a node, the killed one first.
        kills: What the kernel tells.
        containers: What container runtimes tell.
        limits: What nodes and partitions have.
    """

    facts: tuple[Fact, ...] = ()
    accounts: tuple[NodeAccount, ...] = ()
    kills: tuple[KernelKill, ...] = ()
    containers: tuple[ContainerEnd, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The accounts in sentences: of those that were over the limit, else of the largest."""
        over = tuple(one.text for one in self.accounts if one.verdict.startswith("over"))
        told = [one for one in self.accounts if one.verdict != "unknown"]
        return over or tuple(one.text for one in sorted(told, key=lambda one: -(one.worst_bytes or 0)))[:1]

    def placed(self, index: int) -> tuple[Stream, list[Fact]]:
        """The facts that may be the job's own, in a stream of their own lines that lie far apart.

        Args:
            index: The stream's number among those of the job's logs.
        """
        lines: list[Line] = []
        facts: list[Fact] = []
        # Of several that nothing links to the job, none can be told to be its own.
        unlinked = {_identity(fact) for fact in self.facts if fact.values.get("linked", True) is None}
        for fact in self.facts:
            link = fact.values.get("linked", True)
            if link or (link is None and len({one for one in unlinked if one[0] == fact.file}) == 1):
                facts.append(replace(fact, stream=index, place=len(lines)))
                lines += [*fact.lines, *([Line(fact.file, 0, "")] * _APART)]
        return Stream(lines), facts


@dataclass(frozen=True)
class Named:
    """Numbers by which a job's own log names it: of jobs and of processes."""

    jobs: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()


def find_names(lines: Iterable[Line]) -> Named:
    """The numbers of jobs and processes in a log and its file's name.

    >>> find_names([Line("slurm-7.out", 1, "slurm_script: line 3:  4260 Killed   python train.py")])
    Named(jobs=frozenset({'7'}), pids=frozenset({4260}))
    """
    jobs: set[str] = set()
    pids: set[int] = set()
    files: set[str] = set()
    for line in lines:
        if line.file not in files:
            files.add(line.file)
            jobs.update(_JOB_IDS.findall(Path(line.file).name))
        if "ob" in line.text or "tep" in line.text or "JOB" in line.text:
            jobs.update(_JOB_IDS.findall(line.text))
        if "pid" in line.text or "PID" in line.text or "Killed" in line.text:
            pids.update(int(next(filter(None, found))) for found in _PIDS.findall(line.text))
    return Named(frozenset(jobs), frozenset(pids))


def hear(
    lines: Sequence[Line] = (),
    *,
    sacct: str | None = None,
    kernel_log: str | None = None,
    asked: Request | None = None,
    tasks_per_node: int | None = None,
    files: tuple[str, str] = ("sacct", "kernel log"),
) -> Heard:
    """What the lines of a job's logs and its other witnesses say.

    Args:
        lines: The lines of all logs.
        sacct: The text of what ``sacct`` printed; also ``seff``, ``scontrol`` and ``sinfo`` in one file.
        kernel_log: The text of the kernel's log.
        asked: What the script asks for.
        tasks_per_node: What the script says.
        files: The names of those two files.
    """
    named = find_names(lines)
    told = lines_of(sacct, files[0]) if sacct is not None else []
    rows = parse_sacct(sacct, files[0]) if sacct is not None else parse_sacct_lines(lines)
    rows, linked = _ours(rows, named)
    kills = (
        [*find_kills(read_kernel_lines(kernel_log, files[1])), *find_kills(lines)] if kernel_log else find_kills(lines)
    )
    ends = [*parse_lines(lines), *(parse_documents(sacct, files[0]) if sacct and not rows else [])]
    facts = _linked([(fact, kill) for kill in kills for fact in kernel_facts([kill], _NOWHERE)], named)
    facts += container_facts(ends, kills, _NOWHERE)
    facts += [replace(fact, values={**fact.values, "linked": linked}) for fact in sacct_facts(rows, _NOWHERE)]
    facts.sort(key=lambda fact: fact.kind != "success")  # another job's good end makes nothing good
    shapes = [shape for shape in parse_shapes(told) if not rows or shape.job == rows[0].raw_job]
    seffs = [one for one in parse_seff(told) if not rows or one.job == rows[0].job]
    accounts: list[NodeAccount] = []
    for job in dict.fromkeys(row.job for row in rows):
        accounts += account_nodes(
            [row for row in rows if row.job == job],
            shape=shapes[0] if shapes else None,
            seff=seffs[0] if seffs else None,
            asked=asked,
            tasks_per_node=tasks_per_node,
        )
    limits = parse_node_limits(told)
    return Heard(tuple(facts), tuple(accounts), tuple(kills), tuple(ends), tuple(limits))


def hear_run(path: Path) -> Heard:
    """What a run directory of memfit's says, of all of its jobs or of the one whose folder or log was named."""
    run = find_run(path)
    if run is None:
        return Heard()
    inside = path.resolve().relative_to(run.path.resolve()).parts if path.resolve() != run.path.resolve() else ()
    only = inside[1] if len(inside) > 1 and inside[0] == "jobs" else None
    return Heard(tuple(run_facts(run, only, _NOWHERE)))


def _ours(rows: list[Row], named: Named) -> tuple[list[Row], bool | None]:
    """The rows of the job that the log names; all of them when it names none."""
    found = [row for row in rows if {row.job, row.raw_job} & named.jobs]
    found = found or [row for row in rows if row.job.partition("_")[0] in named.jobs]
    if found:
        return found, True
    return rows, None if not named.jobs or len({row.job for row in rows}) == 1 else False


def _identity(fact: Fact) -> tuple[str, str]:
    """Where a fact stands, and which job or process it speaks of."""
    step = str(fact.values.get("step", "")).partition(".")[0]
    return fact.file, step or str(fact.values.get("pid", ""))


def _linked(found: Sequence[tuple[Fact, KernelKill]], named: Named) -> list[Fact]:
    """Facts with what links them to the job; beside one that is surely the job's, the others are others'."""
    links = [_link(kill, named) for _, kill in found]
    if True in links:
        links = [link or False for link in links]
    return [replace(fact, values={**fact.values, "linked": link}) for (fact, _), link in zip(found, links, strict=True)]


def _link(kill: KernelKill, named: Named) -> bool | None:
    job = kill.owner.get("job") if kill.owner.get("who") == "slurm" else None
    if kill.pid in named.pids or (job is not None and job in named.jobs):
        return True
    return False if job is not None and named.jobs else None
