"""Decode videos in bounded memory: as a stream, by one thread, and only the frames that are kept.

A container that is not closed keeps its threads and buffers, so each is closed here. A frame that leaves is a copy: a
view would keep the whole picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import av

#: A container may tell other times than its frames have; what lies this share of the length before the end is the end.
_END = 0.02
#: A file whose packets end before this share of the length that it tells was cut off.
_LEAST_SHARE = 0.7
#: What ffmpeg reads from text: letters drawn as pictures, subtitles, lists of other files.
_NO_VIDEO = frozenset({"tty", "ass", "srt", "webvtt", "concat", "hls", "lavfi"})


class BadVideoError(Exception):
    """A file that cannot be decoded; the text says why in a few words."""


@dataclass(frozen=True)
class VideoInfo:
    """What a file holds, by its packets and not by its header."""

    num_frames: int
    seconds: float
    fps: float
    width: int
    height: int
    codec: str
    num_bytes: int


def decoder_version() -> str:
    """Return what decodes: other versions may choose other frames."""
    import av

    return f"av {av.__version__}, libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"


def probe(path: Path) -> VideoInfo:
    """Return what a file holds.

    Raises:
        BadVideoError: If it has no video, or its first frame cannot be decoded.
    """
    with _opened(path) as (container, stream):
        first = next(_decoded(container, stream), None)
        if first is None:
            raise BadVideoError("no frame can be decoded")
        width, height, codec = first.width, first.height, stream.codec_context.name
    times = _times(path)
    seconds = float(times[-1] - times[0]) * len(times) / max(1, len(times) - 1) if len(times) > 1 else 0.0
    fps = len(times) / seconds if seconds else 0.0
    return VideoInfo(len(times), seconds, fps, width, height, codec, path.stat().st_size)


def sample_frames(path: Path, num_frames: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the frames nearest to evenly spaced times, shape (num_frames, 3, size, size), in memory of their own.

    Raises:
        BadVideoError: If the file is damaged before the last of these times.
    """
    times = _times(path)
    wanted = times[0] + (np.arange(num_frames) + 0.5) / num_frames * (times[-1] - times[0])
    found = np.empty((num_frames, 3, size, size), np.uint8)
    at = num_decoded = 0
    last: tuple[float, Any] | None = None

    def keep(frame: av.VideoFrame) -> None:
        nonlocal at
        picture = frame.reformat(size, size, "rgb24").to_ndarray()
        found[at] = picture.transpose(2, 0, 1)
        at += 1

    with _opened(path) as (container, stream):
        for frame in _decoded(container, stream):
            now = times[min(num_decoded, len(times) - 1)] if frame.time is None else frame.time
            num_decoded += 1
            while at < num_frames and last is not None and now - wanted[at] >= wanted[at] - last[0]:
                keep(last[1])
            if at == num_frames:
                break
            last = now, frame
        near_end = times[-1] - _END * (times[-1] - times[0]) - 2 * (times[-1] - times[0]) / len(times)
        while at < num_frames and last is not None and last[0] >= min(wanted[at], near_end):
            keep(last[1])
        last = None
    if at < num_frames:
        raise BadVideoError(f"damaged after frame {num_decoded} of {len(times)}")
    return found


def _decoded(container: Any, stream: Any) -> Iterator[av.VideoFrame]:
    """Yield the frames that can be decoded; what is missing shows by their times."""
    from av import FFmpegError

    for packet in container.demux(stream):
        if packet.size or packet.dts is None:  # an empty one repeats a frame; to the decoder it would be the end
            with suppress(FFmpegError):
                yield from packet.decode()


def _times(path: Path) -> npt.NDArray[np.float64]:
    """Return the time of each packet of a file's video in seconds, ascending."""
    import av
    from av import FFmpegError

    with _opened(path) as (container, stream):
        times: list[float] = []
        rate = float(stream.average_rate or 25)
        try:
            for packet in container.demux(stream):
                if packet.size:
                    stamp = packet.dts if packet.pts is None else packet.pts
                    times.append(len(times) / rate if stamp is None else float(stamp * packet.time_base))
        except FFmpegError:
            pass  # what is left out is missed when it is decoded
        told = [float((stream.duration or 0) * stream.time_base), stream.frames / rate]
        told.append(0.0 if any(told) else (container.duration or 0) / av.time_base)
    if not times:
        raise BadVideoError("it has no frames")
    found = np.sort(np.asarray(times))
    length = (found[-1] - found[0]) * len(found) / max(1, len(found) - 1)
    if len(found) > 1 and length < _LEAST_SHARE * max(told):
        raise BadVideoError(f"it was cut off: {length:.1f} of {max(told):.1f} s are there")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a file with one decoder thread; close it and free its decoder whatever happens."""
    import av
    from av import FFmpegError

    try:
        container = av.open(f"file:{path}", metadata_errors="ignore")
    except FileNotFoundError:
        raise BadVideoError("there is no such file") from None
    except (OSError, FFmpegError) as error:
        why = "it is empty" if path.exists() and not path.stat().st_size else f"no video: {error.strerror}"
        raise BadVideoError(why) from None
    with container:
        if container.format.name in _NO_VIDEO:
            raise BadVideoError(f"no video: it is read as {container.format.name}")
        cover = av.stream.Disposition.attached_pic
        stream = next((one for one in container.streams.video if not one.disposition & cover), None)
        if stream is None:
            raise BadVideoError("it has no video stream")
        if stream.codec_context is None:
            raise BadVideoError("no decoder knows its format")
        stream.codec_context.thread_count = 1
        yield container, stream
