"""A fit whose loaders' workers copy a list: ``validation_child.py <room>...``; room is 0 or 1.

Prints a line of JSON for each: ``phases``, the forecast of each phase beyond the data, and ``grown``, by how much all
memory that cannot be reclaimed grew by the end of training and of validation.
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import torch
from footprint_child import Rows, held
from torch.utils.data import DataLoader

from memfit.data import LoaderUse, host_footprint
from memfit.training import Trainer, _validation

NUM_ROWS, MANY = 40_000, 1 << 50


def listed(number):
    return Rows([{"id": n, "text": f"record number {n}" * 4, "labels": [n]} for n in range(number)])


def fit(has_room, num_rows=NUM_ROWS):
    _validation.Budget.read = staticmethod(lambda: SimpleNamespace(headroom_bytes=MANY * has_room, lendable_bytes=MANY))
    train_data, valid_data = listed(num_rows), listed(num_rows)
    loader = partial(DataLoader, batch_size=500, shuffle=True, num_workers=2, multiprocessing_context="fork")
    train, valid = loader(train_data, persistent_workers=True), loader(valid_data)
    found = host_footprint(train, valid, LoaderUse(release=not has_room), training_bytes=None)
    model = torch.nn.Linear(1, 1)
    before, grown = held(), {"train": 0, "validate": 0}

    def step(model, batch):
        if len(seen) % 40 == 39:
            grown["train"] = max(grown["train"], held() - before)
        seen.append(0)
        return model(batch[:, None].float() * 0).sum(), len(batch)

    def evaluate(model, batches):
        for number, _ in enumerate(batches):
            if number % 40 == 39 or number == len(batches) - 1:
                grown["validate"] = max(grown["validate"], held() - before)
        return {"loss": 1.0}

    seen = []
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=step)
    trainer.fit(train, num_epochs=1, valid=valid, evaluate=evaluate, best_metric="loss", preflight=False)
    phases = {name: peak.private_bytes - found.parts["data"] for name, peak in found.phases.items()}
    return json.dumps({"phases": phases, "grown": grown})


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(1, num_rows=500)  # what torch loads with a first fit is there now
    for word in sys.argv[1:]:
        print(fit(int(word)), flush=True)
