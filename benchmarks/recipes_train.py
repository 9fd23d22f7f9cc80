"""A T5 that trains on a file of many lines: its memory, its waiting, a plain DataLoader in turns, and kills.

`recipes.py --part train` calls `run`; the trainings are children of this script, so that each counts its own memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from memfit.data import PackedDataset, Padding, SequenceLoader
from memfit.errors import DataError
from memfit.pipeline import Output
from memfit.training import Trainer, seed_everything
from memfit_workloads.recipes import text, training
from memfit_workloads.recipes.params import RecipesParams

CONFIG = Path(__file__).parents[1] / "src/memfit_workloads/recipes/config.yaml"
BATCH, STEPS, ROUNDS, BATCHES, NUM_KILLS = 8, 100, 5, 30, 3


def params_of(path: Path) -> RecipesParams:
    data = {"source": "files", "path": path}
    return RecipesParams.model_validate({"data": data, "batch_size": BATCH, "gradient_accumulation_steps": 4})


class Made(dict[str, Output]):
    """The outputs of the stages before the training, as its context has them."""

    seed = 1

    def __init__(self, run: Path) -> None:
        super().__init__({name: Output(run / f"checkpoints/stage_{name}.json") for name in ("index", "tokenize")})
        self.path = run.parents[2] / "lines.jsonl"

    def loader(self) -> SequenceLoader:
        return training.loaders(self, params_of(self.path), BATCH)["train"]  # type: ignore[arg-type]

    def pairs(self) -> list[dict[str, str]]:
        return list(text.pairs_of(self, params_of(self.path), "train"))  # type: ignore[arg-type]

    def encode(self) -> text.Encode:
        return text.Encode(text.load_tokenizer(self["tokenize"].dir), params_of(self.path))

    def model(self) -> Any:
        seed_everything(self.seed)
        return training.make_model(params_of(self.path), self["tokenize"].result["vocab_size"])


class First:
    """The first batches of each epoch, with the loader's own position. Each may be noted by a digest of its tokens."""

    def __init__(self, loader: SequenceLoader, count: int, log: Path | None) -> None:
        self.loader, self.count, self.log = loader, count, log
        self.batch_size, self.longest = loader.batch_size, loader.longest
        self.set_epoch, self.state_dict, self.load_state_dict = (
            loader.set_epoch, loader.state_dict, loader.load_state_dict
        )  # fmt: skip

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self.loader, self.count - self.state_dict()["position"]):
            if self.log is not None:
                state, found = self.state_dict(), blake2b(digest_size=8)
                for name in ("input_ids", "labels"):
                    found.update(batch[name].tobytes())
                with open(self.log, "a") as file:
                    file.write(f"{state['epoch']} {state['position']} {found.hexdigest()}\n")
            yield batch


def anonymous() -> int:
    """Return the bytes of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def child_train(run: Path, out: Path, steps: int, log: Path | None) -> None:
    """Train two epochs of so many steps; write what the records say, the largest memory above imports, the weights."""
    before, most, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = Made(run)
    began = time.perf_counter()
    model, loader = made.model(), made.loader()
    opened = time.perf_counter() - began
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    trainer = Trainer(model, loss=training.loss, optimizer=optimizer, seed=1, global_batch_size=4 * BATCH,
                      checkpoint_dir=out, checkpoint_seconds=2.0 if log else 600.0, max_grad_norm=1.0)  # fmt: skip
    result = trainer.fit(First(loader, 4 * steps, log), num_epochs=2)
    loader.close()
    done.set()
    watcher.join()
    weights = blake2b(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    history = [[one.train_loss, one.samples_per_second, one.wait_share] for one in result.history]
    facts = {"added": most[0] - before, "imports": before, "opened": opened, "history": history, "weights": weights}
    (out / "facts.json").write_text(json.dumps(facts))


class PerItem(torch.utils.data.Dataset[Any]):
    """What is usual: each item is read and tokenised when it is asked for."""

    def __init__(self, made: Made) -> None:
        self.pairs, self.encode = made.pairs(), made.encode()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {name: self.encode.tokenizer.encode(one).ids for name, one in self.pairs[index].items()}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in Padding(pad_id=0)(rows).items()}


def contestants(made: Made) -> Iterator[tuple[str, Any]]:
    """Yield each way to have batches, made anew: its memory is what it adds."""
    yield "memfit, tokenised before", made.loader()
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            PerItem(made), BATCH, shuffle=True, collate_fn=collate, num_workers=workers, generator=torch.Generator()
        )
        yield f"DataLoader, per item, {workers} workers", loader


class Turn:
    """One contestant: its batches, a model of its own, and what its turns took."""

    def __init__(self, made: Made, batches: Any) -> None:
        before, began = anonymous(), time.perf_counter()
        self.loader = batches
        self.batches = iter(batches)
        next(self.batches)
        self.start, self.added = time.perf_counter() - began, anonymous() - before
        self.model = made.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.rates: list[float] = []
        self.waited = self.took = 0.0
        self.padding = self.positions = 0

    def take(self, *, trained: bool) -> float:
        """Take some batches; return the samples a second."""
        samples, waited, began = 0, 0.0, time.perf_counter()
        for _ in range(BATCHES):
            start = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - start
            samples += len(batch["labels"])
            if trained:
                total, number = training.loss(self.model, batch)
                (total / number).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                for name, fill in (("input_ids", 0), ("labels", -100)):
                    self.padding += int((batch[name] == fill).sum())
                    self.positions += int(np.prod(batch[name].shape))
        seconds = time.perf_counter() - began
        if trained:
            self.rates.append(samples / seconds)
            self.waited, self.took = self.waited + waited, self.took + seconds
        return samples / seconds


def child_turns(run: Path) -> None:
    """Let each contestant train a few batches, in turn; then have batches alone, in turn."""
    made = Made(run)
    turns = {name: Turn(made, batches) for name, batches in contestants(made)}
    for one in turns.values():
        one.take(trained=True)  # warm
        one.rates.clear()
        one.waited = one.took = 0.0
    for _ in range(ROUNDS):
        for one in turns.values():
            one.take(trained=True)
    alone: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(ROUNDS):
        for name, one in turns.items():
            alone[name].append(one.take(trained=False))
    ours = next(iter(turns.values()))
    print(f"{'in turns, ' + str(ROUNDS) + ' rounds':34}{'trained/s':>10}{'of ours':>9}{'waits':>8}{'pads':>7}"
          f"{'alone/s':>10}{'start':>9}{'added':>10}")  # fmt: skip
    for name, one in turns.items():
        ratio = statistics.median(a / b for a, b in zip(one.rates, ours.rates, strict=True))
        print(f"{name:34}{statistics.median(one.rates):10,.0f}{ratio:9.2f}{one.waited / one.took:8.1%}"
              f"{one.padding / one.positions:7.1%}{statistics.median(alone[name]):10,.0f}{one.start:7.2f} s"
              f"{one.added / 1e6:7.0f} MB")  # fmt: skip
        sys.stdout.flush()
        getattr(one.loader, "close", int)()


def write_lines(path: Path, num_lines: int) -> None:
    """Write recipes, each with a number of its own in two words."""
    with tempfile.TemporaryDirectory() as name:
        text.make_recipes(Path(name, "block"), min(num_lines, 5000), 0)
        block = [json.loads(line) for line in Path(name, "block").read_text().splitlines()]
    with open(path, "w", buffering=1 << 20) as file:
        for number in range(num_lines):
            row = block[number % len(block)]
            file.write(f'{{"ingredients": "{number // 2500} {number % 2500} {row["ingredients"]}", '
                       f'"recipe": "{row["recipe"]}"}}\n')  # fmt: skip


def prepare(folder: Path, path: Path) -> Path:
    """Run the stages before the training; return the run."""
    settings = ("params.data.source=files", f"params.data.path={path}")
    words = [
        sys.executable,
        "-m",
        "memfit",
        "run",
        str(CONFIG),
        "--runs-dir",
        str(folder / "runs"),
        "--until",
        "tokenize",
    ]
    began = time.perf_counter()
    done = subprocess.run(
        [*words, *(word for one in settings for word in ("--set", one))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    print(f"index and tokenize: {time.perf_counter() - began:.0f} s")
    print("\n".join(line for line in (done.stdout + done.stderr).splitlines() if "completed" in line))
    return next((folder / "runs").glob("recipes/run_*"))


def check_once(made: Made, num_lines: int) -> None:
    """Count each record of two epochs, and compare what is packed with what the file says."""
    loader, rows, number = made.loader(), made["index"].arrays("rows"), len(made.pairs())
    counts = []
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        counts.append(np.bincount(np.concatenate(loader.indices), minlength=number))
    wrong = sum(int((one != 1).sum()) for one in counts)
    left = sum(made["index"].result["left_out"].values())
    seen = np.bincount(np.concatenate([rows["train"], rows["valid"]]), minlength=num_lines)
    assert seen.max() == 1 and int(seen.sum()) + left == num_lines
    pairs, ids, encode = made.pairs(), PackedDataset.open(made["tokenize"].path("train")), made.encode()
    picked = random.Random(0).sample(range(number), min(2000, number))
    same = sum(encode([pairs[one]])[0]["input_ids"].tolist() == ids[one]["input_ids"].tolist() for one in picked)
    print(f"{num_lines} lines: {number} to train on, {left} left out; of 2 epochs {wrong} come not exactly once; "
          f"{same} of {len(picked)} are those of the file")  # fmt: skip


def check_changed(made: Made) -> None:
    with open(made.path, "a") as file:
        file.write('{"ingredients": "one more", "recipe": "it came later than the index"}\n')
    try:
        made.pairs()
    except DataError as error:
        print(f"a changed file: {error.what}")
    else:
        raise AssertionError("a changed file was taken")


def child(kind: str, *words: object) -> list[str]:
    return [sys.executable, __file__, kind, *map(str, words)]


def check_kills(run: Path, folder: Path) -> None:
    """Kill a training at random moments; compare each batch and the weights with those of an unbroken one."""
    num_batches = 2 * 4 * STEPS
    whole, killed = folder / "whole", folder / "killed"
    subprocess.run(child("train", run, whole, "--log", folder / "whole.log"), check=True, stderr=subprocess.DEVNULL)
    expected = {tuple(line.split()[:2]): line.split()[2] for line in (folder / "whole.log").read_text().splitlines()}
    assert len(expected) == num_batches
    rng, log, starts, lost = random.Random(1), folder / "killed.log", [], []
    marks = sorted(rng.sample(range(num_batches // 10, num_batches - num_batches // 10), NUM_KILLS))
    for mark in [*marks, None]:
        before = log.read_text().splitlines() if log.exists() else []
        process = subprocess.Popen(child("train", run, killed, "--log", log), stderr=subprocess.DEVNULL)
        while process.poll() is None and mark is not None:
            last = log.read_text().splitlines()[-1:] if log.exists() else []
            if last and last != before[-1:] and number_of(last[0]) >= mark:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.02)
        assert process.wait() == (0 if mark is None else -signal.SIGKILL)
        new = log.read_text().splitlines()[len(before):]  # fmt: skip
        starts.append(number_of(new[0]))
        if before:
            lost.append(number_of(before[-1]) - starts[-1] + 1)
        numbers = [number_of(line) for line in new]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
    lines = log.read_text().splitlines()
    wrong = sum(expected[tuple(line.split()[:2])] != line.split()[2] for line in lines)
    weights = [json.loads((one / "facts.json").read_text())["weights"] for one in (whole, killed)]
    same = "the same" if weights[0] == weights[1] else "OTHERS"
    print(f"{NUM_KILLS} kills: went on at batches {starts[1:]} of {num_batches}, {lost} made again")
    print(f"  {wrong} of {len(lines)} batches differ; the weights are {same}")


def number_of(line: str) -> int:
    """Return the number of a batch from the start of the training, of a line of its log."""
    epoch, position, _ = line.split()
    return (int(epoch) - 1) * 4 * STEPS + int(position)


def run(folder: Path, num_lines: int) -> None:
    path = folder / "lines.jsonl"
    write_lines(path, num_lines)
    print(f"{num_lines} lines, {path.stat().st_size / 2**30:.2f} GiB", flush=True)
    made = Made(prepare(folder, path))
    run_path = made["index"].manifest.parents[1]
    check_once(made, num_lines)
    subprocess.run(child("train", run_path, folder / "train"), check=True)
    facts = json.loads((folder / "train/facts.json").read_text())
    added, imports = facts["added"] / 1e6, facts["imports"] / 1e6
    print(
        f"training: {added:.0f} MB anonymous above the {imports:.0f} MB of its imports; {facts['opened']:.1f} s to open"
    )
    for number, (loss, rate, waits) in enumerate(facts["history"], 1):
        figures = f"loss {loss:.2f}, {rate:,.0f} samples/s, waits {waits:.2%}"
        print(f"  epoch {number}, {STEPS} steps: {figures}")
    sys.stdout.flush()
    subprocess.run(child("turns", run_path), check=True)
    check_kills(run_path, folder)
    check_changed(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("train", "turns"))
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if options.kind == "turns" else "true"
    torch.set_num_threads(1)
    transformers.T5ForConditionalGeneration  # noqa: B018 - loaded lazily; an import is no memory of the training
    if options.kind == "turns":
        child_turns(options.run)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        child_train(options.run, options.out, STEPS, options.log)


if __name__ == "__main__":
    main()
