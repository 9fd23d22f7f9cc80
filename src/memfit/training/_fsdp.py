"""Keep the checkpoints of a sharded model: each rank writes its shards, and one seal makes them a whole.

Shards are files of ``torch.distributed.checkpoint``, so another number of ranks can load them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.files import replacing
from memfit.training._checkpoint import (
    BEST,
    LATEST,
    SHARED,
    CheckpointFolder,
    Position,
    load_checkpoint,
    save_checkpoint,
)
from memfit.training._sealed import SEAL, SealedFolder

if TYPE_CHECKING:
    from memfit.training._step import SafeStep

PREFIX = "sharded-"
_KEPT = 2


class ShardedFolder(CheckpointFolder):
    """Keeps the checkpoints of one fit of a sharded model, ``sharded-<optimizer steps>/`` each, and ``best_model.pt``.
    ``save_shards`` and ``load_shards`` are called by all ranks, the rest by rank 0."""

    def __init__(self, path: Path, keep_epochs: int, milestones: Collection[int] = (), *, step: SafeStep) -> None:
        super().__init__(path, keep_epochs, milestones)
        assert step.ranks is not None
        self._step, self._ranks = step, step.ranks
        self._sealed = SealedFolder(path, PREFIX)
        self._num_steps = 1

    def check_room(self, one_bytes: int, num_epochs: int) -> None:
        tensors = [
            *self._step.parameters(),
            *(one for state in self._step.optimizer.state.values() for one in state.values()),
        ]
        sharded = sum(one.numel() * one.element_size() for one in tensors if hasattr(one, "numel"))
        super().check_room(one_bytes + sharded, num_epochs)

    def save_shards(self, position: Position, num_steps: int) -> None:
        """Write this rank's shards of weights and optimizer; torch waits for rank 0 before, and for all ranks after."""
        import torch.distributed.checkpoint as dcp

        self._num_steps = num_steps
        if self._ranks.rank == 0:
            self._sealed.begin(self._number(position))
        path = self._sealed.folder_of(self._number(position))
        dcp.save(self._shards(), checkpoint_id=path, process_group=self._ranks.side)  # type: ignore[attr-defined]

    def save(self, position: Position, state: dict[str, Any]) -> Path:
        number = self._number(position)
        save_checkpoint(self._sealed.folder_of(number) / SHARED, state)
        return self._sealed.seal(number, {"epoch": position[0], "ranks": self._ranks.size, "steps": self._num_steps})

    def mark_best(self) -> None:
        if (newest := self._newest_path()) is not None:
            with replacing(self.path / BEST, durable=False) as aside:
                aside.symlink_to(newest.name)

    def prune(self, position: Position, best_epoch: int | None) -> None:
        spared = [
            self._sealed.folder_of(self._number((epoch, 0)))
            for epoch in (*self.milestones, best_epoch)
            if epoch is not None
        ]
        self._sealed.prune(max(self.keep_epochs, _KEPT), spared)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        if (self.path / LATEST).exists():
            raise UsageError(
                f"{self.path} holds checkpoints of a model that is not sharded.",
                rule="a fit goes on with what wrote its checkpoints.",
                remedy="train the model as it was, or pass another checkpoint_dir",
            )
        if (found := self._sealed.newest()) is None:
            return None
        self._num_steps = found.facts["steps"]  # what an epoch's checkpoint is called, before this fit saves one
        return found.path, self.read(found.path)

    def read(self, path: Path) -> dict[str, Any]:
        return load_checkpoint(path / SHARED)

    def load_shards(self, path: Path) -> None:
        """Load this rank's shards, whatever the number of ranks was that wrote them."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        names = {name.partition(".")[0] for name in saved}
        state = self._shards(with_optimizer="optimizer" in names)
        dcp.load(state, checkpoint_id=path, process_group=self._ranks.side)  # type: ignore[attr-defined]
        set_model_state_dict(self._step.model, state["model"])
        if "optimizer" in state:
            set_optimizer_state_dict(self._step.model, self._step.optimizer, state["optimizer"])

    def _shards(self, *, with_optimizer: bool | None = None) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        model, optimizer = self._step.model, self._step.optimizer
        found: dict[str, Any] = {"model": get_model_state_dict(model)}
        if bool(optimizer.state) if with_optimizer is None else with_optimizer:  # else torch would make it by a step
            found["optimizer"] = get_optimizer_state_dict(model, optimizer)
        return found

    def _number(self, position: Position) -> int:
        return position[0] * self._num_steps + position[1]

    def _newest_path(self) -> Path | None:
        sealed = [path for path in self.path.glob(f"{PREFIX}*") if (path / SEAL).exists()]
        return max(sealed, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)
