"""Say what killed a job: the cause, the lines that prove it, and how sure that is."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._find import find_signs
from memfit.diagnosis._grown import find_growth_in
from memfit.diagnosis._mention import events, is_quoted
from memfit.diagnosis._phase import JobPhase, find_phase
from memfit.diagnosis._pod import read_pods
from memfit.diagnosis._progress import Reading, read_counters, read_progress
from memfit.diagnosis._record import Diagnosis, Evidence, Moment
from memfit.diagnosis._remedy_table import find_whom
from memfit.diagnosis._runs import Checkpoint, find_run, judge_checkpoints, names_of, read_text, streams_of
from memfit.diagnosis._signatures import FOLLOWED, MARK, MEMORY, Sure
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.diagnosis._verdict import exceptions, is_unlinked, rank, settle, survived
from memfit.diagnosis._witnesses import Witnesses, read_witnesses
from memfit.masking import mask
from memfit.units import format_bytes, list_some

_Readings = Sequence[list[Reading]]
_MOST_NOTES = 5
#: What a job may survive, the first of which is told.
_SURVIVED = ("skipped_batches", "rank_lost", "pressure")
_NODE = re.compile(
    r"error: (\w[\w.-]*): tasks? [\d,-]+:|(?:JOB|STEP) [\w.+]+ ON (\S+) CANCELLED"
    r"|slurmstepd-([\w-]+):|Node failure on (\S+)|IP: ([\d.]+)"
)
_PID = re.compile(
    r"\(pid:? (\d{1,9})\)|received by PID (\d{1,9})|Killed? process (\d{1,9})|worker \(pid\(?s?\)? (\d{1,9})",
    re.IGNORECASE,
)
_NAMES_SAVE = re.compile(r"\bsav(?:ed|ing)\b|checkpoint|ckpt", re.IGNORECASE)
#: The heading of errors in collectives: a rank that prints one waited for another.
_WAITED = "collective_timeout"
#: torchrun's table of ranks that failed. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py.
_IN_TABLE = re.compile(r"^\s*rank\s*: (\d{1,6}) \(local_rank")
_LOCAL_RANK = re.compile(r"local_rank: (\d{1,6})|\[Rank (\d{1,6})\]|tasks? (\d{1,6}): ")
#: What a person should look at, by heading, where a log's words have several causes.
_CHECKS: dict[str, str] = {
    "library_alloc": "The same words follow an index out of range: run once with CUDA_LAUNCH_BLOCKING=1 before "
    "blaming memory.",
    "bad_alloc": "A size that is wrong (negative, or from a broken file) fails the same way.",
}
#: The rule and the remedy of a file that cannot be read.
_PRINTED = ("sacct and kernel_log are files that these tools wrote.", "Give a file with what sacct or dmesg printed.")
_MISSING: tuple[str, ...] = (
    "On its node: dmesg -T > kernel.log (or journalctl -k > ...). Under Slurm: sacct -P -j JOB -o ALL > sacct.txt",
    "Of a container: kubectl describe pod POD > pod.txt, or docker inspect NAME > pod.txt",
    "Then: memfit diagnose LOG OTHER_LOG pod.txt --kernel-log kernel.log --sacct sacct.txt",
)
_EMPTY = "{} is empty: the program printed nothing, or its output went to another file (.out, .err)."
_UNPROVED = "Load these checkpoints before you use them; they are of an older torch.save, without a table of contents:"
_LOOK = "Look at the exit status and at the newest checkpoint before you use the result."
_ALONE = "The log alone does not prove success: look at the exit status and at the newest checkpoint."
_BROKEN = "The checkpoint written then is broken: load it, compare its tensors with an earlier one, and save again."
_UNSAVED = (
    "No line names a checkpoint: the training is lost. Save before the validation, and try it: memfit run --canary."
)


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
        >>> _ = log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        >>> diagnose(log).kind
        'gpu'
    """
    named = [paths] if isinstance(paths, Path | str) else list(paths)
    found_in = [(stream, read_pods(stream)) for one in named for stream in streams_of(one)]
    streams = [stream for stream, ends in found_in if ends is None]
    pods = [end for _, ends in found_in for end in ends or ()]
    files = [Path(one) for one in named if str(one) != "-"]
    runs = [run for one in files if (run := find_run(one)) is not None]
    witnesses = read_witnesses(
        [line for stream in streams for line in stream.lines],
        sacct=accounting or None if sacct is None else read_text(Path(sacct), *_PRINTED),
        kernel_log=None if kernel_log is None else read_text(Path(kernel_log), *_PRINTED),
        files=(str(sacct or "sacct"), str(kernel_log or "kernel log")),
    )
    signs = witnesses.signs if sacct or accounting or kernel_log else ()  # the table knows the logs' own lines
    witnesses = replace(witnesses, signs=(*signs, *pods, *(sign for one in runs for sign in one.signs)))
    found = _diagnose(streams, witnesses, judge_checkpoints(files))
    found = found if runs else find_growth_in(found, streams)
    for run in runs:
        found = run.add_facts(found)
    told = (mask(note) for one in runs for note in one.notes())
    return replace(found, notes=(*found.notes, *told)[:_MOST_NOTES])


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """Return what logs alone say, without the run directory around them."""
    return _diagnose([stream for path in paths for stream in streams_of(path)], Witnesses(), [])


def find_shortage(new: bytes) -> str:
    """Return the line in the newest part of a log that proves a shortage of memory; empty if none does."""
    streams = read_streams("log", io.BytesIO(new))
    if not any(sign.meaning.tier == MEMORY for stream in streams for sign in find_signs(stream)):
        return ""
    found = _diagnose(streams, Witnesses(), [])
    return found.evidence[0].text if found.oom and found.confidence == "proved" and found.evidence else ""


def _diagnose(streams: list[Stream], witnesses: Witnesses, kept: Sequence[Checkpoint]) -> Diagnosis:
    num_read = len(streams)
    signs = [sign for index, stream in enumerate(streams) for sign in find_signs(stream, index)]
    signs += [sign for index, stream in enumerate(streams) for sign in exceptions(stream, index)]
    spoken = [sign.lines[0] for sign in signs if sign.meaning.tier == MEMORY]  # nearest to a cause
    signs = events(streams, signs)
    stream, placed = witnesses.as_stream(num_read)
    streams = [*streams, stream]
    signs = [settle(streams[sign.stream], sign) for sign in (*signs, *placed)]
    readings = [list(read_counters(stream.lines)) for stream in streams]
    lived = survived(signs, readings)
    findings = rank(streams, signs, lived)
    best, also = findings[0] if findings else None, _beside(findings)
    if best is None or (id(best) in lived and best.kind == "none"):
        also = [best] if best is not None and best.meaning.tier < FOLLOWED else []
        marks = (one for one in reversed(signs) if one.name in _SURVIVED)
        best = min(marks, key=lambda one: _SURVIVED.index(one.name), default=None)
    if best is None:
        return _ended(streams, signs, readings, witnesses, kept, spoken)
    phase = best.values.get("phase") or _phase(streams, best, signs, num_read)
    recovered = id(best) in lived or best.cause == "limit_touched" or best.meaning.tier == MARK
    if best.kind == "none" and not recovered:
        recovered = any(id(one) in lived and one.kind != "none" for one in findings)
    where, lines = _where(best, findings, num_read), [line for stream in streams for line in stream.lines]
    where["rank"], note = _explain_group(best, where["rank"], signs, lines)
    is_host, figures = best.kind.startswith("host") or best.cause == "killed", _figures(best, findings)
    checked = Figures.read({} if best.kind == "none" else figures, best.text)
    is_bare = best.kind != "none" and not figures and ("who" not in best.values or is_quoted(streams, best))
    sure: Sure = "likely" if is_bare or is_unlinked(best) or checked.contradictions else best.meaning.sure
    progress = read_progress(lines, chain.from_iterable(readings))
    is_lost = best.kind != "none" and phase == "validate" and not (recovered or kept)
    is_lost = is_lost and not any(_NAMES_SAVE.search(line.text) for line in lines)
    is_own = any("attempt" in one.values for one in findings)
    sums = [*_arithmetic(best, figures, checked), *(witnesses.arithmetic if is_host else ())]
    return Diagnosis(
        oom=best.kind != "none",
        recovered=recovered,
        kind=best.kind,
        cause=best.cause,
        phase=phase,
        confidence="proved" if best.values.get("stranger") else sure,  # the job's own counter of kills did not rise
        figures={} if best.kind == "none" else figures,
        evidence=_evidence(line for sign in (best, *also) for line in sign.lines),
        where=where,
        notes=tuple(filter(None, (note, _UNSAVED if is_lost else ""))),
        timeline=_timeline(streams, best, signs, readings, progress.claim if progress.doubt else None),
        arithmetic=tuple(filter(None, [*sums, progress.doubt])),
        checks=tuple(filter(None, (_BROKEN if "Failed to clone" in best.text else "", _CHECKS.get(best.name)))),
        emitter=best.emitter,
        whom=(*find_whom((one.flat for one in streams), best.text), *(["memfit"] if is_own else [])),
    )


def _beside(findings: Sequence[Sign]) -> list[Sign]:
    """The signs of other witnesses that speak of the same death as the first."""
    others = findings[:0:-1] if any("linked" in one.values for one in findings) else ()
    same = (one for one in others if one.cause in (findings[0].cause, "killed") and one.file != findings[0].file)
    return [*{one.file: one for one in same}.values()][:2]


def _figures(best: Sign, findings: Sequence[Sign]) -> dict[str, int]:
    """The figures of the deciding sign; what was requested may stand in the line after it."""
    found = {name.removesuffix("_bytes"): size for name, size in best.values.items() if name.endswith("_bytes")}
    if "total" in found:
        found["device_total"] = found.pop("total")
    near = (one for one in findings if one.stream == best.stream and abs(one.place - best.place) <= 6)
    tried = [one.values["tried_bytes"] for one in near if one.kind == best.kind and "tried_bytes" in one.values]
    return {"tried": tried[0]} | found if tried else found


def _evidence(lines: Iterable[Line | None]) -> tuple[Evidence, ...]:
    return tuple(Evidence(line.file, line.number, mask(line.text)) for line in lines if line is not None)


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
    values, line = sign.values, sign.lines[0]
    number = re.search(r"\d+", str(values.get("pid", "")))
    pid, host = number[0] if number else _first(_PID, sign.text), line.host or None
    rank = values.get("rank", _first(_LOCAL_RANK, sign.text) if line.rank is None else line.rank)
    return {
        "host": host,
        "rank": None if rank is None else int(rank),
        "node": values.get("node") or _first(_NODE, sign.text) or host,
        "device": values.get("device"),
        "pid": None if pid is None else int(pid),
    }


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return next(group for group in match.groups() if group is not None) if match else None


def _explain_group(
    best: Sign, first: int | None, signs: Sequence[Sign], lines: Sequence[Line]
) -> tuple[int | None, str]:
    """Which rank was lost first, and a note on the others; ``first`` is the rank that the cause names."""
    said = [one.lines[0].rank for one in signs if one.name == _WAITED]
    waited = {rank for rank in said if rank is not None}
    if best.name != _WAITED:
        name, others = "one rank" if first is None else f"rank {first}", waited - {first}
        says = f"{_name_ranks(others)} {'say' if len(others) > 1 else 'says'}"
        note = f"{name} was lost first; what {says} of a collective follows from that."
        return first, note if others and best.meaning.tier != MARK else ""
    silent = {line.rank for line in lines if line.rank is not None} - waited
    silent |= {int(found[1]) for line in lines if (found := _IN_TABLE.match(line.text))} - waited
    if not waited or not silent:
        return first, ""
    note = f"{_name_ranks(waited)} only waited for a peer; {_name_ranks(silent)} did not say so: look there first."
    return min(silent) if len(silent) == 1 else None, note


def _name_ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_some([str(one) for one in sorted(ranks)])}"


def _timeline(
    streams: Sequence[Stream], sign: Sign | None, signs: Sequence[Sign], readings: _Readings, claim: Line | None
) -> tuple[Moment, ...]:
    def moment(what: str, line: Line, index: int = 0, place: int = 0) -> Moment:
        before = streams[index].lines[max(0, place - 80) : place + 1]  # its own time, or the last one before it
        time = line.time or next((one.time for one in reversed(before) if one.time), "")
        return Moment(line.file, line.number, mask(line.text)[:200], what, time)

    failed = sign if sign and sign.meaning.tier != MARK else None
    found = [moment("start", line) for stream in streams for line in stream.lines if line.time][:1]
    files = list(dict.fromkeys(line.file for stream in streams for line in stream.lines))
    shown = [(one.line, index, one.place) for index, own in enumerate(readings) for one in own]
    shown = [one for one in shown if failed is None or one[0].file != failed.file or one[0].number <= failed.number]
    if shown:
        last = max(shown, key=lambda one: (files.index(one[0].file), one[0].number, *one[1:]))
        found.append(moment("last progress", *last))
    if claim is not None:
        found.append(moment("says it is done", claim))
    if failed is not None:
        later = (one for one in signs if one.meaning.tier == FOLLOWED and one.file == failed.file)
        behind = sorted((one for one in later if one.number > failed.number), key=lambda one: one.number)[:3]
        named = (("failure", failed), *(("consequence", one) for one in behind))
        found += [moment(what, one.lines[0], one.stream, one.place) for what, one in named]
    return tuple(found)


def _arithmetic(finding: Sign, size: Mapping[str, int], device: Figures) -> list[str]:
    values, total, found = finding.values, device.total or 0, [*device.contradictions.values()]
    card = f"GPU {values['device']}" if "device" in values else "the card"
    said = {name: format_bytes(one) for name, one in size.items()}
    if (slack := device.slack) is not None:
        share = f", {slack / total:.0%} of {card}" if total else ""
        cache = format_bytes(slack)
        found.append(
            f"This process's allocator holds {said['reserved']}: {said['allocated']} in tensors and {cache} in its "
            f"cache{share}."
        )
        if "tried" in size and finding.kind == "gpu_fragmentation":
            seen = "a noticeable share" if total and slack >= NOTICEABLE * total else "too little of the card to matter"
            found.append(f"{said['tried']} failed although {cache} of cache is free in pieces; {seen}.")
    if device.own_pids:
        pids, what = " or ".join(map(str, device.own_pids)), "is this process, by its number outside of the container"
        found.append(f"Process {pids} {what}: with {said['reserved']} of another it would exceed the card.")
    if device.foreign and device.foreign >= NOTICEABLE * total:
        found.append(
            f"Memory of others on {card}: {format_bytes(total)} total - {said['free']} free - "
            f"{format_bytes(device.held or 0)} of this process = {format_bytes(device.foreign)} (other processes, and "
            "this one's context and libraries)."
        )
    if {"used", "limit"} <= size.keys():
        over = size["used"] - size["limit"]
        more = f", {format_bytes(over)} over" if over > 0 else ""
        scope = values.get("scope") or ("node" if finding.kind == "host_kernel" else "limit")
        found.append(f"{values.get('who') or 'The limit'}: {said['used']} used of {said['limit']} (per {scope}){more}.")
    elif "used" in size:
        found.append(f"The killed process alone held {said['used']} (one process, anonymous memory).")
    return found


def _phase(streams: list[Stream], best: Sign, signs: Sequence[Sign], num_read: int) -> JobPhase:
    """The phase at the deciding sign, else at another that says the same, or at the ends of the logs."""
    is_outside = best.stream >= num_read  # the kernel's log and the accounting show no phase
    candidates = [] if is_outside else [best]
    candidates += [one for one in signs if one is not best and one.name == best.name and one.stream < num_read]
    candidates += [one for one in signs if is_outside and one.name == "killed" and one.stream < num_read]
    for index, stream in enumerate(streams[:num_read]):  # a line without its rank belongs to a traceback of some rank
        is_near = bool(stream.lines) and stream.lines[-1].number < best.number + 2
        if index != best.stream and stream.lines and (is_near or is_outside):
            candidates.append(_mark(streams, index, len(stream.lines) - 1, best.name))
    found = (find_phase(streams, sign) for sign in candidates[:6])
    return next((phase for phase in found if phase != "unknown"), "unknown")


def _mark(streams: Sequence[Stream], index: int, place: int, name: str = "success") -> Sign:
    return Sign(name, (streams[index].lines[place],), {}, index, place)


def _ended(
    streams: list[Stream],
    signs: Sequence[Sign],
    readings: _Readings,
    witnesses: Witnesses,
    kept: Sequence[Checkpoint],
    spoken: Sequence[Line],
) -> Diagnosis:
    """No failure in these lines. A good end needs all epochs, whole checkpoints and exit status 0."""
    shown = ((at, own[-1].place if own else len(streams[at].lines) - 1) for at, own in enumerate(readings))
    phases = (find_phase(streams, _mark(streams, at, place)) for at, place in shown if streams[at].lines)
    lines = [line for stream in streams for line in stream.lines]
    said = [line for line in lines if line.text.strip()]
    full = {line.file for line in said}
    ends = [sign for sign in signs if sign.name == "success"]
    progress, torn = read_progress(lines, chain.from_iterable(readings)), names_of(kept, "damaged")
    doubts = {
        progress.doubt: [progress.bar.line if progress.bar else None, progress.claim],
        "the log says that it is done, and the accounting has exit status "
        f"{witnesses.status}" if witnesses.status else "": [witnesses.row],
        f"checkpoints that cannot be loaded: {torn}" if torn else "": [],
    }  # fmt: skip
    doubts = {text: own for text, own in doubts.items() if text and ends}
    is_said = witnesses.status == 0 and any("exit_code" not in one.values for one in ends)
    is_proved = is_said or any("attempt" in one.values for one in ends)
    cause, checks = "unknown", _MISSING
    sure: Sure = "not shown"
    cited: Sequence[Line | None] = spoken[-3:] or said[-3:]
    if doubts:
        cause, sure, checks = "incomplete", "likely", (_LOOK,)
        cited = [line for own in doubts.values() for line in own]
    elif ends:
        cause, sure, cited = "completed", "proved" if is_proved else "likely", []
        unproved = f"{_UNPROVED} {names}" if (names := names_of(kept, "not proved")) else ""
        checks = tuple(filter(None, ("" if is_proved else _ALONE, unproved)))
    return Diagnosis(
        oom=False,
        recovered=False,
        kind="none",
        cause=cause,
        phase=next((phase for phase in phases if phase != "unknown"), "unknown"),
        confidence=sure,
        evidence=_evidence(cited),
        timeline=_timeline(streams, None, signs, readings, None),
        arithmetic=tuple(doubts),
        checks=checks,
        notes=tuple(_EMPTY.format(file) for file in dict.fromkeys(line.file for line in lines) if file not in full),
    )
