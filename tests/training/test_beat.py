"""Ranks that hang, and what ends them. A group here is two forked processes that beat and share nothing else."""

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.forked import call

from memfit.errors import ConfigError, PeerFailedError
from memfit.files import write_json
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, STATUS, Beat, RunDir, launch_of, open_beats, read_beats
from memfit.training import beat, keep_beats, leave, peers_lost

LEFT = PeerFailedError.exit_code
HANG = 0.3


def _become(rank: int, folder: Path, does: Callable[[], None], hang: float) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MEMFIT_HANG_SECONDS": str(hang)}
    if folder.name == "ranks":  # that of torchrun for this start
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}/error.json"
    else:
        keep_beats(folder)
    beat("begin")
    does()


def _group(folder: Path, does: Sequence[Callable[[], None]], hang: float = HANG) -> list[multiprocessing.Process]:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_become, args=(rank, folder, one, hang)) for rank, one in enumerate(does)]
    for rank in ranks:
        rank.start()
    return ranks  # type: ignore[return-value]


def _codes(ranks: Sequence[multiprocessing.Process]) -> list[int | None]:
    for rank in ranks:
        rank.join(20)
    return [rank.exitcode for rank in ranks]


def _steps(*places: str) -> None:
    for step, place in enumerate(places, 1):
        beat(place, step)


def waits() -> None:
    _steps("microbatch", "microbatch", "vote")
    time.sleep(60)


def hangs() -> None:
    _steps("microbatch", "microbatch", "microbatch")
    time.sleep(60)


def takes_long_and_says_so() -> None:
    _steps("microbatch", "microbatch", "repeat")
    beat("microbatch", 3)
    time.sleep(4 * HANG)


def does_something_else() -> None:
    _steps("microbatch", "microbatch", "end")
    time.sleep(4 * HANG)


@pytest.mark.parametrize(
    ("is_stopped", "folder"),
    [(False, "."), (True, "."), (True, "ranks")],
    ids=["computes for ever", "stopped", "torchrun"],
)
def test_all_ranks_leave_when_one_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_stopped: bool, folder: str
) -> None:
    ranks = _group(tmp_path / folder, [waits, hangs])
    if is_stopped:
        while read_beats(tmp_path / "ranks").get(1, Beat(1, 0, "", "", "")).step != 3:
            time.sleep(0.01)
        os.kill(ranks[1].pid or 0, signal.SIGSTOP)
    assert _codes(ranks[:1]) == [LEFT]
    if is_stopped:
        ranks[1].kill()
    assert _codes(ranks) == [LEFT, -signal.SIGKILL if is_stopped else LEFT]
    said = capfd.readouterr().err
    assert re.search("rank 0 leaves with exit code 79: rank 1 (?:hangs|left: it hangs): no sign of life", said)


@pytest.mark.slow
def test_a_wait_and_a_repeat_and_what_is_not_watched_are_no_hang(tmp_path: Path) -> None:
    for peer in (takes_long_and_says_so, does_something_else):
        folder = tmp_path / peer.__name__
        first, second = _group(folder, [lambda: time.sleep(8 * HANG), peer])
        assert _codes([second]) == [0]
        assert _codes([first]) == [0]


def test_patience_follows_the_longest_step_and_is_longer_before_the_first(tmp_path: Path) -> None:
    def run() -> list[float | None]:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MEMFIT_HANG_SECONDS": "5"}
        keep_beats(tmp_path)
        found = []
        for now, place, step in [
            (0, "vote", 1),
            (0, "microbatch", 1),
            (7, "microbatch", 2),
            (8, "save", 2),
            (99, "vote", 3),
            (140, "microbatch", 4),
        ]:
            time.monotonic = lambda now=now: float(now)  # of this fork
            beat(place, step)
            found.append(read_beats(tmp_path / "ranks")[0].patience)
        return found

    # a wait is never longer by its place; the step that saved is not as long as others, nor one that waited; the first
    # counts until there is a second
    assert call(run) == [5, 150, 70, 150, 10, 10]


def test_ranks_that_wait_for_memory_at_their_limit_do_not_hang(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    run.job_dir("j").mkdir()
    status = {"state": "running", "stalled": True}
    write_json(run.job_dir("j") / STATUS, status)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIR_VARIABLE, str(run.path))
        patch.setenv(JOB_ID_VARIABLE, "j")
        ranks = _group(tmp_path, [hangs])
    ranks[0].join(5 * HANG)
    assert ranks[0].exitcode is None
    write_json(run.job_dir("j") / STATUS, status | {"stalled": False})
    assert _codes(ranks) == [LEFT]


def test_where_an_error_was_raised_is_kept_and_nobody_waits_for_a_next_beat(tmp_path: Path) -> None:
    def fails() -> None:
        try:
            beat("microbatch", 3)
            raise ValueError
        finally:
            beat("end")

    assert _codes(_group(tmp_path, [fails])) == [1]
    last = read_beats(tmp_path / "ranks")[0]
    assert (last.where, last.patience) == ("microbatch of step 3", None)


def test_files_of_an_earlier_launch_are_no_ranks_of_this_one(tmp_path: Path) -> None:
    old = Beat(1, os.getpid(), os.uname().nodename, launch_of({"MASTER_PORT": "1"}), "update", patience=0.1)
    os.pwrite(open_beats(tmp_path / "ranks", 1), old.to_line(), 0)
    (rank,) = _group(tmp_path, [lambda: time.sleep(4 * HANG)])
    assert _codes([rank]) == [0]


def test_a_process_without_peers_has_no_watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    keep_beats(tmp_path)
    before = threading.active_count()
    beat("microbatch", 1)
    assert threading.active_count() == before
    assert not (tmp_path / "ranks").exists()


def test_leave_ends_at_once_with_79_and_says_why(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = "[/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:4711. This is typically caused by advice"
    shown = {"rank 1 failed": "rank 1 failed", said: "it lost its peers: Connection closed by peer [127.0.0.1]:4711"}
    for why, told in shown.items():
        assert _codes(_group(tmp_path, [lambda why=why: leave(why)])) == [LEFT]
        assert f"rank 0 leaves with exit code 79: {told}\n" in capfd.readouterr().err


def test_a_wrong_time_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MEMFIT_HANG_SECONDS": "-1"}.items():
        monkeypatch.setenv(name, value)
    keep_beats(tmp_path)
    with pytest.raises(ConfigError, match="MEMFIT_HANG_SECONDS is '-1'"):
        beat("begin")


def test_a_lost_peer_is_told_from_other_errors() -> None:
    said = [
        "[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
        "Timed out waiting 1800000ms for recv operation",
    ]
    assert [peers_lost(RuntimeError(text)) for text in [*said, "CUDA out of memory"]] == [True, True, False]
    assert peers_lost(torch.distributed.DistNetworkError("the client socket has timed out"))
    assert not peers_lost(OSError("Connection reset by peer"))


def test_torchrun_without_restarts_is_told_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    try:
        _codes(_group(tmp_path, [lambda: beat("vote"), lambda: None]))
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    said = capfd.readouterr().err
    assert said.count("it lacks --max-restarts=3 and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment") == 1
    assert "A lost rank ends the job at its last checkpoint" in said
