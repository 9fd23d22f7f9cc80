"""Extrapolate the peaks of a step that takes too long to trace from traces of it at smaller sizes.

The bytes of each part are fitted at the same moments of every trace. At a larger size another moment of the phase may
be the peak: the end of the backward pass holds all gradients, its begin all activations.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memfit.errors import OutOfTimeError, UntraceableError
from memfit.estimation._allocator import MIN_BLOCK, Replay
from memfit.estimation._events import PARTS, Part, Peak, Phase, Trace
from memfit.estimation._interval import Interval
from memfit.estimation._time_limit import limit_seconds, out_of_time, share_time, time_left
from memfit.units import format_bytes

#: The share of the time that is left for the first trace of a size: a size that does not shorten a trace uses it up.
_FOR_FIRST = 0.3
#: The share of the time for which the larger traces are planned: their speed scatters.
_PLANNED = 0.7
#: Traces begin at this part of the size.
_FIRST = 128
_MOST_DEGREE = 2  # a part is constant, linear or quadratic in the size
_Moments = Mapping[tuple[Phase, str], Mapping[Part, int]]


class Size(NamedTuple):
    """A size of a step that may be made smaller, such as its tokens."""

    name: str
    full: int
    make: Callable[[int], Callable[[], Any]]  # what `memfit.estimation.trace` takes, at another size


def sizes_of_batch(batch: Any, make: Callable[[Any], Callable[[], Any]]) -> Iterator[Size]:
    """Yield the sizes of a tree of tensors that may be made smaller: the second dimension first, then the first."""
    from memfit.estimation._program import find_tensors, map_tensors

    for axis in (1, 0):
        for full, _ in Counter(one.shape[axis] for one in find_tensors(batch) if one.dim() > axis).most_common():

            def cut(number: int, axis: int = axis, full: int = full) -> Callable[[], Any]:
                def shorten(tensor: Any) -> Any:
                    is_cut = tensor.dim() > axis and tensor.shape[axis] == full
                    return tensor.narrow(axis, 0, number).clone() if is_cut else tensor

                return make(map_tensors(shorten, batch))

            yield Size(f"rows of dimension {axis} of the batch", full, cut)


class _Sample(NamedTuple):
    size: int
    seconds: float
    trace: Trace
    replay: Replay
    moments: _Moments


def extrapolate(
    sizes: Iterable[Size], run: Callable[[Callable[[], Any]], tuple[Trace, Replay]]
) -> tuple[dict[Phase, Peak], Replay, Trace]:
    """Return peaks, allocator and the rest of a trace at its full size, from traces at smaller ones. ``run`` traces a
    step and replays the allocator. The first of ``sizes`` that shortens the trace is used; OutOfTimeError if there is
    none, or three smaller traces take too long, too."""
    names = []
    for size in sizes:
        names.append(size.name)
        try:
            samples = _sample(size, run)
        except UntraceableError:  # the model needs this size, or smaller ones take too long, too
            continue
        return _continue_to(size, samples)
    tried = f"smaller {' or '.join(names)} took too long, too" if names else "its batch and its length are fixed"
    raise out_of_time(f"the trace was not done after {limit_seconds():.0f} s of CPU, and {tried}")


def _sample(size: Size, run: Callable[[Callable[[], Any]], tuple[Trace, Replay]]) -> list[_Sample]:
    """Trace three or four smaller sizes, the largest ones that the time allows."""

    def sample(number: int) -> _Sample:
        begin = time.process_time()
        trace, replay = run(size.make(number))
        return _Sample(number, time.process_time() - begin, trace, replay, find_moments(trace))

    first = max(2, size.full // _FIRST)
    with share_time(_FOR_FIRST):
        found = [sample(first), sample(2 * first)]
    low, high = found
    slope = max((high.seconds - low.seconds) / first, high.seconds / size.full / 2)
    fixed = max(0.0, high.seconds - slope * high.size)
    largest = int(min((time_left() * _PLANNED - 2 * fixed) / (1.5 * slope), size.full // 2))
    for number in (largest // 2, largest):
        if number <= found[-1].size:
            raise out_of_time(f"{size.name} of {2 * first} take {high.seconds:.0f} s of CPU already")
        try:
            found.append(sample(number))
        except OutOfTimeError:
            if len(found) < 3:
                raise
    return found


def _continue_to(size: Size, samples: Sequence[_Sample]) -> tuple[dict[Phase, Peak], Replay, Trace]:
    at = [one.size for one in samples]

    def fit_all(counts: Sequence[int]) -> Interval:
        return fit(at, counts, size.full)

    peaks: dict[Phase, Peak] = {}
    for key in dict.fromkeys(key for one in samples for key in one.moments):
        of_moment = [one.moments.get(key, {}) for one in samples]
        parts = {part: fit_all([one.get(part, 0) for one in of_moment]) for part in PARTS}
        parts = {part: one for part, one in parts.items() if one.upper}
        peak = Peak(
            sum(one.value for one in parts.values()),
            {part: one.value for part, one in parts.items()},
            {part: one.upper - one.value for part, one in parts.items()},
        )
        before = peaks.get(key[0], Peak(-1))
        if peak.num_bytes + sum(peak.widths.values()) > before.num_bytes + sum(before.widths.values()):
            peaks[key[0]] = peak
    last, total = samples[-1], max(peak.num_bytes for peak in peaks.values())
    caches = [one.replay.reserved_bytes - max(one.replay.allocated_bytes.values()) for one in samples]
    most = max(caches[-1], int(caches[-1] * total / max(last.replay.allocated_bytes.values())))
    cache = min(max(fit_all(caches).value, caches[-1]), most)
    phases = dict.fromkeys(phase for one in samples for phase in one.trace.convolution_slack)
    width = max(sum(peak.widths.values()) for peak in peaks.values())
    note = (
        f"extrapolated: a trace of {size.full} {size.name} takes too long; each part was traced at "
        f"{', '.join(map(str, at[:-1]))} and {at[-1]} {size.name} and continued as constant, linear or quadratic; "
        f"what that leaves widens the bound by {format_bytes(width)}"
    )
    rest = replace(
        last.trace,
        notes=(*dict.fromkeys(note for one in samples for note in one.trace.notes), note),
        slack_bytes=fit_all([one.trace.slack_bytes for one in samples]).upper,
        convolution_slack={
            phase: fit_all([one.trace.convolution_slack.get(phase, 0) for one in samples]).upper for phase in phases
        },
    )
    allocated = {phase: peak.num_bytes for phase, peak in peaks.items()}
    return peaks, Replay(allocated, total + cache, width=most - cache), rest


def fit(sizes: Sequence[int], counts: Sequence[int], at: int) -> Interval:
    """Continue counts at growing sizes to a larger one; the width is what the next degree would add there.

    Newton's polynomial begins with the largest sizes. Its degree is the one after which the next term is least, and
    each term is checked by a smaller size.

    >>> fit([4, 8, 16], [1, 1, 1], 64), fit([4, 8, 16], [9, 17, 33], 64), fit([4, 8, 16, 32], [16, 64, 256, 1024], 64)
    (Interval(value=1, upper=1), Interval(value=129, upper=129), Interval(value=4096, upper=4096))
    >>> fit([4, 8, 16], [9, 18, 33], 64)
    Interval(value=123, upper=207)
    """
    places, column = sizes[::-1], [float(one) for one in counts[::-1]]
    terms = []
    for degree in range(len(places)):
        terms.append(column[0] * math.prod(at - one for one in places[:degree]))
        gaps = range(len(column) - 1)
        column = [(column[i + 1] - column[i]) / (places[i + degree + 1] - places[i]) for i in gaps]
    degree = min(range(min(_MOST_DEGREE + 1, len(terms) - 1)), key=lambda one: round(abs(terms[one + 1])))
    value = max(0, round(sum(terms[: degree + 1])))
    return Interval(value, value + round(abs(terms[degree + 1])))


def find_moments(trace: Trace) -> dict[tuple[Phase, str], dict[Part, int]]:
    """Return the bytes of each part, rounded as torch does, at the begin of each phase and where a part is highest."""
    sizes: dict[int, int] = {}
    alive: dict[Part, int] = {}
    found: dict[tuple[Phase, str], dict[Part, int]] = {}
    highest: dict[tuple[Phase, str], int] = {}
    total = 0
    for block, num_bytes, phase in trace.events:
        found.setdefault((phase, "begin"), dict(alive))
        change, part = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK or -sizes.pop(block), trace.parts[block]
        if num_bytes:
            sizes[block] = change
        total += change
        alive[part] = alive.get(part, 0) + change
        for name, count in (("all", total), (part, alive[part])):
            if num_bytes and count > highest.get((phase, name), 0):
                highest[phase, name], found[phase, name] = count, dict(alive)
    return found
