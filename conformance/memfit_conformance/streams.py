"""Stop a training on streamed data in mid epoch, resume it with memfit, and list the samples that it saw.

``python -m memfit_conformance.streams [SOURCE...]``. It needs memfit and the packages of the sources: ``datasets``,
``webdataset``, ``litdata``. All data are files that it writes itself. A row is good if memfit says that the resume is
not exact, and each sample of the epoch is seen once, or it says how many are seen again, or that a shuffle buffer is
lost; and if the later epochs have all samples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import signal
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

SHARDS, SAMPLES, BATCH, EPOCHS, BUFFER = 4, 48, 4, 3, 8
#: The batches of an epoch.
SIZE = SAMPLES // BATCH
#: The batch of all epochs that the signal comes in: the eighth of the second epoch.
STOP_AT = SIZE + 8
FRAMEWORKS = ("huggingface", "lightning", "accelerate", "loop")


def main() -> int:
    """Print a table of Markdown; return 0 if no row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=list(SOURCES), help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    import lightning
    import transformers

    import memfit.integrations.accelerate
    import memfit.integrations.huggingface
    import memfit.integrations.lightning  # noqa: F401 - once, for all that are forked

    names = {"memfit": "", "transformers": transformers.__version__, "lightning": lightning.__version__}
    names |= dict.fromkeys(("accelerate", "datasets", "webdataset", "litdata"), "")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names if _is_there(name)), end="\n\n")
    print("| source | in | workers | samples of the epoch, after stop and resume | memfit says: not the same bytes: |")
    print("|---|---|---|---|---|")
    is_good = True
    with tempfile.TemporaryDirectory() as place:
        for source in given.sources:
            SOURCES[source].write(Path(place, source))
            for framework in given.frameworks.split(","):
                for workers in (0, 2):
                    row = Row(source, framework, workers, Path(place, source))
                    seen, told, row_is_good = row.measure(Path(place, f"{source}-{framework}-{workers}"))
                    is_good &= row_is_good
                    wrong = "" if row_is_good else " **wrong**"
                    print(f"| {source} | {framework} | {workers} | {seen}{wrong} | {told} |", flush=True)
    return 0 if is_good else 1


def _is_there(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


class Row(NamedTuple):
    """One source in one framework."""

    source: str
    framework: str
    workers: int
    data: Path

    def measure(self, place: Path) -> tuple[str, str, bool]:
        """Return what was seen, what was said, and whether that is right."""
        place.mkdir()
        code, whole, said = self._run(place / "whole", None)
        if code:
            return f"refused or failed at the start: {_last(said)}", "", "UsageError" in said
        code, before, said = self._run(place / "stopped", STOP_AT)
        if code != 75:
            return f"the stop ended with {code}: {_last(said)}", "", False
        code, after, said = self._run(place / "stopped", None)
        told = next((line.partition("same bytes: ")[2] for line in said.splitlines() if "same bytes: " in line), "")
        if code:
            return f"the resume ended with {code}: {_last(said)}", told, False
        if before + after == whole:
            return "each once, in the same order", told, bool(told)
        rest = SIZE if "seen again" in told else 2 * SIZE - STOP_AT  # a pass that begins anew, or the rest of it
        if self.framework != "huggingface":  # there the steps are counted, not the epochs
            short = rest + SIZE - len(after)
            if short > BUFFER // BATCH * ("shuffled" in self.source):
                return f"the later epoch lacks {short} of {SIZE} batches", told, False
            rest -= short
        wanted = Counter(one for batch in whole[SIZE : 2 * SIZE] for one in batch)
        found = Counter(one for batch in before[SIZE:] + after[:rest] for one in batch)
        lost, again = (wanted - found).total(), (found - wanted).total()
        is_told = not lost and told.startswith(f"{again} samples")
        is_told |= "shuffled" in self.source and "shuffle buffer" in told and lost <= BUFFER
        if not (lost or again):
            return "each once, in another order", told, bool(told)
        return f"{lost} never, {again} again", told, is_told

    def _run(self, folder: Path, stop_at: int | None) -> tuple[int, list[list[int]], str]:
        """Train in a forked process; return its exit code, the samples of each batch, and what it said."""
        folder.mkdir(exist_ok=True)
        seen, said = folder / "seen.txt", folder / "said.txt"
        seen.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                for number in (1, 2):
                    os.dup2(os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), number)
                signal.alarm(60)
                globals()[f"_{self.framework}"](self, folder / "out", _Seen(seen, stop_at))
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lines = seen.read_text().splitlines() if seen.exists() else []
        return code, [list(map(int, line.split())) for line in lines], said.read_text()

    def loader(self) -> Any:
        """Return the loader that the source's own documentation shows."""
        return SOURCES[self.source].loader(self.data, self.workers)


def _last(said: str) -> str:
    return (said.strip().splitlines() or [""])[-1][:160]


class _Seen:
    """Writes down the samples of each batch that is trained, and sends the signal in one of them."""

    def __init__(self, path: Path, stop_at: int | None) -> None:
        self.path, self.stop_at, self.number = path, stop_at, 0

    def __call__(self, ids: torch.Tensor) -> None:
        self.number += 1
        with open(self.path, "a") as file:
            file.write(" ".join(map(str, ids.view(-1).tolist())) + "\n")
        if self.number == self.stop_at:
            os.killpg(0, signal.SIGTERM)


class Model(torch.nn.Module):
    """One layer, whose loss is that of any batch."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), seen

    def forward(self, number: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        if torch.is_grad_enabled():
            self.seen(number)
        return {"loss": self.layer(number.float().view(-1, 1) / SAMPLES).square().mean()}


# --- the frameworks


def _huggingface(row: Row, folder: Path, seen: _Seen) -> None:
    import transformers

    from memfit.integrations.huggingface import stoppable

    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=EPOCHS * SIZE,
        dataloader_num_workers=row.workers,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    loader = row.loader()
    trainer = transformers.Trainer(Model(seen), args, train_dataset=loader.dataset)
    if type(loader) is not DataLoader:
        trainer.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
    stoppable(trainer)
    trainer.train()


def _lightning(row: Row, folder: Path, seen: _Seen) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from memfit.integrations.lightning import Stop

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(seen)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, default_root_dir=str(folder), **quiet)
    Stop(folder, every=1000).fit(trainer, Module(), row.loader())


def _accelerate(row: Row, folder: Path, seen: _Seen) -> None:
    from accelerate import Accelerator

    from memfit.integrations.accelerate import Stop

    accelerator, model = Accelerator(cpu=True), Model(seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, row.loader())
    loop = Stop(accelerator, folder, every=1000)
    _train(loop, model, optimizer, loader, accelerator.backward)


def _loop(row: Row, folder: Path, seen: _Seen) -> None:
    from memfit.training import Loop

    model = Model(seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(folder, every=1000, model=model, optimizer=optimizer)
    _train(loop, model, optimizer, row.loader(), torch.Tensor.backward)


def _train(loop: Any, model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None]) -> None:
    for _epoch in loop.epochs(EPOCHS):
        for batch in loop(loader):
            backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


# --- the sources


class Source(NamedTuple):
    """How a source is written, and how it is read."""

    write: Callable[[Path], None]
    loader: Callable[[Path, int], Any]


def _write_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    for shard, numbers in enumerate(torch.arange(SAMPLES).chunk(SHARDS)):
        pyarrow.parquet.write_table(pyarrow.table({"number": numbers.tolist()}), folder / f"{shard}.parquet")


def _datasets(folder: Path, buffer: int = 0) -> Any:
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    cache = str(folder.parent / "cache")
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
    return (found.shuffle(seed=1, buffer_size=buffer) if buffer else found).with_format("torch")


def _write_tar(folder: Path) -> None:
    folder.mkdir()
    for shard, numbers in enumerate(torch.arange(SAMPLES).chunk(SHARDS)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers.tolist():
                info = tarfile.TarInfo(f"{number:04}.cls")
                text = str(number).encode()
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))


def _webdataset(folder: Path) -> Any:
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    found = webdataset.WebDataset(files, shardshuffle=False, empty_check=False).decode()
    return found.map(lambda sample: {"number": sample["cls"]})


def _write_litdata(folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=SAMPLES // SHARDS)
    for number in range(SAMPLES):
        writer[number] = {"number": number}
    writer.done()
    writer.merge()


def _litdata(folder: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder), shuffle=False)


def _litdata_loader(folder: Path, workers: int) -> Any:
    import litdata

    return litdata.StreamingDataLoader(_litdata(folder), batch_size=BATCH, num_workers=workers)


def _plain(make: Callable[[Path], IterableDataset[Any]]) -> Callable[[Path, int], Any]:
    return lambda folder, workers: DataLoader(make(folder), BATCH, num_workers=workers)


SOURCES = {
    "datasets": Source(_write_parquet, _plain(_datasets)),
    "datasets, shuffled": Source(_write_parquet, _plain(lambda folder: _datasets(folder, BUFFER))),
    "webdataset": Source(_write_tar, _plain(_webdataset)),
    "litdata, torch's loader": Source(_write_litdata, _plain(_litdata)),
    "litdata, its loader": Source(_write_litdata, _litdata_loader),
}


if __name__ == "__main__":
    sys.exit(main())
