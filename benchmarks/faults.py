"""Faults of ranks: each place of a training x what happens there, on four ranks under memfit's agent.

    python benchmarks/faults.py [--launch WORDS] [--json FILE]

A small model is trained by memfit's Trainer, wrapped in DistributedDataParallel, as ``memfit run --nproc 4 -- python``.
Faults strike at ten places: out of memory (torch.OutOfMemoryError), an error, SIGKILL and a hang (SIGSTOP, or a sleep
for ever). A launch has many of them: those that cost a restart strike in one generation each. Printed for each fault:
how it ended, the stall (until all ranks had left, or the next step), the seconds to the next optimizer step of that
rank with all imports, and the steps that were made again. A hang may stall for as long as memfit's rule allows.
Exit status: 0 every launch ended with the bytes of a training without faults, no stall was longer than 10 s, and an
honest step of 40 s was not ended; else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from memfit.rundir import RANKS_VARIABLE, WAITING, read_beats, read_events
from memfit.training import Ema, KeyedDataset, KeyedSampler, Trainer, joined_group

RANKS = 4
PLACES = (
    "forward", "loss", "backward", "trial", "update", "reduction", "validation", "save", "rendezvous", "load",
)  # fmt: skip
OUT_OF_MEMORY, ERROR, KILL, HANG, SLOW = "out of memory", "error", "SIGKILL", "hang", "slow"
#: Where no generation has made a checkpoint yet.
_STARTS = frozenset({"rendezvous", "load"})
#: Those at the end of an epoch.
_ENDS = frozenset({"validation", "save"})
STEPS_PER_EPOCH = 4
_HANG_SECONDS, _MOST_STALL, _MOST_START, _LONGER = 1.0, 10.0, 60.0, 30


@dataclass(frozen=True)
class Fault:
    """What happens once, to some ranks, at a place of the step after ``at`` steps, or as a generation starts."""

    number: int
    place: str
    what: str
    ranks: tuple[int, ...]
    at: int | None = None
    generation: int | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        where = "all ranks" if len(self.ranks) == RANKS else f"rank {', '.join(map(str, self.ranks))}"
        return f"{self.what} in {self.place}, {where}"


# --- the training


class Faults:
    """Strikes at the places of one rank, and notes when, and when each optimizer step was done."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.generation = int(os.environ["RANK"]), int(os.environ["MEMFIT_GENERATION"])
        self.folder = folder
        self.optimizer: Any = None
        plan = [Fault(**one) for one in json.loads((folder / "plan.json").read_text())]
        self.own = [one for one in plan if self.rank in one.ranks]
        self.log = os.open(folder / f"log_{self.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, those before a checkpoint included."""
        states: Any = () if self.optimizer is None else self.optimizer.state.values()
        return max((int(state["step"]) for state in states), default=0)

    def note(self, **fields: Any) -> None:
        content = {"time": time.time(), "rank": self.rank, "generation": self.generation, **fields}
        os.write(self.log, json.dumps(content).encode() + b"\n")

    def at(self, place: str, half: Callable[[], object] = lambda: None) -> None:
        """Strike if a fault is due here; ``half`` is done before."""
        for one in self.own:
            if one.place != place or self.generation != (self.generation if one.at is not None else one.generation):
                continue
            if one.at is not None and one.at != self.num_steps:
                continue
            with suppress(FileExistsError):
                os.close(os.open(self.folder / f"struck_{one.number}_{self.rank}", os.O_CREAT | os.O_EXCL))
                self._strike(one, half)

    def _strike(self, one: Fault, half: Callable[[], object]) -> None:
        import torch

        beat = read_beats(Path(os.environ[RANKS_VARIABLE]))[self.rank]
        rule = (beat.patience or 0.0) * (_LONGER if beat.place in WAITING else 1)
        waits = beat.place in (*WAITING, "begin")  # so do its peers: nobody can tell which of them hangs
        self.note(fault=one.number, steps=self.num_steps, rule=rule if one.what == HANG else 0.0, waits=waits)
        half()
        if one.what == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if one.what == ERROR:
            raise ValueError("a fault on purpose")
        if one.what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if one.what == HANG and self.rank % 2 == 0 and self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(one.seconds or 1e6)

    def before(self, holder: Any, name: str, place: str, of: type = object) -> None:
        """Strike before each call of a function whose first argument, if it has one, is an ``of``."""
        call = getattr(holder, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if isinstance(next(iter(args), None), of):
                self.at(place)
            return call(*args, **kwargs)

        setattr(holder, name, faulty)


def train(folder: str, num_epochs: int) -> None:
    """Train on one rank of a group, with the faults of ``plan.json``; leave a digest of all that was trained."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    faults = Faults(Path(folder))
    faults.before(dist, "init_process_group", "rendezvous")
    faults.before(torch, "load", "load")
    faults.before(dist, "all_reduce", "reduction")
    if faults.rank == 0:
        faults.before(torch, "save", "save", of=dict)  # of a checkpoint
    else:
        faults.before(dist, "all_gather_object", "save")

    class FailsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            faults.at("backward")
            return grad

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.dropout = torch.nn.Linear(6, 64), torch.nn.Linear(64, 1), torch.nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                faults.at("forward")
            return self.last(torch.relu(self.first(self.dropout(x))))  # type: ignore[no-any-return]

    def loss(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        found = (model(x) - x.sum(1, keepdim=True)).square().sum()
        faults.at("loss" if model.training else "validation")
        if model.training:
            found = FailsBackward.apply(found)  # type: ignore[no-untyped-call]
        return found, len(x)

    with joined_group():
        torch.manual_seed(0)
        model = Net().double()
        faults.optimizer = optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        samples = torch.randn(30, 6, generator=torch.Generator().manual_seed(5)).double()
        data = KeyedDataset(samples, seed=1)
        loader = DataLoader(data, 8, sampler=KeyedSampler(data, seed=1))
        ema = Ema(0.9)
        trainer = Trainer(
            DistributedDataParallel(model), loss=loss, optimizer=optimizer, ema=ema, seed=3, microbatch_size=1,
            max_grad_norm=1.0, checkpoint_dir=Path(folder) / "checkpoints",
        )  # fmt: skip
        faults.before(trainer.step.guard, "try_memory", "trial")
        step = optimizer.step

        def update(*args: Any) -> None:
            faults.at("update", partial(torch.Tensor.mul_, model.last.weight.data, 0.5))
            step(*args)
            faults.note(steps=faults.num_steps)

        optimizer.step = update  # type: ignore[assignment,method-assign]
        result = trainer.fit(loader, list(torch.split(samples, 4)), num_epochs=num_epochs)
    sha = hashlib.sha256()
    states = [model.state_dict(), optimizer.state_dict(), ema.state_dict(), [one.metrics for one in result.history]]
    for leaf in torch.utils._pytree.tree_leaves([*states, torch.get_rng_state()]):
        sha.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    (Path(folder) / f"digest_{faults.rank}").write_text(sha.hexdigest())


# --- the plans


@dataclass(frozen=True)
class Launch:
    """One launch, and the faults in it."""

    name: str
    faults: tuple[Fault, ...]
    num_epochs: int
    hang_seconds: float | None = None


def in_the_process(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> Launch:
    """Return a launch whose faults cost no restart: at every second step of an epoch, and at its end."""
    steps, ends = ([kind for kind in kinds if (kind[0] in _ENDS) == is_end] for is_end in (False, True))
    faults: list[Fault] = []
    at = 0
    while steps or ends:
        at += 1
        due = steps if at % 2 else ends if at % STEPS_PER_EPOCH == 0 else []
        if due:
            place, ranks = due.pop(0)
            faults.append(Fault(len(faults), place, OUT_OF_MEMORY, ranks, at))
    return Launch("out of memory, in the process", tuple(faults), at // STEPS_PER_EPOCH + 2)


def with_restarts(name: str, kinds: Sequence[tuple[str, str, int]], hang_seconds: float | None = None) -> Launch:
    """Return a launch whose faults end one generation each; each but those at a start leaves time for a checkpoint."""
    faults: list[Fault] = []
    epoch = 0
    for number, (place, what, rank) in enumerate(kinds):
        if place in _STARTS:
            faults.append(Fault(number, place, what, (rank,), generation=number))
            continue
        epoch += 2
        at = (epoch + 1) * STEPS_PER_EPOCH if place in _ENDS else epoch * STEPS_PER_EPOCH + 2
        faults.append(Fault(number, place, what, (rank,), at))
    return Launch(name, tuple(faults), epoch + 3, hang_seconds)


#: The places in an order in which two starts never follow each other.
_ORDER = ("forward", "rendezvous", "loss", "load", "backward", "trial", "update", "reduction", "validation", "save")


def launches() -> Iterator[Launch]:
    """Return all launches of the whole table."""
    every = tuple(range(RANKS))
    groups = [*((rank,) for rank in every), (1, 3), every]
    steps = [(place, ranks) for place in (*PLACES[:5], "validation") for ranks in groups]
    yield in_the_process([*steps, ("save", (0,))])
    kinds = ("reduction", 0), ("load", 0), ("reduction", 2), ("load", 2), ("save", 2), ("rendezvous", 0)
    each = [(place, OUT_OF_MEMORY, rank) for place, rank in (*kinds, ("reduction", 1), ("rendezvous", 2))]
    yield with_restarts("out of memory, restarts", each)
    for what in (ERROR, KILL, HANG):
        for rank in (0, 2):
            seconds = _HANG_SECONDS if what == HANG else None
            yield with_restarts(f"{what}, rank {rank}", [(place, what, rank) for place in _ORDER], seconds)
    yield Launch("an honest step of 40 s", (Fault(0, "loss", SLOW, (3,), 6, seconds=40.0),), 3)


# --- running them


@dataclass(frozen=True)
class Row:
    """How one fault ended."""

    fault: Fault
    launch: str
    how: str
    stall: float
    over_rule: float
    next_step: float
    lost: int
    is_ok: bool


def judge(launch: Launch, folder: Path, events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each fault of a launch, from what its ranks and its agent noted."""
    lines = [json.loads(line) for path in folder.glob("log_*") for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line["time"])
    steps = [line for line in lines if "fault" not in line]
    lost_in = {one["generation"]: one for one in events if one["kind"] == "rank_lost"}
    rows = []
    for fault in launch.faults:
        struck = [line for line in lines if line.get("fault") == fault.number]
        if {line["rank"] for line in struck} != set(fault.ranks):
            rows.append(Row(fault, launch.name, "did not strike", 0.0, 0.0, 0.0, 0, False))
            continue
        first = struck[0]
        after = [one for one in steps if one["rank"] == first["rank"] and one["time"] > first["time"]]
        before = max((one["steps"] for one in steps if one["time"] <= first["time"]), default=0)
        if not after:
            rows.append(Row(fault, launch.name, "no step followed", 0.0, 0.0, 0.0, 0, False))
            continue
        stall = next_step = after[0]["time"] - first["time"]
        how, is_named = "in the process", True
        if (now := after[0]["generation"]) > first["generation"]:
            end = lost_in[first["generation"]]
            how, stall = end["text"], end["time"] - first["time"]
            next_step = stall + after[0]["time"] - lost_in[now - 1]["time"]  # without those of a fault in between
            is_named = end["rank"] in fault.ranks or (fault.what == HANG and first["waits"])
        over = max(0.0, stall - first["rule"] - fault.seconds)
        is_ok = over <= _MOST_STALL and next_step - stall <= _MOST_START and is_named
        lost = max(0, before - after[0]["steps"] + 1)
        rows.append(Row(fault, launch.name, how, stall, over, next_step, lost, is_ok))
    return rows


def write_plan(launch: Launch, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps([asdict(one) for one in launch.faults]))


def digests(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("digest_*"))]


def events_in(runs: Path) -> list[dict[str, Any]]:
    return [one for path in runs.glob("**/events") for one in read_events(path)]


def run_command(launch: Launch, folder: Path, most_seconds: float) -> list[dict[str, Any]]:
    """Run a launch by ``memfit run --nproc 4``; return its events."""
    write_plan(launch, folder)
    train_words = [sys.executable, __file__, "--train", str(folder), "--epochs", str(launch.num_epochs)]
    words = [sys.executable, "-m", "memfit", "run", "--nproc", str(RANKS), "--runs-dir", str(folder / "runs")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if launch.hang_seconds is not None:
        env["MEMFIT_HANG_SECONDS"] = str(launch.hang_seconds)
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen([*words, "--", *train_words], env=env, stdout=output, stderr=output)
        try:
            process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    return events_in(folder / "runs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--launch", default="", help="only launches with these words in their names")
    parser.add_argument("--folder", type=Path, help="keep all files here")
    parser.add_argument("--most", type=float, default=600.0, help="seconds after which a launch counts as hung")
    parser.add_argument("--json", type=Path, help="write all rows here")
    args = parser.parse_args()
    if args.train:
        train(args.train, args.epochs)
        return 0
    with tempfile.TemporaryDirectory() as made:
        return measure(args, args.folder or Path(made))


def measure(args: argparse.Namespace, folder: Path) -> int:
    expected: dict[int, list[str]] = {}
    rows, is_ok = [], True
    for number, launch in enumerate(one for one in launches() if args.launch in one.name):
        plain = expected.get(launch.num_epochs)
        if plain is None:
            whole = folder / f"plain_{launch.num_epochs}"
            run_command(replace(launch, faults=(), hang_seconds=None), whole, args.most)
            plain = expected[launch.num_epochs] = digests(whole)
        own, began = folder / str(number), time.monotonic()
        found = judge(launch, own, run_command(launch, own, args.most))
        is_same = len(plain) == RANKS and digests(own) == plain
        is_ok &= is_same and all(row.is_ok for row in found)
        rows += found
        verdict = "the same bytes" if is_same else "NOT the same bytes"
        load = os.getloadavg()[0]
        print(f"\n{launch.name}: {verdict}, {time.monotonic() - began:.0f} s, load {load:.0f}", flush=True)
        for row in found:
            print(line_of(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{len(rows)} faults, {sum(row.is_ok for row in rows)} as promised\n")
    print(table(rows))
    return 0 if is_ok else 1


def line_of(row: Row) -> str:
    times = f"stall {row.stall:6.2f} s  next step {row.next_step:6.2f} s  lost {row.lost}"
    return f"{'met   ' if row.is_ok else 'MISSED'} {row.fault.name:40} {times}  {row.how}"


def table(rows: Sequence[Row]) -> str:
    """Return the worst of each place and kind as a table in Markdown."""
    kinds = (OUT_OF_MEMORY, ERROR, KILL, HANG)
    lines = [f"| place | {' | '.join(kinds)} |", "| --- " * (len(kinds) + 1) + "|"]
    for place in PLACES:
        cells = []
        for kind in kinds:
            same = [row for row in rows if (row.fault.place, row.fault.what) == (place, kind)]
            cells.append("; ".join(cell(same, is_again) for is_again in (False, True) if cell(same, is_again)))
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(rows: Sequence[Row], is_again: bool) -> str:
    """Return how many faults ended in one of both ways, the most seconds to the next step, and the most steps lost.

    Those of a hang count from when its rule allows to end it.
    """
    own = [row for row in rows if (row.how != "in the process") == is_again]
    if not own:
        return ""
    how = "again" if is_again else "goes on"
    seconds, lost = max(row.next_step - row.stall + row.over_rule for row in own), max(row.lost for row in own)
    return f"{len(own)} {how}, {seconds:.1f} s, {lost} lost"


if __name__ == "__main__":
    raise SystemExit(main())
