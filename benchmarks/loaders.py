"""memfit's loaders beside what is usual: day windows beside pandas and Parquet, token batches beside PyTorch's loader.

    python benchmarks/loaders.py [--part days] [--part tokens] [--seconds 8] [--json FILE]

All is measured in turns, and every byte of a batch is read once, by the thread that asks for it. The batches of all are
the same: they are compared.

- *days*: windows of 20 dates of all assets, from a generated store of ``--gib``: memfit's `Loader` without workers and
  with two, a pandas frame in memory, and the row groups of the Parquet file; *of memcpy* is the ratio to np.copyto of
  as many bytes.
- *tokens*: pairs of generated texts, as for fine-tuning a T5, padded: `SequenceLoader` over ids that were tokenised
  once, and PyTorch's DataLoader over a list of dicts, tokenised before or in ``__getitem__``. *Fit* is what so many
  epochs cost with all that comes before them: tokenising once where that is done, and the start of the workers.

Exit status: 0 all targets met, 1 one missed, or batches differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from harness import in_turns, parser, print_table, ratio, told, write_json
from memfit.data import Loader, Padding, Panel, SequenceLoader, pack
from memfit.units import GIB
from memfit_workloads.finance.generated import Market, write_market

PROVES = ("S2-10", "S4-07")
NUM_FEATURES, LOOKBACK = 112, 20
SEGMENT_SECONDS = 0.25
LEAST_TIMES_BEST_PEER, LEAST_OF_MEMCPY = 10.0, 0.8
Arrays = Iterator[npt.NDArray[Any]]


# --- day windows


def write_store(folder: Path, num_dates: int, num_assets: int) -> tuple[Path, Panel]:
    """The source as a Parquet file with a row group for each date, and its panel."""
    market = Market(max(num_dates, 3 * LOOKBACK), num_assets, NUM_FEATURES, horizons=(1,), turnover=0.0)
    source = folder / "source.parquet"
    write_market(source, market, rows_per_group=num_assets)
    names, labels = market.feature_names, market.label_names
    return source, Panel.build(source, folder / "panels", features=names, targets=labels)


def endless(loader: Any) -> Iterator[Any]:
    for epoch in itertools.count(1):
        if (set_epoch := getattr(loader, "set_epoch", None)) is not None:
            set_epoch(epoch)
        yield from loader


def memcpy(panel: Panel, num_bytes: int) -> Arrays:
    """np.copyto of a batch's bytes out of a panel's values, place after place."""
    source = panel.values.reshape(-1)
    target = np.zeros(min(num_bytes // 4, source.size // 2), source.dtype)
    for place in itertools.cycle(range(0, source.size - target.size, target.size)):
        np.copyto(target, source[place : place + target.size])
        yield target


class Days:
    """The windows of each date by something that gives the rows of the source: (num_dates, assets, lookback, ...)."""

    def __init__(self, dates: Sequence[int], rows: Callable[[int, int], npt.NDArray[Any]], num_assets: int) -> None:
        self.dates, self.rows, self.num_assets = dates, rows, num_assets

    def __iter__(self) -> Arrays:
        for date in self.dates:
            rows = self.rows(date + 1 - LOOKBACK, date + 1)
            windows = rows.reshape(LOOKBACK, self.num_assets, NUM_FEATURES).swapaxes(0, 1)
            yield np.ascontiguousarray(windows)


def peers(source: Path, names: Sequence[str], num_assets: int, dates: Sequence[int]) -> dict[str, Days]:
    file, found = pq.ParquetFile(source), {}

    def from_groups(first: int, last: int) -> npt.NDArray[Any]:
        table = file.read_row_groups(list(range(first, last)), columns=list(names), use_threads=False)
        return np.stack([table.column(name).to_numpy() for name in names], axis=-1)

    if importlib.util.find_spec("pandas") is None:
        print("pandas: not installed, left out")
    else:
        import pandas as pd

        frame = pd.read_parquet(source, columns=list(names))
        found["pandas frame"] = Days(
            dates, lambda first, last: frame.iloc[first * num_assets : last * num_assets].to_numpy(), num_assets
        )
    return found | {"Parquet row groups": Days(dates, from_groups, num_assets)}


def read_every_byte(array: npt.NDArray[Any]) -> None:
    np.maximum.reduce(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def bytes_per_second(batches: Arrays, *, skip: int = 4) -> float:
    """Over a quarter of a second or two batches, whichever takes longer; what had been made ahead is not counted."""
    for _ in range(skip):
        read_every_byte(next(batches))
    num_batches = num_bytes = 0
    start = now = time.perf_counter()
    while now - start < SEGMENT_SECONDS or num_batches < 2:
        array = next(batches)
        read_every_byte(array)
        num_batches, num_bytes = num_batches + 1, num_bytes + array.nbytes
        now = time.perf_counter()
    return num_bytes / (now - start)


def part_days(args: argparse.Namespace, folder: Path) -> tuple[Any, list[bool]]:
    num_dates = round(args.gib * GIB / (args.assets * NUM_FEATURES * 4))
    source, panel = write_store(folder, num_dates, args.assets)
    dates = np.random.default_rng(1).permutation(np.arange(LOOKBACK - 1, len(panel.dates))).tolist()
    print(f"{panel}, look-back {LOOKBACK}, {len(os.sched_getaffinity(0))} cores")

    def loader(count: int) -> Loader:
        return Loader(panel, np.array(dates), lookback=LOOKBACK, target=None, num_workers=count)

    others = peers(source, panel.feature_names, args.assets, dates)
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        f"memfit, {count} workers": partial(loader, count) for count in (0, 2)
    }
    ways |= {name: lambda one=one: one for name, one in others.items()}  # type: ignore[misc]
    firsts = [
        [np.asarray(getattr(one, "windows", one)) for one in itertools.islice(make(), 3)] for make in ways.values()
    ]
    is_same = all(np.array_equal(*pair) for one in firsts for pair in zip(one, firsts[0], strict=True))
    batch_bytes = firsts[0][0].nbytes
    batches: dict[str, Arrays] = {
        name: (getattr(one, "windows", one) for one in endless(make())) for name, make in ways.items()
    }
    batches["memcpy"] = memcpy(panel, batch_bytes)
    rounds = max(2, round(args.seconds / SEGMENT_SECONDS / 2))
    rates = in_turns({name: partial(bytes_per_second, one) for name, one in batches.items()}, rounds, warm=1)
    lines: list[tuple[object, ...]] = [("", "GB/s", "of memcpy")]
    found = {}
    for name, own in rates.items():
        found[name] = ratio(own, rates["memcpy"])[0]
        lines.append((name, f"{statistics.median(own) / 1e9:.3f}", f"{found[name]:.2f}"))
    print_table(lines)
    ours = max(value for name, value in found.items() if name.startswith("memfit"))
    times = ours / max(found[name] for name in others)
    text = f"days: {ours:.2f} of memcpy ({LEAST_OF_MEMCPY}); {times:.1f} x the best peer ({LEAST_TIMES_BEST_PEER:g} x)"
    is_fast = ours >= LEAST_OF_MEMCPY or times >= LEAST_TIMES_BEST_PEER
    return found, [told(is_same, "days: batches are the same for all"), told(is_fast, f"{text}; one of both is enough")]


# --- token batches

BATCH, PAD = 32, Padding(pad_id=0, multiple_of=8)
FIELDS = {"source": "input_ids", "target": "labels"}


def texts(number: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    stems = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(2, 9))) for _ in range(4000)]

    def text(least: int, most: int) -> str:
        return " ".join(stems[min(int(draw.expovariate(0.004)), 3999)] for _ in range(draw.randint(least, most)))

    return [{"source": text(5, 120), "target": text(3, 20)} for _ in range(number)]


def make_tokenizer(rows: Sequence[dict[str, str]]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE(unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<pad>", "<unk>"], show_progress=False)
    found.train_from_iterator((row["source"] for row in rows[:2000]), trainer)
    return found


class Rows:
    """What is usual: a list of dicts, tokenised when an item is asked for, if there is a tokenizer."""

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any = None) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        return row if self.tokenizer is None else {FIELDS[one]: self.tokenizer.encode(row[one]).ids for one in FIELDS}


def tokenise(rows: Sequence[dict[str, str]], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the ids of each row, 256 rows in a call."""
    for start in range(0, len(rows), 256):
        some = rows[start : start + 256]
        found = iter(tokenizer.encode_batch_fast([row[field] for row in some for field in FIELDS]))
        for _ in some:
            yield {name: np.asarray(next(found).ids, np.int32) for name in FIELDS.values()}


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    batch = {}
    for name, fill in (("input_ids", PAD.pad_id), ("labels", PAD.label_pad)):
        width = -(-max(len(row[name]) for row in rows) // PAD.multiple_of) * PAD.multiple_of
        batch[name] = torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
    longest = batch["input_ids"].shape[1]
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": batch["input_ids"], "attention_mask": torch.tensor(mask), "labels": batch["labels"]}


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


def part_tokens(args: argparse.Namespace, folder: Path) -> tuple[Any, list[bool]]:
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # what forks after it was used would say so once a worker
    torch.set_num_threads(1)
    rows = texts(args.examples)
    tokenizer = make_tokenizer(rows)
    lengths = [max(map(len, row.values())) for row in tokenise(rows, tokenizer)]
    ours = partial(SequenceLoader, padding=PAD, batch=BATCH, shuffle=0, lengths=lengths)
    plan = [indices.tolist() for indices in ours(list(tokenise(rows, tokenizer))).indices]

    def usual(data: Any, count: int) -> Any:
        make: Any = partial(torch.utils.data.DataLoader, batch_sampler=plan, collate_fn=collate)
        return make(data, num_workers=count, persistent_workers=count > 0)

    def memfit(data: Any, count: int) -> Any:
        return ours(data, num_workers=count)

    prepare: dict[str, tuple[Callable[[], Any], Any]] = {
        "DataLoader, tokenise": (lambda: Rows(rows, tokenizer), usual),
        "DataLoader, ids": (lambda: Rows([Rows(rows, tokenizer)[number] for number in range(len(rows))]), usual),
        "memfit, ids": (lambda: pack(tokenise(rows, tokenizer)), memfit),
    }
    data, prepared, found, met = {}, {}, {}, []
    for name, (make, _) in prepare.items():
        began = time.perf_counter()
        data[name] = make()
        prepared[name] = time.perf_counter() - began
    lines: list[tuple[object, ...]] = [("seconds of", "workers", "prepare", "start", "epoch", f"{args.epochs} epochs")]
    for count in (0, 2):
        loaders, starts, digests = {}, {}, set()
        for name, (_, way) in prepare.items():
            began = time.perf_counter()
            loaders[name] = loader = way(data[name], count)
            next(iter(loader))  # the workers are there
            starts[name] = time.perf_counter() - began
            getattr(loader, "set_epoch", int)(0)
            digests.add(digest(loader))
        turns = in_turns({name: partial(seconds_of, one) for name, one in loaders.items()}, args.rounds)
        best = {name: min(seconds) for name, seconds in turns.items()}
        fits = {name: prepared[name] + starts[name] + args.epochs * best[name] for name in best}
        for name in best:
            cells = (prepared[name], starts[name], best[name], fits[name])
            lines.append((name, count, *(f"{one:.2f}" for one in cells)))
        for loader in loaders.values():
            getattr(loader, "close", lambda loader=loader: setattr(loader, "_iterator", None))()
        epoch, fit = best["DataLoader, ids"] / best["memfit, ids"], fits["DataLoader, tokenise"] / fits["memfit, ids"]
        found[count] = {"epoch": epoch, "fit": fit}
        met.append(told(len(digests) == 1, f"tokens: batches are the same for all, {count} workers"))
        text = f"{epoch:.2f} x, {args.epochs} epochs with tokenising {fit:.2f} x PyTorch's (1 x)"
        met.append(told(min(epoch, fit) >= 1, f"tokens: an epoch of ids with {count} workers {text}"))
    print_table(lines)
    return found, met


PARTS = {"days": part_days, "tokens": part_tokens}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--part", choices=[*PARTS], action="append")
    options.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement of days (8)")
    options.add_argument("--gib", type=float, default=1.0, help="days: size of the store's values in GiB (1)")
    options.add_argument("--assets", type=int, default=4484, help="days: assets (4484)")
    options.add_argument("--examples", type=int, default=20_000, help="tokens: examples (20000)")
    options.add_argument("--epochs", type=int, default=3, help="tokens: epochs of a fit (3)")
    options.add_argument("--rounds", type=int, default=3, help="tokens: epochs measured of each, in turns (3)")
    args = options.parse_args()
    found, met = {}, []
    for name in args.part or PARTS:
        with tempfile.TemporaryDirectory(prefix="memfit-loaders-") as folder:
            found[name], asked = PARTS[name](args, Path(folder))
        met += asked
    write_json(args.json, found)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
