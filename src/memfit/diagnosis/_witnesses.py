"""What the accounting, the kernel log and memfit's run directory say of a job's death.

Their signs get a stream of their own from `Heard.placed`. A sign of a kernel log or of an accounting has ``linked``
among its values: True if a number in the job's own log names it, None if nothing tells, False if the log names others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.diagnosis._kernel_log import find_kills, read_kernel_lines
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
    """What the witnesses say.

    Attributes:
        signs: Good ends, then the kernel's and the accounting's; of a run directory, in time.
        accounts: The memory of each step of the job on a node, the killed one first.
        status: The job's exit status in the accounting; None if it is not there.
        row: The accounting's row of the job.
    """

    signs: tuple[Sign, ...] = ()
    accounts: tuple[NodeAccount, ...] = ()
    status: int | None = None
    row: Line | None = None

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The accounts in sentences: of those that were over the limit, else of the largest."""
        over = tuple(one.text for one in self.accounts if one.verdict.startswith("over"))
        told = [one for one in self.accounts if one.verdict != "unknown"]
        return over or tuple(one.text for one in sorted(told, key=lambda one: -(one.worst_bytes or 0)))[:1]

    def placed(self, index: int) -> tuple[Stream, list[Sign]]:
        """The signs that may be the job's own, in stream ``index``, of their own lines that lie far apart."""
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


def _names(lines: Iterable[Line]) -> tuple[set[str], set[int]]:
    """The numbers of jobs and of processes by which a log, and its file's name, name them."""
    jobs: set[str] = set()
    pids: set[int] = set()
    for file in {line.file for line in lines}:
        jobs.update(_JOB_IDS.findall(Path(file).name))
    for line in lines:
        if "ob" in line.text or "tep" in line.text or "JOB" in line.text:
            jobs.update(_JOB_IDS.findall(line.text))
        if "pid" in line.text or "PID" in line.text or "Killed" in line.text:
            pids.update(int(next(filter(None, found))) for found in _PIDS.findall(line.text))
    return jobs, pids


def hear(
    lines: Sequence[Line] = (),
    *,
    sacct: str | None = None,
    kernel_log: str | None = None,
    files: tuple[str, str] = ("sacct", "kernel log"),
) -> Heard:
    """What the lines of a job's logs and its other witnesses say.

    Args:
        sacct: The text of what ``sacct`` printed; also ``scontrol`` in the same file.
        files: The names of the files of ``sacct`` and of ``kernel_log``.
    """
    jobs, pids = _names(lines)
    told = [Line(files[0], number, text) for number, text in enumerate((sacct or "").split("\n"), 1)]
    told = list(lines) if sacct is None else told
    texts = [line.text for line in told]
    rows, linked = _ours(parse_sacct(texts), jobs)
    kills = [*(find_kills(read_kernel_lines(kernel_log, files[1])) if kernel_log else ()), *find_kills(lines)]
    links = [_link(sign, jobs, pids) for sign in kills]
    if True in links:  # beside a kill that is surely the job's, the others are others'
        links = [link or False for link in links]
    signs = [replace(sign, values={**sign.values, "linked": link}) for sign, link in zip(kills, links, strict=True)]
    signs += [replace(sign, values={**sign.values, "linked": linked}) for sign in sacct_signs(rows, told)]
    signs.sort(key=lambda sign: sign.name != "success")  # another job's good end makes nothing good
    shapes = [shape for shape in parse_shapes(texts) if not rows or shape.job == rows[0].raw_job]
    accounts: list[NodeAccount] = []
    for job in dict.fromkeys(row.job for row in rows):
        accounts += account_nodes([row for row in rows if row.job == job], shape=shapes[0] if shapes else None)
    ends = [row for row in rows if not row.step and linked is not False][-1:]
    return Heard(
        tuple(signs),
        tuple(accounts),
        ends[0].exit_code if ends else None,
        told[ends[0].number - 1] if ends else None,
    )


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


def _ours(rows: list[Row], jobs: set[str]) -> tuple[list[Row], bool | None]:
    """The rows of the job that the log names; all of them if it names none."""
    found = [row for row in rows if {row.job, row.raw_job} & jobs]
    found = found or [row for row in rows if row.job.partition("_")[0] in jobs]
    if found:
        return found, True
    return rows, None if not jobs or len({row.job for row in rows}) == 1 else False


def _identity(sign: Sign) -> tuple[str, str]:
    """Where a sign stands, and which job or process it speaks of."""
    step = str(sign.values.get("step", "")).partition(".")[0]
    return sign.file, step or str(sign.values.get("pid", ""))


def _link(kill: Sign, jobs: set[str], pids: set[int]) -> bool | None:
    """Whether a kernel's kill is the job's: by the process, or by the job that its cgroup names."""
    owner = kill.values.get("owner", {})
    job = owner.get("job") if owner.get("who") == "slurm" else None
    if kill.values["pid"] in pids or (job is not None and job in jobs):
        return True
    return False if job is not None and jobs else None
