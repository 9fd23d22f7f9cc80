"""The trainings of `tune.py` under Optuna alone: one process pool, ``study.ask`` and ``study.tell`` in its parent.

    python benchmarks/tune_peer.py PROCESSES TRIALS SEED GUARD_BYTES EPOCHS RESULT DRAWS

Each process of the pool trains one trial after the other and builds the data for each, as a script for one training
does. It puts each epoch's loss into a queue. The parent reports it to the study and asks the median pruner; a pruned
trial ends after its current epoch. ``GUARD_BYTES`` limits the data segment of each process (0: no limit): what is too
large then fails in Python, is told as FAIL, and the pool lives on. A kill by the kernel ends a pool. ``DRAWS`` is a
JSON file with the settings of the first trials; the sampler draws the others.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

import tune_job

_reports: Any = None


class Pruned(Exception):
    """The parent has ended this trial."""


def _begin(reports: Any, guard_bytes: int) -> None:
    """Start a process of the pool: load torch once, and limit its memory."""
    global _reports  # a pool hands nothing else to its processes
    _reports = reports
    import torch

    if guard_bytes:
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # it loads what every training loads
        pages = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        data, anonymous = (int(pages[name].split()[0]) << 10 for name in ("VmData", "RssAnon"))
        limit = guard_bytes + data - anonymous  # the limit counts what is reserved, the kernel what is used
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _train(number: int, params: dict[str, Any], stop: str) -> tuple[str, float | None]:
    """Train one trial; its state and its loss."""

    def report(loss: float, epoch: int) -> None:
        _reports.put((number, epoch, loss))
        if Path(stop).exists():
            raise Pruned

    try:
        return "completed", tune_job.train_network(tune_job.make_data(), tune_job.Params(**params), report)
    except Pruned:
        return "pruned", None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return "out_of_memory", None
        raise


@dataclass
class Peer:
    """A study of Optuna's while it runs.

    Attributes:
        states: How the trials ended, by number.
        ended: Why the study ended early; empty if all trials were run.
    """

    num_jobs: int
    num_trials: int
    seed: int
    guard_bytes: int
    num_epochs: int
    result: Path
    draws: Sequence[Mapping[str, Any]]
    states: dict[int, str] = field(default_factory=dict)
    ended: str = ""

    def run(self) -> None:
        """Run the study to its end, or until its pool breaks."""
        context = multiprocessing.get_context("spawn")
        reports = context.Queue()
        sampler = optuna.samplers.TPESampler(seed=self.seed)
        self.study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(4, 1))
        for params in self.draws:
            self.study.enqueue_trial(dict(params))
        self.trials: dict[int, optuna.Trial] = {}
        running: dict[Future[Any], int] = {}
        with ProcessPoolExecutor(self.num_jobs, context, _begin, (reports, self.guard_bytes)) as pool:
            try:
                while running or len(self.trials) < self.num_trials:
                    while len(running) < self.num_jobs and len(self.trials) < self.num_trials:
                        running |= self._start(pool.submit)
                    done, _ = wait(running, 0.1, FIRST_COMPLETED)
                    self._take(reports)
                    for one in done:
                        self._tell(running.pop(one), *one.result())
            except BrokenProcessPool:
                self.ended = f"a process of the pool was killed with {len(self.states)} trials done"

    def _start(self, submit: Callable[..., Future[Any]]) -> dict[Future[Any], int]:
        trial = self.study.ask(fixed_distributions=distributions())
        self.trials[trial.number] = trial
        return {
            submit(
                _train, trial.number, trial.params | {"num_epochs": self.num_epochs}, str(self._stop(trial.number))
            ): trial.number
        }

    def _stop(self, number: int) -> Path:
        return self.result.parent / f"stop_{number}"

    def _take(self, reports: Any) -> None:
        """Hand what was reported to the study, and end what its pruner ends."""
        while True:
            try:
                number, epoch, loss = reports.get_nowait()
            except queue.Empty:
                return
            if number in self.states:  # its last report came after its result
                continue
            self.trials[number].report(loss, epoch)
            if epoch < self.num_epochs and self.trials[number].should_prune():
                self._stop(number).touch()

    def _tell(self, number: int, state: str, loss: float | None) -> None:
        states = optuna.trial.TrialState
        told = {"completed": states.COMPLETE, "pruned": states.PRUNED, "out_of_memory": states.FAIL}[state]
        self.study.tell(self.trials[number], loss, told)
        self.states[number] = state
        self.write()

    def write(self) -> None:
        """Write what is known so far, so that a study that is ended early counts too."""
        params = {number: trial.params for number, trial in self.trials.items()}
        found = {"states": self.states, "params": params, "ended": self.ended}
        aside = self.result.with_suffix(".tmp")
        aside.write_text(json.dumps(found) + "\n")
        aside.replace(self.result)


def distributions() -> dict[str, Any]:
    """Return the searched settings."""
    of = optuna.distributions
    return {
        "batch_size": of.CategoricalDistribution(tune_job.BATCH_SIZES),
        "hidden_size": of.CategoricalDistribution(tune_job.HIDDEN_SIZES),
        "num_layers": of.CategoricalDistribution(tune_job.NUM_LAYERS),
        "learning_rate": of.FloatDistribution(*tune_job.LEARNING_RATES, log=True),
    }


def main() -> None:
    num_jobs, num_trials, seed, guard_bytes, num_epochs = map(int, sys.argv[1:6])
    result, draws = Path(sys.argv[6]), json.loads(Path(sys.argv[7]).read_text())
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    peer = Peer(num_jobs, num_trials, seed, guard_bytes, num_epochs, result, draws)
    peer.run()
    peer.write()


if __name__ == "__main__":
    main()
