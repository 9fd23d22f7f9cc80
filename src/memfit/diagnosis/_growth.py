"""Find memory that grows from epoch to epoch, and what held it when an allocation failed."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from memfit.diagnosis._runs import find_run, folders_of
from memfit.errors import DamagedError
from memfit.memory import Sample, read_series
from memfit.rundir import event_time, fits, pass_over, read_events, read_json
from memfit.units import format_bytes, format_duration

_LEAST_EPOCHS, _MOST_PIECES = 5, 10
_LEAST_SHARE, _LEAST_ERRORS = 0.01, 3.0
_CAUSES = (
    "more memory only delays its end; usual causes: a loss summed with its graph (add loss.item()), outputs kept in a "
    "list, a cache without a bound"
)
_LARGEST = {"owner": str, "shape": [int], "dtype": str, "count": int, "bytes": int}
#: What is read of a flight record of ``memfit.training``; a part that it could not read is a text.
_FLIGHT = {"tensors": ({"tensors_bytes": {str: int}, "largest": [_LARGEST]}, str)}
_MOST_FLIGHT_BYTES, _MOST_TENSORS = 16 << 20, 3


def run_notes(path: Path, *, by_time: bool) -> Iterator[str]:
    """Yield what grew in the jobs of a run, and which tensors were the largest when an allocation failed.

    ``by_time`` also looks at jobs that recorded no epochs.
    """
    run = find_run(path)
    events = [] if run is None else read_events(run.events_dir)
    known = [one for one in events if fits(one, {"kind": frozenset({"budget"}), "binding": {"limit_bytes": int}})]
    for folder in [] if run is None else folders_of(run, path):
        ends = [event_time(one) for one in events if (one.get("kind"), one.get("job")) == ("epoch", folder.name)]
        if grown := explain_growth(folder, ends, known[-1]["binding"]["limit_bytes"] if known else 0, by_time=by_time):
            yield f"{folder.name}: {grown}."
        yield from _largest_tensors(folder)


def explain_growth(job_dir: Path, ends: Sequence[float], limit_bytes: int, *, by_time: bool = False) -> str:
    """Return what grows in a job's newest attempt, and when it meets the limit; empty if nothing does.

    Args:
        job_dir: The folder of the job, with its series of memory.
        ends: When its epochs ended, in Unix seconds.
        limit_bytes: The limit of the host's memory; 0 if it is not known.
        by_time: Without epochs, look at equal pieces of its time.
    """
    path = max(job_dir.glob("memory*.jsonl"), key=lambda one: one.lstat().st_mtime, default=None)
    try:
        samples = read_series(path) if path is not None else []
    except (DamagedError, OSError) as error:
        pass_over(str(error).partition("\n")[0])
        samples = []
    if not samples:
        return ""
    begin, seconds = samples[0].time, samples[-1].time - samples[0].time
    ends, unit = [end for end in ends if end >= begin], "an epoch"
    if not ends and by_time:
        pieces = min(len(samples), _MOST_PIECES)
        ends, unit = [begin + seconds * at / pieces for at in range(pieces + 1)], f"in {seconds / pieces:.1f} s"
    series = {"host memory": [float(max(one.peak_bytes, one.private_bytes)) for one in samples]}
    for device in samples[-1].device_bytes:
        series[f"memory of {device}"] = [float(one.device_bytes.get(device, 0)) for one in samples]
    for name, sizes in series.items():
        points = _peaks(samples, sizes, ends)
        if not (slope := find_growth(points)):
            continue
        said = f"{name} grows by {format_bytes(int(slope))} {unit}, up to {format_bytes(int(points[-1][1]))}"
        if unit == "an epoch" and name == "host memory" and limit_bytes > points[-1][1]:
            left = (limit_bytes - points[-1][1]) / slope
            time = format_duration(left * (ends[-1] - ends[0]) / (len(ends) - 1), short=True)
            said += f"; it meets the limit of {format_bytes(limit_bytes)} in {left:.0f} epochs, about {time}"
        return f"{said}; {_CAUSES}"
    return ""


def _peaks(samples: Sequence[Sample], sizes: Sequence[float], ends: Sequence[float]) -> list[tuple[float, float]]:
    """The peak of each epoch behind the first that has a sample."""
    times = [one.time for one in samples]
    places = [bisect_right(times, end) for end in ends]
    return [(at, max(sizes[i:j])) for at, (i, j) in enumerate(pairwise(places)) if i < j]


def find_growth(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much a series of (epoch, size) rises an epoch; 0 if that is not sure.

    The slope must exceed 1 % of the peak and three times its standard error, and the newer half must rise as well.

    >>> find_growth([*enumerate([10, 20, 30, 40, 50])]), find_growth([*enumerate([10, 30, 50, 50, 50, 50])])
    (10.0, 0.0)
    """
    if len(points) < _LEAST_EPOCHS:
        return 0.0
    at, sizes = zip(*points, strict=True)
    slope, start = statistics.linear_regression(at, sizes)
    spread = (len(at) - 2) * len(at) * statistics.pvariance(at)
    error = math.sqrt(sum((size - start - slope * one) ** 2 for one, size in points) / spread)
    half = len(at) // 2
    least = _LEAST_SHARE * max(sizes)
    newest = statistics.linear_regression(at[half:], sizes[half:]).slope
    return slope if slope > max(least, _LEAST_ERRORS * error) and newest > least else 0.0


def _largest_tensors(folder: Path) -> Iterator[str]:
    """Yield a sentence on the newest flight record of a job."""
    path = max(folder.glob("oom_*.json"), key=lambda one: one.lstat().st_mtime, default=None)
    try:
        found = read_json(path, _FLIGHT, most_bytes=_MOST_FLIGHT_BYTES) if path is not None else None
    except (DamagedError, OSError) as error:
        pass_over(str(error).partition("\n")[0])
        return
    if path is None or found is None or isinstance(found["tensors"], str):
        return
    total = ", ".join(f"{format_bytes(size)} on {name}" for name, size in found["tensors"]["tensors_bytes"].items())
    largest = "; ".join(
        f"{format_bytes(one['bytes'])} {one['owner'][:80]} {one['shape']} {one['dtype']} x {one['count']}"
        for one in found["tensors"]["largest"][:_MOST_TENSORS]
    )
    yield f"{folder.name}, when an allocation failed ({path.name}): tensors held {total}; the largest: {largest}."
