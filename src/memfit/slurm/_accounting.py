"""Parse what ``sacct`` prints of a job.

MaxRSS and AveRSS are one task's. A request is a node's, a CPU's or the whole job's. A state is a step's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.amounts import Amount, Scope
from memfit.units import GIB, KIB, MIB, TIB

_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": TIB << 10}
_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "CONFIGURING", "DEADLINE", "FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "REQUEUED", "RESIZING", "REVOKED", "RUNNING", "STOPPED", "SUSPENDED",
    "TIMEOUT",
)  # fmt: skip
#: Names of columns that tell a header of sacct from another table's.
_COLUMNS = frozenset((
    "jobid", "jobidraw", "jobname", "partition", "account", "alloccpus", "state", "exitcode", "derivedexitcode",
    "reqmem", "maxrss", "maxrssnode", "maxrsstask", "averss", "ntasks", "nnodes", "reqnodes", "allocnodes",
    "reqcpus", "ncpus", "elapsed", "timelimit", "start", "end", "nodelist", "alloctres", "reqtres",
    "tresusageinmax", "tresusageintot", "tresusageinave", "maxvmsize", "user", "cluster", "submit",
))  # fmt: skip
_ID = re.compile(r"\d+(?:_(?:\d+|\[[\d,%-]+\]))?(?:\+\d+)?(?:\.(?:\d+|[a-z]+\+?|\+)(?:\+\d+)?)?")
_PAIR = re.compile(r"\d+:\d+")


@dataclass(frozen=True)
class Row:
    """A job or one of its steps, as ``sacct`` or ``scontrol show job`` prints it; None where it does not say.

    Attributes:
        job: The job's number; of an array's task as in ``12_3``.
        step: ``batch``, ``extern``, ``interactive`` or a number; empty for the job itself.
        raw_job: The number in ``StepId=``; another one for an array's task.
        state: In full; empty if it does not say.
        request: The memory that it requested; 0 is all that a node has.
        exit_code, signal: Of its ``ExitCode``; signal 125 stands for memory.
        derived_signal: The worst of a job's steps.
        allocated_bytes: The memory that it got, over all of its nodes.
        max_rss_bytes: The largest sample of one task. A task that died between two samples may show nothing.
        ave_rss_bytes: The mean over the tasks; one that was not sampled counts as nothing in it.
        total_rss_bytes: The sum over the tasks.
        seconds, limit_seconds: How long it ran, and was allowed to run.
        attempt: From 1; a requeued job has several.
        number: Its line, from 1.
    """

    job: str
    step: str = ""
    raw_job: str = ""
    state: str = ""
    exit_code: int | None = None
    signal: int | None = None
    derived_signal: int | None = None
    request: Amount | None = None
    allocated_bytes: int | None = None
    max_rss_bytes: int | None = None
    ave_rss_bytes: int | None = None
    total_rss_bytes: int | None = None
    num_tasks: int | None = None
    num_nodes: int | None = None
    num_cpus: int | None = None
    tasks_per_node: int | None = None
    seconds: int | None = None
    limit_seconds: int | None = None
    nodes: str = ""
    partition: str = ""
    attempt: int = 1
    number: int = 0

    @property
    def id(self) -> str:
        """Its number as sacct writes it."""
        return f"{self.job}.{self.step}" if self.step else self.job


def parse_sacct(text: str | Sequence[str]) -> list[Row]:
    """Return the rows of what ``sacct`` printed, alone or amid other lines, in order.

    It reads ``-P``, ``-p`` and other delimiters, and wide tables with cut columns, also without a header.

    Example:
        >>> parse_sacct("JobID|State|MaxRSS\\n7.0|OUT_OF_MEMORY|258908K\\n")[0].max_rss_bytes == 258908 * 1024
        True
        >>> wide = "JobID             State ReqMem\\n------------ ---------- ------\\n7            OUT_OF_ME+ 4000Mn\\n"
        >>> parse_sacct(wide)[0].state, parse_sacct(wide)[0].request.per
        ('OUT_OF_MEMORY', 'node')
    """
    lines = [line.rstrip("\r") for line in (text.split("\n") if isinstance(text, str) else text)]
    rows: list[Row] = []
    attempts: dict[str, int] = {}
    names: list[str] = []
    delimiter = ""
    spans: list[tuple[int, int]] = []
    for number, line in enumerate(lines, 1):
        if header := _header(line):
            delimiter, names = header
            below = lines[number] if number < len(lines) else ""
            spans = [found.span() for found in re.finditer(r"-+", below)] if set(below.strip()) == {"-", " "} else []
            continue
        cells = _cells(line, delimiter, names, spans) if names else {}
        row = (_row(cells) if cells else None) or _bare_row(line)
        if row is not None:
            if not row.step:  # a job's own row that comes again begins the next attempt
                attempts[row.job] = attempts.get(row.job, 0) + 1
            rows.append(replace(row, attempt=attempts.get(row.job, 1), number=number))
    return rows


def _header(text: str) -> tuple[str, list[str]] | None:
    """The delimiter (empty for a table of columns) and the names of a header.

    >>> _header("JobID|State|MaxRSS|"), _header("       JobID    JobName  Partition      State")
    (('|', ['jobid', 'state', 'maxrss', '']), ('', ['jobid', 'jobname', 'partition', 'state']))
    """
    for delimiter in ("|", ",", ";", "\t", ""):
        parts = text.split(delimiter) if delimiter else text.split()
        names = [part.strip().lower() for part in parts]
        known = sum(name in _COLUMNS for name in names)
        if known >= min(5, max(2, 0.6 * len([name for name in names if name]))) and {"jobid", "jobidraw"} & set(names):
            return delimiter, names
    return None


def _cells(text: str, delimiter: str, names: list[str], spans: list[tuple[int, int]]) -> dict[str, str]:
    """A row's cells by column; empty for a line that is no row."""
    if delimiter:
        parts = text.split(delimiter)
        return dict(zip(names, parts, strict=False)) if abs(len(parts) - len(names)) <= 1 else {}
    words = text.split()
    if len(words) == len(names):
        return dict(zip(names, words, strict=True))
    if len(spans) != len(names):
        return {}
    # A column is as wide as its dashes; a cell that a column's end would cut is not from this table.
    for shift in (0, -1, 1):
        if all(text[end + shift : end + shift + 1] in ("", " ") for _, end in spans):
            cells = [text[max(0, start + shift) : end + shift].strip() for start, end in spans]
            return dict(zip(names, cells, strict=True))
    return {}


def _row(cells: Mapping[str, str]) -> Row | None:
    cells = {name: value.strip() for name, value in cells.items()}
    shown = cells.get("jobid") or cells.get("jobidraw") or ""
    if not _ID.fullmatch(shown):
        return None
    job, _, step = shown.partition(".")
    exit_code, signal = _pair(cells.get("exitcode", ""))
    tres = parse_tres(cells.get("alloctres") or cells.get("reqtres") or "")
    return Row(
        job,
        _step(step),
        raw_job=cells.get("jobidraw", "").partition(".")[0] or job,
        state=full_state(cells.get("state", "")),
        exit_code=exit_code,
        signal=signal,
        derived_signal=_pair(cells.get("derivedexitcode", ""))[1],
        request=parse_request(cells.get("reqmem", "")),
        allocated_bytes=tres.get("mem"),
        max_rss_bytes=_or(parse_size(cells.get("maxrss", "")), parse_tres(cells.get("tresusageinmax", "")).get("mem")),
        ave_rss_bytes=_or(parse_size(cells.get("averss", "")), parse_tres(cells.get("tresusageinave", "")).get("mem")),
        total_rss_bytes=parse_tres(cells.get("tresusageintot", "")).get("mem"),
        num_tasks=_number(cells.get("ntasks", "")),
        num_nodes=_or(_number(cells.get("nnodes") or cells.get("allocnodes") or ""), tres.get("node")),
        num_cpus=_or(_number(cells.get("alloccpus") or cells.get("ncpus") or ""), tres.get("cpu")),
        seconds=parse_seconds(cells.get("elapsed", "")),
        limit_seconds=parse_seconds(cells.get("timelimit", "")),
        nodes=cells.get("nodelist", ""),
        partition=cells.get("partition", ""),
    )


def _bare_row(line: str) -> Row | None:
    """A row without its header: only what says by itself what it is.

    >>> _bare_row("7.batch|OUT_OF_MEMORY||0").state
    'OUT_OF_MEMORY'
    >>> _bare_row("7.bat+      batch               root          1 OUT_OF_ME+    0:125 ").signal
    125
    """
    parts = [part.strip() for part in line.split("|")] if "|" in line else line.split()
    if len(parts) < 2 or not _ID.fullmatch(parts[0]) or f"{parts[0]} |" in line:  # a table of something else
        return None
    states = [state for part in parts[1:] if (state := full_state(part))]
    pairs = [part for part in parts[1:] if _PAIR.fullmatch(part)]
    if not states or not ("|" in line or pairs):
        return None
    exit_code, signal = _pair(pairs[0] if pairs else "")
    job, _, step = parts[0].partition(".")
    request = next((found for part in parts[1:] if part[-1:] in ("n", "c") and (found := parse_request(part))), None)
    return Row(job, _step(step), job, states[0], exit_code, signal, request=request)


def _step(text: str) -> str:
    """A step's name, however it was cut."""
    if text.endswith("+"):
        return next((name for name in ("batch", "extern", "interactive") if name.startswith(text[:-1])), text)
    return text


def full_state(text: str) -> str:
    """A state in full; empty for what is none.

    >>> full_state("OUT_OF_ME+"), full_state("CANCELLED by 1000"), full_state("CANCELLED+"), full_state("OK")
    ('OUT_OF_MEMORY', 'CANCELLED', 'CANCELLED', '')
    """
    word = text.split()[0] if text.split() else ""
    cut = word.endswith("+")
    word = word.removesuffix("+")
    fitting = [state for state in _STATES if state == word or (cut and len(word) >= 3 and state.startswith(word))]
    return fitting[0] if fitting else ""


def parse_size(text: str) -> int | None:
    """Bytes of a size as Slurm writes it, in powers of 1024; a bare number is bytes (``--noconvert``).

    >>> parse_size("258908K") == 258908 << 10, parse_size("0.25G"), parse_size("265121792"), parse_size("")
    (True, 268435456, 265121792, None)
    """
    found = re.fullmatch(r"([\d.]{1,20})\s*([KMGTP]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or found[1].count(".") > 1 or found[1] == ".":
        return None
    return round(float(found[1]) * _UNITS[found[2].upper()])


def parse_request(text: str) -> Amount | None:
    """A request with its scope: ``n`` of each node, ``c`` of each CPU; since Slurm 21.08, without, of the whole job.

    A bare number is MiB. Measured on Slurm 22.05: two nodes with ``--mem=300M`` show ``600M``.

    >>> parse_request("4Gn"), parse_request("2Gc")
    (Amount(bytes=4294967296, per='node', place='host'), Amount(bytes=2147483648, per='cpu', place='host'))
    >>> parse_request("600M").per
    'job'
    """
    found = re.fullmatch(r"([\d.]{1,20})([KMGTP]?)([nc?]?)", text.strip())
    if not found or found[1].count(".") > 1 or found[1] == ".":
        return None
    scope: Scope = "node" if found[3] == "n" else "cpu" if found[3] == "c" else "job"
    return Amount(round(float(found[1]) * _UNITS[found[2] or "M"]), scope)


def parse_seconds(text: str) -> int | None:
    """Seconds of ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or minutes.

    >>> parse_seconds("1-02:03:04"), parse_seconds("22:54"), parse_seconds("1440"), parse_seconds("UNLIMITED")
    (93784, 1374, 86400, None)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text.strip())
    if not found:
        return None
    days, first, second, third = (int(group) if group else 0 for group in found.groups())
    if found[1]:  # after days come hours
        return days * 86400 + first * 3600 + second * 60 + third
    if found[4]:
        return first * 3600 + second * 60 + third
    return first * 60 + (second if found[3] else 0)


def parse_tres(text: str) -> dict[str, int]:
    """Counts of ``cpu=4,mem=600M,node=2``; a list that was cut gives what is whole."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if value.endswith("+"):
            continue
        count = parse_size(value) if name == "mem" else _number(value)
        if count is not None:
            found[name] = count
    return found


def _pair(text: str) -> tuple[int | None, int | None]:
    return (int(text.partition(":")[0]), int(text.partition(":")[2])) if _PAIR.fullmatch(text) else (None, None)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _or(first: int | None, second: int | None) -> int | None:
    return second if first is None else first
