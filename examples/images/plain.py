"""The same folds as a plain script: each process makes its own images, as people write it.

python plain.py --fold 1
"""

import argparse

import torch
from workload import make_images, make_model

parser = argparse.ArgumentParser()
parser.add_argument("--fold", type=int, required=True)
parser.add_argument("--num-epochs", type=int, default=3)
options = parser.parse_args()

print("makes its images", flush=True)
images, labels, folds = make_images(num_folds=5, seed=1)
test = folds == options.fold
train_set, test_set = (
    torch.utils.data.TensorDataset(torch.from_numpy(images[rows][:, None]), torch.from_numpy(labels[rows]))
    for rows in (~test, test)
)

torch.manual_seed(1)
model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for epoch in range(1, options.num_epochs + 1):
    total = 0.0
    for order in torch.randperm(len(train_set)).split(256):
        inputs, targets = train_set[order]
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(order)
    print(f"epoch {epoch}/{options.num_epochs} loss {total / len(train_set):.3f}", flush=True)
with torch.no_grad():
    right = sum(
        int((model(test_set[part][0]).argmax(1) == test_set[part][1]).sum())
        for part in torch.arange(len(test_set)).split(256)
    )
print(f"accuracy {right / len(test_set):.4f}", flush=True)
