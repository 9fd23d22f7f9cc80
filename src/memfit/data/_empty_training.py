"""A program: what the processes of a training on the CPU hold that trains one weight, printed in bytes.

``_empty_training.py <loop> <alone or group> <start method> <module>...``, where the loop is plain, huggingface or
lightning. Two steps are made, so that what the first one loads is loaded. Then two workers of a DataLoader deliver some
batches, and the process collects its garbage, which writes to the pages of its objects that it shares with workers.
Printed are: the anonymous bytes of the process before it had workers, the bytes of the files that it maps, what each
worker has for itself, and what all of them add beside that: helpers of the start method, and pages copied once.
It is its own script, so that spawned workers import what it does: torch and the modules that are named, and no more.
"""

import gc
import importlib
import os
import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch

for name in sys.argv[4:]:
    with suppress(Exception):  # one that a program of this form cannot import is left out
        importlib.import_module(name)

LOADER: Any = torch.utils.data.DataLoader([{"x": torch.ones(1)} for _ in range(2)])  # type: ignore[arg-type]


class Weight(torch.nn.Module):
    """One weight, as each of the loops wants its model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: Any, return_loss: bool = True) -> dict[str, Any]:
        return {"loss": self.layer(x).mean()}


def plain(in_group: bool) -> None:
    model: torch.nn.Module = Weight()
    if in_group:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in LOADER:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def huggingface(in_group: bool) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=2, eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, logging_strategy="no", prediction_loss_only=True, remove_unused_columns=False,
        )  # fmt: skip
        Trainer(Weight(), settings, train_dataset=LOADER.dataset, eval_dataset=LOADER.dataset).train()


def with_lightning(in_group: bool) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Weight()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, number: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        accelerator="cpu", devices=1, strategy="ddp" if in_group else "auto", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), LOADER, LOADER)  # fmt: skip


def held(pid: int) -> dict[str, int]:
    """Return the sizes of a process in bytes, as the kernel names them."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return {words[0]: int(words[1]) << 10 for words in map(str.split, file) if words[-1] == "kB"}


def tree() -> list[int]:
    """Return this process and those that come from it."""
    found = [os.getpid()]
    for pid in found:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def main(loop: str, where: str, method: str) -> list[int]:
    {"plain": plain, "huggingface": huggingface, "lightning": with_lightning}[loop](where == "group")
    gc.collect()
    sizes = held(os.getpid())
    own = sizes["Anonymous:"] + sizes["Swap:"]
    loader: Any = torch.utils.data.DataLoader(
        LOADER.dataset * 40, 8, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    for _ in loader:
        pass
    gc.collect()
    each = [held(worker.pid) for worker in loader._iterator._workers]
    worker = sum(one["Private_Dirty:"] + one["Swap:"] for one in each) // len(each)
    whole = sum(one["Pss_Anon:"] + one["SwapPss:"] for one in map(held, tree()))
    return [own, sizes["Rss:"] - sizes["Anonymous:"] - sizes["Pss_Shmem:"], worker, whole - own - len(each) * worker]


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # what the loops print goes where errors go
    os.write(answer, " ".join(map(str, main(*sys.argv[1:4]))).encode())
