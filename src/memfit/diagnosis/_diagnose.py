"""What killed a job: the cause, the lines that prove it, and how sure that is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.diagnosis._circumstances import Moment, arithmetic, checks, timeline, where
from memfit.diagnosis._facts import Fact, find_facts
from memfit.diagnosis._log_progress import STOPS_EARLY, Progress, read_progress
from memfit.diagnosis._phase import JobPhase, find_phase
from memfit.diagnosis._read_device import DEVICE
from memfit.diagnosis._read_host import HOST
from memfit.diagnosis._read_killers import KILLERS
from memfit.diagnosis._read_other import OTHER
from memfit.diagnosis._read_progress import MILD, Reading, read_counters
from memfit.diagnosis._rules import Finding, Kind, rank_findings
from memfit.diagnosis._runs import find_run, logs_of
from memfit.diagnosis._survived import survived, without_echoes
from memfit.diagnosis._text import Stream, read_streams
from memfit.diagnosis._training_account import check_rate
from memfit.diagnosis._witnesses import Heard, hear, hear_run
from memfit.errors import UsageError
from memfit.units import GIB

_Readings = Sequence[list[Reading]]
PATTERNS = (*DEVICE, *HOST, *KILLERS, *OTHER, *MILD)
_FIGURES = {"device_total": "total", "allocated": "allocated", "reserved": "reserved", "tried": "tried"}
#: Files of a folder that are logs.
_LOGS = ("*.out", "*.err", "*.log", "*.txt", "*.gz", "*.out.*", "*.err.*", "*.log.*")


@dataclass(frozen=True)
class Evidence:
    """A line that proves something."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a job.

    Attributes:
        oom: Whether it was short of memory.
        recovered: Whether that, or a warning of it, did not end it.
        kind: Of which memory; ``none`` for another cause.
        cause: In a word: ``out_of_memory``, ``killed``, ``walltime``, ``incomplete``, ``unknown`` ...
        phase: What it was doing.
        confidence: From 0 to 1.
        figures: The message's figures in bytes: ``device_total``, ``allocated``, ``reserved``, ``tried``.
        evidence: The lines that it rests on.
        where: ``host``, ``rank``, ``node``, ``device``, ``pid``; None for what no line names.
        timeline: Start, last progress, failure, consequences.
        arithmetic: How the figures add up, each with its scope.
        checks: What to look at by hand.
        remedies: What to change, the cheapest in speed first.
        findings: All explanations, the best first.
    """

    oom: bool
    recovered: bool
    kind: Kind
    cause: str
    phase: JobPhase
    confidence: float
    figures: dict[str, int] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    where: dict[str, Any] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    arithmetic: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    remedies: tuple[Any, ...] = ()
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; figures in GiB, None where the text has none."""
        return {
            "oom": self.oom,
            "recovered": self.recovered,
            "kind": self.kind,
            "cause": self.cause,
            "phase": self.phase,
            "confidence": round(self.confidence, 2),
            **{
                f"{name}_gib": round(self.figures[name] / GIB, 4) if name in self.figures else None for name in _FIGURES
            },
            "evidence": [vars(one) for one in self.evidence],
            "remedies": list(self.remedies),
            "where": dict(self.where),
            "timeline": [asdict(one) for one in self.timeline],
            "arithmetic": list(self.arithmetic),
            "checks": list(self.checks),
        }


def diagnose(
    paths: Path | str | Sequence[Path | str],
    *,
    sacct: Path | str | None = None,
    kernel_log: Path | str | None = None,
) -> Diagnosis:
    """What killed a job, from what it left.

    Args:
        paths: Logs, folders of logs, run directories of memfit's, or ``-`` for standard input.
        sacct: A file with the scheduler's account of it.
        kernel_log: A file with the kernel's log of its node.

    Raises:
        UsageError: A path does not exist, or a folder has no log.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp(), "train.err")
        >>> _ = log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        ...     "total capacity of 23.69 GiB of which 1.10 GiB is free.")
        >>> found = diagnose(log)
        >>> found.kind, found.cause, found.to_dict()["tried_gib"]
        ('gpu', 'out_of_memory', 2.0)
    """
    named = [paths] if isinstance(paths, Path | str) else list(paths)
    streams = [stream for one in named for stream in streams_of(one)]
    lines = [line for stream in streams for line in stream.lines]
    heard = hear(
        lines,
        sacct=None if sacct is None else _text(sacct),
        kernel_log=None if kernel_log is None else _text(kernel_log),
        files=(str(sacct or "sacct"), str(kernel_log or "kernel log")),
    )
    if sacct is None and kernel_log is None:  # what stands in the logs themselves their own readers know
        heard = replace(heard, facts=())
    told = [fact for one in named if str(one) != "-" for fact in hear_run(Path(one)).facts]
    return diagnose_streams(streams, replace(heard, facts=(*heard.facts, *told)))


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """What logs alone say, whatever lies beside them."""
    return diagnose_streams([stream for path in paths for stream in streams_of(path)])


def streams_of(path: Path | str) -> list[Stream]:
    """The streams of a log, of each log of a folder, or of standard input.

    Raises:
        UsageError: The path does not exist or cannot be read, or the folder has no log.
    """
    if str(path) == "-":
        return read_streams("-", sys.stdin.buffer)
    path = Path(path)
    if not path.is_dir():
        return _read(path)
    run = find_run(path)
    if run is not None:
        jobs = [path.name] if path.parent.name == "jobs" else sorted(one.name for one in (run.path / "jobs").iterdir())
        return [stream for job in jobs for log in logs_of(run, job) for stream in _read(log)]
    logs = sorted({log for form in _LOGS for log in path.glob(form) if log.is_file()})
    if not logs:
        raise UsageError(
            f"No log in {path}.",
            rule=f"A folder's logs are {', '.join(_LOGS[:5])}.",
            remedy="Name the log itself: memfit diagnose PATH/slurm-123.out",
        )
    return [stream for log in logs for stream in _read(log)]


def _text(path: Path | str) -> str:
    """The text of what a scheduler or a kernel printed."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"Cannot read {path}.", rule=str(error), remedy="Give a file with what sacct or dmesg printed."
        ) from None


def _read(path: Path) -> list[Stream]:
    try:
        return read_streams(path)
    except OSError as error:
        raise UsageError(
            f"Cannot read {path}.", rule=str(error), remedy="Give a log, a folder of logs, or - for standard input."
        ) from None


def diagnose_streams(streams: Sequence[Stream], heard: Heard | None = None) -> Diagnosis:
    """The diagnosis of what some logs say, and of what was heard from others."""
    streams = list(streams)
    heard = heard or Heard()
    placed: list[Fact] = []
    if heard.facts:
        stream, placed = heard.placed(len(streams))
        streams.append(stream)
    readings = [list(read_counters(stream)) for stream in streams]
    read = streams[: len(streams) - bool(placed)]
    facts = [fact for index, stream in enumerate(read) for fact in find_facts(stream, PATTERNS, index)]
    facts += placed
    facts = without_echoes(streams, _pinned(streams, facts))
    lived = survived(streams, facts, readings)
    findings = tuple(rank_findings(facts, lived))
    best = findings[0] if findings else None
    mild = [fact for fact in facts if fact.kind in ("pressure", "skipped_batches")]
    if best is None or (id(best.fact) in lived and best.kind == "none"):
        return _mild(streams, mild, facts, readings) if mild else _nothing(streams, facts, readings)
    phase = best.values.get("phase") or _phase(streams, best, facts, len(read))
    recovered = id(best.fact) in lived or best.cause == "limit_touched"
    if recovered and phase == "unknown":
        phase = _later_phase(streams, best.fact, readings)
    if best.kind == "none":
        recovered = any(id(one.fact) in lived and one.kind != "none" for one in findings)
    return Diagnosis(
        oom=best.kind != "none",
        recovered=recovered,
        kind=best.kind,
        cause=best.cause,
        phase=phase,
        confidence=best.confidence,
        figures={} if best.kind == "none" else _figures(best, findings),
        evidence=_evidence(best.facts),
        where=_where(best, findings, len(read)),
        timeline=tuple(timeline(streams, best, facts, readings)),
        arithmetic=(*arithmetic(best), *(heard.arithmetic if _is_of_host(best) else ())),
        checks=tuple(checks(streams, best)),
        findings=findings,
    )


def _is_of_host(best: Finding) -> bool:
    """Whether what a node's tasks take together has to do with it."""
    return best.kind.startswith("host") or best.cause == "killed"


def _figures(best: Finding, findings: Sequence[Finding]) -> dict[str, int]:
    """The figures of the deciding fact; what was asked for may stand in the line after it."""
    found = {name: best.values[f"{key}_bytes"] for name, key in _FIGURES.items() if f"{key}_bytes" in best.values}
    for one in findings:
        near = one.fact.stream == best.fact.stream and abs(one.fact.place - best.fact.place) <= 6
        if near and "tried" not in found and one.kind == best.kind and "tried_bytes" in one.values:
            found["tried"] = one.values["tried_bytes"]
    return found


def _evidence(facts: Sequence[Fact]) -> tuple[Evidence, ...]:
    return tuple(Evidence(line.file, line.number, line.text) for fact in facts for line in fact.lines)


def _pinned(streams: list[Stream], facts: list[Fact]) -> list[Fact]:
    """A driver's refusal becomes one of pinned memory where the frames say so."""
    found = []
    for fact in facts:
        if fact.kind in ("device_error_oom", "own_exception"):
            lines = streams[fact.stream].lines[max(0, fact.place - 25) : fact.place + 1]
            text = "\n".join(line.text for line in lines)
            pinned = any(
                word in text for word in ("pin_memory", "memory_pool_host", "PinMemory", "cudaHostAlloc", "pinned")
            )
            invalid = "CUDA error: invalid argument" in fact.lines[0].text
            if pinned and (fact.kind == "device_error_oom" or invalid):
                fact = Fact("pinned", fact.lines, {"confidence": 0.6 if invalid else 0.85}, fact.stream, fact.place)
        found.append(fact)
    return found


def _where(best: Finding, findings: Sequence[Finding], num_read: int) -> dict[str, Any]:
    """Where it was; what a witness from outside does not know, the log's own word on that process may."""
    found = where(best)
    for one in findings if best.fact.stream >= num_read else ():
        if one.fact.stream < num_read and one.cause in ("killed", best.cause):
            told = where(one)
            if None in (found["pid"], told["pid"]) or found["pid"] == told["pid"]:
                found = {name: told[name] if value is None else value for name, value in found.items()}
    return found


def _phase(streams: list[Stream], best: Finding, facts: Sequence[Fact], num_read: int) -> JobPhase:
    """The phase at the deciding fact; where it stands alone, at another that says the same, or at the logs' ends."""
    candidates = [best.fact, *(one for one in facts if one.kind == best.fact.kind and one is not best.fact)]
    is_outside = best.fact.stream >= num_read  # the kernel's log and the accounting tell no phase
    if is_outside:
        candidates += [one for one in facts if one.kind in ("sigkill", "worker_killed")]
    for index, stream in enumerate(streams):  # a line without its rank belongs to a traceback of some rank
        is_near = bool(stream.lines) and stream.lines[-1].number < best.fact.number + 2
        if index != best.fact.stream and stream.lines and (is_near or is_outside):
            place = len(stream.lines) - 1
            candidates.append(Fact(best.fact.kind, (stream.lines[place],), {}, index, place))
    found = (find_phase(streams, fact) for fact in candidates[:6])
    return next((phase for phase in found if phase != "unknown"), "unknown")


def _later_phase(streams: list[Stream], fact: Fact, readings: _Readings) -> JobPhase:
    """The phase of the first progress after a fact, for a job that went on."""
    stream = streams[fact.stream]
    place = next((one.place for one in readings[fact.stream] if one.place > fact.place), None)
    if place is None:
        return "unknown"
    return find_phase(streams, Fact("progress", (stream.lines[place],), {}, fact.stream, place))


def _mild(streams: list[Stream], mild: list[Fact], facts: Sequence[Fact], readings: _Readings) -> Diagnosis:
    """Warnings of a shortage, and no end."""
    skipped = [fact for fact in mild if fact.kind == "skipped_batches"]
    fact = (skipped or mild)[-1]
    return Diagnosis(
        oom=bool(skipped),
        recovered=True,
        kind="gpu" if skipped else "none",
        cause="out_of_memory" if skipped else "recovered",
        phase=phase if (phase := find_phase(streams, fact)) != "unknown" else _later_phase(streams, fact, readings),
        confidence=0.8,
        evidence=_evidence([fact]),
        timeline=tuple(timeline(streams, None, facts, readings)),
    )


def _nothing(streams: list[Stream], facts: Sequence[Fact], readings: _Readings) -> Diagnosis:
    """No cause in these lines; the phase is that of the last progress, or of the last line."""
    phase: JobPhase = "unknown"
    for index, stream in enumerate(streams):
        places = [one.place for one in readings[index]][-1:] or [len(stream.lines) - 1]
        if phase == "unknown" and stream.lines:
            phase = find_phase(streams, Fact("progress", (stream.lines[places[0]],), {}, index, places[0]))
    finished = any(fact.kind == "success" for fact in facts)
    for stream in streams if finished else ():
        progress = read_progress(stream.lines)
        if progress.is_premature and not any(STOPS_EARLY.search(line.text) for line in stream.lines):
            return _incomplete(progress, phase, timeline(streams, None, facts, readings))
    return Diagnosis(
        oom=False,
        recovered=False,
        kind="none",
        cause="completed" if finished else "unknown",
        phase=phase,
        confidence=0.8 if finished else 0.0,
        timeline=tuple(timeline(streams, None, facts, readings)),
        checks=tuple(checks(streams, None, completed=finished)),
    )


def _incomplete(progress: Progress, phase: JobPhase, moments: Iterable[Moment]) -> Diagnosis:
    """A log that says it is done, and whose own bars show too few epochs."""
    bar, claim = progress.train or progress.last, progress.claims[-1]
    said = f"the log says that it is done after {progress.epochs_done} of {progress.num_epochs} epochs"
    sums = [said]
    if bar is not None and bar.total and bar.rate and bar.seconds and not bar.is_global:
        sums.append(check_rate(bar.total, bar.rate, bar.seconds).text)
    lines = [line for line in (bar.line if bar is not None else None, claim) if line is not None]
    return Diagnosis(
        oom=False,
        recovered=False,
        kind="none",
        cause="incomplete",
        phase=phase,
        confidence=0.7,
        evidence=tuple(Evidence(line.file, line.number, line.text) for line in lines),
        timeline=tuple(moments),
        arithmetic=tuple(sums),
        checks=("Look at the exit status and at the newest checkpoint before you use the result.",),
    )
