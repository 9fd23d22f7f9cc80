"""The first minute of a training tries what would otherwise fail after its first epoch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.errors import DoesNotFitError, MemfitError, UsageError
from memfit.memory import Meter, measure
from memfit.rundir import mark_phase, record
from memfit.training._keyed import preserved_generators
from memfit.training._oom import classify_oom, device_bytes, release
from memfit.training._process import preserved_rng
from memfit.training._snapshot import Snapshot
from memfit.training._split import held_bytes
from memfit.training._step import SafeStep, _memory_now
from memfit.training._workers import FIRST_BATCH_SECONDS, watched

T = TypeVar("T")

_NUM_SAMPLED = 8
_INTERVAL_SECONDS = 0.02

_REMEDIES = {
    "train": "take an optimizer with a smaller state (SGD, Adafactor, an 8-bit one), train fewer weights, or give more "
    "memory: its state is needed whole, whatever the batch",
    "validate": "make the validation batches smaller or fewer workers load them, or keep less of each in evaluate",
    "checkpoint": "give more host memory: the state passes through it on its way to the disk",
}


@dataclass(frozen=True)
class Longest:
    """The batch that takes most memory, and how it was found.

    Attributes:
        batch: As the loader gives it.
        how: ``given`` by the user; ``known`` by the batches' own ``longest()``; made of the samples with the largest of
            the dataset's ``lengths``; the largest of ``all`` batches of a list; the largest of those ``sampled``.
        num_seen: How many batches were looked at.
    """

    batch: Any
    how: Literal["given", "known", "lengths", "all", "sampled"]
    num_seen: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors and arrays."""
        return held_bytes(self.batch)


@dataclass(frozen=True)
class PhaseMemory:
    """The peaks of one phase of the preflight.

    Attributes:
        host_bytes: Non-reclaimable memory of this process and its loader workers.
        allocated_bytes: By device such as ``cuda:0``: what tensors took.
        reserved_bytes: By device: what torch's allocator held for them.
        seconds: How long it took.
    """

    host_bytes: int
    allocated_bytes: Mapping[str, int]
    reserved_bytes: Mapping[str, int]
    seconds: float


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight found.

    Attributes:
        phases: ``train``, ``validate`` and ``checkpoint``, as far as they were tried.
        longest: How the longest batch was found; ``sampled`` promises least.
        num_seen: How many batches were looked at for it.
        microbatch_size: What the longest batch is split into.
        num_ooms: How often it had to be split smaller until it fitted.
        checkpoint_bytes: The size of the checkpoint; None if none was written.
    """

    phases: Mapping[str, PhaseMemory]
    longest: str
    num_seen: int
    microbatch_size: int
    num_ooms: int
    checkpoint_bytes: int | None

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak on the devices, or on the host where there is none."""
        return max(
            self.phases,
            key=lambda name: (sum(self.phases[name].reserved_bytes.values()), self.phases[name].host_bytes),
        )


def preflight(
    step: SafeStep,
    *,
    longest: Longest,
    validate: Callable[[], object] | None = None,
    save: Callable[[], Path | None] | None = None,
    num_batches: int = 1,
) -> PreflightReport:
    """Try the longest batch, the optimizer's first step, validation and a checkpoint before the training begins.

    What would fail later fails now, or shrinks: the step remembers how the longest batch has to be split, unless it
    knows sizes already, of the training that it resumes. That batch is tried twice, the second time beside the
    optimizer's state, and its gradients stay to the end. Nothing else remains: weights, buffers, gradients, modes and
    the random state are as they were, so that the training is the same bit for bit as without.

    Args:
        step: The step of the training; no gradient is kept.
        longest: The batch that takes most; see ``find_longest``.
        validate: Validates the longest batch of validation, or all of it. Called in evaluation mode without gradients.
            Keep the training loader's iterator alive meanwhile if it will live then.
        save: Writes a checkpoint, of the state as it was before the preflight, and gives its path.
        num_batches: How many batches make one optimizer step; more than one are tried as two.

    Raises:
        SampleTooLargeError: If a single sample of the longest batch does not fit.
        DoesNotFitError: If the optimizer's state, validation or the checkpoint does not fit.

    Example:
        >>> from memfit.training import SafeStep
        >>> model = torch.nn.Linear(2, 1)
        >>> step = SafeStep(model, torch.optim.AdamW(model.parameters()), lambda model, x: (model(x).sum(), len(x)))
        >>> report = preflight(step, longest=find_longest([torch.ones(3, 2), torch.ones(5, 2)]))
        >>> report.longest, report.num_seen, report.microbatch_size, list(report.phases)
        ('all', 2, 5, ['train'])
    """
    mark_phase("preflight")
    model = step.model
    devices: dict[str, dict[str, dict[str, int]]] = {}
    path: Path | None = None

    def train() -> int:
        model.train()
        batches = [longest.batch] * min(num_batches, 2)
        step.gradients(*batches)
        step.prepare()  # with the gradients there: for the weights that have one
        return step.gradients(*batches).microbatch_size

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            if validate is not None:
                validate()

    with ExitStack() as stack:
        for owner in (step.optimizer, model):
            stack.callback(owner.zero_grad, set_to_none=True)
        with measure(interval_seconds=_INTERVAL_SECONDS) as meter:
            with _untouched(step), _sizes_learned_at_most(step) as count_ooms:
                microbatch_size = _take("train", train, meter, devices)
                num_ooms = count_ooms()
                if validate is not None:
                    _take("validate", evaluate, meter, devices)
            if save is not None:
                path = _take("checkpoint", save, meter, devices)
    report = PreflightReport(
        phases={phase: _peaks_of(meter.footprint.phases[phase], sizes) for phase, sizes in devices.items()},
        longest=longest.how,
        num_seen=longest.num_seen,
        microbatch_size=microbatch_size,
        num_ooms=num_ooms,
        checkpoint_bytes=None if path is None else path.stat().st_size,
    )
    record("preflight", **asdict(report))
    return report


@contextmanager
def _untouched(step: SafeStep) -> Iterator[None]:
    """Random state, buffers and modes are afterwards what they were."""
    modes = [(module, module.training) for module in step.model.modules()]
    before = Snapshot(step.model, step.optimizer, step.scaler)
    before.take()
    try:
        yield
    finally:
        before.restore()
        for module, training in modes:
            module.training = training


@contextmanager
def _sizes_learned_at_most(step: SafeStep) -> Iterator[Callable[[], int]]:
    """Afterwards the step has learned microbatch sizes, if it knew none before; its counts are what they were.

    Sizes that a resumed step knows are part of what makes a resume bit-exact.
    """
    before = step.state_dict()
    try:
        yield lambda: step.num_ooms - int(before["num_ooms"])
    finally:
        learned = {} if before["sizes"]["limit"] is not None else {"sizes": step.state_dict()["sizes"]}
        step.load_state_dict({**before, **learned})


def _take(phase: str, action: Callable[[], T], meter: Meter, devices: dict[str, Any]) -> T:
    """Run one phase and note the peaks on devices; a failed allocation becomes an error with the arithmetic."""
    meter.phase(phase)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    failed: Exception | None = None
    try:
        return action()
    except Exception as error:
        kind = classify_oom(error)
        if kind is None or isinstance(error, MemfitError):
            raise
        failed = error
    finally:
        devices[phase] = device_bytes()
    text = str(failed).partition("\n")[0] or type(failed).__name__
    release(failed)
    raise DoesNotFitError(
        f"The preflight ran out of {kind} memory in its phase '{phase}': {text}",
        rule=_memory_now(kind),
        remedy=_REMEDIES[phase],
    )


def _peaks_of(host: Any, devices: Mapping[str, Mapping[str, int]]) -> PhaseMemory:
    return PhaseMemory(
        host_bytes=host.private_bytes,
        allocated_bytes={name: sizes["allocated_peak_bytes"] for name, sizes in devices.items()},
        reserved_bytes={name: sizes["reserved_peak_bytes"] for name, sizes in devices.items()},
        seconds=host.seconds,
    )


def find_longest(batches: Iterable[Any], first_batch_seconds: float = FIRST_BATCH_SECONDS) -> Longest:
    """The batch that will take most memory, without disturbing the batches or the random state.

    In this order: what the batches' own ``longest()`` gives; for a ``DataLoader`` whose dataset has ``lengths``, one of
    its longest samples; for a list, the largest of all; else the largest of the first eight, which is a sample: a
    longer batch may come later. Of a ``DataLoader`` a second one is made for it, with at most one worker, so that
    neither its iterator nor its workers are touched; the generators of loader, samplers and data set are put back.

    Args:
        batches: What a training iterates over once per epoch.
        first_batch_seconds: How long a worker of a ``DataLoader`` may do nothing before a first batch.

    Raises:
        UsageError: If it can be iterated only once, or gives no batch.
        JobFailedError: If a worker was stuck.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> find_longest([[1], [1, 2, 3], [1, 2]]).batch
        [1, 2, 3]
        >>> loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4)
        >>> find_longest(loader).how
        'sampled'
    """
    own = getattr(batches, "longest", None)
    with preserved_rng(), preserved_generators(batches):
        if callable(own):
            return Longest(copy.deepcopy(own()), "known")
        if isinstance(batches, DataLoader):
            return _longest_of_loader(batches, first_batch_seconds)
        if isinstance(batches, list | tuple):
            return _largest(batches, "all", shared=True)
        iterator = iter(batches)
        if iterator is batches:
            raise UsageError(
                f"{type(batches).__name__} can be iterated once only.",
                rule="a batch is taken from it before the training begins.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        return _largest(itertools.islice(iterator, _NUM_SAMPLED), "sampled", shared=True)


def _longest_of_loader(loader: DataLoader[Any], seconds: float) -> Longest:
    lengths = getattr(loader.dataset, "lengths", None)
    if isinstance(loader.dataset, IterableDataset):
        probe = _probe(loader, batch_size=loader.batch_size, drop_last=loader.drop_last)
        with watched(probe, seconds, "the preflight") as each:
            return _largest(itertools.islice(each, _NUM_SAMPLED), "sampled")
    indices = _indices(loader, _NUM_SAMPLED) if lengths is None else [_longest_indices(loader, lengths)]
    probe = _probe_indices(loader, indices)
    with watched(probe, seconds, "the preflight") as each:
        return _largest(each, "sampled" if lengths is None else "lengths")


def _indices(loader: DataLoader[Any], count: int | None = None) -> list[Any]:
    """What the loader's samplers give first."""
    return list(itertools.islice(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, count))


def _longest_indices(loader: DataLoader[Any], lengths: Any) -> Any:
    """The indices of one batch: the longest samples; of samplers that make batches as they like, the largest batch."""
    values = torch.as_tensor(lengths).flatten()
    if loader.batch_sampler is None:
        return int(values.argmax())
    if loader.batch_size is not None:
        return values.topk(min(loader.batch_size, len(values))).indices.tolist()

    def padded(batch: Any) -> int:
        return len(batch) * max(int(values[index[-1] if isinstance(index, tuple) else index]) for index in batch)

    return max(_indices(loader), key=padded)


def _probe_indices(loader: DataLoader[Any], batches: list[Any]) -> Iterable[Any]:
    if loader.batch_sampler is None:
        return _probe(loader, sampler=batches, batch_size=None)
    return _probe(loader, batch_sampler=batches)


def _probe(loader: DataLoader[Any], **batching: Any) -> Iterable[Any]:
    """A loader of the same samples that shares no iterator, worker or generator with the first."""
    return DataLoader(
        loader.dataset,
        **batching,
        num_workers=min(loader.num_workers, 1),
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )


def _largest(batches: Iterable[Any], how: Literal["lengths", "all", "sampled"], *, shared: bool = False) -> Longest:
    """The largest batch by its bytes; a copy of it where it is the user's own, which a loss may change in place."""
    best, best_size, num_seen = None, -1, 0
    for batch in batches:
        num_seen += 1
        size = held_bytes(batch)
        if size > best_size:
            best, best_size = batch, size
    if num_seen == 0:
        raise UsageError(
            "There is no batch to train on.",
            rule="an epoch has at least one batch.",
            remedy="check how the training data were filtered",
        )
    return Longest(copy.deepcopy(best) if shared else best, how, num_seen)
