"""Batches of tokenised texts by memfit, beside PyTorch's DataLoader over the usual list of dicts, the same batches.

    python benchmarks/sequences.py [--examples 20000] [--epochs 3] [--rounds 3] [--num-workers 0,2] [--json FILE]

Pairs of generated texts, as for fine-tuning a T5: a source of 5 to 120 words, a target of 3 to 20. Their tokenizer is a
byte-pair encoding of the library ``tokenizers``, trained here, or words that are looked up where it is not installed
(and it says so). The contestants:

- *DataLoader, tokenise*: a data set over a list of dicts that tokenises in ``__getitem__``; a ``collate_fn`` that pads;
- *DataLoader, ids*: the same over a list of dicts of ids, tokenised before;
- *HF datasets*: ``Dataset.map`` tokenises once, its rows go through the same ``collate_fn`` (if it is installed);
- *memfit, ids*: ``SequenceLoader`` over ``pack(map(tokenize, rows))``, tokenised once.

All give the batches of one order, examples of about one length together; digests of all batches of an epoch are
compared. In each round every contestant runs through one epoch, in turn, its workers already there; the best round
counts. *Fit* is what so many epochs cost with all that comes before them: tokenising once where that is done, and the
start of the workers. *Private* is what the workers take for themselves, of all memory that is not shared.

Exit status: 0 all targets met, 1 one missed, or batches differ.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfit.data import Padding, SequenceLoader, pack
from memfit.memory import ProcReader
from memfit.units import format_bytes

BATCH, PAD = 32, Padding(pad_id=0, multiple_of=8)
FIELDS = {"source": "input_ids", "target": "labels"}
LEAST_TIMES = {"memfit, ids": ("DataLoader, ids", 1.0)}
LEAST_FIT = 1.0


class Words:
    """Looks words up; what stands in where ``tokenizers`` is not installed."""

    def encode(self, text: str) -> list[int]:
        return [1 + int.from_bytes(word.encode()[:3], "little") % 30000 for word in text.split()]


def texts(number: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    stems = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 9))) for _ in range(4000)]

    def text(least: int, most: int) -> str:
        return " ".join(stems[min(int(draw.expovariate(0.004)), 3999)] for _ in range(draw.randint(least, most)))

    return [{"source": text(5, 120), "target": text(3, 20)} for _ in range(number)]


def tokenizer_of(rows: Sequence[dict[str, str]]) -> tuple[Any, str]:
    if importlib.util.find_spec("tokenizers") is None:
        return Words(), "words that are looked up (tokenizers is not installed)"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE(unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<pad>", "<unk>"], show_progress=False)
    found.train_from_iterator((row["source"] for row in rows[:2000]), trainer)
    return found, "byte-pair encoding of tokenizers"


class Rows(torch.utils.data.Dataset[Any]):
    """What is usual: a list of dicts."""

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any = None) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        if self.tokenizer is None:
            return row
        return {name: ids(self.tokenizer, row[field]) for field, name in FIELDS.items()}


def ids(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text)
    return list(getattr(found, "ids", found))


def tokenise(rows: Sequence[dict[str, str]], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the ids of each row, 256 rows in a call where the tokenizer takes several texts."""
    many = getattr(tokenizer, "encode_batch_fast", None) or (lambda texts: [tokenizer.encode(one) for one in texts])
    for start in range(0, len(rows), 256):
        some = rows[start : start + 256]
        found = iter(many([row[field] for row in some for field in FIELDS]))
        for _ in some:
            pair = itertools.islice(found, len(FIELDS))
            yield {
                name: np.asarray(getattr(one, "ids", one), np.int32)
                for name, one in zip(FIELDS.values(), pair, strict=True)
            }


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """What a collator for sequence-to-sequence models does."""
    batch = {}
    for name, fill in (("input_ids", PAD.pad_id), ("labels", PAD.label_pad)):
        width = -(-max(len(row[name]) for row in rows) // PAD.multiple_of) * PAD.multiple_of
        batch[name] = torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
    longest = batch["input_ids"].shape[1]
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": batch["input_ids"], "attention_mask": torch.tensor(mask), "labels": batch["labels"]}


def data_loader(data: Any, plan: list[list[int]], num_workers: int) -> Any:
    return torch.utils.data.DataLoader(
        data, batch_sampler=plan, collate_fn=collate, num_workers=num_workers, persistent_workers=num_workers > 0
    )


def contestants(
    rows: list[dict[str, str]],
    tokenizer: Any,
    plan: list[list[int]],
    lengths: Sequence[int],
) -> dict[str, Callable[[], Callable[[int], Iterable[Any]]]]:
    """By name: what is prepared once, which gives what makes a loader with so many workers."""

    def memfit(data: Any) -> Callable[[int], Iterable[Any]]:
        return lambda count: SequenceLoader(data, PAD, batch=BATCH, shuffle=0, lengths=lengths, num_workers=count)

    def listed() -> Callable[[int], Iterable[Any]]:
        data = Rows([{name: ids(tokenizer, row[field]) for field, name in FIELDS.items()} for row in rows])
        return functools.partial(data_loader, data, plan)

    def mapped() -> Callable[[int], Iterable[Any]]:
        import datasets

        def tokenise(row: dict[str, str]) -> dict[str, list[int]]:
            return {name: ids(tokenizer, row[field]) for field, name in FIELDS.items()}

        data = datasets.Dataset.from_list(rows).map(tokenise, remove_columns=list(FIELDS))
        return functools.partial(data_loader, data, plan)

    found: dict[str, Callable[[], Callable[[int], Iterable[Any]]]] = {
        "DataLoader, tokenise": lambda: functools.partial(data_loader, Rows(rows, tokenizer), plan),
        "DataLoader, ids": listed,
        "HF datasets": mapped,
        "memfit, ids": lambda: memfit(pack(tokenise(rows, tokenizer))),
    }
    if importlib.util.find_spec("datasets") is None:
        print("HF datasets: not installed")
        del found["HF datasets"]
    return found


def digest(loader: Iterable[Any]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for batch in loader:
        for name in ("input_ids", "attention_mask", "labels"):
            array = np.asarray(batch[name])
            found.update(str(array.shape).encode() + array.tobytes())
    return found.hexdigest()


def seconds_of(loader: Iterable[Any]) -> float:
    began = time.perf_counter()
    for batch in loader:
        batch["input_ids"].sum()
    return time.perf_counter() - began


def worker_bytes(others: set[int]) -> int:
    rollups = (ProcReader().rollup(pid) for pid in descendants() - others)
    return sum(found.held + found.shared_memory for found in rollups if found is not None)


def descendants() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def measured(
    makers: dict[str, tuple[Callable[[int], Iterable[Any]], float]], count: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each contestant with so many workers."""
    loaders: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, (make, prepared) in makers.items():
        others, began = descendants(), time.perf_counter()
        loaders[name] = loader = make(count)
        next(iter(loader))  # the workers are there
        start = time.perf_counter() - began
        found[name] = {"name": name, "num_workers": count, "prepare_seconds": prepared, "start_seconds": start}
        getattr(loader, "set_epoch", int)(0)
        found[name] |= {"digest": digest(loader), "private_bytes": worker_bytes(others), "epochs": []}
    for _ in range(options.rounds):
        for name, loader in loaders.items():
            found[name]["epochs"].append(seconds_of(loader))
    for name, loader in loaders.items():
        if hasattr(loader, "close"):
            loader.close()
        else:
            loader._iterator = None
        row = found[name]
        row["epoch_seconds"] = min(row["epochs"])
        row["fit_seconds"] = row["prepare_seconds"] + row["start_seconds"] + options.epochs * row["epoch_seconds"]
        yield row


def told(holds: bool, text: str) -> bool:
    print(f"{'met   ' if holds else 'MISSED'} {text}", flush=True)
    return holds


def compare(rows: Sequence[dict[str, Any]], count: int, epochs: int) -> list[bool]:
    here = {row["name"]: row for row in rows if row["num_workers"] == count}
    met = []
    for name, (other, least) in LEAST_TIMES.items():
        times = here[other]["epoch_seconds"] / here[name]["epoch_seconds"]
        met.append(told(times >= least, f"{count} workers: an epoch of {name} is {times:.2f} x {other} ({least:g} x)"))
    usual = here["DataLoader, tokenise"]["fit_seconds"]
    times = usual / here["memfit, ids"]["fit_seconds"]
    text = (
        f"{count} workers: {epochs} epochs of memfit, ids, tokenising included, are {times:.2f} x DataLoader, tokenise"
    )
    return [*met, told(times >= LEAST_FIT, f"{text} ({LEAST_FIT:g} x)")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000, help="examples (default: 20000)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a fit (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="epochs measured of each, in turn (default: 3)")
    parser.add_argument("--num-workers", default="0,2", help="worker counts of every contestant (default: 0,2)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # what forks after it was used would say so once a worker
    torch.set_num_threads(1)
    rows = texts(options.examples)
    tokenizer, kind = tokenizer_of(rows)
    tokenised = list(tokenise(rows, tokenizer))
    lengths = [max(len(one) for one in row.values()) for row in tokenised]
    order = SequenceLoader(tokenised, PAD, batch=BATCH, shuffle=0, lengths=lengths).indices
    plan = [indices.tolist() for indices in order]
    print(f"{len(rows)} pairs of texts, {np.mean(lengths):.0f} tokens on average, {kind}; batches of {BATCH}, "
          f"{len(os.sched_getaffinity(0))} cores\n{'':22}{'workers':>8}{'prepare':>9}{'start':>8}{'epoch':>9}"
          f"{'examples/s':>12}{'fit':>9}{'private':>12}")  # fmt: skip
    makers = {}
    for name, prepare in contestants(rows, tokenizer, plan, lengths).items():
        began = time.perf_counter()
        made = prepare()
        makers[name] = made, time.perf_counter() - began
    found: list[dict[str, Any]] = []
    counts = [int(count) for count in options.num_workers.split(",")]
    for count in counts:
        for row in measured(makers, count, options):
            found.append(row)
            print(f"{row['name']:22}{count:8}{row['prepare_seconds']:7.2f} s{row['start_seconds']:6.2f} s"
                  f"{row['epoch_seconds']:7.2f} s{len(rows) / row['epoch_seconds']:12,.0f}{row['fit_seconds']:7.2f} s"
                  f"{format_bytes(row['private_bytes']):>12}", flush=True)  # fmt: skip
    print()
    met = [told(len({row["digest"] for row in found}) == 1, "batches are the same for all")]
    for count in counts:
        met += compare(found, count, options.epochs)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
