"""A training whose data set is a list of dicts, which every loader worker copies."""

import torch
from torch.utils.data import DataLoader, Dataset

from memfit.rundir import phase


class Scenes(Dataset):
    """So many scenes of fifty numbers each."""

    def __init__(self, number):
        self.scenes = [{"path": [float(one + step) for step in range(50)], "label": one % 7} for one in range(number)]

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        return torch.tensor(self.scenes[index]["path"]), self.scenes[index]["label"]


def loaders(params):
    """Return the loaders of the training and of the validation, for one rank."""
    train = DataLoader(Scenes(params["num_scenes"]), batch_size=32, shuffle=True, num_workers=2)
    return train, DataLoader(Scenes(params["num_scenes"] // 2), batch_size=64, num_workers=2)


def main():
    """Train for one epoch, and validate."""
    phase("load")
    train, valid = loaders({"num_scenes": 20000})
    model = torch.nn.Linear(50, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    phase("train")
    for paths, labels in train:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(paths), labels).backward()
        optimizer.step()
    phase("validate")
    with torch.no_grad():
        hits = sum(int((model(paths).argmax(1) == labels).sum()) for paths, labels in valid)
    print(f"{hits} hits")


if __name__ == "__main__":
    main()
