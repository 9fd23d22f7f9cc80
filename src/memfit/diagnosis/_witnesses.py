"""What others than the job's own log say of its death: accounting, kernel, memfit's own run directory.

Their signs get a stream of their own from `Heard.placed`, in which no line around them tells a phase. A sign of a
kernel's log or of an accounting has ``linked`` among its values: True where a number in the job's own log names it,
None where nothing could tell, False where the log names others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.diagnosis._kernel_log import KernelKill, find_kills, kernel_signs, read_kernel_lines
from memfit.diagnosis._runs import find_run, run_signs
from memfit.diagnosis._signatures import Sign
from memfit.diagnosis._slurm_account import NodeAccount, account_nodes
from memfit.diagnosis._text import Line, Stream
from memfit.slurm import Row, parse_sacct, parse_shapes

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
        signs: Good ends, then the kernel's and the accounting's; of a run directory, in time.
        accounts: The memory of each step of the job on a node, the killed one first.
    """

    signs: tuple[Sign, ...] = ()
    accounts: tuple[NodeAccount, ...] = ()

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The accounts in sentences: of those that were over the limit, else of the largest."""
        over = tuple(one.text for one in self.accounts if one.verdict.startswith("over"))
        told = [one for one in self.accounts if one.verdict != "unknown"]
        return over or tuple(one.text for one in sorted(told, key=lambda one: -(one.worst_bytes or 0)))[:1]

    def placed(self, index: int) -> tuple[Stream, list[Sign]]:
        """The signs that may be the job's own, in a stream of their own lines that lie far apart.

        Args:
            index: The stream's number among those of the job's logs.
        """
        lines: list[Line] = []
        signs: list[Sign] = []
        # Of several that nothing links to the job, none can be told to be its own.
        unlinked = {_identity(sign) for sign in self.signs if sign.values.get("linked", True) is None}
        for sign in self.signs:
            link = sign.values.get("linked", True)
            if link or (link is None and len({one for one in unlinked if one[0] == sign.file}) == 1):
                signs.append(replace(sign, stream=index, place=len(lines)))
                lines += [*sign.lines, *([Line(sign.file, 0, "")] * _APART)]
        return Stream(lines), signs


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
    files: tuple[str, str] = ("sacct", "kernel log"),
) -> Heard:
    """What the lines of a job's logs and its other witnesses say.

    Args:
        lines: The lines of all logs.
        sacct: The text of what ``sacct`` printed; also ``scontrol`` in the same file.
        kernel_log: The text of the kernel's log.
        files: The names of those two files.
    """
    named = find_names(lines)
    told = [Line(files[0], number, text) for number, text in enumerate((sacct or "").split("\n"), 1)]
    told = list(lines) if sacct is None else told
    texts = [line.text for line in told]
    rows, linked = _ours(parse_sacct(texts), named)
    kills = (
        [*find_kills(read_kernel_lines(kernel_log, files[1])), *find_kills(lines)] if kernel_log else find_kills(lines)
    )
    signs = _linked([(sign, kill) for kill in kills for sign in kernel_signs([kill])], named)
    signs += [replace(sign, values={**sign.values, "linked": linked}) for sign in sacct_signs(rows, told)]
    signs.sort(key=lambda sign: sign.name != "success")  # another job's good end makes nothing good
    shapes = [shape for shape in parse_shapes(texts) if not rows or shape.job == rows[0].raw_job]
    accounts: list[NodeAccount] = []
    for job in dict.fromkeys(row.job for row in rows):
        accounts += account_nodes([row for row in rows if row.job == job], shape=shapes[0] if shapes else None)
    return Heard(tuple(signs), tuple(accounts))


_STATES = {
    "OUT_OF_MEMORY": "cgroup_kill",
    "TIMEOUT": "walltime",
    "DEADLINE": "walltime",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "CANCELLED": "cancelled",
}
#: The signal that stands in an exit code for a kill by the out-of-memory handler. Source: Slurm, slurm_errno.h.
_OOM_SIGNAL = 125


def sacct_signs(rows: Sequence[Row], lines: Sequence[Line]) -> list[Sign]:
    """What the last attempt of each job says of its end; of a job and its steps, each that says something.

    A step's state is its own: a job may end FAILED by its script while one of its steps ran out of memory, and a job
    is OUT_OF_MEMORY though its script went on and ended with 0.
    """
    last = {row.job: row.attempt for row in rows}
    found = []
    for row in rows:
        if row.attempt != last[row.job]:
            continue
        name = _STATES.get(row.state, "")
        if _OOM_SIGNAL in (row.signal, row.derived_signal):
            name = "cgroup_kill"
        elif not name and row.signal == 9:
            name = "killed"
        elif row.state == "COMPLETED" and not row.step and not row.exit_code:
            name = "success"
        if name and not (name == "cancelled" and row.step):
            values = {"who": "Slurm", "step": row.id, "exit_code": row.exit_code, "state": row.state}
            found.append(Sign(name, (lines[row.number - 1],), values))
    return found


def hear_run(path: Path) -> Heard:
    """What a run directory of memfit's says, of all of its jobs or of the one whose folder or log was named."""
    run = find_run(path)
    if run is None:
        return Heard()
    inside = path.resolve().relative_to(run.path.resolve()).parts if path.resolve() != run.path.resolve() else ()
    only = inside[1] if len(inside) > 1 and inside[0] == "jobs" else None
    return Heard(tuple(run_signs(run, only)))


def _ours(rows: list[Row], named: Named) -> tuple[list[Row], bool | None]:
    """The rows of the job that the log names; all of them when it names none."""
    found = [row for row in rows if {row.job, row.raw_job} & named.jobs]
    found = found or [row for row in rows if row.job.partition("_")[0] in named.jobs]
    if found:
        return found, True
    return rows, None if not named.jobs or len({row.job for row in rows}) == 1 else False


def _identity(sign: Sign) -> tuple[str, str]:
    """Where a sign stands, and which job or process it speaks of."""
    step = str(sign.values.get("step", "")).partition(".")[0]
    return sign.file, step or str(sign.values.get("pid", ""))


def _linked(found: Sequence[tuple[Sign, KernelKill]], named: Named) -> list[Sign]:
    """Signs with what links them to the job; beside one that is surely the job's, the others are others'."""
    links = [_link(kill, named) for _, kill in found]
    if True in links:
        links = [link or False for link in links]
    return [replace(sign, values={**sign.values, "linked": link}) for (sign, _), link in zip(found, links, strict=True)]


def _link(kill: KernelKill, named: Named) -> bool | None:
    job = kill.owner.get("job") if kill.owner.get("who") == "slurm" else None
    if kill.pid in named.pids or (job is not None and job in named.jobs):
        return True
    return False if job is not None and named.jobs else None
