"""Read what a run left: the logs, how its jobs ended and who killed them, which memory grew, whole checkpoints."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from memfit.diagnosis._grown import add_growth
from memfit.diagnosis._record import Diagnosis
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.errors import DamagedError, PeerFailedError, UsageError
from memfit.files import check_owner, fits, open_own, open_regular, pass_over, read_json
from memfit.masking import mask
from memfit.rundir import OUTCOME, STATUS, EventTail, JobState, RunDir, RunState, read, read_status_file
from memfit.units import format_bytes, format_count, list_some, natural_order

T = TypeVar("T")
#: Files of a folder that are logs.
LOGS = ("*.out", "*.err", "*.log", "*.txt", "*.gz", "*.out.*", "*.err.*", "*.log.*")
_SIGKILL, _SHELLS_SIGKILL = -9, 137  # as Python counts, and as a shell or srun does
_NONE = type(None)
_COUNTS = ({"own": (int, _NONE), "above": ({str: int}, _NONE)}, _NONE)
#: The fields of a status's evidence that are read; evidence with other types is passed over.
_EVIDENCE = {"oom_kills": ({"before": _COUNTS, "after": _COUNTS}, _NONE), "ran_out_by": (str, _NONE)}
_EVIDENCE |= dict.fromkeys(("wall_bytes", "data_limit_bytes", "rank"), (int, _NONE))
#: What of a growth is read that was told while the job ran.
_GROWTH = {"kind": frozenset({"growth"}), "past": str, "who": str, "unit": str}
#: States under another heading, and those under their own.
_STATES = {"completed": "success", "timeout": "walltime"}
_STATES |= {name: name for name in ("preempted", "cancelled", "node_fail")}
_NAME = re.compile(r"\b\w*(?:Error|Exception|Interrupt|Exit)(?::|$)")
#: Events that a training records.
_EVENTS = {"shm_full": "shm", "loader_worker_died": "killed", **dict.fromkeys(("aside", "short"), "pressure")}
_EVENTS |= dict.fromkeys(("oom", "skip"), "skipped_batches")
_KEPT = {"phase": str, "rank": int, "pids": [int]}  # what is read of them
#: The phase of a rank's places, where it is not the training.
_PHASES = {"begin": "build", "load": "build", "save": "checkpoint", "sealed": "checkpoint", "validate": "validate"}

_LARGEST = {"owner": str, "shape": [int], "dtype": str, "count": int, "bytes": int}
#: What is read of a flight record of ``memfit.training``; a part that it could not read is a text.
_FLIGHT = {"tensors": ({"tensors_bytes": {str: int}, "largest": [_LARGEST]}, str)}

State = Literal["whole", "damaged", "not proved"]

_CHECKPOINT = re.compile(r".*\.(?:ckpt|pt|pth|safetensors)|pytorch_model.*\.bin")
#: MS-DOS's mark of a folder. torch reads nothing of a record that has it: its tensor is what lay in memory before.
_FOLDER = 0x10
_MOST_FOLDERS = 2000
_TORN = (zipfile.BadZipFile, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Run:
    """A run directory, or the job of it that a path names."""

    def __init__(self, folder: Path, inside: Sequence[str]) -> None:
        self.dir = RunDir(folder)
        self.only = inside[1] if len(inside) > 1 and inside[0] == "jobs" else None

    @functools.cached_property
    def state(self) -> RunState | None:
        return read_or_say(lambda _: read(self.dir), self.dir.path)

    @property
    def folders(self) -> list[Path]:
        folders = sorted((self.dir.path / "jobs").iterdir())
        return [one for one in folders if one.is_dir() and self.only in (None, one.name)]

    @functools.cached_property
    def signs(self) -> list[Sign]:
        signs = [sign for folder in self.folders for sign in _ends_of(folder, self.state)]
        failed = {sign.values["job"] for sign in signs if sign.name != "success" and not sign.values["recovered"]}
        files = sorted(self.dir.events_dir.glob("*.jsonl"))
        return signs + [sign for path in files for sign in _survived(path, self, failed)]

    def add_facts(self, found: Diagnosis) -> Diagnosis:
        """Return a diagnosis with rank and node, peak and limit, and a sentence, of the job that it cites a file of."""
        cited = Path(found.evidence[0].file if found.evidence else "")
        job = self.state.jobs.get(cited.parent.name) if self.state else None
        is_own = cited.resolve().is_relative_to(self.dir.path.resolve())
        if job is None or not is_own or found.cause in ("unknown", "completed"):
            return found
        used, limit = job.peak_bytes, _limit_of(_evidence_of(job.evidence), job, self.state)
        ranks = [format_bytes(one["peak_bytes"]) for one in job.ranks if one["peak_bytes"]]
        told = [
            f"attempt {job.attempt}" if job.attempt > 1 else "",
            f"a peak of {format_bytes(used)}" if used else "",
            f"a limit of {format_bytes(limit)}" if limit else "",
            f"peaks of its {format_count(len(ranks), 'rank')}: {list_some(ranks, 8)}" if ranks else "",
            *(job.explain_lost(event) for event in job.lost[-1:]),
        ]
        notes = [mask(f"{job.name}: {', '.join(filter(None, told))}.")] if any(told) else []
        sizes = {"used": used, "limit": limit} if found.kind.startswith("host") else {}
        grown, by = fits(job.growth, _GROWTH), _evidence_of(job.evidence).get("ran_out_by")
        has_grown = by == "growth" or (grown and not by)
        if grown and job.growth["unit"] == "second":  # loading data grows too: its log must show steps
            has_grown = found.phase == "train" and any(one.what == "last progress" for one in found.timeline)
        if found.oom and not found.recovered and has_grown:
            text = job.growth["past"] if grown else "its memory grew evenly"
            found = add_growth(found, f"{job.name}: {text} until it met its limit", str(job.growth.get("who")))
        return replace(
            found,
            where=found.where | {name: one for name, one in _place_of(job).items() if found.where.get(name) is None},
            figures={name: size for name, size in sizes.items() if size} | found.figures,
            notes=(*found.notes, *notes),
            whom=(*found.whom, *("memfit" for _ in notes)),
        )

    def notes(self) -> Iterator[str]:
        """Yield which ranks were lost, what grows in jobs that did not die of it, and what filled a memory."""
        lost: defaultdict[str, list[str]] = defaultdict(list)
        for one in self.signs:
            if one.name == "rank_lost":
                lost[one.values["job"]].append(one.values["text"])
        done = {one.values.get("job") for one in self.signs if one.name == "success"}
        for job, texts in lost.items():
            times = "once" if len(texts) == 1 else f"{len(texts)} times"
            again = f"The group began again {times}{', and the job completed' if job in done else ''}."
            yield f"{job}: {list_some(texts)}; errors of other ranks follow from that. {again}"
        for folder in self.folders:
            known = self.state.jobs.get(folder.name) if self.state else None
            if known and known.growth_told and (known.state != "out_of_memory" or not fits(known.growth, _GROWTH)):
                yield known.growth_told
            record = _newest(folder, "oom_*.json")
            found = record and read_or_say(lambda one: read_json(one, _FLIGHT, most_bytes=16 << 20), record)
            if record and found and not isinstance(tensors := found["tensors"], str):
                held = ", ".join(f"{format_bytes(size)} on {name}" for name, size in tensors["tensors_bytes"].items())
                largest = "; ".join(
                    f"{format_bytes(one['bytes'])} {one['owner'][:80]} {one['shape']} {one['dtype']} x {one['count']}"
                    for one in tensors["largest"][:3]
                )
                when = f"{folder.name}, when an allocation failed ({record.name})"
                yield f"{when}: tensors held {held}; the largest: {largest}."


def find_run(path: Path) -> Run | None:
    """Return the run directory that a path is or lies in; refuse that of another user."""
    for folder in (path, *path.parents, *path.absolute().parents):
        inside = Path(os.path.relpath(path, folder)).parts
        if ".." not in inside and os.path.lexists(folder / "run.json") and (folder / "jobs").is_dir():
            check_owner(folder.resolve())
            return Run(folder, inside)
    return None


def open_file(path: Path) -> BinaryIO:
    """Open a file that a user names or that lies below a folder. Only in a run directory must it be an own one.

    Elsewhere it may be a link. A pipe is read only where the shell made it, as ``<(...)`` does; others are an OSError.
    """
    if str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/")):
        return open(path, "rb")
    try:
        if find_run(path) is not None:
            return open_own(path)
    except UsageError as error:
        raise OSError(errno.EPERM, error.what, str(path)) from None
    return open(open_regular(os.path.realpath(path)), "rb")


def read_log(path: Path) -> list[Stream]:
    """Return the streams of a log; what cannot be opened, or is no text, is an OSError."""
    with open_file(path) as file:
        about = os.fstat(file.fileno())
    if streams := _read(path, about.st_size, about.st_ino, about.st_mtime_ns):
        return streams
    raise OSError(errno.EINVAL, "it is no text", str(path))


@functools.lru_cache(maxsize=32)
def _read(path: Path, *_: int) -> list[Stream]:
    """Read a log once, although it is asked for its signs and for its settings."""
    with open_file(path) as file:
        return read_streams(path, file)


def read_text(path: Path, rule: str, remedy: str, most_bytes: int = -1) -> str:
    """Return the text of a file that a user names; one that cannot be read is an error with this rule and remedy."""
    try:
        with open_file(path) as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", rule=rule, remedy=remedy) from None


def read_or_say(read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except DamagedError as error:
        pass_over(error.what)
    except OSError as error:
        pass_over(f"{path}: {error.strerror}")
    return None


def logs_below(path: Path) -> list[Path]:
    """Return the logs of a run directory, of each job its errors first, or those of a folder; a log itself."""
    if not path.is_dir():
        return [path]
    if (run := find_run(path)) is not None:
        logs = (folder / name for folder in run.folders for name in ("err.log", "out.log"))
        return [log for log in logs if os.path.lexists(log) and (not log.is_file() or log.stat().st_size)]
    return sorted({log for form in LOGS for log in path.glob(form) if log.is_file()})


def streams_of(path: Path | str) -> list[Stream]:
    """Return the streams of a log, of each log of a folder or a run directory, or of standard input."""
    if str(path) == "-":
        return read_streams("-", sys.stdin.buffer)
    path, found = Path(path), []
    logs = logs_below(path)
    if not logs and find_run(path) is None:
        raise UsageError(
            f"No log in {path}.",
            rule=f"A folder's logs are {', '.join(LOGS[:5])}.",
            remedy="Name the log itself: memfit diagnose PATH/slurm-123.out",
        )
    for log in logs:
        try:
            found += read_log(log)
        except OSError as error:
            if log is path:
                remedy = "Give a log, a folder of logs, or - for standard input."
                raise UsageError(f"Cannot read {path}.", rule=f"{error.strerror}.", remedy=remedy) from None
            pass_over(f"{log}: {error.strerror}")
    return found


def _survived(path: Path, run: Run, failed: Collection[str]) -> Iterator[Sign]:
    """Yield what a training met and recorded, and each rank after whose loss its group began again."""
    lost: dict[str, tuple[Line, dict[str, Any]]] = {}
    for number, event in read_or_say(lambda one: EventTail(one).read_lines(), path) or ():
        job, kind = str(event.get("job")), str(event.get("kind"))
        text = json.dumps(event, separators=(",", ":"))[:4000]
        line = Line(str(path), number, text, time=str(event.get("time", "")))
        if run.only not in (None, job):
            continue
        if kind == "rank_lost":
            lost[job] = line, event
        elif kind == "ranks_again":
            line, event = lost.pop(job, (line, event))
            values = {"job": job, "recovered": job not in failed, "folder": run.dir.job_dir(job)}
            values |= {"phase": _PHASES.get(str(place), "train")} if (place := event.get("place")) else {}
            values |= {"rank": rank} if isinstance(rank := event.get("rank"), int) else {}
            yield Sign("rank_lost", (line,), values | {"text": str(event.get("text")).removeprefix(f"{job} ")})
        elif kind in _EVENTS and (kind != "loader_worker_died" or event.get("exit_code") == _SIGKILL):
            of_host = kind == "oom" and "device" not in str(event.get("memory"))
            values = {key: event[key] for key in _KEPT if fits(event.get(key), _KEPT[key])}
            yield Sign("pressure" if of_host else _EVENTS[kind], (line,), values)


def _evidence_of(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) and fits(found, _EVIDENCE) else {}


def _place_of(job: JobState) -> dict[str, Any]:
    """The rank that a job lost, and its node."""
    ranks = (_evidence_of(job.evidence).get("rank"), *(event["rank"] for event in job.lost[-1:]))
    rank = next((one for one in ranks if one is not None), None)
    node = next((str(one["node"]) for one in job.ranks if one["rank"] == rank and one.get("node")), job.node)
    if re.fullmatch(r"\d+ nodes", node):  # its cause begins with the node that is told of
        node = job.cause.partition(": ")[0] if re.match(r"[\w.-]+: ", job.cause) else ""
    return {name: value for name, value in (("rank", rank), ("node", node)) if value not in (None, "")}


def _limit_of(evidence: Mapping[str, Any], job: JobState | None, state: RunState | None) -> int | None:
    asked = job.reserved_bytes if job and state and state.budget.get("backend") else None
    return evidence.get("wall_bytes") or evidence.get("data_limit_bytes") or asked


def _ends_of(folder: Path, state: RunState | None) -> Iterator[Sign]:
    """Yield how each attempt ended, as far as known."""
    ended = folder / OUTCOME
    last = ended if ended.is_file() else folder / STATUS  # it still runs, or its watcher died
    paths = [*sorted(folder.glob("outcome_*.json"), key=natural_order), last]
    records = [(path, record) for path in paths if (record := read_or_say(read_status_file, path)) is not None]
    for path, record in records:
        is_last, cause = record is records[-1][1], record.get("cause") or ""
        job = state.jobs.get(folder.name) if state and is_last else None
        evidence = _evidence_of(record.get("evidence"))
        before, after = ((evidence.get("oom_kills") or {}).get(name) or {} for name in ("before", "after"))
        above = after.get("above") or {}
        counts = [(before.get("own"), after.get("own"))]
        counts += [(count, above.get(group)) for group, count in (before.get("above") or {}).items()]
        name, who = _judge(record, evidence, counts)
        known = {"used_bytes": record.get("peak_bytes") or None, "limit_bytes": _limit_of(evidence, job, state)}
        known |= {"rank": evidence.get("rank")} | (_place_of(job) if job else {})
        values: dict[str, Any] = {"who": who, "job": folder.name, "attempt": int(record.get("attempt") or 1)}
        values |= {"phase": record.get("phase") or ""} | {key: one for key, one in known.items() if one is not None}
        values["recovered"] = records[-1][1]["state"] == "completed" and not is_last
        if name == "killed":  # its own cgroup's count stood still: it was not killed for memory
            values["stranger"] = None not in counts[0]
        if name:
            text = f"{folder.name}: {record['state']}{cause and ': '}{cause}"
            yield Sign(name, (Line(str(path), 1, text),), values)


def _judge(
    record: Mapping[str, Any], evidence: Mapping[str, Any], counts: Sequence[tuple[int | None, int | None]]
) -> tuple[str, str]:
    """The heading for the end of a job, and who ended it, by the counts of kills."""
    state, code, is_own = record["state"], record.get("exit_code"), _NAME.search(str(record.get("cause")))
    is_killed = code in (_SIGKILL, _SHELLS_SIGKILL)
    if state == "preempted" and record.get("asked"):
        state = "cancelled"
    if state != "out_of_memory":
        ended = "hang" if code == PeerFailedError.exit_code else "own_exception" if is_own else "exit_status"
        name = "killed" if code == _SIGKILL else ended if state == "failed" else ""
        return _STATES.get(state, name), "memfit" if state in ("cancelled", "timeout") else ""
    if witness := evidence.get("witness"):
        return "cgroup_kill", str(witness).capitalize()
    if evidence.get("place") == "device":
        return "device_refused", ""
    if any(first is not None and last is not None and last > first for first, last in counts):
        return "cgroup_kill", "the kernel" if is_killed else ""
    if not is_killed:
        return "host_refused", ""
    # No count of its cgroups rose: memfit ended it at its wall, or the kernel did for the whole host.
    is_memfit = counts[0][1] is not None or bool(record.get("asked"))
    return ("cgroup_kill", "memfit") if is_memfit else ("global_kill", "the kernel")


def _newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(pattern), key=lambda one: one.lstat().st_mtime, default=None)


class Checkpoint(NamedTuple):
    """A file and its path below the folder that was given. A ``damaged`` one cannot be loaded."""

    name: str
    bytes: int
    written: float  # in Unix seconds
    state: State


def judge_checkpoints(paths: Sequence[Path]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints below some paths; those below a sole path have short names."""
    found = []
    for top in paths:
        for folder, names, files in islice(os.walk(top), _MOST_FOLDERS):
            names.sort()
            for path in (Path(folder, name) for name in files if _CHECKPOINT.fullmatch(name)):
                stat = path.stat() if path.exists() else os.stat_result([0] * 10)
                name = str(path.relative_to(top) if len(paths) == 1 else path)
                found.append(Checkpoint(name, stat.st_size, stat.st_mtime, _state_of(path)))
    return tuple(sorted(found))


def names_of(checkpoints: Iterable[Checkpoint], state: State) -> str:
    return list_some([one.name for one in checkpoints if one.state == state])


def _state_of(path: Path) -> State:
    try:
        with open_file(path) as file:
            head, size = file.read(8), os.fstat(file.fileno()).st_size
            if path.suffix == ".safetensors":
                # Eight bytes with the header's length, the header, and the tensors up to the file's end.
                length = int.from_bytes(head, "little")
                header = json.loads(file.read(length)) if length < size else {}
                ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
                return "whole" if 8 + length + max(ends, default=0) == size else "damaged"
            if not head.startswith(b"PK\x03\x04"):
                return "not proved" if head.strip(b"\0") else "damaged"  # of older torch; empty, or a disk's zeros
            with zipfile.ZipFile(file) as archive:
                torn = any(
                    one.header_offset + one.compress_size > archive.start_dir
                    or (one.file_size and (one.is_dir() or one.external_attr & _FOLDER))
                    for one in archive.infolist()
                )
            return "damaged" if torn else "whole"
    except (FileNotFoundError, *_TORN):
        return "damaged"
    except OSError:  # not to be opened
        return "not proved"
