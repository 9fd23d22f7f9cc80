"""What a network of one's own takes in four systems, beside the bound of a plan with first steps.

    make bench NAME=own

Each system trains the network of ``examples/own_networks`` from a small config; systems/tests/workloads/test_own.py
kills these trainings. Exit status 0: no stage takes more than its bound.
"""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness import ROOT, parser, told, write_json
from memfit.files import read_json
from memfit.units import format_bytes
from memfit_workloads.video.clips import make_clips

STOCKS = {"source": "generated", "num_dates": 110, "num_assets": 10, "num_features": 2, "lookback": 10,
          "information_coefficient": 0.5, "horizons": [1, 2], "main_horizon": 2}  # fmt: skip
SPLITS, SMALL, EPOCHS = {"n_splits": 2, "embargo_size": 2}, {"params": {"width": 8, "num_heads": 2}}, {"num_epochs": 3}
#: The class of each example, the stage that trains it, a small training.
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ranker": ("Ranker", "fold", {
        "data": STOCKS, "splits": SPLITS, "blend": "latest", "model": SMALL,
        "train": EPOCHS | {"dates_per_batch": 2, "device": "cpu"},
    }),
    "forecaster": ("Gat", "fold", {
        "data": STOCKS, "splits": SPLITS, "graph": {"neighbours": 3, "window": 20}, "model": SMALL,
        "train": EPOCHS | {"batch_size": 100, "device": "cpu"},
    }),
    "video": ("FrameAndFace", "fold", {
        "data": {"source": "files", "path": "list.csv"}, "clip": {"num_frames": 2, "size": 32}, "train": EPOCHS,
        "splits": {"n_splits": 2, "test_share": 0}, "model": {"params": {"backbone": "backbone.pt", "width": 2}},
    }),
    "trajectory": ("Planner", "train", {
        "data": {"places": ["RiLSA_example1"], "simulations": 1, "seconds": 60, "stride_seconds": 8, "raster_size": 16},
        "vocabulary": {"size": 16}, "model": SMALL, "seeds": 1, "trainer": {"params": {"max_epochs": 3}},
    }),
}  # fmt: skip


def write(folder: Path, system: str) -> Path:
    """Write a config, and beside it a file with the network, and return their folder."""
    name, _, params = SYSTEMS[system]
    content = {"experiment": "own", "seed": 3, "target": f"memfit_workloads.{system}.stages:{system.upper()}",
               "params": params | {"model": {"target": f"nets:{name}", **params["model"]}},
               "skip": ["health"] if system == "ranker" else []}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(content))
    shutil.copy(ROOT / "examples" / "own_networks" / f"{system}.py", folder / "nets.py")
    if system == "video":
        clips = make_clips(folder, 12, 0, seconds=0.5)["path"].to_pylist()
        rows = [f"{path},{'abc'[number % 3]}" for number, path in enumerate(clips)]
        (folder / "list.csv").write_text("\n".join(["path,label", *rows]))
        torch.save(runpy.run_path(str(folder / "nets.py"))["Backbone"](2).state_dict(), folder / "backbone.pt")
    return folder


def measure(folder: Path) -> dict[str, tuple[int, int]]:
    """Plan a config and run it; return the peak and the bound of each stage in bytes."""
    command = [sys.executable, "-m", "memfit", "run", "config.yaml", "--json"]
    plan, done = (
        json.loads(subprocess.run([*command, *more], cwd=folder, stdout=subprocess.PIPE, check=True).stdout)
        for more in (["--plan"], [])
    )
    found = {one["name"]: (0, one["footprint"]["private_bytes"]) for one in plan["stages"] if one["footprint"]}
    for path in Path(folder, done["run"]).glob("jobs/*/outcome.json"):
        peak, job = (read_json(path) or {})["peak_bytes"], path.parent.name
        for name in (one for one in found if job == one or job.startswith(f"{one}_")):
            found[name] = (max(found[name][0], peak), found[name][1])
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("systems", nargs="*", default=[*SYSTEMS], help="some of them")
    args, figures, good = options.parse_args(), {}, []
    for system in args.systems:
        with tempfile.TemporaryDirectory(prefix="memfit-own-") as name:
            found = figures[system] = measure(write(Path(name), system))
        for stage, (peak, bound) in found.items():
            good += [told(peak <= bound, f"{system} {stage}: {format_bytes(peak)}, planned {format_bytes(bound)}")]
    write_json(args.json, figures)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
