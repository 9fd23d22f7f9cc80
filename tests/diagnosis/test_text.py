"""Logs as they are found: every disguise of the same lines gives the same diagnosis, and a large one stays small."""

import gzip
import random

import pytest

from reading import look, proof

ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.75 GiB"
LOG = f"""\
step 10 loss 0.5
Traceback (most recent call last):
  File "train.py", line 7, in train
    loss.backward()
{ERROR}
"""
PLAIN = LOG.splitlines()


def facts(raw):
    found = look(raw)
    return found.kind, found.phase, found.to_dict()["tried_gib"], found.where["rank"], proof(found)


@pytest.mark.parametrize(
    "raw",
    [
        LOG.encode(),
        LOG.replace("\n", "\r\n").encode(),
        LOG.encode("utf-8-sig"),
        LOG.encode("utf-16"),
        gzip.compress(LOG.encode()),
        gzip.compress(LOG.encode("utf-16")),
        gzip.compress(LOG[:40].encode()) + gzip.compress(LOG[40:].encode()),
        "".join(f"\x1b[1;31m{line}\x1b[0m\n" for line in PLAIN).encode(),
        LOG.replace("o", "o\0").encode(),
        "".join(f"2024-03-01T10:00:00.123Z {line}\n" for line in PLAIN).encode(),
        "".join(f"(TrainWorker pid=7, ip=10.0.0.1) {line}\n" for line in PLAIN).encode(),
        "".join(f"trainer-1  | {line}\n" for line in PLAIN).encode(),
    ],
)
def test_a_log_is_read_the_same_in_every_disguise(raw):
    assert facts(raw) == ("gpu", "train", 15.75, None, [("log", 5)])
    assert look(raw).evidence[0].text == ERROR


@pytest.mark.parametrize("mark", ["[rank3]: ", "3: ", "[default3]:", "[1,3]<stderr>:", "2024-03-01 10:00:00 [rank3]: "])
def test_the_marks_of_launchers_become_ranks(mark):
    assert facts("".join(f"{mark}{line}\n" for line in PLAIN).encode()) == ("gpu", "train", 15.75, 3, [("log", 5)])


def test_a_number_and_a_colon_are_no_rank_where_few_lines_have_them():
    text = f"names of classes\n0: cat\nof 1: dog\nepoch begins\nepoch goes on\n0: {ERROR}\n"
    assert look(text).where["rank"] is None


def test_sixteen_interleaved_ranks_come_apart_in_order():
    steps = [(rank, f"step {at} loss 0.1") for at in range(20) for rank in range(16)]
    random.Random(3).shuffle(steps)
    ends = [(rank, line) for line in PLAIN[1:4] for rank in range(16)]  # the frames of all ranks between each other
    text = "".join(f"[rank{rank}]: {line}\n" for rank, line in [*steps, *ends, (5, ERROR)])
    found = look(text)
    assert (found.where["rank"], found.phase, found.kind) == (5, "train", "gpu")


def test_a_line_that_the_console_wrapped_keeps_its_rank():
    long = f"[rank2]: {'x' * 40} {ERROR} of GPU 0 and more"
    width = 60
    lines = [long[at : at + width] for at in range(0, len(long), width)]
    text = "\n".join([f"[rank5]: {'y' * (width - 9)}", *lines, "[rank5]: end\n"])
    found = look(text)
    assert (found.where["rank"], found.kind, found.to_dict()["tried_gib"]) == (2, "gpu", 15.75)


def test_words_and_numbers_that_wrap_are_read_with_all_of_their_lines():
    found = look("step 1\nCUDA out of mem\nory. Tried to allocate 15.7\n5 GiB al\nready\n")
    assert found.to_dict()["tried_gib"] == 15.75
    assert proof(found) == [("log", 2), ("log", 3), ("log", 4)]


def test_carriage_returns_divide_a_line_into_pieces_of_one_number():
    found = look("\r 1%| 1/9\r 2%| 2/9 [00:01]Killed")
    assert (found.cause, proof(found), found.evidence[0].text) == ("killed", [("log", 1)], " 2%| 2/9 [00:01]Killed")


def test_a_box_around_a_traceback_is_taken_off():
    assert look(f"│ {ERROR}                │\n").evidence[0].text == ERROR


def test_an_archive_that_is_torn_gives_what_is_whole():
    noise = "".join(f"line {at} {random.Random(at).random()}\n" for at in range(4000))
    packed = gzip.compress(f"{ERROR}\n{noise}".encode())
    assert facts(packed[: len(packed) // 2])[0] == "gpu"


@pytest.mark.slow
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_of_a_large_log_the_ends_and_the_telling_lines_stay_with_their_numbers(pack):
    block = "step 1 loss 0.5 lr 0.1 all is well and the time goes by\n" * 40_000
    large = look(pack(f"2024-03-01 10:00:00 first\n{block}{ERROR}\n{block}srun: error: n1: task 0: Killed\n".encode()))
    assert (large.kind, proof(large)) == ("gpu", [("log", 40_002)])
    assert [(one.what, one.line) for one in large.timeline][:1] == [("start", 1)]
    ended = look(pack(f"hello\n{block}srun: error: n1: task 0: Out Of Memory\n".encode()))
    assert proof(ended) == [("log", 40_002)]


@pytest.mark.slow
def test_a_large_log_of_nothing_but_telling_words_is_read_too():
    found = look(b"an error was killed in memory\n" * 300_000 + f"{ERROR}\n".encode())
    assert proof(found) == [("log", 300_001)]


def test_a_line_without_end_is_cut():
    found = look(b"x" * (12 << 20) + f" {ERROR}".encode())
    assert found.kind == "gpu"
    assert all(len(one.text) <= 8000 for one in found.evidence)
