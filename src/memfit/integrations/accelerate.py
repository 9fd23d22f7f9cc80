"""Watch, stop and resume a loop of Accelerate, and make the resume exact: ``docs/frameworks/accelerate.md``.

The loop is that of ``memfit.training.Loop``; ``accelerator.save_state`` writes what it saves. Private names of
Accelerate that have no public way: the lists of what it has prepared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import accelerate as _accelerate
    import torch
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "accelerate", __name__) from error

from torch.nn.parallel import DistributedDataParallel

from memfit.integrations._refuse import Cause, refuse_any
from memfit.training import KeyedStream, Loop, LoopParts, Ranks, deaf_workers, order_of

__all__ = ["Exact", "MemfitCallback", "Stop"]


class _Adapted(Loop):
    """A loop over what an Accelerator has prepared."""

    def __init__(self, accelerator: _accelerate.Accelerator, folder: Path | str | None = None, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.session.parts = _Prepared(accelerator)
        self.session.join(Ranks.current())

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch that are left.

        Args:
            loader: What ``accelerator.prepare`` gave.
        """
        return self(loader)


class MemfitCallback(_Adapted):
    """Watches a loop of Accelerate: phases, steps, epochs, losses and waits become events; nothing else changes.

    Args:
        accelerator: The ``accelerate.Accelerator``.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> watch = MemfitCallback(accelerator)
        >>> for epoch in watch.epochs(2):
        ...     for batch in watch.batches(loader):
        ...         loss = model(batch).square().mean()
        ...         accelerator.backward(loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         watch.log(loss)
        >>> watch.step
        4
    """

    def __init__(self, accelerator: _accelerate.Accelerator) -> None:
        super().__init__(accelerator)


class Stop(_Adapted):
    """Stops a loop of Accelerate by SIGTERM, SIGUSR1 or Ctrl-C after the step under way, and resumes it.

    It ends with exit code 75. The newest whole checkpoint is taken, each sample of the epoch is seen once, and random
    numbers stay as they are: what the data draw is another after a resume than in a training without a stop. Of several
    ranks all stop after the same step, and rank 0 seals what they saved.

    Args:
        accelerator: The ``accelerate.Accelerator``. What it has prepared or was told to checkpoint
            (``register_for_checkpointing``) is saved.
        folder, every, every_seconds, keep, allow, settings, loss: As for ``memfit.training.Loop``.

    Raises:
        UsageError: When it is entered, before anything is trained: what cannot be resumed, by name.
        StoppedError: A signal asked for it; everything up to here is saved.
    """

    def __init__(  # noqa: PLR0913
        self,
        accelerator: _accelerate.Accelerator,
        folder: Path | str,
        *,
        every: int | None = None,
        every_seconds: float | None = 600.0,
        keep: int = 2,
        allow: Collection[str] = (),
        settings: Mapping[str, Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        times: Any = {"every": every, "every_seconds": every_seconds, "keep": keep}
        super().__init__(accelerator, folder, allow=allow, settings=settings, loss=loss, **times)


class Exact(Stop):
    """Resumes a loop of Accelerate to the same bytes, wherever it was stopped or killed, or refuses it before step 1.

    Order, items, collation and the model's draws are functions of seed and position, so they are others than without
    it, of the same distribution. Weights do not depend on the number of workers; another number of ranks is refused.

    Args:
        seed: Other seeds, other order and draws.
        allow: As for ``Stop``, and names of what is refused otherwise, such as ``"data"``.
        accelerator, folder, every, every_seconds, keep, settings, loss: As for ``Stop``.

    Raises:
        UsageError: As for ``Stop``; in ``loader`` also what cannot be exact.
        StoppedError: As for ``Stop``.
    """

    def __init__(self, accelerator: _accelerate.Accelerator, folder: Path | str, *, seed: int, **settings: Any) -> None:
        super().__init__(accelerator, folder, **settings)
        ranks = self.session.ranks
        self.session.stream = KeyedStream(seed, 0 if ranks is None else ranks.rank)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch that are left, of a loader that ``loader`` made and Accelerate prepared."""
        how = "loader = exact.loader(loader), before accelerator.prepare(...)"
        refuse_any([("a loader that exact.loader has not made", order_of(loader) is None, how)], (), is_exact=True)
        return self(loader)


class _Prepared(LoopParts):
    """What an Accelerator has prepared, saved by itself."""

    look_ahead = 1

    def __init__(self, accelerator: _accelerate.Accelerator) -> None:
        super().__init__({})
        self.accelerator: Any = accelerator

    def check(self, allow: Collection[str] = (), others: Iterable[Any] = ()) -> None:
        accelerator = self.accelerator
        is_stateful = accelerator.dataloader_config.use_stateful_dataloader
        names_folders = accelerator.project_configuration.automatic_checkpoint_naming
        is_empty = not (accelerator._models and accelerator._optimizers)
        own: list[Cause] = [
            ("use_stateful_dataloader", is_stateful, "leave it off: memfit keeps the position of the data"),
            ("automatic_checkpoint_naming", names_folders, "leave it off: memfit names the folders"),
            ("a model or optimizer that was not prepared", is_empty, "call accelerator.prepare(...) before the loop"),
        ]
        refuse_any(refused_ranks(accelerator) + own, allow)
        for loader in accelerator._dataloaders:  # those of an evaluation too
            deaf_workers(getattr(loader, "base_dataloader", loader))
        super().check(allow, accelerator._custom_objects)

    def models(self) -> dict[str, torch.nn.Module]:
        return {f"model {number}": model for number, model in enumerate(self.accelerator._models)}

    def wrappers(self) -> list[Any]:
        bare = {id(one) for one in self.accelerator._models}  # their wrappers are the script's alone
        return [one for one in gc.get_objects() if type(one) is DistributedDataParallel and id(one.module) in bare]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one.optimizer for one in self.accelerator._optimizers]

    def schedules(self) -> list[Any]:
        return [one.scheduler for one in self.accelerator._schedulers]

    def identity(self) -> dict[str, Any]:
        accelerator = self.accelerator
        own = {"accumulation": accelerator.gradient_accumulation_steps, "mixed_precision": accelerator.mixed_precision}
        return own | {"world_size": accelerator.num_processes} | super().identity()

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def skip(self, loader: Any, count: int) -> Any:
        return _accelerate.skip_first_batches(loader, count)

    def skip_ordered(self, loader: Any, order: Any, num_samples: int, count: int) -> Any:
        if self.accelerator.num_processes == 1:
            return super().skip_ordered(loader, order, num_samples, count)
        return self.skip(loader, count) if count else loader  # its first batches fill up the last ones

    def placed(self, batch: Any) -> Any:
        return _accelerate.utils.send_to_device(batch, self.accelerator.device)

    def enter_epoch(self, loader: Any, epoch: int) -> None:
        loader.iteration = epoch  # a resumed process would begin at 0
        if hasattr(loader, "set_epoch"):  # nor is a batch sampler told, of which the first batches are skipped
            loader.set_epoch(epoch)

    def dealt(self, count: int, before: int, now: int) -> int:
        return count if self.accelerator.dataloader_config.split_batches else super().dealt(count, before, now)

    def is_over(self, loader: Any) -> bool:
        return bool(loader.end_of_dataloader)

    def source(self, loader: Any) -> Any:
        refuse_stream(loader.dataset, self.accelerator.num_processes)
        return super().source(getattr(loader, "base_dataloader", loader))


def refuse_stream(data: Any, size: int) -> None:
    is_stream = isinstance(data, torch.utils.data.IterableDataset)
    refuse_any([("a stream on several ranks", size > 1 and is_stream, "train in one process")], ())


def refused_ranks(accelerator: Any) -> list[Cause]:
    """Return what several ranks may have that no checkpoint holds."""
    size, kind = accelerator.num_processes, str(accelerator.distributed_type.value)
    data, handler = accelerator.dataloader_config, accelerator.ddp_handler
    hook = "" if handler is None else str(handler.comm_hook.value)
    has_mesh = getattr(accelerator, "torch_device_mesh", None) is not None
    is_plain = kind == "NO" or kind.startswith("MULTI_")
    return [
        (
            "parallelism_config" if has_mesh else kind.lower(),
            has_mesh or not is_plain,
            "train in one process, or on ranks in DistributedDataParallel; or keep to the framework's own checkpoints",
        ),
        ("dispatch_batches", size > 1 and bool(data.dispatch_batches), "leave it off: each rank reads its own data"),
        ("even_batches", size > 1 and not data.even_batches, "leave it on: its peers would wait for a rank's batch"),
        ("comm_hook", size > 1 and "power" in hook, "take another: no checkpoint holds its state"),
    ]
