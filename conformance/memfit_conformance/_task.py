"""The small training that each framework does: a BERT of one layer x 16 for masked words, 96 samples, 2 epochs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
#: A checkpoint is written, and where a moment needs it an evaluation made, after so many optimizer steps.
EVERY = 5
KEEP = 2
_WORDS, _MASK = 40, 4


@dataclass(frozen=True)
class Options:
    """One combination."""

    workers: int = 0  # processes that load data
    persistent: bool = False  # whether they stay between epochs
    masks: bool = True  # whether the collator draws masks from the global generator, or masks fixed places
    dropout: float = 0.1
    warmup: int = 4  # optimizer steps until the learning rate is reached
    accumulation: int = 2  # batches of one optimizer step
    batch: int = 4  # samples of one batch
    drop_last: bool = False
    samples: int = 96
    rate: float = 1e-3
    evaluate: str = "no"  # or "steps" (every 5), or "epoch"
    best: bool = False  # whether the best model is loaded at the end
    threads: int = 1  # of torch
    version: str = ""  # what the framework says its version is, or "" for the true one
    seedable: bool = False  # whether Accelerate draws the order by a sampler of its own, with a seed
    on_exception: bool = False  # whether Lightning's ModelCheckpoint saves at an exception, too
    signal: str = "KILL"  # what stops the training where a moment names no signal of its own
    own_stop: bool = False  # whether the framework's own checkpoint at SIGTERM is on

    @property
    def batches(self) -> int:
        """Batches of one epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return EPOCHS * -(-self.batches // self.accumulation)


class Words(Dataset[Any]):
    """Rows of eight words, each with its number."""

    def __init__(self, number: int) -> None:
        self.rows = torch.randint(5, _WORDS, (number, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": index, "input_ids": self.rows[index]}


class Collate:
    """Hides words: at random, or at fixed places."""

    def __init__(self, masks: bool) -> None:
        self.masks = masks

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        words = torch.stack([item["input_ids"] for item in items])
        hidden = torch.rand(words.shape) < 0.3 if self.masks else torch.zeros(words.shape, dtype=torch.bool)
        hidden[:, 1] = True
        labels = words.masked_fill(~hidden, -100)
        ids = torch.tensor([item["ids"] for item in items])
        return {"ids": ids, "input_ids": words.masked_fill(hidden, _MASK), "labels": labels}


class Model(transformers.BertForMaskedLM):
    """Takes a batch as the collator makes it."""

    def forward(self, input_ids: Any = None, labels: Any = None, ids: Any = None) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


def model(options: Options) -> Model:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=_WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    return Model(config)


def optimizer(net: torch.nn.Module, options: Options) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW with two groups of parameters, and a schedule with a warm-up."""
    weights = list(net.parameters())
    groups = [
        {"params": [one for one in weights if one.ndim > 1], "weight_decay": 0.01},
        {"params": [one for one in weights if one.ndim == 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=options.rate)
    return made, transformers.get_linear_schedule_with_warmup(made, options.warmup, options.steps)


def loader(options: Options, *, train: bool = True) -> DataLoader[Any]:
    """Return the loader of training, or that of evaluation."""
    return DataLoader(
        Words(options.samples if train else 16),
        batch_size=options.batch,
        shuffle=train,
        drop_last=options.drop_last and train,
        num_workers=options.workers,
        persistent_workers=options.persistent and options.workers > 0,
        collate_fn=Collate(options.masks),
    )


def digest(*parts: Any) -> str:
    """Return the SHA-256 of state dicts, tensors and plain values."""
    sha = hashlib.sha256()
    _add(sha, parts)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            sha.update(str(name).encode())
            _add(sha, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            _add(sha, one)
    elif not callable(value):
        sha.update(repr(value).encode())
