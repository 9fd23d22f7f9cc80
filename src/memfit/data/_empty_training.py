"""A program: print the bytes that the processes of a small training on the CPU hold.

``_empty_training.py <loop> <alone or group> <start method> <items in a batch> <numbers in an item> <module>...``
trains one layer of 256 x 256 weights for two epochs with validation, by workers that live on, and prints the fields of
`EmptyTraining`. It is its own script, so that spawned workers import torch and the named modules, and no more.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

_WORDS = sys.argv if __name__ in ("__main__", "__mp_main__") else []  # a spawned worker runs it by the second name
for name in _WORDS[6:]:
    with suppress(Exception):  # one that a program of this form cannot import is left out
        importlib.import_module(name)

WIDTH, NUM_BATCHES, EPOCHS = 256, 24, 2
BATCH, NUMBERS = (int(word) for word in _WORDS[4:6] or (1, 1))


class Items:
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(np.ones(NUMBERS, np.float32))}


class Layer(torch.nn.Module):
    """One layer, as each of the loops wants its model; it looks at the processes in each validation step."""

    found: list[int]
    left = 2 * NUM_BATCHES * EPOCHS

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, return_loss: bool = True) -> dict[str, Any]:
        if not self.training:
            Layer.left -= 1
            if Layer.left % NUM_BATCHES == 1:
                Layer.found = sizes()
        return {"loss": self.layer(torch.nn.functional.pad(x, (0, max(0, WIDTH - NUMBERS)))[:, :WIDTH]).square().mean()}


def loaders(workers: int) -> list[Any]:
    data: Any = Items(BATCH * NUM_BATCHES)
    return [torch.utils.data.DataLoader(data, BATCH, num_workers=workers, persistent_workers=True) for _ in range(2)]


def plain(workers: int, in_group: bool) -> None:
    model: torch.nn.Module = Layer()
    if in_group:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train, valid = loaders(workers)
    for _ in range(EPOCHS):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in valid:
                model(**batch)


def huggingface(workers: int, in_group: bool) -> None:
    from transformers import Trainer, TrainingArguments

    data = Items(BATCH * NUM_BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, num_train_epochs=EPOCHS, eval_strategy="epoch", save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True, logging_strategy="no", prediction_loss_only=True,
            dataloader_num_workers=workers, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
            remove_unused_columns=False, dataloader_persistent_workers=workers > 0,
        )  # fmt: skip
        Trainer(Layer(), settings, train_dataset=data, eval_dataset=data).train()


def with_lightning(workers: int, in_group: bool) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Layer()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, number: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        accelerator="cpu", devices=1, strategy="ddp" if in_group else "auto", max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), *loaders(workers))  # fmt: skip


def held(pid: int) -> dict[str, int]:
    """Return the sizes of a process in bytes, as the kernel names them."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return {words[0]: int(words[1]) << 10 for words in map(str.split, file) if words[-1] == "kB"}


def below(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found[1:]


def sizes() -> list[int]:
    own = held(os.getpid())
    process = own["Anonymous:"] + own["Swap:"]
    all_others = {pid: held(pid) for pid in below(os.getpid())}
    workers = [all_others[worker.pid] for worker in multiprocessing.active_children() if worker.pid in all_others]
    each = sum(one["Private_Dirty:"] + one["Swap:"] for one in workers) // max(len(workers), 1)
    whole = sum(one["Pss_Anon:"] + one["SwapPss:"] for one in (own, *all_others.values()))
    together = (whole - process - len(workers) * each) // 2
    return [process, own["Rss:"] - own["Anonymous:"] - own["Pss_Shmem:"], each, max(0, together)]


if __name__ == "__main__":
    loop, where, method = sys.argv[1:4]
    multiprocessing.set_start_method(method)
    answer = os.dup(1)
    os.dup2(2, 1)  # what the loops print goes where errors go
    # Pages that a forked worker shares with another one only tell themselves apart if there are two.
    num_workers = 2 if method == "fork" else 1
    {"plain": plain, "huggingface": huggingface, "lightning": with_lightning}[loop](num_workers, where == "group")
    os.write(answer, " ".join(map(str, Layer.found)).encode())
