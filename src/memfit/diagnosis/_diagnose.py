"""Say what killed a job: the cause, the lines that prove it, and how sure that is."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.diagnosis._checkpoints import Checkpoint, judge_checkpoints, names_of
from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._granted import find_files
from memfit.diagnosis._group import explain_group, explain_lost
from memfit.diagnosis._growth import run_notes
from memfit.diagnosis._phase import JobPhase, find_phase
from memfit.diagnosis._pod import read_pods
from memfit.diagnosis._progress import Reading, clock_between, read_counters, read_progress
from memfit.diagnosis._record import Diagnosis, Evidence, Moment
from memfit.diagnosis._runs import find_run, logs_of, open_file, read_log, run_signs
from memfit.diagnosis._signatures import find_signs
from memfit.diagnosis._signs import FOLLOWED, Sign, Sure
from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.diagnosis._verdict import events, exceptions, is_unlinked, rank, settle, survived
from memfit.diagnosis._witnesses import Witnesses, read_witnesses
from memfit.errors import UsageError
from memfit.files import pass_over
from memfit.masking import mask, redact
from memfit.units import GIB, format_duration

_Readings = Sequence[list[Reading]]
_MOST_NOTES = 5
#: What a job may survive, the first of which is told.
_SURVIVED = ("skipped_batches", "rank_lost", "pressure")
#: Files of a folder that are logs.
_LOGS = ("*.out", "*.err", "*.log", "*.txt", "*.gz", "*.out.*", "*.err.*", "*.log.*")


_NODE = re.compile(
    r"error: (\w[\w.-]*): tasks? [\d,-]+:|(?:JOB|STEP) [\w.+]+ ON (\S+) CANCELLED"
    r"|slurmstepd-([\w-]+):|Node failure on (\S+)|IP: ([\d.]+)"
)
_PID = re.compile(
    r"\(pid:? (\d{1,9})\)|received by PID (\d{1,9})|Killed? process (\d{1,9})|worker \(pid\(?s?\)? (\d{1,9})",
    re.IGNORECASE,
)
_NAMES_SAVE = re.compile(r"\bsav(?:ed|ing)\b|checkpoint|ckpt", re.IGNORECASE)
_LOCAL_RANK = re.compile(r"local_rank: (\d{1,6})|\[Rank (\d{1,6})\]|tasks? (\d{1,6}): ")
#: What a person should look at, by heading, where a log's words have several causes.
_CHECKS: dict[str, str] = {
    "killed": "A SIGKILL names nobody: look in journalctl -k or dmesg for oom-kill at that time, in sacct for "
    "OUT_OF_MEMORY, in kubectl describe or docker inspect for OOMKilled.",
    "unknown": "Nothing in these lines names a cause: give the scheduler's log, the kernel's log, or the error file "
    "too.",
    "library_alloc": "The same words follow an index out of range: run once with CUDA_LAUNCH_BLOCKING=1 before "
    "blaming memory.",
    "bad_alloc": "A size that is wrong (negative, or from a broken file) fails the same way.",
}
_UNPROVED = "Load these checkpoints before you use them; they have no checksum, or were not read whole (--verify does):"
_BROKEN = "The checkpoint written then is broken: load it, compare its tensors with an earlier one, and save again."


#: Words of which a line about a shortage has at least one.
_MAY_BE_SHORT = re.compile(rb"memory|oom|bad_alloc|ENOMEM|Bus error", re.IGNORECASE)


def diagnose(
    paths: Path | str | Sequence[Path | str],
    *,
    sacct: Path | str | None = None,
    accounting: str = "",
    kernel_log: Path | str | None = None,
) -> Diagnosis:
    """Say what killed a job, from what it left.

    Args:
        paths: Logs, folders of logs, run directories of memfit, what ``kubectl`` says of a pod (``get pod -o json`` or
            ``-o yaml``, ``describe pod``), or ``-`` for standard input.
        sacct: A file with what ``sacct`` printed.
        accounting: That text itself; its lines are cited as those of ``sacct``.
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
    found_in = [(stream, read_pods(stream)) for one in named for stream in streams_of(one)]
    streams = [stream for stream, ends in found_in if ends is None]
    pods = [end for _, ends in found_in for end in ends or ()]
    files = [Path(one) for one in named if str(one) != "-"]
    witnesses = read_witnesses(
        [line for stream in streams for line in stream.lines],
        sacct=accounting or None if sacct is None else _text(sacct),
        kernel_log=None if kernel_log is None else _text(kernel_log),
        files=(str(sacct or "sacct"), str(kernel_log or "kernel log")),
    )
    signs = witnesses.signs
    if sacct is None and not accounting and kernel_log is None:  # the table knows the logs' own lines
        signs = ()
    witnesses = replace(witnesses, signs=(*signs, *pods, *(sign for one in files for sign in run_signs(one))))
    _, checkpoints = find_files(files)
    found = _diagnose(streams, witnesses, judge_checkpoints(checkpoints))
    # Without recorded epochs only a training whose counters rose is looked at: loading data grows too.
    by_time = found.oom and found.phase == "train" and any(one.what == "last progress" for one in found.timeline)
    told = [*explain_lost(witnesses.signs), *(note for one in files for note in run_notes(one, by_time=by_time))]
    notes = [*found.notes, *map(redact, told)]
    evidence = tuple(replace(one, text=redact(one.text)) for one in found.evidence)
    timeline = tuple(replace(one, text=redact(one.text)) for one in found.timeline)
    return replace(found, evidence=evidence, timeline=timeline, notes=tuple(notes[:_MOST_NOTES]))


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """Return what logs alone say, without the run directory around them."""
    return _diagnose([stream for path in paths for stream in streams_of(path)], Witnesses(), [])


def find_shortage(new: bytes) -> str:
    """Return the line in the newest part of a log that proves a shortage of memory; empty if none does.

    >>> find_shortage(b"step 3\\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB.\\n")
    'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB.'
    """
    if not _MAY_BE_SHORT.search(new):
        return ""
    found = _diagnose(read_streams("log", io.BytesIO(new)), Witnesses(), [])
    return found.evidence[0].text if found.oom and found.confidence == "proved" and found.evidence else ""


def streams_of(path: Path | str) -> list[Stream]:
    """Return the streams of a log, of each log of a folder or a run directory, or of standard input."""
    if str(path) == "-":
        return read_streams("-", sys.stdin.buffer)
    path = Path(path)
    logs = [path]
    if path.is_dir() and (run := find_run(path)) is not None:
        jobs = [path] if path.parent.name == "jobs" else sorted((run.path / "jobs").iterdir())
        logs = [log for job in jobs for log in logs_of(run, job.name)]
    elif path.is_dir():
        logs = sorted({log for form in _LOGS for log in path.glob(form) if log.is_file()})
        if not logs:
            raise UsageError(
                f"No log in {path}.",
                rule=f"A folder's logs are {', '.join(_LOGS[:5])}.",
                remedy="Name the log itself: memfit diagnose PATH/slurm-123.out",
            )
    found = []
    for log in logs:
        try:
            streams = read_log(log)
            why = "" if streams else "it is no text"
        except OSError as error:
            why = error.strerror or str(error)
        if why and log is path:
            raise UsageError(
                f"Cannot read {path}.", rule=f"{why}.", remedy="Give a log, a folder of logs, or - for standard input."
            )
        if why:
            pass_over(f"{log}: {why}")
        else:
            found += streams
    return found


def _text(path: Path | str) -> str:
    """The text of what a scheduler or a kernel printed."""
    try:
        with open_file(Path(path)) as file:
            return file.read().decode(errors="replace")
    except OSError as error:
        remedy = "Give a file with what sacct or dmesg printed."
        raise UsageError(f"Cannot read {path}.", rule=str(error), remedy=remedy) from None


def _diagnose(streams: list[Stream], witnesses: Witnesses, kept: Sequence[Checkpoint]) -> Diagnosis:
    """The diagnosis by logs, other witnesses, and the checkpoints that were kept."""
    num_read = len(streams)
    signs = [sign for index, stream in enumerate(streams) for sign in find_signs(stream, index)]
    signs += [sign for index, stream in enumerate(streams) for sign in exceptions(stream, index)]
    signs = events(streams, signs)
    stream, placed = witnesses.as_stream(num_read)
    streams = [*streams, stream]
    signs = [settle(streams[sign.stream], sign) for sign in (*signs, *placed)]
    readings = [list(read_counters(stream)) for stream in streams]
    lived = survived(streams, signs, readings)
    findings = rank(streams, signs, lived)
    best = findings[0] if findings else None
    if best is None or (id(best) in lived and best.kind == "none"):
        marks = [sign for sign in signs if sign.name in _SURVIVED]
        if marks:
            reason = best.lines if best is not None and best.meaning.tier < FOLLOWED else ()
            return _warned(streams, marks, reason, signs, readings)
        return _ended(streams, signs, readings, witnesses, kept)
    phase = best.values.get("phase") or _phase(streams, best, signs, num_read)
    recovered = id(best) in lived or best.cause == "limit_touched"
    if best.kind == "none" and best.cause != "limit_touched":
        recovered = any(id(one) in lived and one.kind != "none" for one in findings)
    where = _where(best, findings, num_read)
    where["rank"], note = explain_group(best, where["rank"], signs, streams)
    is_host, figures = best.kind.startswith("host") or best.cause == "killed", _figures(best, findings)
    checked = Figures.read({} if best.kind == "none" else figures, best.text)
    sure: Sure = "likely" if is_unlinked(best) or checked.contradictions else best.meaning.sure
    early = filter(None, (read_progress(one).doubt for one in streams))
    lost = _unsaved(streams, phase) if best.kind != "none" and not (recovered or kept) else ""
    return Diagnosis(
        oom=best.kind != "none",
        recovered=recovered,
        kind=best.kind,
        cause=best.cause,
        phase=phase,
        confidence="proved" if best.values.get("stranger") else sure,  # the job's own counter of kills did not rise
        figures={} if best.kind == "none" else figures,
        evidence=_evidence(line for sign in (best, *_beside(best, findings)) for line in sign.lines),
        where=where,
        notes=tuple(filter(None, (note, lost))),
        timeline=_timeline(streams, best, signs, readings),
        arithmetic=(
            *_arithmetic(best, figures, checked),
            *(witnesses.arithmetic if is_host else ()),
            *early,
        ),
        checks=_checks(best),
        under_memfit=any("own_kills" in one.values for one in findings),
        emitter=best.emitter,
    )


def _unsaved(streams: Sequence[Stream], phase: JobPhase) -> str:
    """Return a note if a validation ended a job, and no line names a checkpoint."""
    if phase != "validate" or any(_NAMES_SAVE.search(line.text) for stream in streams for line in stream.lines):
        return ""
    return (
        "No line names a checkpoint: the training is lost. Save before the validation, and try it: memfit run --canary."
    )


def _beside(best: Sign, findings: Sequence[Sign]) -> list[Sign]:
    """The signs of other witnesses that speak of the same death."""
    if not any("linked" in one.values for one in findings):
        return []
    same = [one for one in findings if one.file != best.file and one.cause in (best.cause, "killed")]
    others = {one.file: one for one in reversed(same)}
    return list(others.values())[:2]


def _figures(best: Sign, findings: Sequence[Sign]) -> dict[str, int]:
    """The figures of the deciding sign; what was requested may stand in the line after it."""
    found = {name.removesuffix("_bytes"): size for name, size in best.values.items() if name.endswith("_bytes")}
    if "total" in found:
        found["device_total"] = found.pop("total")
    for one in findings:
        near = one.stream == best.stream and abs(one.place - best.place) <= 6
        if near and "tried" not in found and one.kind == best.kind and "tried_bytes" in one.values:
            found["tried"] = one.values["tried_bytes"]
    return found


def _evidence(lines: Iterable[Line]) -> tuple[Evidence, ...]:
    return tuple(Evidence(line.file, line.number, mask(line.text)) for line in lines)


def _where(best: Sign, findings: Sequence[Sign], num_read: int) -> dict[str, Any]:
    """Where it was. What an outer witness does not know, a line of the log on the same process may."""
    found = _place(best)
    near = [one for one in findings if one.stream < num_read and one.cause in ("killed", best.cause)]
    places = [_place(one) for one in near if best.stream >= num_read]
    for own in sorted(places, key=lambda one: one["rank"] is None):  # its node, not that of another rank
        if None in (found["pid"], own["pid"]) or found["pid"] == own["pid"]:
            found = {name: own[name] if value is None else value for name, value in found.items()}
    return found


def _place(sign: Sign) -> dict[str, Any]:
    """What a sign's lines name; None for what they do not."""
    values, line = sign.values, sign.lines[0] if sign.lines else None
    host, rank = (line.host or None, line.rank) if line else (None, None)
    number = re.search(r"\d+", str(values.get("pid", "")))
    pid = number[0] if number else _first(_PID, sign.text)
    local = _first(_LOCAL_RANK, sign.text) if rank is None else None
    return {
        "host": host,
        "rank": int(values["rank"]) if "rank" in values else rank if local is None else int(local),
        "node": values.get("node") or _first(_NODE, sign.text) or host,
        "device": values.get("device"),
        "pid": None if pid is None else int(pid),
    }


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return next(group for group in match.groups() if group is not None) if match else None


def _timeline(
    streams: Sequence[Stream], sign: Sign | None, signs: Sequence[Sign], readings: _Readings
) -> tuple[Moment, ...]:
    """Start, last progress before the failure, the failure, and what followed from it."""

    def moment(what: str, index: int, place: int, line: Line) -> Moment:
        lines = streams[index].lines  # its own time, or the last one before it and what a bar's clock ran since
        at = next((at for at in range(place, max(-1, place - 81), -1) if lines[at].time), None)
        ran = clock_between(readings[index], at, place) if at is not None else 0
        time = "" if at is None else lines[at].time + (f" + {format_duration(ran)}" if ran > 0 else "")
        return Moment(what, time, line.file, line.number, mask(line.text)[:200])

    is_known = sign is not None and bool(sign.lines)
    starts = (line for stream in streams for line in stream.lines if line.time)
    found = [Moment("start", line.time, line.file, line.number, mask(line.text)[:200]) for line in islice(starts, 1)]
    progress: tuple[int, int, Line] | None = None
    for index, stream in enumerate(streams):
        for one in readings[index]:
            line = stream.lines[one.place]
            is_before = sign is None or not is_known or line.file != sign.file or line.number <= sign.number
            if is_before and (progress is None or line.file != progress[2].file or line.number >= progress[2].number):
                progress = (index, one.place, line)
    found += [moment("last progress", *progress)] if progress else []
    if sign is not None and is_known:
        later = [one for one in signs if one.meaning.tier == FOLLOWED and one.lines and one.file == sign.file]
        later = sorted((one for one in later if one.number > sign.number), key=lambda one: one.number)[:3]
        named = [("failure", sign), *(("consequence", one) for one in later)]
        found += [moment(what, one.stream, one.place, one.lines[0]) for what, one in named]
    return tuple(found)


def _arithmetic(finding: Sign, size: Mapping[str, int], device: Figures) -> list[str]:
    """How a finding's figures add up, each with its scope; contradictions come first."""
    values, total, held, found = finding.values, device.total or 0, device.held or 0, [*device.contradictions.values()]
    card = f"GPU {values['device']}" if "device" in values else "the card"
    if (slack := device.slack) is not None:
        share = f", {slack / total:.0%} of {card}" if total else ""
        found.append(
            f"This process's allocator holds {_gib(size['reserved'])}: {_gib(size['allocated'])} in tensors"
            f" and {_gib(slack)} in its cache{share}."
        )
        if "tried" in size and finding.kind == "gpu_fragmentation":
            seen = "a noticeable share" if total and slack >= NOTICEABLE * total else "too little of the card to matter"
            found.append(f"{_gib(size['tried'])} failed although {_gib(slack)} of cache is free in pieces; {seen}.")
    if device.own_pids:
        pids, what = " or ".join(map(str, device.own_pids)), "is this process, by its number outside of the container"
        found.append(f"Process {pids} {what}: with {_gib(size['reserved'])} of another it would exceed the card.")
    if device.foreign and device.foreign >= NOTICEABLE * total:
        found.append(
            f"Memory of others on {card}: {_gib(total)} total - {_gib(size['free'])} free - {_gib(held)} of this"
            f" process = {_gib(device.foreign)} (other processes, and this one's context and libraries)."
        )
    if {"used", "limit"} <= size.keys():
        over = size["used"] - size["limit"]
        of_kind = "node" if finding.kind == "host_kernel" else "limit"
        found.append(
            f"{values.get('who') or 'The limit'}: {_gib(size['used'])} used of {_gib(size['limit'])}"
            f" (per {values.get('scope') or of_kind}){f', {_gib(over)} over' if over > 0 else ''}."
        )
    elif "used" in size:
        found.append(f"The killed process alone held {_gib(size['used'])} (one process, anonymous memory).")
    return found


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _checks(finding: Sign) -> tuple[str, ...]:
    """What a person should look at next."""
    name = "killed" if finding.cause in ("killed", "bus_error") else finding.name
    return tuple(filter(None, (_BROKEN if "Failed to clone" in finding.text else "", _CHECKS.get(name))))


def _phase(streams: list[Stream], best: Sign, signs: Sequence[Sign], num_read: int) -> JobPhase:
    """The phase at the deciding sign, else at another that says the same, or at the ends of the logs."""
    is_outside = best.stream >= num_read  # the kernel's log and the accounting show no phase
    candidates = [] if is_outside else [best]
    candidates += [one for one in signs if one is not best and one.name == best.name and one.stream < num_read]
    candidates += [one for one in signs if is_outside and one.name == "killed" and one.stream < num_read]
    for index, stream in enumerate(streams[:num_read]):  # a line without its rank belongs to a traceback of some rank
        is_near = bool(stream.lines) and stream.lines[-1].number < best.number + 2
        if index != best.stream and stream.lines and (is_near or is_outside):
            place = len(stream.lines) - 1
            candidates.append(Sign(best.name, (stream.lines[place],), {}, index, place))
    found = (find_phase(streams, sign) for sign in candidates[:6])
    return next((phase for phase in found if phase != "unknown"), "unknown")


def _phase_at(streams: list[Stream], index: int, place: int) -> JobPhase:
    return find_phase(streams, Sign("success", (streams[index].lines[place],), {}, index, place))


def _warned(
    streams: list[Stream], marks: list[Sign], reason: Sequence[Line], signs: Sequence[Sign], readings: _Readings
) -> Diagnosis:
    """Return what a job survived: a shortage, warnings of one, or a rank that was lost."""
    sign = min(reversed(marks), key=lambda one: _SURVIVED.index(one.name))
    return Diagnosis(
        oom=sign.name == "skipped_batches",
        recovered=True,
        kind=sign.kind,
        cause=sign.cause,
        phase=sign.values.get("phase") or find_phase(streams, sign),
        confidence=sign.meaning.sure,
        evidence=_evidence((*sign.lines, *reason)),
        where={"rank": sign.values.get("rank")},
        timeline=_timeline(streams, None, signs, readings),
    )


def _ended(
    streams: list[Stream], signs: Sequence[Sign], readings: _Readings, witnesses: Witnesses, kept: Sequence[Checkpoint]
) -> Diagnosis:
    """No failure in these lines. A good end needs all epochs, whole checkpoints and exit status 0."""
    phase: JobPhase = "unknown"
    for index, stream in enumerate(streams):
        if phase == "unknown" and stream.lines:
            phase = _phase_at(streams, index, readings[index][-1].place if readings[index] else len(stream.lines) - 1)
    found = Diagnosis(
        oom=False,
        recovered=False,
        kind="none",
        cause="unknown",
        phase=phase,
        confidence="not shown",
        timeline=_timeline(streams, None, signs, readings),
        checks=(_CHECKS["unknown"],),
    )
    ends = [sign for sign in signs if sign.name == "success"]
    if not ends:
        return found
    doubts: list[str] = []
    lines: list[Line | None] = []
    for progress in map(read_progress, streams):
        if progress.doubt:
            doubts.append(progress.doubt)
            lines += [progress.bar.line if progress.bar else None, progress.claim]
    if witnesses.status:
        doubts.append(f"the log says that it is done, and the accounting has exit status {witnesses.status}")
        lines.append(witnesses.row)
    if torn := names_of(kept, "damaged"):
        doubts.append(f"checkpoints that cannot be loaded: {torn}")
    if doubts:
        return replace(
            found,
            cause="incomplete",
            confidence="likely",
            evidence=_evidence(line for line in lines if line is not None),
            arithmetic=tuple(doubts),
            checks=("Look at the exit status and at the newest checkpoint before you use the result.",),
        )
    is_proved = any("attempt" in one.values for one in ends) or (
        witnesses.status == 0 and any("exit_code" not in one.values for one in ends)
    )
    check = "The log alone does not prove success: look at the exit status and at the newest checkpoint."
    sure: Sure = "proved" if is_proved else "likely"
    unproved = names_of(kept, "not proved")
    checks = (*(() if is_proved else (check,)), *([f"{_UNPROVED} {unproved}"] if unproved else []))
    return replace(found, cause="completed", confidence=sure, checks=checks)
