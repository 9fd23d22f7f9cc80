"""Find memory that grows from epoch to epoch, and what held it when an allocation failed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, pvariance

from memfit.diagnosis._runs import find_run, folders_of, read_or_say
from memfit.files import read_json
from memfit.memory import read_series
from memfit.rundir import read
from memfit.units import format_bytes, format_count, format_duration

_LEAST_EPOCHS, _LEAST_SHARE, _LEAST_ERRORS = 5, 0.01, 3.0
_CAUSES = (
    "more memory only delays its end; usual causes: a loss summed with its graph (add loss.item()), outputs kept in a "
    "list, a cache without a bound"
)
_LARGEST = {"owner": str, "shape": [int], "dtype": str, "count": int, "bytes": int}
#: What is read of a flight record of ``memfit.training``; a part that it could not read is a text.
_FLIGHT = {"tensors": ({"tensors_bytes": {str: int}, "largest": [_LARGEST]}, str)}


def run_notes(path: Path, *, by_time: bool) -> Iterator[str]:
    """Yield what grew in a run's jobs (``by_time``: also without epochs), and what filled the memory of a refusal."""
    if (run := find_run(path)) is None:
        return
    state = read_or_say(lambda _: read(run), run.path)
    limit = state.budget["binding"]["limit_bytes"] if state and state.budget else 0
    for folder in folders_of(run, path):
        ends = state.jobs[folder.name].epoch_ends if state and folder.name in state.jobs else ()
        if grown := explain_growth(folder, ends, limit, by_time=by_time):
            yield f"{folder.name}: {grown}."
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


def _newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(pattern), key=lambda one: one.lstat().st_mtime, default=None)


def explain_growth(job_dir: Path, ends: Sequence[float], limit_bytes: int, *, by_time: bool = False) -> str:
    """Return what grows in a job's newest attempt, and when it meets the limit; empty if nothing does.

    Args:
        job_dir: The folder of the job, with its series of memory.
        ends: When its epochs ended, in Unix seconds.
        limit_bytes: The limit of the host's memory; 0 if it is not known.
        by_time: Without epochs, look at ten equal pieces of its time.
    """
    path = _newest(job_dir, "memory*.jsonl")
    samples = path and read_or_say(read_series, path)
    if not samples:
        return ""
    times = [one.time for one in samples]
    ends, seconds, unit = [end for end in ends if end >= times[0]], times[-1] - times[0], "an epoch"
    if not ends and by_time:
        pieces = min(len(samples), 10)
        ends, unit = [times[0] + seconds * at / pieces for at in range(pieces + 1)], f"in {seconds / pieces:.1f} s"
    places = [*enumerate(pairwise(bisect_right(times, end) for end in ends))]
    series = {"host memory": [max(one.peak_bytes, one.private_bytes) for one in samples]}
    for device in samples[-1].device_bytes:
        series[f"memory of {device}"] = [one.device_bytes.get(device, 0) for one in samples]
    for name, sizes in series.items():
        points = [(at, max(sizes[i:j])) for at, (i, j) in places if i < j]
        if slope := find_growth(points):
            now = points[-1][1]
            said = f"{name} grows by {format_bytes(int(slope))} {unit}, up to {format_bytes(now)}"
            if unit == "an epoch" and name == "host memory" and limit_bytes > now:
                left = (limit_bytes - now) / slope
                time = format_duration(left * (ends[-1] - ends[0]) / (len(ends) - 1), short=True)
                time = f"{format_count(round(left), 'epoch')}, about {time}"
                said += f"; it meets the limit of {format_bytes(limit_bytes)} in {time}"
            return f"{said}; {_CAUSES}"
    return ""


def find_growth(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much a series of (epoch, size) rises an epoch; 0 if that is not sure.

    The slope must exceed 1 % of the peak and three times its standard error, and the newer half must rise as well.

    >>> find_growth([*enumerate([10, 20, 30, 40, 50])]), find_growth([*enumerate([10, 30, 50, 50, 50, 50])])
    (10.0, 0.0)
    """
    if len(points) < _LEAST_EPOCHS:
        return 0.0
    at, sizes = zip(*points, strict=True)
    slope, start = linear_regression(at, sizes)
    spread = (len(at) - 2) * len(at) * pvariance(at)
    error = math.sqrt(sum((size - start - slope * one) ** 2 for one, size in points) / spread)
    half, least = len(at) // 2, _LEAST_SHARE * max(sizes)
    newest = linear_regression(at[half:], sizes[half:]).slope
    return slope if slope > max(least, _LEAST_ERRORS * error) and newest > least else 0.0
