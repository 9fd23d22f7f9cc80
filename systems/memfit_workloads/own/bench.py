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

import torch

from harness import ROOT, parser, told, write_json
from memfit.files import read_json
from memfit.units import format_bytes
from memfit_workloads.video.clips import make_clips

#: The class of each example, and the stage that trains it.
SYSTEMS = {
    "ranker": ("Ranker", "fold"),
    "forecaster": ("Gat", "fold"),
    "video": ("FrameAndFace", "fold"),
    "trajectory": ("Planner", "train"),
}


def write(folder: Path, system: str) -> Path:
    """Copy a network and its config into a folder; return the folder."""
    for file in (ROOT / "examples/own_networks").glob(f"{system}.*"):
        shutil.copy(file, folder)
    if system == "video":
        clips = make_clips(folder, 12, 0, seconds=0.5)["path"].to_pylist()
        rows = [f"{path},{'abc'[number % 3]}" for number, path in enumerate(clips)]
        (folder / "list.csv").write_text("\n".join(["path,label", *rows]))
        torch.save(runpy.run_path(str(folder / "video.py"))["Backbone"](2).state_dict(), folder / "backbone.pt")
    return folder


def measure(folder: Path, system: str) -> dict[str, tuple[int, int]]:
    """Plan a config and run it; return the peak and the bound of each stage in bytes."""
    command = [sys.executable, "-m", "memfit", "run", f"{system}.yaml", "--json"]
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
            found = figures[system] = measure(write(Path(name), system), system)
        for stage, (peak, bound) in found.items():
            good += [told(peak <= bound, f"{system} {stage}: {format_bytes(peak)}, planned {format_bytes(bound)}")]
    write_json(args.json, figures)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
