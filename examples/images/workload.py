"""Handwritten digits in five folds: each image enlarged and shifted 25 ways, a small network for each fold.

The data are 176 MiB. They are made once, by the stage ``prepare``, and all folds map the same file.
"""

import numpy as np

from memfit.config import Settings
from memfit.pipeline import Stage, Workload

SHIFTS = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]


class Params(Settings):
    num_folds: int = 5
    num_epochs: int = 3
    learning_rate: float = 0.003


def make_images(num_folds, seed):
    """Return images (n, 32, 32) float32, labels (n,) and folds (n,): the copies of one digit share a fold."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    small, labels = load_digits(return_X_y=True)
    folds = np.zeros(len(labels), np.int64)
    splits = StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(small, labels)
    for fold, (_, test) in enumerate(splits, start=1):
        folds[test] = fold
    large = np.kron(small.reshape(-1, 8, 8).astype(np.float32) / 16, np.ones((4, 4), np.float32))
    images = np.concatenate([np.roll(large, shift, axis=(1, 2)) for shift in SHIFTS])
    return images, np.tile(labels, len(SHIFTS)), np.tile(folds, len(SHIFTS))


def make_model():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=4, stride=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Rows:
    """Some rows of the images as a data set; a batch is copied from the mapped file when it is needed."""

    def __init__(self, data, rows):
        self.images, self.labels, self.rows = data["images"], data["label"], np.flatnonzero(rows)

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, indices):
        rows = self.rows[indices]
        return torch_of(self.images[rows][:, None]), torch_of(self.labels[rows])


def torch_of(array):
    import torch

    return torch.from_numpy(array)


def batches(data_set, **options):
    """Return a loader whose batches are read at once, not image by image."""
    from torch.utils.data import DataLoader

    return DataLoader(data_set, 256, collate_fn=tuple, **options)


def prepare(ctx, params):
    """Save the images once for all folds, and for each image the fold that tests it."""
    images, labels, folds = make_images(params.num_folds, ctx.seed)
    ctx.save("data", {"images": images, "label": labels, "fold": folds})


def train_fold(ctx, params):
    """Train on the other folds, and count what is right in this one."""
    import torch

    from memfit.training import Trainer, seed_everything

    def loss(model, batch):  # the summed loss of a batch, and the number of samples that it sums
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    data = ctx["prepare"].arrays("data")
    test = data["fold"] == ctx.unit
    train_set, test_set = Rows(data, ~test), Rows(data, test)
    seed_everything(ctx.seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate)
    trainer = Trainer(model, loss=loss, optimizer=optimizer, checkpoint_dir=ctx.dir, seed=ctx.seed)
    trainer.fit(batches(train_set, shuffle=True), batches(test_set), num_epochs=params.num_epochs)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches(test_set))
    ctx.save("weights", {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    return {"accuracy": right / len(test_set)}


IMAGES = Workload(Params, stages=(
    Stage("prepare", prepare, reads=("num_folds", "@seed")),
    Stage("fold", train_fold, needs=("prepare",), each="fold in params.num_folds",
          reads=("num_epochs", "learning_rate", "@seed"), phases=("train", "validate")),
))  # fmt: skip
