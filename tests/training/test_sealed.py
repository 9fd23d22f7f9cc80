"""Folders of sealed checkpoints: the newest whole one is taken, by one process, or by ranks of which rank 0 alone
marks, seals and chooses."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranked
from memfit.errors import DamagedError, JobFailedError, MemfitError, UsageError
from memfit.rundir import RunDir
from memfit.training import CheckpointWarning, Ranks, SealedFolder, Stopper


def write(folder, step, text="whole"):
    (folder.begin(step) / "deep").mkdir()
    (folder.folder_of(step) / "deep" / "weights").write_text(text)
    return folder.seal(step, {"epoch": 0, "lr": (0.1, 0.2)})


def test_the_newest_whole_one_is_taken(tmp_path, monkeypatch):
    folder, forced = SealedFolder(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_ino))
    assert folder.newest() is None
    for step in (9, 10):
        write(folder, step)
    assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} <= {*forced}  # a power cut takes none
    (folder.begin(11) / "weights").write_text("never sealed")
    assert folder.newest().step == 10
    assert not folder.folder_of(11).exists()
    (folder.folder_of(10) / "deep" / "weights").write_text("flipp")  # as long as before
    with pytest.warns(CheckpointWarning, match="step-9"):
        assert folder.newest().step == 9
    (folder.folder_of(9) / "deep" / "weights").unlink()
    with pytest.raises(DamagedError, match="differs"):
        folder.newest()


@pytest.mark.parametrize("place", [0, 16 << 20, -1])
def test_one_byte_of_a_file_of_several_parts_is_seen(tmp_path, place):
    folder = SealedFolder(tmp_path)
    path = folder.begin(1) / "weights"
    path.write_bytes(bytes((33 << 20) + 5))
    (path.parent / "empty").touch()
    folder.seal(1, {})
    assert folder.newest().step == 1
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(b"x")
    with pytest.raises(DamagedError, match="weights differs"):
        folder.newest()


@pytest.mark.parametrize("is_whole", [True, False])
def test_each_bit_of_a_file_of_torch_counts(tmp_path, is_whole):
    folder, state = SealedFolder(tmp_path), {"a": torch.arange(100.0), "b": "text"}
    path = folder.begin(1) / "weights.pt"
    torch.save(state, path)
    if not is_whole:  # shards are archives one after the other
        path.write_bytes(path.read_bytes() * 2)
    folder.seal(1, {})
    whole = path.read_bytes()
    assert folder.newest().step == 1
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert folder.newest().step == 1
        except DamagedError:
            continue
        assert is_whole and same(torch.load(path, weights_only=True), state), place  # padding, or what stands twice


def same(one, other):
    return one["b"] == other["b"] and torch.equal(one["a"], other["a"])


def test_what_others_wrote_is_left_alone(tmp_path):
    folder = SealedFolder(tmp_path, "checkpoint-")
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (10, 20, 30):
        write(folder, step)
    folder.prune(1, spared=[folder.folder_of(10)])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-50", "notes", "checkpoint-10", "checkpoint-30"}
    assert [path.name for path in folder.foreign()] == ["checkpoint-50"]
    assert folder.newest().facts["lr"] == [0.1, 0.2]


HOLDER = """
import sys
from memfit.training import SealedFolder
folder = SealedFolder(sys.argv[1])
with folder.held():
    (folder.begin(2) / "weights").write_text("half")
    print("held", flush=True)
    sys.stdin.read()
    folder.seal(2, {})
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_another_process_that_trains_there_is_named_and_loses_nothing(tmp_path, is_killed):
    folder = SealedFolder(tmp_path)
    write(folder, 1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], **pipes) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"Process {holder.pid} trains into") as caught, folder.held():
            pass
        assert caught.value.exit_code == 2
        assert (folder.folder_of(2) / "weights").read_text() == "half"
        if is_killed:
            holder.kill()
        holder.stdin.close()
        assert holder.wait() == (-signal.SIGKILL if is_killed else 0)
    with folder.held():
        assert folder.newest().step == (1 if is_killed else 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"][: 2 - is_killed]


def test_a_disk_that_refuses_is_told_with_what_stays(tmp_path):
    folder = SealedFolder(tmp_path)
    write(folder, 1)
    with pytest.raises(JobFailedError, match="No space") as caught, folder.writing():
        raise OSError(28, "No space left on device")
    assert "step-1 stays" in str(caught.value)


@pytest.mark.parametrize(("grace", "told"), [(0, 1), (60, 0)])
def test_a_save_that_a_stop_has_no_time_for_is_told_once(grace, told, tmp_path, monkeypatch, capsys):
    run = RunDir.create(tmp_path, "slow", "0" * 64)
    run.job_dir("cmd").mkdir(parents=True)
    monkeypatch.setenv("MEMFIT_RUN_DIR", str(run.path))
    monkeypatch.setenv("MEMFIT_JOB_ID", "cmd")
    (run.job_dir("cmd") / "job.json").write_text(f'{{"grace_seconds": {grace}}}')
    for _ in range(2):
        write(SealedFolder(tmp_path / "checkpoints"), 1)
    assert capsys.readouterr().err.count("--grace") == told
    assert [event["kind"] for event in run.events()].count("slow_save") == told


@pytest.mark.parametrize(("job", "seconds", "told"), [("7", 40, 1), ("8", 4, 0), (None, 40, 0)])
def test_in_slurm_alone_a_slow_save_says_what_signal_it_needs(job, seconds, told, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MEMFIT_RUN_DIR", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    now = itertools.count(0, seconds)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(now))
        for step in (1, 2):
            write(SealedFolder(tmp_path), step)
    assert capsys.readouterr().err.count("--signal=TERM@80 or more") == told


def test_a_seal_of_a_later_version_is_refused_and_not_taken_for_damage(tmp_path):
    folder = SealedFolder(tmp_path)
    seal = write(folder, 1) / "SEAL.json"
    seal.write_text(seal.read_text().replace('"memfit_seal": 4', '"memfit_seal": 5'))
    with pytest.raises(UsageError, match="another version"):
        folder.newest()


# --- written by several ranks


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
