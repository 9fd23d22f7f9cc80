"""Try before the first step what would otherwise fail after the first epoch."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from memfit.errors import DoesNotFitError, SampleTooLargeError, UsageError
from memfit.memory import Meter, measure
from memfit.rundir import is_canary, phase, record
from memfit.training._feed import is_numbered
from memfit.training._loaders import preserved_generators, remade
from memfit.training._oom import Failed, attempt, device_bytes, memory_now, reset_device_peaks
from memfit.training._process import preserved_rng, say
from memfit.training._ranks import first_line
from memfit.training._snapshot import Snapshot, kept
from memfit.training._split import WHOLE, Split, held_bytes
from memfit.training._step import SafeStep
from memfit.training._workers import FIRST_BATCH_SECONDS, Workers
from memfit.units import format_bytes, format_count

T = TypeVar("T")

#: So many batches are drawn to find the largest, and no further one after so long.
_NUM_SAMPLED, _SAMPLE_SECONDS = 8, 10.0
_INTERVAL_SECONDS = 0.02

_REMEDIES = {
    "train": "take an optimizer with a smaller state (SGD, Adafactor, an 8-bit one), train fewer weights, or give more "
    "memory: its state is needed whole, whatever the batch",
    "validate": "make the validation batches smaller or fewer workers load them, or keep less of each in evaluate",
    "checkpoint": "give more host memory: the state passes through it on its way to the disk",
}


@dataclass(frozen=True)
class Longest:
    """The batch that takes most memory, and how it was found: ``given`` by the user; ``known`` by the batches' own
    ``longest()``; by the dataset's ``lengths``; the largest of ``all`` batches of a list, or of the ``num_seen``
    ``sampled``."""

    batch: Any
    how: Literal["given", "known", "lengths", "all", "sampled"]
    num_seen: int = 1

    @property
    def num_bytes(self) -> int:
        return held_bytes(self.batch)


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight found in its phases, as far as they were tried: their ``seconds``, and the peaks of
    ``host_bytes`` (non-reclaimable, with loader workers) and ``devices``. ``microbatch_size`` is what the longest batch
    is split into, after ``num_ooms`` failures."""

    phases: Mapping[str, dict[str, Any]]
    longest: str
    num_seen: int
    microbatch_size: int
    num_ooms: int


def preflight(
    step: SafeStep,
    *,
    longest: Longest,
    validate: Callable[[], object] | None = None,
    save: Callable[[], object] | None = None,
    num_batches: int = 1,
) -> PreflightReport:
    """Try the longest batch, the optimizer's first step, validation and a checkpoint before the training begins.

    What would fail later fails now, or shrinks: the step remembers how the longest batch has to be split, unless it
    knows that from the training it resumes. Weights, buffers, gradients, modes and the random state stay as they were,
    so that the training is the same bit for bit as without.

    Args:
        step: The step of the training.
        longest: The batch that takes most; see ``find_longest``.
        validate: Validates the longest batch of validation, or all of it; called in evaluation mode without gradients.
        save: Writes a checkpoint, of the state as it was before the preflight.
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
    phase("preflight")
    model = step.model
    devices: dict[str, dict[str, dict[str, int]]] = {}

    def train() -> int:
        model.train()
        batches = [longest.batch] * min(num_batches, 2)
        step.gradients(*batches)
        step.prepare()  # with the gradients there: for the weights that have one
        return step.gradients(*batches).microbatch_size

    num_ooms = -step.num_ooms
    try:
        with measure(interval_seconds=_INTERVAL_SECONDS) as meter:
            with _untouched(step):
                microbatch_size = _take("train", train, meter, devices)
                num_ooms += step.num_ooms
                if validate is not None:
                    model.eval()
                    with torch.no_grad():
                        _take("validate", validate, meter, devices)
            if save is not None:
                _take("checkpoint", save, meter, devices)
    finally:
        step.optimizer.zero_grad()
        model.zero_grad()
    hosts = {name: meter.footprint.phases[name] for name in devices}
    phases = {
        name: {"host_bytes": host.private_bytes, "devices": devices[name], "seconds": host.seconds}
        for name, host in hosts.items()
    }
    report = PreflightReport(phases, longest.how, longest.num_seen, microbatch_size, num_ooms)
    record("preflight", **asdict(report))
    return report


def rehearse(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], torch.Tensor],
    batches: Any,
    split: Split = WHOLE,
) -> PreflightReport | None:
    """Say before the first step of a loop that is not memfit's whether its largest batch fits; DoesNotFitError if not.

    The batch goes forward and backward twice, whole, and the memory of the optimizer's state and of its step is tried;
    all is put back. The model is in the mode in which it trains, the optimizer a plain one of torch. Returns None, and
    prints why, where there is no verdict: no batch can be taken from the data without losing it, or it raises an
    error."""
    if not isinstance(batches, Longest) and not _can_be_read_ahead(batches):
        say_verdict(
            "no verdict whether the largest batch fits: the data are a stream, and reading ahead would lose samples"
        )
        return None
    try:
        step = SafeStep(model, optimizer, lambda _, x: (loss(x), 1.0), split=split, allow_inexact=True, group=None)
        report = preflight(step, longest=batches if isinstance(batches, Longest) else find_longest(batches))
    except SampleTooLargeError as error:
        raise DoesNotFitError(
            f"The largest batch does not fit: {error.what}",
            rule=error.rule,
            remedy="make the batch smaller and accumulate gradients over as many more; the loss stays that of all",
        ) from None
    except Exception as error:  # the training's own steps may be well, or say the same with their own traceback
        if isinstance(error, DoesNotFitError | SystemExit):
            raise
        text = f"no verdict whether the largest batch fits: {first_line(error)}".rstrip(".")
        record("untried", text=text)
        say_verdict(f"{text}; allow=('rehearsal',) leaves this out")
        return None
    found = report.phases["train"]
    sizes = [f"{format_bytes(found['host_bytes'])} of host memory"]
    sizes += [f"{format_bytes(one['reserved_peak_bytes'])} on {device}" for device, one in found["devices"].items()]
    seen = f"{format_count(report.num_seen, 'batch')} ({report.longest})"
    say_verdict(f"fits: the largest of {seen} and the optimizer take {', '.join(sizes)}")
    return report


def say_verdict(text: str) -> None:
    """Say in one process of a group whether the largest batch fits: on rank 0, which asks no other rank."""
    is_grouped = dist.is_available() and dist.is_initialized()
    if not is_grouped or dist.get_rank() == 0:
        say(text)


def _can_be_read_ahead(batches: Any) -> bool:
    if callable(getattr(batches, "longest", None)) or is_numbered(batches):
        return True
    return isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset)


@contextmanager
def _untouched(step: SafeStep) -> Iterator[None]:
    """Put back random state, buffers, modes and counts; a step that knew no microbatch sizes keeps those it learned."""
    modes = [(module, module.training) for module in step.model.modules()]
    before, state = Snapshot(step.model, step.optimizer, step.scaler), step.state_dict()
    before.take()
    try:
        with kept(step.model):
            yield
    finally:
        before.restore()
        for module, training in modes:
            module.training = training
        learned = {} if state["sizes"]["limit"] is not None else {"sizes": step.state_dict()["sizes"]}
        step.load_state_dict({**state, **learned})


def _take(name: str, action: Callable[[], T], meter: Meter, devices: dict[str, Any]) -> T:
    """Run one phase and note the peaks on devices; refuse a failed allocation with the numbers."""
    meter.phase(name)
    if is_canary():
        phase(name)  # it is to be named if the job dies here
    reset_device_peaks()
    result = attempt(action)
    devices[name] = device_bytes()
    if not isinstance(result, Failed):
        return result
    raise DoesNotFitError(
        f"The preflight ran out of {result.kind} memory in its phase '{name}': {result.first_line}",
        rule=memory_now(result.kind),
        remedy=_REMEDIES[name],
    )


def find_longest(batches: Iterable[Any], first_batch_seconds: float = FIRST_BATCH_SECONDS) -> Longest:
    """Return the batch that will take most memory; the batches and the random state stay undisturbed.

    In this order: the batches' own ``longest()``; for a ``DataLoader`` whose dataset has ``lengths``, its longest
    samples; for a list, the largest of all; else the largest of the first eight, which is only a sample, or of fewer if
    drawing them takes more than 10 s. For a ``DataLoader`` a second one is made, with at most one worker, which may do
    nothing for ``first_batch_seconds``.

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
    how: Literal["lengths", "sampled"] = "sampled"
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if lengths is None:
            chosen = list(itertools.islice(sampler, _NUM_SAMPLED))
        else:
            chosen, how = [_longest_indices(loader, torch.as_tensor(lengths).flatten())], "lengths"
        is_single = loader.batch_sampler is None
        batching = {"sampler": chosen, "batch_size": None} if is_single else {"batch_sampler": chosen}
    # It shares no iterator, worker or generator with the user's.
    own = {"num_workers": min(loader.num_workers, 1), "persistent_workers": False, "generator": torch.Generator()}
    with closing(Workers(remade(loader, **batching, **own), seconds)) as workers:
        return _largest(itertools.islice(workers.open("the preflight"), _NUM_SAMPLED), how)


def _longest_indices(loader: DataLoader[Any], lengths: torch.Tensor) -> Any:
    """Return the indices of one batch: the longest samples, or the largest batch of a batch sampler of the user's."""
    if loader.batch_sampler is None:
        return int(lengths.argmax())
    if loader.batch_size is not None:
        return lengths.topk(min(loader.batch_size, len(lengths))).indices.tolist()

    def padded(batch: Any) -> int:
        return len(batch) * max(int(lengths[index[-1] if isinstance(index, tuple) else index]) for index in batch)

    return max(loader.batch_sampler, key=padded)


def _largest(batches: Iterable[Any], how: Literal["lengths", "all", "sampled"], *, shared: bool = False) -> Longest:
    """Return the largest batch by its bytes; a copy of one that the user holds, which a loss may change in place."""
    best, best_size, num_seen, began = None, -1, 0, time.monotonic()
    for batch in batches:
        num_seen += 1
        size = held_bytes(batch)
        if size > best_size:
            best, best_size = batch, size
        if how == "sampled" and time.monotonic() - began > _SAMPLE_SECONDS:
            break
    if num_seen == 0:
        raise UsageError(
            "There is no batch to train on.",
            rule="an epoch has at least one batch.",
            remedy="check how the training data were filtered",
        )
    return Longest(copy.deepcopy(best) if shared else best, how, num_seen)
