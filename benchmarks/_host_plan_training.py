"""A training as a user writes it, for host_plan.py: in the environment lie the row, the folder, and the rank."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROW = SimpleNamespace(**json.loads(os.environ["HOST_PLAN_ROW"]))
FOLDER = Path(os.environ["HOST_PLAN_FOLDER"])
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ROW.loop == "huggingface":
    from transformers import Trainer, TrainingArguments
elif ROW.loop == "lightning":
    import lightning

WIDTH, OUT, BATCH, EPOCHS, MIB = 1024, 256, 512, 2, 1 << 20
#: Items of a list of dicts are shorter: a number of Python takes 32 bytes.
LISTED = 96


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: Any, name: Any, nbytes: Any) -> None:
        self.name, self.kind = name, kind
        self.rows: Any
        number = nbytes // (4 * WIDTH)
        path = FOLDER / name
        if kind == "list":
            rng = np.random.default_rng(0)
            self.rows = [{"id": n, "x": rng.random(LISTED).tolist()} for n in range(nbytes // (32 * LISTED + 500))]
        elif kind == "array":
            self.rows = np.random.default_rng(0).random((number, WIDTH), np.float32)
        elif kind == "mapped":
            self.rows = np.memmap(path.with_suffix(".bin"), np.float32, "r", shape=(number, WIDTH))
        else:
            from memfit.data import PackedDataset

            self.rows = PackedDataset.open(path)

    def __len__(self) -> Any:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row = self.rows[number]
        if self.kind == "list":
            return {"x": torch.tensor(row["x"] * (WIDTH // LISTED + 1))[:WIDTH].clone()}
        return {"x": torch.from_numpy(np.array(row["x"] if self.kind == "packed" else row))}


def make_files() -> Any:
    """Write the files of mapped and packed data; the ranks only read them."""
    from memfit.data import pack

    for name, nbytes in (("train", ROW.train_mib * MIB), ("valid", ROW.valid_mib * MIB)):
        rows = np.random.default_rng(0).random((nbytes // (4 * WIDTH), WIDTH), np.float32)
        if ROW.data == "mapped":
            rows.tofile(FOLDER / f"{name}.bin")
        elif ROW.data == "packed":
            pack(({"x": row} for row in rows), FOLDER / name)


def data() -> Any:
    train = Items(ROW.data, "train", ROW.train_mib * MIB)
    return train, Items(ROW.data, "valid", ROW.valid_mib * MIB) if ROW.validation else None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, OUT)

    def forward(self, x: Any, return_loss: Any = True) -> Any:
        return {"loss": self.layer(x).square().mean()}


def loaders() -> Any:
    """The loaders of the plain loop and of Lightning, which sets the samplers of its ranks itself."""
    found = []
    for one, shuffled in zip(data(), (True, False), strict=True):
        sampler: Any = None
        if RANKS > 1 and ROW.loop == "plain" and one is not None:
            sampler = torch.utils.data.DistributedSampler(one, RANKS, RANK, shuffle=shuffled)
        settings = {"num_workers": ROW.workers, "persistent_workers": ROW.persistent, "sampler": sampler}
        found.append(
            one and torch.utils.data.DataLoader(one, BATCH, shuffle=shuffled if sampler is None else None, **settings)
        )
    return found


def trainer() -> Any:
    train, valid = data()
    settings = TrainingArguments(
        output_dir=str(FOLDER / "out"), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, dataloader_num_workers=ROW.workers, use_cpu=True, report_to="none",
        dataloader_persistent_workers=ROW.persistent, eval_strategy="epoch" if valid else "no", save_strategy="no",
        disable_tqdm=True, logging_strategy="no", prediction_loss_only=True, remove_unused_columns=False,
        dataloader_multiprocessing_context=ROW.start if ROW.workers else None,
    )  # fmt: skip
    return Trainer(Model(), settings, train_dataset=train, eval_dataset=valid)


def train_plain() -> Any:
    model: Any = Model()
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train, valid = loaders()
    for _ in range(EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            for batch in valid or ():
                model(**batch)
    if RANKS > 1:
        torch.distributed.destroy_process_group()


def train_lightning() -> Any:
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

    train, valid = loaders()
    lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), train, valid)  # fmt: skip


def mark_phases() -> Any:
    """Say which loader was begun last, in a file of this rank."""
    begin = torch.utils.data.DataLoader.__iter__

    def marked(self: Any) -> Any:
        name = getattr(self.dataset, "name", "")
        (FOLDER / f"phase.{RANK}").write_text({"train": "train", "valid": "validate"}.get(name, ""))
        return begin(self)

    torch.utils.data.DataLoader.__iter__ = marked  # type: ignore[method-assign]


def forecast(asked: Any) -> Any:
    """Print what memfit forecasts of trainings with this loop, each on one node, before any of them runs."""
    global ROW, FOLDER
    for number, row, folder in asked:
        ROW, FOLDER = SimpleNamespace(**row), Path(folder)
        multiprocessing.set_start_method(ROW.start, force=True)
        print(json.dumps({"row": number, **forecast_one()}), flush=True)


def forecast_one() -> Any:
    from memfit.data import LoaderUse, host_footprint

    if ROW.loop == "huggingface":
        made = trainer()
        train, valid = made.get_train_dataloader(), made.get_eval_dataloader() if ROW.validation else None
    else:
        train, valid = loaders()
    weights = sum(one.nbytes for one in Model().parameters())
    copies = 4 if ROW.ranks == 1 else 5  # weights, gradients, Adam's two, and the buckets of DDP
    use = LoaderUse(num_ranks=ROW.ranks, loop=ROW.loop, num_epochs=EPOCHS)
    return host_footprint(train, valid, use, training_bytes=copies * weights).to_dict()


if __name__ == "__main__":
    multiprocessing.set_start_method(ROW.start)
    torch.manual_seed(0)
    if sys.argv[1:] == ["files"]:
        make_files()
    elif sys.argv[1:2] == ["forecast"]:
        forecast(json.loads(sys.argv[2]))
    else:
        mark_phases()
        loops: dict[str, Any] = {"plain": train_plain, "lightning": train_lightning}
        loops.get(ROW.loop, lambda: trainer().train())()
        print("trained")
