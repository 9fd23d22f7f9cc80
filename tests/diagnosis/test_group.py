"""The rank that was lost first, in logs as torchrun and memfit wrote them when ranks of a gloo group were ended here."""

import pytest

from memfit.diagnosis import diagnose

PEER = (
    "[rank{}]: Traceback (most recent call last):\n"
    '[rank{}]:   File "train.py", line 11, in <module>\n'
    "[rank{}]:     dist.all_reduce(x)\n"
    "[rank{}]: RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/{}"
)
CLOSED = (
    "pair.cc:553] Connection closed by peer [127.0.0.1]:10456. This is typically caused by a remote worker crashing."
)
LATE = "unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
TABLE = """\
Failures:
[1]:
  rank      : {} (local_rank: {})
  exitcode  : -15 (pid: 29529)  (SIGTERM)
"""
KILLED = "W1127 21:11:08.3 28453 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 28552 closing signal SIGTERM\nE1127 21:11:08.382000 28453 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 28553) of binary: python"
OWN = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 9, in <module>\n[rank1]: ValueError: bad sample 17'
HUNG = "memfit: rank 0 leaves with exit code 79: rank 1 hangs: no sign of life for 61 s in microbatch of step 3"


def peer(rank, said):
    return PEER.format(*[rank] * 4, said)


@pytest.mark.parametrize(
    ("lines", "cause", "note"),
    [
        ([peer(2, CLOSED), peer(0, CLOSED), KILLED], "killed", "rank 1 was lost first; what ranks 0, 2 say"),
        ([peer(2, CLOSED), OWN, peer(0, CLOSED)], "own_exception", "rank 1 was lost first; what ranks 0, 2 say"),
        ([peer(2, LATE), peer(0, LATE), TABLE.format(1, 1)], "collective_timeout", "rank 1 did not say so"),
        ([peer(2, CLOSED), HUNG], "hang", "rank 1 was lost first; what rank 2 says"),
    ],
    ids=["killed", "error", "silent", "memfit says who hangs"],
)
def test_the_rank_that_was_lost_first_is_named_and_the_others_follow(tmp_path, lines, cause, note):
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines))
    found = diagnose(log)
    assert (found.cause, found.where["rank"]) == (cause, 1)
    assert note in found.notes[0]


def test_one_rank_alone_has_no_note(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(OWN)
    assert diagnose(log).notes == ()
