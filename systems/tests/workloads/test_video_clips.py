"""Sample clips, the decoder and the search for near-duplicates, on real files."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
av = pytest.importorskip("av")

from memfit_workloads.video.alike import frame_signatures, group_alike  # noqa: E402
from memfit_workloads.video.clips import make_clips  # noqa: E402
from memfit_workloads.video.decode import BadVideoError, probe, sample_frames  # noqa: E402

MIB = 1 << 20


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return folder, make_clips(folder, 24, seed=3, bad_share=0.2).to_pylist()


def write(path: Path, codec: str, times, levels=None, size: tuple[int, int] = (96, 64)) -> None:
    """Write a video of grey frames with the given times in seconds; a level is 10 times the frame's number."""
    width, height = size
    fixed = path.suffix in (".avi", ".mpg")
    with av.open(str(path), "w", format={".mkv": "matroska", ".mpg": "mpeg"}.get(path.suffix)) as container:
        stream = container.add_stream(codec, rate=25, options={"threads": "1", "preset": "ultrafast"})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 2_000_000
        clock = Fraction(1, 25) if fixed else Fraction(1, 1000)
        stream.codec_context.time_base = clock
        for number, at in enumerate(times):
            level = 10 * number % 250 if levels is None else levels[number]
            picture = np.full((height, width, 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(at / clock), clock
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def test_the_same_recipe_gives_the_same_bytes(clips, tmp_path):
    folder, rows = clips
    assert make_clips(tmp_path, 24, seed=3, bad_share=0.2).to_pylist() == rows
    for row in rows:
        assert (tmp_path / row["path"]).read_bytes() == (folder / row["path"]).read_bytes(), row


def test_each_segment_has_a_real_and_a_tampered_clip_and_the_bad_ones_are_named(clips):
    folder, rows = clips
    assert [row["label"] for row in rows] == ["real", "tampered"] * 12
    assert {row["kind"] for row in rows} == {"none", "splice", "duplicate", "recompress", "overlay"}
    for row in rows:
        if row["bad"]:
            with pytest.raises(BadVideoError, match=r"empty|no video|damaged|no frame|cut off"):
                sample_frames(folder / row["path"], 8, 32)
        else:
            info, frames = probe(folder / row["path"]), sample_frames(folder / row["path"], 8, 32)
            assert (info.width, info.height) == (160, 120) and 0.8 < info.seconds < 1.3
            assert frames.shape == (8, 3, 32, 32) and frames.base is None
    assert len({row["codec"] for row in rows if not row["bad"]}) == 2


def test_frames_are_taken_by_their_times_when_the_rate_varies(tmp_path):
    times = [*np.arange(0, 1, 0.01), *np.arange(1, 100, 1.0)]  # half of the frames lie in the first second
    write(tmp_path / "a.mkv", "mpeg4", times, 2 * np.array(times))
    grey = sample_frames(tmp_path / "a.mkv", 10, 32).mean(axis=(1, 2, 3)) / 2
    assert grey == pytest.approx(np.linspace(4.95, 94.05, 10), abs=2.5)


def levels(path, num_frames):
    """What `write` gave the frames that are sampled."""
    frames = sample_frames(path, num_frames, 16)
    assert frames.shape == (num_frames, 3, 16, 16) and frames.dtype == np.uint8 and frames.base is None
    return (frames.mean(axis=(1, 2, 3)) / 10).round().astype(int).tolist()


@pytest.mark.parametrize(("codec", "suffix"), [("libx264", "mp4"), ("mpeg2video", "mpg"), ("mpeg4", "avi")])
def test_each_codec_and_container_gives_its_frames_back_and_half_a_file_never_the_whole(tmp_path, codec, suffix):
    path = tmp_path / f"clip.{suffix}"
    write(path, codec, [number / 25 for number in range(20)])
    info = probe(path)
    assert (info.num_frames, info.width, info.height, info.num_bytes) == (20, 96, 64, path.stat().st_size)
    assert info.seconds == pytest.approx(0.8, abs=0.05) and info.fps == pytest.approx(25, abs=1.5)
    assert levels(path, 20) == list(range(20))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if suffix == "mpg":  # states no duration: it is a shorter video
        assert probe(path).num_frames < 20
        return
    with pytest.raises(BadVideoError):
        sample_frames(path, 4, 16)


def test_a_clip_with_fewer_frames_repeats_them(tmp_path):
    write(tmp_path / "clip.mp4", "mpeg4", [0.0, 0.04])
    assert levels(tmp_path / "clip.mp4", 4) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.mp4", b"", "it is empty"),
        ("a.mp4", b"text\n" * 99, "no video: "),
        ("a.mp4", bytes(4000), "no video: "),
        ("a.txt", b"ffmpeg would draw this text as pictures\n" * 99, "read as tty"),
        ("absent/a.mp4", None, "no such file"),
    ],
)
def test_a_file_that_is_no_video_is_named(tmp_path, name, content, why):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (probe, lambda path: sample_frames(path, 4, 16)):
        with pytest.raises(BadVideoError, match=why):
            read(tmp_path / name)


def test_damage_in_the_middle_is_named_with_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    write(path, "mjpeg", [number / 25 for number in range(25)])
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    for at, size in places[12:]:
        content[at + 8 : at + size] = bytes(size - 8)
    path.write_bytes(content)
    with pytest.raises(BadVideoError, match=r"^damaged after frame \d+ of 25$"):
        sample_frames(path, 8, 16)


PROGRAM = """
import resource, sys
from pathlib import Path
import av, numpy
from memfit_workloads.video.decode import sample_frames
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1].split(","):
    sample_frames(Path(path), 16, 112)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown * 1024, len([*Path("/proc/self/task").iterdir()]))
"""


@pytest.mark.parametrize(
    ("size", "seconds", "opens"), [((640, 360), 60, 1), ((3840, 2160), 1, 1), ((160, 120), 1, 150)]
)
def test_decoding_takes_at_most_64_mib_and_its_frames(tmp_path, size, seconds, opens):
    """However long the clip is and however large its picture, and after many of them."""
    path = tmp_path / "a.mp4"
    times = np.arange(0, seconds, 0.04 if seconds > 1 else 0.1)
    write(path, "mpeg4", times, 2 * times, size)
    words = [sys.executable, "-c", PROGRAM, ",".join([str(path)] * opens)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    grown, num_threads = map(int, done.stdout.split())
    assert grown <= 64 * MIB + 16 * 3 * 112 * 112
    assert num_threads <= 3


def test_variants_of_a_segment_are_one_group_by_their_pictures_mostly(clips):
    folder, rows = clips
    good = [row for row in rows if not row["bad"]]
    signatures = np.stack([frame_signatures(sample_frames(folder / row["path"], 8, 72)) for row in good])
    found = group_alike(signatures)
    segments = np.array([row["segment"] for row in good])
    same = (segments[:, None] == segments[None]) & ~np.eye(len(good), dtype=bool)
    together = found[:, None] == found[None]
    assert together[same].mean() > 0.7
    assert together[~same & ~np.eye(len(good), dtype=bool)].mean() < 0.2
    both = group_alike(signatures, segments.tolist())
    assert (both[:, None] == both[None])[same].all()
