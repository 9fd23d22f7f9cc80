"""What `torch.compile` gains the small T5 of the recipe fine-tune, after all its graphs are there.

    make bench NAME=recipes ARGS="--rounds 30"

Steps without and with compiled blocks, in turns; the gain is the median of the rounds' ratios with a 95 % interval, and
the warm-up stands apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from harness import in_turns, parser, ratio, write_json
from memfit.data import Padding, SequenceLoader
from memfit.training import EpochRecord, seed_everything
from memfit_workloads.recipes import text, training
from memfit_workloads.recipes.compiling import CompiledBlocks
from memfit_workloads.recipes.params import RecipesParams


class Contestant:
    """A small T5 with its optimizer, as the workload trains it; calling it takes a step on each batch."""

    def __init__(self, params: RecipesParams, batches: list[Any], vocab_size: int) -> None:
        seed_everything(0)
        self.batches, self.model = batches, training.make_model(params, vocab_size).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=params.learning_rate, foreach=False)

    def __call__(self) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        for batch in self.batches:
            total, weight = training.loss(self.model, batch)
            (total / weight).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / len(self.batches)


def batches_of(folder: Path, params: RecipesParams) -> tuple[list[Any], int]:
    """Return batches of generated recipes as the workload reads them, and the size of the vocabulary."""
    text.make_recipes(folder / "recipes.jsonl", 160, 0)
    rows = map(json.loads, (folder / "recipes.jsonl").read_text().splitlines())
    pairs = [{"input_ids": row["ingredients"], "labels": row["recipe"]} for row in rows]
    tokenizer = text.train_tokenizer(pairs, params)
    ids = text.Encode(tokenizer, params)(pairs)
    return list(SequenceLoader(ids, Padding(pad_id=0), batch=8)), tokenizer.get_vocab_size()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30)
    args = options.parse_args()
    params = RecipesParams()
    with tempfile.TemporaryDirectory(prefix="recipes-") as name:
        batches, vocab_size = batches_of(Path(name), params)
    eager, fast = (Contestant(params, batches, vocab_size) for _ in range(2))
    compiled = CompiledBlocks(fast.model, torch.device("cpu"))
    before = psutil.Process().memory_full_info().uss
    for number in (1, 2):
        eager()
        fast()
        compiled(EpochRecord(number, 0.0, len(batches)))
    more = psutil.Process().memory_full_info().uss - before
    turns = in_turns({"without": eager, "with torch.compile": fast}, args.rounds)
    (gain, low, high), found = ratio(*turns.values()), compiled.summary()
    print("a step: " + ", ".join(f"{statistics.median(one) * 1e3:.1f} ms {way}" for way, one in turns.items()))
    print(f"gain: {gain:.2f} times as fast (95 % {low:.2f} to {high:.2f}, {args.rounds} rounds)")
    print(
        f"warm-up {found['warm_up_seconds']:.0f} s, {found['num_graphs']} graphs, "
        f"{found['num_graphs_after_warm_up']} after it; {more / 2**20:.0f} MiB more of the process's own memory"
    )
    write_json(args.json, {"gain": gain, "low": low, "high": high, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
