"""What a study of memfit is worth beside Optuna's own way, on two cores and under one real memory limit.

    python benchmarks/tune.py [--part trials] [--trials 16] [--seed 0] [--seeds N] [--limit 4096MiB] [--json FILE]

- *trials*: useful trials an hour: those that completed or were pruned. The same training, sampler and pruner run under
  memfit and in one process pool of Optuna's with more and more processes, until the kernel kills one. Then memfit runs
  again with one of its means switched off at a time. It prints which share of the space cannot fit alone.
- *same*: the same without the samplers' share: random trials, and the pool gets those that memfit drew, in their order,
  with the refused ones; over 3 seeds.
- *told*: how many of 60 trials run out of memory when the sampler is told FAIL or PRUNED, and when such draws are
  refused; over 12 seeds. Nothing is trained.
- *original*: the faults of a search that was written by hand, one by one, and what memfit does there.

Parts *trials* and *same* need root and cgroup v1, or v2 with a group that hands the memory controller down. They make a
group with the limit and remove it. On two quiet cores each takes about 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import tune_job
from memfit.rundir import RunDir
from memfit.tuning import read_trials, tune
from memfit.units import GIB, MIB, parse_bytes
from stress_watch import Arena, Kills, top_group

BENCHMARKS = Path(__file__).resolve().parent
USEFUL = frozenset({"completed", "pruned"})
#: What the parent of a pool takes, and the kernel for all.
_PARENT_BYTES = 160 * MIB
#: What memfit is to reach against the largest pool that lives, and the most processes that are tried.
AIM, _MOST_JOBS = 1.3, 4
#: Of so many trials memfit chooses those that fit beside each other.
NUM_SLOTS = 8
#: A way may take so long.
_TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True)
class Figures:
    """What came of one way to run the study.

    Attributes:
        states: The trials' states.
        seconds: From the start of its process to its end.
        kills: What the kernel killed under the limit.
        num_refused: Draws that were refused before they started.
        most_at_once: The most trials at once.
        ended: Why it ended early; empty if it did not.
        sizes: What the useful trials take at least, in bytes.
        draws: The settings that were drawn, the refused ones too.
    """

    states: Sequence[str]
    seconds: float
    kills: int
    num_refused: int = 0
    most_at_once: int = 0
    ended: str = ""
    sizes: Sequence[int] = ()
    draws: Sequence[Mapping[str, Any]] = ()

    @property
    def num_useful(self) -> int:
        """Return how many trials completed or were pruned."""
        return sum(state in USEFUL for state in self.states)

    @property
    def an_hour(self) -> float:
        """Return the useful trials an hour."""
        return self.num_useful / self.seconds * 3600

    @property
    def gib_an_hour(self) -> float:
        """Return the sizes of the useful trials, added up, an hour: one way may have drawn larger trials."""
        return sum(self.sizes) / GIB / self.seconds * 3600

    @property
    def lives(self) -> bool:
        """Return whether it came to its end without a kill."""
        return not self.kills and not self.ended

    @property
    def share_refused(self) -> float:
        """Return the refused draws as a share of all draws."""
        num_drawn = self.num_refused + sum(state != "infeasible" for state in self.states)
        return self.num_refused / num_drawn if num_drawn else 0.0


def config_of(work: Path, options: argparse.Namespace, target: str = "SHARED", **tuned: Any) -> dict[str, Any]:
    """Return the config of the study for memfit."""
    names = ("batch_size", "hidden_size", "num_layers")
    values = (tune_job.BATCH_SIZES, tune_job.HIDDEN_SIZES, tune_job.NUM_LAYERS)
    space: list[dict[str, Any]] = [
        {"name": f"params.{name}", "choices": list(choices)} for name, choices in zip(names, values, strict=True)
    ]
    low, high = tune_job.LEARNING_RATES
    space.append({"name": "params.learning_rate", "low": low, "high": high, "log": True})
    fixed = {"objective": "train.loss", "direction": "minimize", "num_slots": NUM_SLOTS, "seed": options.seed}
    return {
        "experiment": "bench-tune",
        "target": f"tune_job:{target}",
        "runs_dir": str(work / "runs"),
        "params": {"num_epochs": options.epochs},
        "tune": {"space": space, "n_trials": options.trials, **fixed, **tuned},
    }


def share_too_large(limit_bytes: int) -> float:
    """Return the share of uniform draws that take more than the limit."""
    sizes = [
        tune_job.least_bytes(tune_job.Params(batch_size=batch, hidden_size=hidden, num_layers=layers))
        for batch in tune_job.BATCH_SIZES
        for hidden in tune_job.HIDDEN_SIZES
        for layers in tune_job.NUM_LAYERS
    ]
    return sum(size > limit_bytes for size in sizes) / len(sizes)


def watch(command: Sequence[str], work: Path, limit_bytes: int) -> tuple[float, int, str]:
    """Run a command under the limit; its seconds, what the kernel killed, and why it did not end well."""
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEMFIT_CLAIMS_DIR": str(work / "claims")}
    with Arena(top_group(), limit_bytes) as arena, open(work / "log", "wb") as log:
        kills = Kills(arena)
        started = time.monotonic()
        process = arena.start("run", command, cwd=work, env=env, stdout=log, stderr=log)
        code: int | None = None
        try:
            while code is None and time.monotonic() - started < _TIMEOUT_SECONDS:
                time.sleep(0.1)
                kills.look()
                code = process.poll()
        finally:
            seconds = time.monotonic() - started
            arena.end_all()
            process.wait()
        num_kills = kills.close()["total"]
    ended = "" if code == 0 else "it took too long" if code is None else f"exit {code}"
    return seconds, num_kills, ended


def by_memfit(options: argparse.Namespace, config: Mapping[str, Any], work: Path, *more: str) -> Figures:
    """Run the study under memfit."""
    path = work / "config.json"
    path.write_text(json.dumps(config))
    words = [sys.executable, __file__, "--inside", str(path), *more]
    seconds, kills, ended = watch(words, work, options.limit)
    trials = [one for path in work.glob("runs/*/*/study.json") for one in read_trials(RunDir.open(path.parent))]
    spans = [(one.measured["started"], one.measured["ended"]) for one in trials if "started" in one.measured]
    sizes = [_size({name.removeprefix("params."): one for name, one in trial.params.items()}) for trial in trials
             if trial.state in USEFUL]  # fmt: skip
    drawn = [params for one in trials for params in (*(refused["params"] for refused in one.refused), one.params)]
    draws = [{name.removeprefix("params."): value for name, value in params.items()} for params in drawn]
    num_refused = sum(len(one.refused) for one in trials)
    return Figures([one.state for one in trials], seconds, kills, num_refused, at_once(spans), ended, sizes, draws)


def _size(params: Mapping[str, Any]) -> int:
    return tune_job.least_bytes(tune_job.Params(**params))


def at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return how many spans of time overlap at most.

    >>> at_once([(0, 2), (1, 3), (2, 4)])
    2
    """
    changes = sorted([(end, -1) for _, end in spans] + [(start, 1) for start, _ in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def by_optuna(
    options: argparse.Namespace, num_jobs: int, guard_bytes: int, work: Path, draws: Sequence[Mapping[str, Any]] = ()
) -> Figures:
    """Run the study in one process pool of Optuna's; of these draws, if there are any."""
    result, listed = work / "result.json", work / "draws.json"
    listed.write_text(json.dumps(list(draws)))
    numbers = map(str, (num_jobs, len(draws) or options.trials, options.seed, guard_bytes, options.epochs))
    words = [sys.executable, str(BENCHMARKS / "tune_peer.py"), *numbers, str(result), str(listed)]
    seconds, kills, ended = watch(words, work, options.limit)
    nothing: dict[str, Any] = {"states": {}, "params": {}, "ended": ended}
    found = json.loads(result.read_text()) if result.exists() else nothing
    sizes = [_size(found["params"][number]) for number, state in found["states"].items() if state in USEFUL]
    return Figures(list(found["states"].values()), seconds, kills, 0, num_jobs, found["ended"] or ended, sizes)


def compare(options: argparse.Namespace, work: Path, *, same: bool = False) -> dict[str, Figures]:
    """Run the study in all ways; with ``same``, the same random draws under memfit and in the pools that live."""
    table: dict[str, Figures] = {}
    draws: list[Mapping[str, Any]] = []

    def do(name: str, way: Callable[[Path], Figures]) -> Figures:
        folder = work / str(len(table))
        folder.mkdir(parents=True)
        table[name] = found = way(folder)
        load = os.getloadavg()[0]
        print(
            f"{name}: {found.num_useful} useful of {len(found.states)} in {found.seconds:.0f} s, {found.kills} kernel "
            f"kills, {found.an_hour:.0f} trials and {found.gib_an_hour:.1f} GiB an hour, load {load:.1f} {found.ended}",
            flush=True,
        )
        return found

    def memfit(folder: Path, *more: str, target: str = "SHARED", most: int = 0, **tuned: Any) -> Figures:
        config = config_of(folder, options, target, **tuned)
        return by_memfit(options, config | ({"max_parallel": most} if most else {}), folder, *more)

    def pool(num_jobs: int, guard_bytes: int) -> Callable[[Path], Figures]:
        return lambda folder: by_optuna(options, num_jobs, guard_bytes, folder, draws)

    whole = options.limit - _PARENT_BYTES
    if same:
        draws += do("memfit", lambda folder: memfit(folder, sampler="random")).draws
    else:
        do("memfit", memfit)
    largest = 0
    for num in count(1):
        found = do(f"Optuna, {num} guarded at the whole limit", pool(num, whole))
        if not found.lives or num == _MOST_JOBS:
            break
        largest = num
    if same:
        return table
    do("Optuna, 2 guarded at half the limit", pool(2, whole // 2))
    do("Optuna, 1 process, no guard", pool(1, 0))
    if options.without:
        do("memfit without packing", lambda folder: memfit(folder, most=max(1, largest)))
        do("memfit without refusal", lambda folder: memfit(folder, "--no-refusal", target="UNKNOWN"))
        do("memfit without pruning", lambda folder: memfit(folder, pruner="none"))
        do("memfit without shared data", lambda folder: memfit(folder, target="OWN_DATA"))
    return table


def inside(config: Path, *, refuses: bool) -> int:
    """In the group: run memfit's study."""
    if not refuses:
        import memfit.tuning._sweep as sweep

        setattr(sweep, "why_infeasible", lambda *_: "")  # noqa: B010 - the name is private
    return tune(json.loads(config.read_text())).exit_code


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of cells, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def report(table: Mapping[str, Figures]) -> bool:
    """Print the comparison; whether memfit reached its aim without a kill."""
    own = table["memfit"]
    lines = [
        ("", "useful of", "an hour", "memfit to it", "GiB an hour", "kernel kills", "refused draws", "at once", "ended")
    ]
    for name, one in table.items():
        ratio = f"{own.an_hour / one.an_hour:.2f}" if one.num_useful else "-"
        counts = f"{one.num_useful} of {len(one.states)}"
        refused = f"{one.num_refused}, {one.share_refused:.0%}"
        lines.append(
            (
                name,
                counts,
                f"{one.an_hour:.0f}",
                ratio,
                f"{one.gib_an_hour:.1f}",
                str(one.kills),
                refused,
                str(one.most_at_once),
                one.ended,
            )
        )
    print_table(lines)
    pools = [one for name, one in table.items() if "whole limit" in name and one.lives]
    best = pools[-1].an_hour if pools else 0.0
    is_met = own.lives and own.an_hour >= AIM * best
    against = f"{own.an_hour / best:.2f} of the largest pool that lives" if best else "no pool lives"
    print(f"memfit: {against}, aim {AIM}, {own.kills} kernel kills: {'met' if is_met else 'MISSED'}")
    return is_met


def add_up(tables: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of several studies as one study's: those of memfit, and of the largest pool that lives."""
    pools = [[one for name, one in table.items() if "whole limit" in name and one.lives] for table in tables]
    ways = {"memfit": [table["memfit"] for table in tables]}
    if all(pools):
        ways["Optuna, the largest pool that lives at the whole limit"] = [found[-1] for found in pools]
    return {
        name: Figures(
            states=[state for one in found for state in one.states],
            seconds=sum(one.seconds for one in found),
            kills=sum(one.kills for one in found),
            num_refused=sum(one.num_refused for one in found),
            most_at_once=max(one.most_at_once for one in found),
            ended="; ".join(filter(None, (one.ended for one in found))),
            sizes=[size for one in found for size in one.sizes],
        )
        for name, found in ways.items()
    }


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        return inside(Path(sys.argv[2]), refuses="--no-refusal" not in sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("trials", "same", "told", "original"), default="trials")
    parser.add_argument("--trials", type=int, default=16, help="trials of a study of parts trials, same (default: 16)")
    parser.add_argument("--epochs", type=int, default=tune_job.NUM_EPOCHS, help="epochs of a trial")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the studies, or the first (default: 0)")
    parser.add_argument("--seeds", type=int, help="how many seeds (default: 12 of part told, 3 of part same)")
    parser.add_argument("--limit", type=parse_bytes, default=4096 * MIB, help="the real limit (default: 4096MiB)")
    parser.add_argument("--no-without", dest="without", action="store_false", help="leave out what switches means off")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        if options.part == "told":
            import tune_told

            num_seeds = options.seeds or 12
            print(f"of uniform draws {tune_told.share_too_large():.0%} do not fit; means over {num_seeds} seeds")
            print_table(tune_told.rows(tune_told.compare(num_seeds)))
            return 0
        if options.part == "original":
            import tune_original

            print_table(tune_original.compare(Path(folder)))
            return 0
        print(
            f"{share_too_large(options.limit):.0%} of uniform draws do not fit {options.limit // MIB} MiB alone",
            flush=True,
        )
        if options.part == "same":
            tables = []
            for seed in range(options.seed, options.seed + (options.seeds or 3)):
                print(f"seed {seed}", flush=True)
                own = argparse.Namespace(**{**vars(options), "seed": seed})
                tables.append(compare(own, Path(folder) / str(seed), same=True))
            table = add_up(tables)
        else:
            table = compare(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps({name: vars(one) for name, one in table.items()}, indent=2) + "\n")
    return 0 if report(table) else 1


if __name__ == "__main__":
    sys.exit(main())
