"""A network of one's own in four systems: planned with first steps, trained, and killed in the middle.

    make bench NAME=own ARGS="ranker video"

Each system trains the network of ``examples/own_networks`` from a small config in a folder of its own. The plan's
bound of the training is held against the peak of its jobs. The same run is then killed with SIGKILL after its first
epoch, all processes of it, and started again: the weights must be the same bytes. Exit status 0: all as asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from harness import ROOT, parser, told, write_json
from memfit.files import read_json
from memfit.rundir import RunDir
from memfit.units import format_bytes
from memfit_workloads.benches import contents
from memfit_workloads.video.clips import make_clips

STOCKS = {"source": "generated", "num_dates": 110, "num_assets": 10, "num_features": 2, "lookback": 10,
          "information_coefficient": 0.5, "horizons": [1, 2], "main_horizon": 2}  # fmt: skip
SPLITS = {"n_splits": 2, "embargo_size": 2}
#: The class of each example, the stage that trains it, a small training.
SYSTEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ranker": ("Ranker", "fold", {
        "data": STOCKS, "splits": SPLITS, "blend": "latest", "model": {"params": {"width": 8, "num_heads": 2}},
        "train": {"num_epochs": 3, "dates_per_batch": 2, "device": "cpu"},
    }),
    "forecaster": ("Gat", "fold", {
        "data": STOCKS, "splits": SPLITS, "graph": {"neighbours": 3, "window": 20},
        "model": {"params": {"width": 8, "num_heads": 2}},
        "train": {"num_epochs": 3, "batch_size": 100, "device": "cpu"},
    }),
    "video": ("FrameAndFace", "fold", {
        "data": {"source": "files", "path": "list.csv"}, "clip": {"num_frames": 2, "size": 224},
        "splits": {"n_splits": 2, "test_share": 0}, "train": {"num_epochs": 3},
        "model": {"params": {"backbone": "backbone.pt", "width": 2}},
    }),
    "trajectory": ("Planner", "train", {
        "data": {"places": ["RiLSA_example1"], "simulations": 1, "seconds": 80, "stride_seconds": 4, "raster_size": 16},
        "vocabulary": {"size": 16}, "model": {"params": {"width": 8, "num_heads": 2}}, "seeds": 1,
        "dataloader": {"params": {"batch_size": 32}}, "trainer": {"params": {"max_epochs": 3}},
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
        clips = make_clips(folder, 24, 0, seconds=0.5)["path"].to_pylist()
        rows = [f"{path},{'abc'[number % 3]}" for number, path in enumerate(clips)]
        (folder / "list.csv").write_text("\n".join(["path,label", *rows]))
        torch.manual_seed(0)
        made = runpy.run_path(str(folder / "nets.py"))["Backbone"](2)
        torch.save(made.state_dict(), folder / "backbone.pt")
    return folder


def memfit(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start ``memfit run`` on a folder's config; it writes JSON to its output."""
    command = [sys.executable, "-m", "memfit", "run", "config.yaml", "--json", *words]
    log = open(folder / "log.txt", "a")  # noqa: SIM115
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for it, and return what it said."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    said: dict[str, Any] = json.loads(printed)
    return said


def kill_in_the_middle(folder: Path, job: str) -> None:
    """Start a run, and send SIGKILL to all its processes, by their folder, when the job has saved an epoch."""
    process, saved = memfit(folder), False
    while not saved:
        assert process.poll() is None, "the run ended before it was to be killed"
        time.sleep(0.01)
        events = [one for path in folder.glob("runs/own/run_*/run.json") for one in RunDir(path.parent).events()]
        saved = any(one["kind"] == "checkpoint" and one["job"] == job and one["epoch"] for one in events)
    process.kill()
    while own := [one for one in psutil.process_iter() if of_folder(one, folder)]:
        for one in own:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.communicate()
    assert not [*folder.glob(f"runs/own/run_*/checkpoints/{job}.json")], f"{job} was done when it was killed"


def of_folder(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder
    return False


def measure(folder: Path, system: str) -> dict[str, Any]:
    """Plan, train, and train with a kill: bound and peak of each stage in bytes, and both digests of the weights."""
    job, digests = f"{SYSTEMS[system][1]}_1", []
    whole, killed = write(folder.resolve() / "whole", system), write(folder.resolve() / "killed", system)
    plan = finish(memfit(whole, "--plan", "--out", "plan.json"))
    bounds = {one["name"]: one["footprint"]["private_bytes"] for one in plan["stages"] if one["footprint"]}
    done = finish(memfit(whole))
    kill_in_the_middle(killed, job)
    for run_dir in (Path(done["run"]), Path(finish(memfit(killed))["run"])):
        newest = f"{job}/{(run_dir / 'checkpoints' / job / 'latest').read_text().strip()}/parts.pt['model']"
        parts = {name: one[2] for name, one in contents(run_dir).items() if name.startswith(newest)}
        assert parts
        digests.append(hashlib.sha256(b"".join(parts[name] for name in sorted(parts))).hexdigest()[:12])
    peaks: dict[str, int] = {}
    for path in Path(done["run"]).glob("jobs/*/outcome.json"):
        name = next(one for one in bounds | {path.parent.name: 0} if path.parent.name.startswith(one))
        peaks[name] = max(peaks.get(name, 0), (read_json(path) or {})["footprint"]["private_bytes"])
    return {"bounds": bounds, "peaks": peaks, "digests": digests}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("systems", nargs="*", default=[*SYSTEMS], help="some of them")
    args, figures, good = options.parse_args(), {}, []
    for system in args.systems:
        with tempfile.TemporaryDirectory(prefix="memfit-own-") as name:
            os.environ["XDG_STATE_HOME"] = name  # not the user's record of comparisons
            found = figures[system] = measure(Path(name), system)
        training, (first, second) = SYSTEMS[system][1], found["digests"]
        for stage, bound in found["bounds"].items():
            peak = found["peaks"][stage]
            text = f"{system} {stage}: {format_bytes(peak)}, planned {format_bytes(bound)}"
            good.append(told(peak <= bound, text) or stage != training)
        good.append(told(first == second, f"{system}: weights {first}; killed and continued {second}"))
    write_json(args.json, figures)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
