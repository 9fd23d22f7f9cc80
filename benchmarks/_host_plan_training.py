"""A training as a user writes it, for host_plan.py: its settings are words, such as ``loop=lightning data=list``."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

DEFAULTS = "loop=plain data=array mib=100 workers=2 validation=1 persistent=0 batch=256 width=64 epochs=2 slow=0"
given = dict(word.split("=") for word in [*DEFAULTS.split(), *sys.argv[1:]])
ROW: Any = SimpleNamespace(**{name: int(text) if text.isdecimal() else text for name, text in given.items()})
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WIDTH, MIB = 1024, 1 << 20


def numpy_only() -> None:
    """A fit by batches of a table that each rank holds, without torch; it says its phases."""
    from memfit.rundir import phase

    table = np.random.default_rng(0).random((ROW.mib * MIB // 8 // WIDTH, WIDTH))
    weights = np.zeros(WIDTH)
    for _ in range(ROW.epochs):
        phase("train")
        for begin in range(0, len(table), ROW.batch):
            part = table[begin : begin + ROW.batch]
            weights -= 1e-6 * part.T @ (part @ weights - 1)
        phase("validate")
        np.corrcoef(table[: len(table) // 2].T)
        phase("checkpoint")
        time.sleep(ROW.slow / 10)


if ROW.loop == "numpy":
    numpy_only()
    sys.exit()

import torch  # noqa: E402

if ROW.loop == "huggingface":
    from transformers import Trainer, TrainingArguments
elif ROW.loop == "lightning":
    import lightning


class Items(torch.utils.data.Dataset[Any]):
    """Rows of 4 KiB: in objects, an array, a frame, a file that is mapped, in /dev/shm, or a rank's own share."""

    def __init__(self, mib: int) -> None:
        number = mib * MIB // (4 * WIDTH)
        self.rows: Any
        rng = np.random.default_rng(0)
        if ROW.data == "list":
            self.rows = [{"x": rng.random(96).tolist()} for _ in range(mib * MIB // 3500)]
        elif ROW.data == "strings":
            self.rows = [f"{n:064d}" for n in range(mib * MIB // 113)]
        elif ROW.data == "frame":
            import pandas

            self.rows = pandas.DataFrame(rng.random((number, WIDTH), np.float32))
        elif ROW.data in ("mapped", "shm"):
            path = f"{'/dev/shm' if ROW.data == 'shm' else os.environ.get('TMPDIR', '/tmp')}/host_plan_{mib}.bin"
            self.rows = np.memmap(path, np.float32, "r", shape=(number, WIDTH))
            self.rows.sum()
        else:
            own = number // RANKS if ROW.data == "share" else number
            self.rows = rng.random((own, WIDTH), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        row = self.rows.iloc[number].to_numpy() if ROW.data == "frame" else self.rows[number]
        if isinstance(row, str):
            return {"x": torch.full((WIDTH,), float(len(row)))}
        values = np.array(row["x"] * 11, np.float32)[:WIDTH] if isinstance(row, dict) else np.array(row)
        return {"x": torch.from_numpy(values)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = max(ROW.width, 64)
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, wide), torch.nn.ReLU(), torch.nn.Linear(wide, wide))

    def forward(self, x: Any, return_loss: Any = True) -> Any:
        return {"loss": self.layers(x).square().mean()}


def loaders() -> list[Any]:
    found = []
    for mib, shuffled in ((ROW.mib, True), (ROW.mib // 2 * ROW.validation, False)):
        data = Items(mib) if mib else None
        sampler: Any = None
        if RANKS > 1 and ROW.loop == "plain" and ROW.data != "share":
            sampler = data and torch.utils.data.DistributedSampler(data, RANKS, RANK, shuffle=shuffled)
        own = {"num_workers": ROW.workers, "persistent_workers": bool(ROW.persistent and ROW.workers)}
        shuffle = shuffled if sampler is None else None
        found.append(data and torch.utils.data.DataLoader(data, ROW.batch, shuffle=shuffle, sampler=sampler, **own))
    return found


def train_plain() -> None:
    """A loop of one's own; loop=accelerate lets Accelerate prepare it, loop=marked says its phases."""
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    train, valid = loaders()
    backward: Any = torch.Tensor.backward
    mark: Any = lambda name: None  # noqa: E731
    if ROW.loop == "marked":
        from memfit.rundir import phase as mark
    if ROW.loop == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
        backward = accelerator.backward
    elif RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(ROW.epochs):
        mark("train")
        for batch in train:
            optimizer.zero_grad()
            backward(model(**batch)["loss"])
            optimizer.step()
            time.sleep(ROW.slow / 1000)
        mark("validate")
        with torch.no_grad():
            for batch in valid or ():
                model(**batch)
        mark("checkpoint")


def train_huggingface() -> None:
    settings = TrainingArguments(
        output_dir=f"/tmp/host_plan_out_{os.getpid()}", num_train_epochs=ROW.epochs, use_cpu=True, report_to="none",
        per_device_train_batch_size=ROW.batch, per_device_eval_batch_size=ROW.batch, save_strategy="no",
        dataloader_num_workers=ROW.workers, dataloader_persistent_workers=bool(ROW.persistent and ROW.workers),
        eval_strategy="epoch" if ROW.validation else "no", disable_tqdm=True, logging_strategy="no",
        prediction_loss_only=True, remove_unused_columns=False,
    )  # fmt: skip
    valid = Items(ROW.mib // 2) if ROW.validation else None
    Trainer(Model(), settings, train_dataset=Items(ROW.mib), eval_dataset=valid).train()


def train_lightning() -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: Any) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _: Any) -> Any:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max_epochs=ROW.epochs, logger=False,
        strategy="ddp" if RANKS > 1 else "auto", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), *loaders())  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    {"huggingface": train_huggingface, "lightning": train_lightning}.get(ROW.loop, train_plain)()
