"""Logs as they are found: every disguise of the same lines reads the same, and a large one stays small."""

import gzip
import io
import random

import pytest

from memfit.diagnosis import _excerpt
from memfit.diagnosis._text import Stream, clean, read_streams

LOG = (
    'step 10 loss 0.5\nTraceback (most recent call last):\n  File "train.py", line 7, in train\n    loss.backward()\n'
    "RuntimeError: boom of 15.75 GiB\n"
)


def read(raw: bytes) -> list[Stream]:
    return read_streams("job.log", io.BytesIO(raw))


def texts(raw: bytes) -> list[str]:
    return [line.text for stream in read(raw) for line in stream.lines if line.text.strip()]


PLAIN = [line for line in LOG.split("\n") if line]


@pytest.mark.parametrize(
    "raw",
    [
        LOG.encode(),
        LOG.replace("\n", "\r\n").encode(),
        LOG.encode("utf-8-sig"),
        LOG.encode("utf-16"),
        LOG.encode("utf-16-le"),
        LOG.encode("utf-16-be"),
        gzip.compress(LOG.encode()),
        gzip.compress(LOG[:40].encode()) + gzip.compress(LOG[40:].encode()),
        "".join(f"\x1b[1;31m{line}\x1b[0m\n" for line in PLAIN).encode(),
        LOG.replace("o", "o\0").encode(),
        "".join(f"2024-03-01T10:00:00.123Z {line}\n" for line in PLAIN).encode(),
        "".join(f"(TrainWorker pid=7, ip=10.0.0.1) {line}\n" for line in PLAIN).encode(),
        "".join(f"trainer-1  | {line}\n" for line in PLAIN).encode(),
    ],
)
def test_lines_read_the_same_in_every_disguise(raw):
    assert texts(raw) == PLAIN


@pytest.mark.parametrize("mark", ["[rank3]: ", "3: ", "[default3]:", "[1,3]<stderr>:", "2024-03-01 10:00:00 [rank3]: "])
def test_the_marks_of_launchers_become_ranks(mark):
    streams = read("".join(f"{mark}{line}\n" for line in PLAIN).encode())
    ranked = [stream for stream in streams if stream.lines[0].rank == 3]
    assert [line.text for line in ranked[0].lines] == PLAIN


def test_a_number_and_a_colon_are_no_rank_where_few_lines_have_them():
    streams = read(b"names of classes\n0: cat\nof 1: dog\nepoch begins\nepoch goes on\nepoch ends\n")
    assert len(streams) == 1


def test_sixteen_interleaved_ranks_come_apart_in_order():
    lines = [(rank, at) for at in range(20) for rank in range(16)]
    random.Random(3).shuffle(lines)
    streams = read("".join(f"[rank{rank}]: at {at}\n" for rank, at in lines).encode())
    for stream in streams:
        assert len(stream.lines) in (1, 20)  # the last newline begins a line without a rank
        expected = [f"at {at}" for rank, at in lines if rank == stream.lines[0].rank]
        assert not expected or [line.text for line in stream.lines] == expected


def test_a_line_that_the_console_wrapped_keeps_its_rank():
    long = f"[rank2]: {'x' * 151}"
    raw = f"{long[:80]}\n{long[80:]}\n[rank5]: {'y' * 71}\n[rank2]: end\n".encode()
    ranks = {line.text[:1]: line.rank for stream in read(raw) for line in stream.lines}
    assert ranks["x"] == 2
    assert all(line.rank is not None for stream in read(raw) for line in stream.lines if line.text.startswith("x"))


def test_words_that_wrap_are_found_in_the_squeezed_text_with_their_lines():
    stream = read(b"capacity of 15.7\n5 GiB al\nready allocated\n")[0]
    at = stream.squeezed.index("15.75GiBalready")
    assert [line.number for line in stream.between(at, at + len("15.75GiBalready"))] == [1, 2, 3]


def test_carriage_returns_divide_a_line_into_pieces_of_one_number():
    lines = list(clean("\r 1%| 1/9\r 2%| 2/9Killed"))
    assert [line.text for line in lines] == [" 1%| 1/9", " 2%| 2/9Killed"]
    assert {line.number for line in lines} == {1}


def test_a_box_around_a_traceback_is_taken_off():
    assert next(clean("│ RuntimeError: boom                │")).text == "RuntimeError: boom"


def test_an_archive_that_is_torn_gives_what_is_whole():
    packed = gzip.compress("".join(f"line {at} {random.Random(at).random()}\n" for at in range(4000)).encode())
    found = texts(packed[: len(packed) // 2])
    assert found[0].startswith("line 0 ")
    assert len(found) > 1000


def test_of_a_large_log_the_ends_and_the_telling_lines_stay_with_their_numbers():
    block = b"step 1 loss 0.5 lr 0.1 all is well and the time goes by\n" * 1000
    raw = b"first line\n" + block * 40 + b"torch.OutOfMemoryError: CUDA out of memory.\n" + block * 40 + b"last line\n"
    lines = [line for stream in read(raw) for line in stream.lines]
    by_text = {line.text: line.number for line in lines}
    assert by_text["first line"] == 1
    assert by_text["torch.OutOfMemoryError: CUDA out of memory."] == 40_002
    assert by_text["last line"] == 80_003
    assert len(lines) < 4000


def test_a_large_log_of_nothing_but_telling_words_stays_bounded():
    lines = list(_excerpt.excerpt(b"an error was killed in memory\n" * 300_000, io.BytesIO(b"")))
    assert len(lines) < 20_000
    assert lines[-1][0] in (300_000, 300_001)


def test_a_line_without_end_is_cut():
    found = read(b"x" * (12 << 20))
    assert all(len(line.text) <= 8000 for stream in found for line in stream.lines)
