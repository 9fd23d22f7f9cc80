"""Read what ``sacct`` prints, and add up a job's memory by scope.

MaxRSS and AveRSS are one task's. A request is a node's, a CPU's or the whole job's. A state is a step's.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memfit.amounts import Amount, Layout, Scope
from memfit.diagnosis._find import to_bytes
from memfit.diagnosis._job import Job
from memfit.units import format_bytes, format_count

_SCOPES: Mapping[str, Scope] = {"n": "node", "c": "cpu"}
#: States that are a cause, or a good end.
_STATES = (
    "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "COMPLETED"
)  # fmt: skip
#: Names of columns that tell a header of sacct from another table's.
_COLUMNS = frozenset((
    "jobid", "jobidraw", "jobname", "partition", "account", "alloccpus", "state", "exitcode", "derivedexitcode",
    "reqmem", "maxrss", "maxrssnode", "maxrsstask", "averss", "ntasks", "nnodes", "reqnodes", "allocnodes",
    "reqcpus", "ncpus", "elapsed", "timelimit", "start", "end", "nodelist", "alloctres", "reqtres",
    "tresusageinmax", "tresusageintot", "tresusageinave", "maxvmsize", "user", "cluster", "submit",
))  # fmt: skip
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,%-]+\]))?(?:\+\d+)?(?:\.(?:\d+|[a-z]+\+?|\+)(?:\+\d+)?)?")
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([KMGTP]?)(?:i?B)?([nc?]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """A job or one of its steps, as ``sacct`` prints it; None where it does not say."""

    job: str  # its number; of an array's task as in ``12_3``
    step: str = ""  # ``batch``, ``extern``, ``interactive`` or a number; empty for the job itself
    raw_job: str = ""  # the number in ``StepId=``; another one for an array's task
    state: str = ""  # in full; empty for one that tells no end
    exit_code: int | None = None
    signal: int | None = None  # 125 stands for memory
    derived_signal: int | None = None  # the worst of a job's steps
    request: Amount | None = None  # 0 is all that a node has
    allocated_bytes: int | None = None  # over all of its nodes
    max_rss_bytes: int | None = None  # the largest sample of one task; one that died between two may show nothing
    ave_rss_bytes: int | None = None  # the mean over the tasks; one that was not sampled counts as nothing in it
    num_tasks: int | None = None
    num_nodes: int | None = None
    num_cpus: int | None = None
    limit_seconds: int | None = None  # how long it was allowed to run
    attempt: int = 1  # a requeued job has several
    number: int = 0  # its line, from 1

    @property
    def id(self) -> str:
        return f"{self.job}.{self.step}" if self.step else self.job


def parse_sacct(text: str | Sequence[str]) -> list[Row]:
    """Return the rows of what ``sacct`` printed (any delimiter, or a wide table), alone or amid other lines."""
    lines = [line.rstrip("\r") for line in (text.split("\n") if isinstance(text, str) else text)]
    rows, names, spans, delimiter = list[Row](), list[str](), list[tuple[int, int]](), ""
    attempts: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if header := _header(line):
            delimiter, names = header
            below = lines[number] if number < len(lines) else ""
            spans = [found.span() for found in re.finditer(r"-+", below)] if set(below.strip()) == {"-", " "} else []
            continue
        row = _row(_cells(line, delimiter, names, spans)) if names else None
        if row is not None:
            if not row.step:  # a job's own row that comes again begins the next attempt
                attempts[row.job] += 1
            rows.append(replace(row, attempt=attempts[row.job] or 1, number=number))
    return rows


def _header(text: str) -> tuple[str, list[str]] | None:
    """The delimiter (empty for a table of columns) and the names of a header."""
    for delimiter in ("|", ",", ";", "\t", None):
        names = [part.strip().lower() for part in text.split(delimiter)]
        known = sum(name in _COLUMNS for name in names)
        if known >= min(5, max(2, 0.6 * len([*filter(None, names)]))) and {"jobid", "jobidraw"} & set(names):
            return delimiter or "", names
    return None


def _cells(text: str, delimiter: str, names: list[str], spans: list[tuple[int, int]]) -> dict[str, str]:
    """A row's cells by column; empty for a line that is no row."""
    parts = text.split(delimiter or None)
    if len(parts) == len(names) or (delimiter and abs(len(parts) - len(names)) == 1):
        return dict(zip(names, parts, strict=False))
    # A column is as wide as its dashes; a cell that a column's end would cut is not from this table.
    for shift in (0, -1, 1) if len(spans) == len(names) and not delimiter else ():
        if all(text[end + shift : end + shift + 1] in ("", " ") for _, end in spans):
            return dict(zip(names, [text[max(0, start + shift) : end + shift] for start, end in spans], strict=True))
    return {}


def _row(cells: Mapping[str, str]) -> Row | None:
    said = defaultdict(str, {name: value.strip() for name, value in cells.items()})
    if not _ID.fullmatch(shown := said["jobid"] or said["jobidraw"]):
        return None
    (job, _, step), allocated = shown.partition("."), "alloctres" if said["alloctres"] else "reqtres"
    tres, most, mean = (
        dict(re.findall(r"(?:^|,)([^=,]+)=([^,+]+)(?=,|$)", said[name]))  # what is whole of a list that was cut
        for name in (allocated, "tresusageinmax", "tresusageinave")
    )
    (exit_code, signal), (_, derived) = (
        map(int, said[name].split(":")) if re.fullmatch(r"\d+:\d+", said[name]) else (None, None)
        for name in ("exitcode", "derivedexitcode")
    )
    return Row(
        job,
        _whole(step, ("batch", "extern", "interactive")) or step,
        raw_job=said["jobidraw"].partition(".")[0] or job,
        state=_whole((said["state"].split() or [""])[0], _STATES, 3),
        exit_code=exit_code,
        signal=signal,
        derived_signal=derived,
        request=parse_request(said["reqmem"]),
        allocated_bytes=_bytes(tres.get("mem")),
        max_rss_bytes=_bytes(said["maxrss"] or most.get("mem")),
        ave_rss_bytes=_bytes(said["averss"] or mean.get("mem")),
        num_tasks=_number(said["ntasks"]),
        num_nodes=_number(said["nnodes"] or said["allocnodes"] or tres.get("node")),
        num_cpus=_number(said["alloccpus"] or said["ncpus"] or tres.get("cpu")),
        limit_seconds=parse_seconds(said["timelimit"]),
    )


def _whole(text: str, names: Iterable[str], least: int = 0) -> str:
    """The name that a text is, or is the beginning of where it was cut; empty for none."""
    word = text.removesuffix("+")
    is_cut = word != text and len(word) >= least
    return next((name for name in names if name == word or (is_cut and name.startswith(word))), "")


def _bytes(text: str | None) -> int | None:
    """Bytes of a size as Slurm writes it, in powers of 1024; a bare number is bytes (``--noconvert``)."""
    found = parse_request(text or "", bare="B")
    return found.bytes if found else None


def parse_request(text: str, bare: str = "M") -> Amount | None:
    """Return a request: ``4Gn`` of each node, ``4Gc`` of each CPU; since Slurm 21.08 ``4G``, of the whole job.

    A ``bare`` number is MiB. Measured on Slurm 22.05: two nodes with ``--mem=300M`` show ``600M``.
    """
    found = _SIZE.fullmatch(text.strip())
    size = to_bytes(found[1], found[2] or bare) if found else 0
    return Amount(size, _SCOPES.get(found[3], "job")) if found else None


def parse_seconds(text: str) -> int | None:
    """Return the seconds of ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or minutes; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})(?:\.\d+)?", text.strip())
    if not found:
        return None
    parts = [int(part) for part in found[2].split(":")]
    has_hours = found[1] or len(parts) == 3  # after days come hours
    hours, minutes, seconds = [*([] if has_hours else [0]), *parts, 0, 0][:3]
    return int(found[1] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _number(text: str | None) -> int | None:
    """The number of ``16``, or the first of ``16-32``."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None


class StepMemory(NamedTuple):
    """A step's memory on its fullest node, against what a node's tasks may use."""

    step: str
    job: Job
    most: Amount = Amount(0, "job")  # of all tasks when each is as large as the largest; 0 when not sampled
    is_over: bool = False  # a node was over its limit, on average or when all tasks are as large as the largest
    text: str = ""  # the sum in a sentence; empty without a limit or a sample


def account_steps(rows: Sequence[Row]) -> list[StepMemory]:
    """Return the steps of the first job's last attempt: the killed ones first, then those of ``srun``."""
    rows = [row for row in rows if row.job == rows[0].job]
    rows = [row for row in rows if row.attempt == rows[-1].attempt]
    whole = next((row for row in rows if not row.step), None)
    ran = [row for row in rows if row.step and row.step != "extern"]
    steps = [row for row in ran if row.max_rss_bytes is not None or row.num_tasks] or rows[:1]
    found = [_account(step, whole or step) for step in steps]
    killed = {row.id for row in rows if row.state == "OUT_OF_MEMORY"}
    # A step's kill ends its batch script's step too, whose own memory says nothing.
    return sorted(found, key=lambda one: (one.step not in killed, not one.step[-1:].isdigit(), -one.most.bytes))


def _account(step: Row, whole: Row) -> StepMemory:
    nodes, cpus, tasks = step.num_nodes or whole.num_nodes, step.num_cpus or whole.num_cpus, step.num_tasks
    each = math.ceil(tasks / nodes) if tasks and nodes else None
    if tasks == 1 or (step.step and not step.step.isdigit()):  # one task is surely on one node
        each = 1
    per_task = cpus // tasks or None if cpus and tasks else None
    layout = Layout(nodes, each, per_task)
    if cpus and nodes and per_task is None and cpus % nodes == 0:  # all CPUs of a node, as if of one task
        layout = Layout(nodes, 1, cpus // nodes)
    limit, source = _limit((step, whole), layout)
    # A task that was never sampled shows 0: that is no measurement.
    peak, mean = (Amount(size, "task") if size else None for size in (step.max_rss_bytes, step.ave_rss_bytes))
    job = Job(
        nodes=nodes,
        tasks_per_node=each,
        cpus_per_task=per_task,
        request=limit,
        task_peak=peak,
        task_mean=mean,
        limit_seconds=step.limit_seconds or whole.limit_seconds,
    )
    return _sum_up(step, job, source, max(step.num_nodes or 1, whole.num_nodes or 1))


def _limit(known: Sequence[Row], layout: Layout) -> tuple[Amount | None, str]:
    """What a node's tasks may use (else the whole job's, or a CPU), and the setting that says so."""
    asked = [(one, one.request, "requested") for one in known[::-1] if one.request and one.request.bytes]
    found = [row for row in asked if row[1].per != "job"]
    found += [(one, Amount(one.allocated_bytes, "job"), "AllocTRES") for one in known if one.allocated_bytes]
    found += [row for row in asked if row[1].per == "job" and not row[0].step]  # without n or c, since Slurm 21.08
    for one, amount, source in found:
        if node := replace(layout, nodes=one.num_nodes or layout.nodes).to(amount, "node"):
            of_cpu = f" of a CPU x {format_count(node.bytes // amount.bytes, 'CPU')}"
            return node, source + {"cpu": of_cpu, "job": " over its nodes"}.get(amount.per, "")
    return found[0][1:] if found else (None, "")


def _sum_up(step: Row, job: Job, limit_source: str, num_nodes: int) -> StepMemory:
    """Add up the tasks that share a limit; ``limit_source`` is the setting that says what they may use."""
    limit, mean, most = job.request, step.ave_rss_bytes or 0, step.max_rss_bytes or 0
    found = StepMemory(step.id, job, Amount(most * (step.num_tasks or 1), "job"))
    if limit is None or limit.per == "cpu":
        return found
    alone = max(mean, most)  # of its largest task's node, at least
    if limit_source == "requested over its nodes" and alone > limit.bytes and num_nodes > 1:
        said = f"ReqMem would be {limit} as the job's total, and one task held {format_bytes(alone)}: it may be a "
        said += "node's. What a node may use is not known without the script"
        return found._replace(job=replace(job, request=None), text=said)
    known = step.num_tasks if limit.per == "job" else job.tasks_per_node
    tasks = known or 1
    share = limit.bytes / tasks
    if not (each := mean if share < mean else most):
        return found
    words = f"the {format_bytes(limit.bytes)} of {'a node' if limit.per == 'node' else 'the job'} ({limit_source})"
    if known is None and alone <= share:
        verdict = f"of {words}: how many tasks share them is not known"
    elif share < mean:
        verdict = f"on average, over {words}"
    elif share < most:
        verdict = f"when all are as large as the largest, over {words}"
    else:
        verdict = f"at most, below {words}"
    said = f"{format_count(tasks, 'task')} x {format_bytes(each)} = {format_bytes(each * tasks)} "
    said += f"{verdict}; MaxRSS is one task's, and samples can miss the peak"
    return found._replace(is_over=share < alone, text=said)
