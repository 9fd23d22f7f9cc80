"""Does the keyed stream of *exact* train as well as the random numbers of the framework?

    python benchmarks/exact_seeds.py [--seeds 20] [--recipe digits] [--json FILE]

Three small recipes, each trained with so many seeds with and without ``Loop(seed=...)``, from the same first weights:
*digits* (scikit-learn's 1,797 digits: shuffle, noise on each image, dropout), *words* (a BERT of two layers for masked
words: masks drawn by the collation, dropout), *sines* (a regression with bootstrap samples). It prints the mean of the
validation loss with its 95 % interval (Student's t), the difference of the paired seeds with its interval, and exits
with 1 if an interval of a difference leaves out 0 by more than half of the spread of the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch.utils.data import DataLoader, Dataset, RandomSampler

from memfit.training import Loop, seed_everything

Recipe = Callable[[int, bool], float]


class Noisy(Dataset[Any]):
    """Images with noise that is drawn anew each time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.3 * torch.randn(self.x.shape[1]), self.y[index]


def train(
    model: torch.nn.Module, loader: Any, loss: Callable[[Any], torch.Tensor], epochs: int, seed: int, exact: bool
) -> None:
    """Train with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        keyed: dict[str, Any] = {"seed": seed, "every": 10**6, "keep": 1, "model": model, "optimizer": optimizer}
        loop = Loop(folder, **keyed) if exact else Loop()
        for _ in loop.epochs(epochs):
            for batch in loop(loader):
                optimizer.zero_grad()
                torch.autograd.backward(loss(batch))
                optimizer.step()
    model.eval()


def digits(seed: int, exact: bool) -> float:
    """Return the validation loss of a classifier of digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    seed_everything(seed)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)]
    model = torch.nn.Sequential(*layers)
    entropy = torch.nn.functional.cross_entropy
    loader = DataLoader(Noisy(x[:1200], y[:1200]), batch_size=50, shuffle=True)
    train(model, loader, lambda batch: entropy(model(batch[0]), batch[1]), 8, seed, exact)
    with torch.no_grad():
        return float(entropy(model(x[1200:]), y[1200:]))


def words(seed: int, exact: bool) -> float:
    """Return the validation loss of masked words in sentences of a small grammar."""
    from transformers import BertConfig, BertForMaskedLM

    rng = np.random.default_rng(0)
    text = torch.tensor((np.cumsum(rng.integers(1, 4, (500, 12)), 1) % 20) + 2)  # each depends on the one before

    def mask(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack(items)
        hidden = torch.rand(ids.shape) < 0.2
        return {"input_ids": ids.masked_fill(hidden, 1), "labels": ids.masked_fill(~hidden, -100)}

    seed_everything(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForMaskedLM(BertConfig(vocab_size=22, max_position_embeddings=12, **sizes))
    data: Any = list(text[:400])
    loader: Any = DataLoader(data, batch_size=20, shuffle=True, collate_fn=mask)
    train(model, loader, lambda batch: model(**batch).loss, 8, seed, exact)
    seed_everything(0)
    with torch.no_grad():
        return float(model(**mask(list(text[400:]))).loss)


def sines(seed: int, exact: bool) -> float:
    """Return the validation loss of a regression on bootstrap samples."""
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.uniform(-3, 3, (600, 1)), dtype=torch.float32)
    y = torch.sin(2 * x) + 0.1 * torch.tensor(rng.normal(size=(600, 1)), dtype=torch.float32)
    seed_everything(seed)
    model = torch.nn.Sequential(torch.nn.Linear(1, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))
    data = torch.utils.data.TensorDataset(x[:400], y[:400])
    loader = DataLoader(data, batch_size=20, sampler=RandomSampler(data, replacement=True))
    train(model, loader, lambda batch: (model(batch[0]) - batch[1]).square().mean(), 30, seed, exact)
    with torch.no_grad():
        return float((model(x[400:]) - y[400:]).square().mean())


RECIPES: dict[str, Recipe] = {"digits": digits, "words": words, "sines": sines}


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(half)


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--recipe", choices=[*RECIPES], action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found, is_equal = {}, True
    for name in args.recipe or RECIPES:
        runs = np.array([[RECIPES[name](seed, exact) for exact in (False, True)] for seed in range(args.seeds)])
        plain, exact, difference = map(interval, (runs[:, 0], runs[:, 1], runs[:, 1] - runs[:, 0]))
        spread = float(runs[:, 0].std(ddof=1))
        holds = abs(difference[0]) - difference[1] <= spread / 2
        is_equal &= holds
        found[name] = runs.tolist()
        print(
            f"{name:8} without {plain[0]:.4f} ± {plain[1]:.4f}   with exact {exact[0]:.4f} ± {exact[1]:.4f}   "
            f"difference {difference[0]:+.4f} ± {difference[1]:.4f}   spread of seeds {spread:.4f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
