"""Judge a measured loader: whether the trainer waits for it, and the simplest good way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.errors import DoesNotFitError, UsageError
from memfit.units import format_bytes

#: The largest share of its time that a trainer may wait before its loader is called a bottleneck.
MOST_WAIT_SHARE = 0.02
#: Without a trainer: a way to run a loader is as good as the best if it reaches this share of its rate.
_AS_GOOD = 0.95


@dataclass(frozen=True)
class Pace:
    """What a loader delivered in one measurement, after its first batch.

    Attributes:
        num_batches, num_samples, num_bytes: What it delivered; the first array of a batch gives its samples.
        wait_seconds: Time waited for batches; without a consumer, reading their bytes included.
        compute_seconds: Time in the consumer; 0 without one.
        cached_share: The share of the data in the page cache before the start; None if unknown.
    """

    num_batches: int
    num_samples: int
    num_bytes: int
    wait_seconds: float
    compute_seconds: float = 0.0
    cached_share: float | None = None

    def per_second(self, count: float) -> float:
        seconds = self.wait_seconds + self.compute_seconds
        return count / seconds if seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Of the time between the first and the last batch, the share that was waited, 0 to 1."""
        return self.per_second(self.wait_seconds)


@dataclass(frozen=True)
class LoaderReport:
    """One count of workers, measured.

    Attributes:
        num_workers: The workers asked for.
        start_seconds: To the first batch, the data in the page cache.
        warm: As fast as the loader goes, the data in the page cache.
        cold: The same with the data dropped from the page cache, one epoch at most; None without files or with a
            single batch.
        trained: The same beside the consumer, the data in the page cache; None without a consumer.
        worker_private_bytes: Non-reclaimable bytes of the processes that the loader started.
        worker_pss_bytes: Their proportional set size.
    """

    num_workers: int
    start_seconds: float
    warm: Pace
    cold: Pace | None = None
    trained: Pace | None = None
    worker_private_bytes: int = 0
    worker_pss_bytes: int = 0

    @property
    def wait_share(self) -> float | None:
        """The share of its time that the trainer waited, 0 to 1; None without one."""
        return None if self.trained is None else self.trained.wait_share


@dataclass(frozen=True)
class ModeReport:
    """One way to run a loader, over a training of some epochs.

    Attributes:
        name: ``safe`` makes a batch when it is asked for. ``preload`` also reads all data into the page cache first.
            ``workers`` makes batches ahead.
        num_workers: Workers; 0 for the other modes.
        start_seconds: To the first batch, the reading of the data included.
        samples_per_second: Over the whole training.
        wait_share: The share of it that the trainer waits for data, 0 to 1; None without a trainer.
        private_bytes: Private memory of the worker processes.
        data_bytes: What has to stay in the page cache.
        refused: Why it cannot be chosen; empty if it can.
    """

    name: Literal["safe", "preload", "workers"]
    num_workers: int
    start_seconds: float
    samples_per_second: float
    wait_share: float | None
    private_bytes: int
    data_bytes: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether the loader holds the trainer up (None: no trainer was measured), and the sentence that says so."""

    is_bottleneck: bool | None
    text: str


@dataclass(frozen=True)
class Choice:
    """The chosen number of workers; the text with a line for each way; of `choose_mode`, the mode and all modes."""

    num_workers: int
    text: str
    name: str = ""
    modes: tuple[ModeReport, ...] = ()


def verdict(report: LoaderReport, most_wait_share: float = MOST_WAIT_SHARE) -> Verdict:
    """Say whether the trainer waits for its loader more than the share that is allowed.

    Example:
        >>> warm, trained = Pace(100, 3200, 0, 1.0), Pace(10, 320, 0, wait_seconds=0.001, compute_seconds=1.0)
        >>> found = verdict(LoaderReport(2, 0.5, warm, trained=trained))
        >>> found.is_bottleneck, found.text.partition(":")[0]
        (False, 'no bottleneck')
        >>> found.text.partition(": ")[2]
        '2 workers give a batch every 10.0 ms, a step takes 100.0 ms; the trainer waits 0.1 % of its time (2 % at most)'
    """
    every = report.warm.wait_seconds / max(report.warm.num_batches, 1)
    gives = f"{_workers(report.num_workers)} give a batch every {every * 1e3:.1f} ms"
    pace = report.trained
    if pace is None:
        return Verdict(None, f"no trainer was measured: {gives}; one with longer steps is not held up")
    step = f"a step takes {pace.compute_seconds / max(pace.num_batches, 1) * 1e3:.1f} ms"
    waits = f"waits {pace.wait_share * 100:.1f} % of its time ({most_wait_share * 100:g} % at most)"
    if pace.wait_share <= most_wait_share:
        return Verdict(False, f"no bottleneck: {gives}, {step}; the trainer {waits}")
    return Verdict(True, f"the trainer {waits}: {gives}, {step}")


def choose_num_workers(
    reports: Sequence[LoaderReport], most_wait_share: float = MOST_WAIT_SHARE, budget_bytes: int | None = None
) -> Choice:
    """Choose the fewest workers that keep the trainer from waiting, among those that fit the budget.

    If none does, the count with which it waits least. Without a trainer: the fewest that reach 95 % of the best rate.

    Args:
        reports: One per count of workers, all measured beside the same trainer or all without one.
        most_wait_share: The share of its time that a trainer may wait.
        budget_bytes: What the workers' private bytes may come to; None for no limit.

    Raises:
        DoesNotFitError: If no count that was measured fits the budget.
        UsageError: If there is no report.

    Example:
        >>> warm = Pace(100, 3200, 0, 1.0)
        >>> waited = {0: 0.3, 1: 0.1, 2: 0.01, 4: 0.0}
        >>> reports = [LoaderReport(n, 0.1, warm, None, Pace(9, 9, 0, share, 1 - share), n << 28)
        ...            for n, share in waited.items()]
        >>> choose_num_workers(reports).num_workers, choose_num_workers(reports, budget_bytes=1 << 28).num_workers
        (2, 1)
        >>> print(choose_num_workers(reports).text)
        2 workers, the simplest with which the trainer waits at most 2 %
          0 workers: 3,200 samples/s, waits 30.0 %, starts in 0.10 s, 0 B private
          1 worker: 3,200 samples/s, waits 10.0 %, starts in 0.10 s, 256.0 MiB private
          2 workers: 3,200 samples/s, waits 1.0 %, starts in 0.10 s, 512.0 MiB private
          4 workers: 3,200 samples/s, waits 0.0 %, starts in 0.10 s, 1.00 GiB private
    """
    if not reports:
        raise UsageError(
            "there is no report to choose from.",
            rule="a number of workers is chosen among those that were measured.",
            remedy="measure at least one: measure_loader(make_loader, num_workers=[0])",
        )
    ways = [
        ModeReport(
            name="workers",
            num_workers=one.num_workers,
            start_seconds=one.start_seconds,
            samples_per_second=one.warm.per_second(one.warm.num_samples),
            wait_share=one.wait_share,
            private_bytes=one.worker_private_bytes,
            refused=too_large(one.worker_private_bytes, "workers", budget_bytes),
        )
        for one in sorted(reports, key=lambda one: one.num_workers)
    ]
    if all(way.refused for way in ways):
        least = min(ways, key=lambda way: way.private_bytes)
        raise DoesNotFitError(
            f"{_workers(least.num_workers)} take {format_bytes(least.private_bytes)}, the least measured.",
            rule=f"the workers may take {format_bytes(budget_bytes or 0)}.",
            remedy="measure 0 workers too, which take nothing beside the trainer",
        )
    chosen, text = simplest(ways, [_workers(way.num_workers) for way in ways], most_wait_share)
    return Choice(chosen.num_workers, text)


def too_large(nbytes: int, what: str, budget_bytes: float | None) -> str:
    """Return why something does not fit into a budget; empty if it does."""
    if budget_bytes is None or nbytes <= budget_bytes:
        return ""
    return f"{format_bytes(nbytes)} of {what}, more than the {format_bytes(int(budget_bytes))} that are left"


def simplest(
    ways: Sequence[ModeReport], labels: Sequence[str], most_wait_share: float = MOST_WAIT_SHARE
) -> tuple[ModeReport, str]:
    """Return the first way with which the trainer hardly waits, else the best one; and the figures as text."""
    fitting = [way for way in ways if not way.refused]
    shares = [way.wait_share for way in fitting if way.wait_share is not None]
    if len(shares) < len(fitting):
        best = max(way.samples_per_second for way in fitting)
        chosen = next(way for way in fitting if way.samples_per_second >= _AS_GOOD * best)
        why = f"the simplest that reaches {_AS_GOOD:.0%} of the best rate (no trainer was measured)"
    else:
        place = next((at for at, share in enumerate(shares) if share <= most_wait_share), shares.index(min(shares)))
        chosen, most = fitting[place], f"{most_wait_share * 100:g} %"
        why = f"the simplest with which the trainer waits at most {most}"
        if shares[place] > most_wait_share:
            why = f"with which it waits least; none that fits keeps it below {most}"
    lines = [f"{labels[list(ways).index(chosen)]}, {why}"]
    for way, label in zip(ways, labels, strict=True):
        line = f"{way.samples_per_second:,.0f} samples/s"
        line += "" if way.wait_share is None else f", waits {way.wait_share * 100:.1f} %"
        line += f", starts in {way.start_seconds:.2f} s, {format_bytes(way.private_bytes)} private"
        line += f", {format_bytes(way.data_bytes)} of data in memory" if way.data_bytes else ""
        lines.append(f"  {label}: {line}{f'; refused: {way.refused}' if way.refused else ''}")
    return chosen, "\n".join(lines)


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"
