"""Read what the accounting and the kernel's log say of a job's death.

Their signs have ``linked`` among their values: True if a number in the job's log names them, None if nothing shows
whose they are, False if the log names others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.diagnosis._kernel_log import find_kills, read_kernel_lines
from memfit.diagnosis._sacct import Row, StepMemory, account_steps, parse_sacct
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream

#: Signs so far apart are never taken for the same event.
_APART = 100
_JOB_IDS = re.compile(
    r"(?:StepId=|\b[Ss]tep |\bJOB |\bJob |SLURM_JOB_ID=|Job ID: ?|slurm-|JobId=|/job0*)(\d+(?:_\d+)?)"
)
_PIDS = re.compile(r"\bpid\(?s?\)?\W{1,3}(\d{2,8})\b|: line \d+: +(\d{2,8}) Killed|\bPID (\d{2,8})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Witnesses:
    signs: tuple[Sign, ...] = ()  # good ends, then the kernel's and the accounting's, then those of run directories
    steps: tuple[StepMemory, ...] = ()  # of the job, the killed one first
    status: int | None = None  # the job's exit status in the accounting
    row: Line | None = None  # its row there

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Sums of memory: of the steps that were over their limit, else of the largest."""
        over = tuple(one.text for one in self.steps if one.is_over)
        largest = sorted(self.steps, key=lambda one: -one.most.bytes)
        return over or tuple(one.text for one in largest if one.text)[:1]

    def as_stream(self, index: int) -> tuple[Stream, list[Sign]]:
        """Return the signs that may be the job's own, as a stream of that index."""
        lines: list[Line] = []
        signs: list[Sign] = []
        # Of several that nothing links to the job, none is known to be its own.
        unlinked = {_identity(sign) for sign in self.signs if sign.values.get("linked", True) is None}
        for sign in self.signs:
            link = sign.values.get("linked", True)
            if link or (link is None and len({one for one in unlinked if one[0] == sign.file}) == 1):
                signs.append(replace(sign, stream=index, place=len(lines)))
                lines += [*sign.lines, *([Line(sign.file, 0, "")] * _APART)]
        return Stream(lines), signs


def read_witnesses(
    lines: Sequence[Line], *, sacct: str | None, kernel_log: str | None, files: tuple[str, str]
) -> Witnesses:
    jobs, pids = _numbers(lines)
    account = [Line(files[0], number, text) for number, text in enumerate((sacct or "").split("\n"), 1)]
    account = list(lines) if sacct is None else account
    texts = [line.text for line in account]
    rows, linked = _own_rows(parse_sacct(texts), jobs)
    kills = [*(find_kills(read_kernel_lines(kernel_log, files[1])) if kernel_log else ()), *find_kills(lines)]
    links = [_link(sign, jobs, pids) for sign in kills]
    if True in links:  # beside a kill that is surely the job's, the others are others'
        links = [link or False for link in links]
    signs = [replace(sign, values={**sign.values, "linked": link}) for sign, link in zip(kills, links, strict=True)]
    signs += [replace(sign, values={**sign.values, "linked": linked}) for sign in _row_signs(rows, account)]
    signs.sort(key=lambda sign: sign.name != "success")  # another job's good end makes nothing good
    steps: list[StepMemory] = []
    for job in dict.fromkeys(row.job for row in rows):
        steps += account_steps([row for row in rows if row.job == job])
    ends = [row for row in rows if not row.step and linked is not False][-1:]
    status, row = (ends[0].exit_code, account[ends[0].number - 1]) if ends else (None, None)
    return Witnesses(tuple(signs), tuple(steps), status, row)


def _numbers(lines: Iterable[Line]) -> tuple[set[str], set[int]]:
    """The numbers of jobs and of processes in a log, and in its file's name."""
    jobs = {job for file in {line.file for line in lines} for job in _JOB_IDS.findall(Path(file).name)}
    pids: set[int] = set()
    for line in lines:
        if "ob" in line.text or "tep" in line.text or "JOB" in line.text:
            jobs.update(_JOB_IDS.findall(line.text))
        if "pid" in line.text or "PID" in line.text or "Killed" in line.text:
            pids.update(int(next(filter(None, found))) for found in _PIDS.findall(line.text))
    return jobs, pids


_STATES = {
    "OUT_OF_MEMORY": "cgroup_kill",
    "TIMEOUT": "walltime",
    "DEADLINE": "walltime",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "CANCELLED": "cancelled",
}
#: The signal in an exit code for a kill by the OOM handler. Source: Slurm, slurm_errno.h.
_OOM_SIGNAL = 125


def _row_signs(rows: Sequence[Row], lines: Sequence[Line]) -> Iterator[Sign]:
    last = {row.job: row.attempt for row in rows}
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
            yield Sign(name, (lines[row.number - 1],), values)


def _own_rows(rows: list[Row], jobs: set[str]) -> tuple[list[Row], bool | None]:
    """The rows of the job that the log names; all of them if it names none."""
    found = [row for row in rows if {row.job, row.raw_job} & jobs]
    found = found or [row for row in rows if row.job.partition("_")[0] in jobs]
    if found:
        return found, True
    return rows, None if not jobs or len({row.job for row in rows}) == 1 else False


def _identity(sign: Sign) -> tuple[str, str]:
    step = str(sign.values.get("step", "")).partition(".")[0]
    return sign.file, step or str(sign.values.get("pid", ""))


def _link(kill: Sign, jobs: set[str], pids: set[int]) -> bool | None:
    """Whether a kernel's kill is the job's: by the process, or by the job that its cgroup names."""
    job = kill.values.get("job")
    if kill.values["pid"] in pids or job in jobs:
        return True
    return False if job is not None and jobs else None
