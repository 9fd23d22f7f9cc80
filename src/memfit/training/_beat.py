"""Signs of life of a rank, and a watch that ends it when a rank of its group hangs: nobody waits for hours."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import torch.distributed

from memfit.errors import ConfigError, DamagedError, PeerFailedError, UsageError
from memfit.rundir import (
    LOST,
    RANKS_VARIABLE,
    STATUS,
    WAITING,
    Beat,
    current_run,
    launch_of,
    open_beats,
    read_beats,
    read_status_file,
    record,
)
from memfit.units import format_count

HANG_VARIABLE = "MEMFIT_HANG_SECONDS"
_HANG_SECONDS, _STEPS = 60.0, 10
#: Loading, saving, compiling and repeating may take so many times as long as a step may.
_LONGER = 30
_LONG_PLACES = frozenset({"begin", "load", "data", "save", "repeat"})
#: So long a collective may take to fail on the peers of a rank that left.
_NOTICE_SECONDS = 3.0
_LOST_PEERS = "it lost its peers"
#: A step that holds one of these is not as long as others.
_BETWEEN_STEPS = frozenset({"begin", "load", "data", "save", "sealed", "validate", "repeat", "end"})


def peers_lost(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


def lost_peers(error: BaseException) -> str:
    """Return what a collective's error says, without the library's source files and advice.
    >>> lost_peers(RuntimeError("[/a/pair.cc:537] Read error [::1]:4: Connection reset by peer. This is typically ..."))
    'it lost its peers: Read error [::1]:4: Connection reset by peer'
    """
    said = re.sub(r"^\[[^]]*] *", "", str(error)).partition(". ")[0]
    return f"{_LOST_PEERS}: {said[:160]}"


def beat(place: str, step: int | None = None, *, training: str = "") -> None:
    """Say that this rank lives and what it begins now; a few microseconds, nothing in a process without peers.

    Args:
        place: ``begin``, ``load``, ``data`` (the next batches), ``microbatch``, ``vote``, ``reduce``, ``update``,
            ``save``, ``sealed`` (a new checkpoint is whole), ``smaller`` (a smaller size of a microbatch is written
            down), ``validate`` (each batch), ``repeat`` (a step that takes longer is announced) or ``end`` (nobody
            waits for a next beat).
        step: The optimizer step, counted from the beginning of the training. That of ``sealed`` must grow: after two
            generations in a row without a further one the ranks do not begin again.
        training: What a ``sealed`` checkpoint is of, such as its folder, if a script makes several trainings.

    The first beat starts a thread that ends this process with exit code 79 when a rank of the group hangs: one that
    gave no beat for max(60 s, 10 x the longest step so far) seconds; the first step is left out once there is another.
    It has 30 times 60 s while it loads, saves, waits for data, repeats a step, or does its first step or the first
    batch of a validation. ``MEMFIT_HANG_SECONDS`` replaces the 60 s and what follows from them; ``inf`` turns the
    watch off.
    """
    pulse = _pulses.get(os.getpid())
    if pulse is None:
        if (found := _rank_of(os.environ)) is None:
            return
        pulse = _pulses[os.getpid()] = _Pulse(*found)
    pulse.give(place, step, training)


def place_now() -> str:
    """Return what this rank began last; ``end`` if it has given no beat."""
    pulse = _pulses.get(os.getpid())
    return "end" if pulse is None else pulse.last.place


def keep_beats(folder: Path | str) -> None:
    """Keep the beats of this group in ``<folder>/ranks``, where no run keeps them; call it before the first beat."""
    _folders[os.getpid()] = Path(folder) / "ranks"


def leave(why: str) -> NoReturn:
    """End this process at once with exit code 79, so that its group can begin again from its last checkpoint."""
    if LOST.search(why) and not why.startswith(_LOST_PEERS):  # a script passes on what a collective said
        why = lost_peers(RuntimeError(why))
    pulse = _pulses.get(os.getpid())
    name, where = "this rank", dict[str, Any]()
    if pulse is not None:
        pulse.end(os.getpid(), left=why[:200])
        name = f"rank {pulse.last.rank}"
        where = {"rank": pulse.last.rank, "place": pulse.last.place, "step": pulse.last.step}
    with suppress(Exception):
        record("rank_left", level="verbose", **where, why=why, text=f"{name} left: {why}")
        print(f"memfit: {name} leaves with exit code {PeerFailedError.exit_code}: {why}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(PeerFailedError.exit_code)


@contextmanager
def joined_group() -> Iterator[int]:
    """Join the group of this job's ranks, each with its own GPU where the job has any; yield the rank. All leave
    together: a rank that has done its part waits for the others, and one whose peer failed leaves at once."""
    group, here, num_gpus = torch.distributed, int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < num_gpus < here:
        raise UsageError(
            f"there are {here} ranks on this host and {format_count(num_gpus, 'GPU')}.",
            rule="each rank trains on a GPU of its own.",
            remedy=f"give the job as many: --num-gpus {here}, or fewer ranks: --nproc {num_gpus}",
        )
    if num_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    beat("begin")
    try:
        group.init_process_group("nccl" if num_gpus else "gloo")
        yield group.get_rank()
        beat("vote")
        group.barrier()
        beat("end")
    except PeerFailedError as error:
        leave(error.what)  # an interpreter with torch needs a second of a core to end, which the failed rank needs
    except Exception as error:
        if not peers_lost(error):
            raise
        leave(lost_peers(error))
    finally:
        if group.is_initialized():
            group.destroy_process_group()


def torchrun_lacks(env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return what torchrun was not given, and needs to begin again when a rank is lost. Without the variable, none of
    five restarts came through (torch 2.13, gloo).
    >>> torchrun_lacks({"TORCHELASTIC_MAX_RESTARTS": "0"}, ["torchrun", "--standalone", "train.py"])
    ['--max-restarts=3', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment']
    """
    lacks = ["--max-restarts=3"] if env.get("TORCHELASTIC_MAX_RESTARTS") == "0" else []
    given = " ".join(words).replace("_", "-")
    if re.search(r"--master-(?:addr|port)\b|--rdzv-backend[= ]static\b", given):
        lacks.append("--standalone or --rdzv-backend=c10d in place of a fixed port")
    if env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        lacks.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment")
    return lacks


def _check_torchrun(env: Mapping[str, str]) -> None:
    """Say once what torchrun lacks; nothing under memfit's own agent, or where Slurm starts the ranks."""
    if RANKS_VARIABLE in env or env.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return
    words: list[str] = []
    with suppress(OSError):
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")
    if lacks := torchrun_lacks(env, words):
        text = f"torchrun does not begin again when a rank is lost: it lacks {' and '.join(lacks)}"
        record("torchrun", text=text)
        print(
            f"memfit: {text}. A lost rank ends the job at its last checkpoint.\n"
            f"  do: add that, or let memfit start the ranks: memfit run --nproc {env['WORLD_SIZE']} -- python train.py",
            file=sys.stderr,
            flush=True,
        )


def hang_seconds(env: Mapping[str, str]) -> float | None:
    text = env.get(HANG_VARIABLE)
    if text is None:
        return None
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise ConfigError(
        f"{HANG_VARIABLE} is {text!r}.",
        rule="it is the seconds after which a rank that gives no sign of life counts as hung.",
        remedy=f"set it to a positive number, to inf for never, or not at all: unset {HANG_VARIABLE}",
    )


def _rank_of(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the size of its group; None without peers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        try:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
    return (rank, size) if size > 1 else None


class _Pulse:
    """The beats of this process, and the thread that looks at those of all."""

    def __init__(self, rank: int, size: int) -> None:
        self.size, self._given = size, hang_seconds(os.environ)
        #: How long the longest step took, and the first, which compiles and warms up.
        self._longest, self._first, self._at = 0.0, 0.0, 0.0
        self._step_began, self._has_stepped, self._repeats = math.inf, False, False
        self._lock = threading.Lock()
        self.last = Beat(rank, os.getpid(), socket.gethostname(), f"{launch_of(os.environ)}:{size}", "")
        folder = os.environ.get(RANKS_VARIABLE)
        run = current_run()  # of torchrun
        own = run[0].job_dir(run[1]) / "ranks" / "0" if run else None
        self.folder = Path(folder) if folder else own or _folders.get(os.getpid())
        if self.folder is None and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            self.folder = Path(file).parents[1]  # torchrun makes it on each node, anew for each start of the ranks
        self._file = open_beats(self.folder, rank) if self.folder is not None else None
        # other hosts see what has reached the server alone
        self._syncs = os.environ.get("LOCAL_WORLD_SIZE", "") not in ("", str(size))
        self._watch: threading.Thread | None = None
        self._is_over = threading.Event()
        if rank == 0:
            _check_torchrun(os.environ)

    def give(self, place: str, step: int | None, training: str) -> None:
        now = time.monotonic()
        with self._lock:
            last = self.last
            if (place == "smaller" and last.sealed is None) or (place == "sealed" and step is None):
                last.sealed, last.training = 0, f"{place} {now}"  # not comparable: as the first of a training
            elif place == "sealed":  # a trainer may count its other steps from its start
                last.sealed, last.training, step = step, f"{crc32(training.encode()):x}", None
            if last.place == "vote":  # a peer took so long, not this step
                self._step_began += now - self._at
            self._at = now
            if place in _BETWEEN_STEPS:
                if place != "repeat":
                    self._note_step(now)
                self._step_began = math.inf
                self._repeats = self._repeats or place == "repeat"
            if step is not None and step != last.step:
                self._note_step(now)
                self._has_stepped = self._has_stepped or last.step is not None
                self._step_began, self._repeats = now, place == "repeat"
            has_failed = place == "end" and sys.exc_info()[0] is not None  # then it is told where
            self._write(
                place=last.place if has_failed else place,
                step=step if step is not None else last.step,
                count=last.count + 1,
                patience=None if place == "end" else self._patience(place),
            )
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="memfit-ranks", daemon=True)
            self._watch.start()
            atexit.register(self.end, os.getpid())

    def _note_step(self, now: float) -> None:
        """Take in how long a step took that ends now, if one began and was not repeated."""
        if self._step_began < now:
            took = now - self._step_began
            if self._has_stepped:
                self._longest = max(self._longest, took)
            else:
                self._first, self._has_stepped = took, True

    def end(self, pid: int, left: str = "") -> None:
        """Say that this process ends by itself, or why it left: nobody waits for its next beat."""
        if pid == os.getpid() and self._watch is not None:
            has_lock = self._lock.acquire(timeout=1)  # a write that hangs has it
            self._write(count=self.last.count + 1, patience=None, left=left or self.last.left)
            if has_lock:
                self._lock.release()
            self._is_over.set()
            if threading.current_thread() is not self._watch:
                self._watch.join(5)  # a thread that lives on may abort an interpreter that ends

    def _write(self, **changed: Any) -> None:
        vars(self.last).update(time=time.time(), **changed)
        if self._file is not None:
            with suppress(OSError):  # a full disk costs the watch, not the training
                os.pwrite(self._file, self.last.to_line(), 0)

    def _patience(self, place: str) -> float:
        least = _HANG_SECONDS if self._given is None else self._given
        usual = max(least, _STEPS * (self._longest or self._first))
        is_first = place == "validate" != self.last.place or not self._has_stepped
        is_long = place not in WAITING and (self._repeats or is_first or place in _LONG_PLACES)
        return max(usual, _LONGER * least) if is_long else usual

    def _look(self) -> None:
        quiet = _Quiet(self.last.launch, self.size)
        tick = min(1.0, (self._given or _HANG_SECONDS) / 10)
        while not self._is_over.wait(tick):
            beats = {} if self.folder is None else read_beats(self.folder)
            if self._syncs and self._file is not None:
                with suppress(OSError):
                    os.fdatasync(self._file)
            if found := quiet.hung({**beats, self.last.rank: self.last}, time.monotonic(), 3 * tick):
                if _waits_for_memory():
                    quiet.seconds.clear()
                    continue
                how = f"hangs: no sign of life for {quiet.seconds[found.rank]:.0f} s in {found.where}"
                if found.rank == self.last.rank:
                    with suppress(Exception):
                        faulthandler.dump_traceback(all_threads=True)
                    leave(f"it {how}")
                leave(f"rank {found.rank} {how}")
            if (gone := quiet.gone()) is not None and self.last.patience is not None:
                leave(f"rank {gone.rank} left: {gone.left}")


@dataclass
class _Quiet:
    """How long each rank gave no beat, by this process's own clock: those of other hosts may differ from it."""

    launch: str
    size: int
    seconds: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _looked: float = 0.0
    _live: Mapping[int, Beat] = field(default_factory=dict)

    def gone(self) -> Beat | None:
        """Return the beat of a rank that left a while ago: its peers would have noticed by a collective."""
        return next((one for one in self._live.values() if one.left and self.seconds[one.rank] > _NOTICE_SECONDS), None)

    def hung(self, beats: Mapping[int, Beat], now: float, most: float) -> Beat | None:
        """Return the beat of a rank that hangs; one look adds ``most`` seconds at most: this process may have slept. A
        rank that waits for its peers hangs only if all of them wait: then no work is left that takes long. Where some
        have given no beat yet, they have more time."""
        passed, self._looked = min(now - self._looked, most), now
        live = self._live = {rank: one for rank, one in beats.items() if one.launch == self.launch}
        for rank, one in live.items():
            same = self._counts.get(rank) == one.count
            self.seconds[rank] = self.seconds.get(rank, 0.0) + passed if same else 0.0
            self._counts[rank] = one.count
        at_work = [one for one in live.values() if one.place not in WAITING]
        factor = 1 if at_work or len(live) == self.size else _LONGER
        late = [
            one
            for one in at_work or live.values()
            if one.patience is not None and self.seconds[one.rank] > factor * one.patience and _lives(one)
        ]
        return max(late, key=lambda one: self.seconds[one.rank], default=None)


def _waits_for_memory() -> bool:
    """Return True if the kernel lets this job wait at its limit, until memfit raises that: then no rank hangs."""
    run = current_run()
    with suppress(DamagedError, OSError):
        return run is not None and bool((read_status_file(run[0].job_dir(run[1]) / STATUS) or {}).get("stalled"))
    return False


def _lives(one: Beat) -> bool:
    """Return False for a process of this host that has ended: another error tells of it."""
    return one.host != socket.gethostname() or Path(f"/proc/{one.pid}").exists()


_pulses: dict[int, _Pulse] = {}
_folders: dict[int, Path] = {}
