"""A plain PyTorch script that knows nothing of memfit: it fits a sine."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.linspace(-3, 3, 50_000)[:, None]
y = torch.sin(x)
model = torch.nn.Sequential(torch.nn.Linear(1, args.width), torch.nn.Tanh(), torch.nn.Linear(args.width, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for epoch in range(1, args.epochs + 1):
    for batch in torch.randperm(len(x)).split(500):
        loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}/{args.epochs} loss {loss.item():.4f}", flush=True)
