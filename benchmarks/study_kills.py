"""Kill a study again and again: the same trials, values and checkpoints as without a kill.

    python benchmarks/study_kills.py [--trials 40] [--kills 20] [--seed 0]

A study of a small workload runs once without a disturbance. Then it runs again, and SIGKILL takes the supervisor alone,
all jobs with their watchers, or everything: at random moments, while a trial is drawn, and in the middle of saving a
checkpoint. A table says what was killed. Exit status 0: all records are equal but what was measured, and so are the
best config and the digest of each result; no trial runs on.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from memfit.jobs import running_jobs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import kills  # type: ignore[import-not-found]
from tuning.studies import (  # type: ignore[import-not-found]
    KIND,
    SPACE,
    asking,
    config_of,
    ended,
    lay_out,
    left_by,
    saving,
)

#: What a kill takes, and when.
WAYS = ("supervisor, any time", "jobs, any time", "all, any time", "all, drawing a trial", "all, saving a checkpoint")


def kill_of(way: str, num_ended: int, drawn: random.Random, folder: Path) -> Any:
    """Return the kill: when so many trials have ended, and then at the moment of its way."""
    if way.endswith("drawing a trial"):
        return kills.Kill(asking(num_ended))
    if way.endswith("saving a checkpoint"):
        return saving(num_ended, folder)
    return kills.Kill(kills.later(ended(num_ended), drawn.uniform(0, 2)), way.partition(",")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="how many trials the study has")
    parser.add_argument("--kills", type=int, default=20, help="how often it is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    params = {"num_folds": 2, "num_epochs": 5, "widths_too_large": 8, "save_seconds": 0.05}
    section = {"n_trials": options.trials, "num_slots": 3, "space": [*SPACE, KIND]}
    ways = [WAYS[number % len(WAYS)] for number in range(options.kills)]
    drawn.shuffle(ways)
    with tempfile.TemporaryDirectory(prefix="memfit-study-") as name:
        os.environ["MEMFIT_CLAIMS_DIR"] = f"{name}/claims"
        step = (options.trials - 3) / options.kills
        kill_at = [kill_of(way, int(n * step), drawn, Path(name, "killed")) for n, way in enumerate(ways, 1)]
        found, seconds = {}, {}
        for which, moments in {"unbroken": [], "killed": kill_at}.items():
            lay_out(Path(name, which), config_of(params, section))
            start = time.monotonic()
            run = kills.run(Path(name, which), kill_at=moments, program=kills.TUNE, limit_seconds=1800)
            found[which], seconds[which] = left_by(run), time.monotonic() - start
        left = running_jobs(run)
        starts = sum(event["kind"] == "admit" for event in run.events())
    unbroken, killed = found["unbroken"], found["killed"]
    different = [name for name in {*unbroken, *killed} if unbroken.get(name) != killed.get(name)]
    states = Counter(one["state"] for one in unbroken.values() if "state" in one)
    refused = sum(len(one["refused"]) for one in unbroken.values() if "refused" in one)
    print(f"{options.trials} trials: {dict(states)}; {refused} draws refused")
    print(f"{'killed':28} times")
    for way, times in sorted(Counter(ways).items()):
        print(f"{way:28} {times:5}")
    print(f"seconds: {seconds['unbroken']:.0f} unbroken, {seconds['killed']:.0f} killed; {starts} starts of jobs")
    print(f"different: {len(different)} of {len(unbroken)} records, results and configs {different[:3]}")
    print(f"still running: {len(left)}")
    return 0 if not different and not left else 1


if __name__ == "__main__":
    sys.exit(main())
