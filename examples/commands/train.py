"""Fit a line to all rows but those of one fold, with a checkpoint after each epoch. It knows nothing of memfit."""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("rows", type=Path)
parser.add_argument("--fold", type=int, required=True)
parser.add_argument("--num-epochs", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

rows = [tuple(map(float, line.split())) for line in args.rows.read_text().splitlines()]
fit = [row for number, row in enumerate(rows) if number % 3 != args.fold - 1]
test = [row for number, row in enumerate(rows) if number % 3 == args.fold - 1]
checkpoint = args.out / "checkpoint.json"
state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"epoch": 0, "slope": 0.0, "start": 0.0}

for epoch in range(state["epoch"] + 1, args.num_epochs + 1):
    for x, y in fit:
        error = state["start"] + state["slope"] * x - y
        state["start"] -= 0.05 * error
        state["slope"] -= 0.05 * error * x
    state["epoch"] = epoch
    new = checkpoint.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(checkpoint)  # by rename: a kill leaves the old checkpoint or the new one
    print(f"epoch {epoch}/{args.num_epochs}", flush=True)

error = sum((state["start"] + state["slope"] * x - y) ** 2 for x, y in test) / len(test)
(args.out / "result.json").write_text(json.dumps({"error": error, "slope": state["slope"]}))
