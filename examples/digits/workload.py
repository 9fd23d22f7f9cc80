"""Images in folds: scikit-learn's digits, a small network for each fold, and one result over all folds."""

import numpy as np

from memfit.config import Settings
from memfit.pipeline import Stage, Workload


class Params(Settings):
    num_folds: int = 3
    num_epochs: int = 5
    learning_rate: float = 0.003


def prepare(ctx, params):
    """Save the images once for all folds, and for each image the fold that tests it."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    images, labels = load_digits(return_X_y=True)
    fold_of = np.zeros(len(labels), np.int64)
    splits = StratifiedKFold(params.num_folds, shuffle=True, random_state=ctx.seed).split(images, labels)
    for fold, (_, test) in enumerate(splits, start=1):
        fold_of[test] = fold
    ctx.save("data", {"images": images.astype(np.float32) / 16, "labels": labels, "fold": fold_of})


def train_fold(ctx, params):
    import torch  # here, so that only the processes that train load it
    from torch.utils.data import DataLoader, TensorDataset

    from memfit.training import Trainer, seed_everything

    def loss(model, batch):  # the summed loss of a batch, and the number of samples that it sums
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    data = {name: torch.from_numpy(np.array(array)) for name, array in ctx["prepare"].arrays("data").items()}
    test = data["fold"] == ctx.unit
    fit_set, test_set = (TensorDataset(data["images"][rows], data["labels"][rows]) for rows in (~test, test))
    seed_everything(ctx.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate)
    trainer = Trainer(model, loss=loss, optimizer=optimizer, checkpoint_dir=ctx.dir, seed=ctx.seed)
    trainer.fit(DataLoader(fit_set, 64, shuffle=True), DataLoader(test_set, 256), num_epochs=params.num_epochs)
    predicted = model(data["images"][test]).argmax(1)
    ctx.save("predicted", predicted.numpy())
    return {"accuracy": (predicted == data["labels"][test]).float().mean()}


def join(ctx, params):
    """Count the predictions of all folds: each image was tested by the model that did not see it."""
    data, confusion = ctx["prepare"].arrays("data"), np.zeros((10, 10), np.int64)
    for fold in ctx.units("fold"):
        np.add.at(confusion, (data["labels"][data["fold"] == fold.unit], fold.arrays("predicted")), 1)
    ctx.save("confusion", confusion)
    return {"accuracy": np.trace(confusion) / confusion.sum()}


FOLD_READS = ("num_epochs", "learning_rate", "@seed")
DIGITS = Workload(Params, stages=(
    Stage("prepare", prepare, reads=("num_folds", "@seed")),
    Stage("fold", train_fold, needs=("prepare",), each="fold in params.num_folds", reads=FOLD_READS),
    Stage("join", join, needs=("prepare", "fold"), reads=()),
))  # fmt: skip
