"""A folder of sealed checkpoints that several ranks write together: rank 0 alone marks, seals and chooses."""

import os
import signal

import pytest

import ranked
from memfit.errors import MemfitError
from memfit.training import Ranks, SealedFolder, Stopper


def saved(rank, path, victim=None):
    """Save twice; ``victim`` dies within the second save."""
    folder = SealedFolder(path)
    folder.ranks = Ranks.current()
    with folder.held():
        for step in (1, 2):
            made = folder.begin(step)
            (made / f"rank-{rank}").write_text("whole")
            if (rank, step) == (victim, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            folder.seal(step, {"epoch": 0})
        folder.prune(1)
        found = folder.newest()
    return (
        found.step,
        sorted(one.name for one in found.path.glob("rank-*")),
        sorted(one.name for one in path.glob("step-*")),
    )


def test_all_ranks_write_and_one_seals(tmp_path):
    first, second = ranked.values(ranked.run(2, tmp_path, saved, tmp_path / "kept"))
    assert first == second == (2, ["rank-0", "rank-1"], ["step-2"])


def test_a_save_in_which_a_rank_died_is_not_taken(tmp_path):
    ends = ranked.run(2, tmp_path, saved, tmp_path / "kept", 1)
    assert [end.code for end in ends] == [79, -9]
    assert SealedFolder(tmp_path / "kept").newest().step == 1


def refused(rank, path):
    folder = SealedFolder(path)
    folder.ranks = Ranks.current()
    with pytest.raises(MemfitError) as caught:
        folder.read(7)
    stopper = Stopper()
    stopper.listen()
    stopper.join(folder.ranks)
    seen = [stopper.noted]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    seen.append(stopper.noted)
    stopper.vote(1)
    seen.append(stopper.noted)
    stopper.close()
    return caught.value.what, seen


def test_what_rank_0_refuses_all_refuse_and_a_signal_to_one_stops_all_at_the_same_vote(tmp_path):
    path = tmp_path / "kept"
    (path / "step-7").mkdir(parents=True)
    (path / "step-7" / "SEAL.json").write_text('{"memfit_seal": 1, "step": 7, "facts": {}, "files": {}}')
    (own, seen), (others, seen_by_others) = ranked.values(ranked.run(2, tmp_path, refused, path))
    assert "seal of another version" in own and others == f"Rank 0 failed: {own}"
    assert seen == seen_by_others == [None, None, "SIGUSR1"]
