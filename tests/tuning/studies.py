"""Studies over the small workload: their configs, and what two of them must have in common."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from kills import Kill, Moment
from memfit.config import read_file
from memfit.pipeline import Output
from memfit.rundir import RunDir
from memfit.tuning import Study, read_trials

SPACE = [{"name": "params.lr", "low": 1e-3, "high": 0.5, "log": True}, {"name": "params.width", "low": 1, "high": 9}]
KIND = {"name": "params.kind", "choices": ["a", "b"]}
_HERE = Path(__file__).parent


def config_of(params: Any = None, tune: Any = None, **top: Any) -> dict[str, Any]:
    """The content of a config that searches the small workload."""
    searched = {"space": SPACE, "objective": "fold.loss", "direction": "minimize", "n_trials": 3, "num_slots": 2}
    return {
        "experiment": "study",
        "target": "study_workload:STUDY",
        "seed": 3,
        "memory": {"limit": "1GiB", "reserve": "16MiB"},
        "params": {"num_folds": 1, "num_epochs": 3, **(params or {})},
        "tune": searched | (tune or {}),
    } | top


def lay_out(folder: Path, content: Any) -> Path:
    """Write a config and the module that it names into a folder."""
    folder.mkdir(exist_ok=True)
    shutil.copy(_HERE / "study_workload.py", folder)
    path = folder / "config.yaml"
    path.write_text(json.dumps(content))
    return path


def left_by(run: RunDir) -> dict[str, Any]:
    """What a study left: its records, its best config, and the digest of each result of a trial that completed."""
    trials = Study.open(run).trials
    found: dict[str, Any] = {one.name: one.to_dict() | {"measured": None} for one in trials}  # that may differ
    best = read_file(run.path / "best.yaml")
    found["best"] = {name: value for name, value in best.items() if name != "max_parallel"}
    for one in trials:
        if one.state == "completed":  # of a pruned one, a fold may have completed or not
            for path in sorted(run.path.glob(f"checkpoints/*{one.name}.*.json")):
                found[path.stem] = Output(path).facts["digest"]
    return found


# Moments to kill a study at


def ended(num: int) -> Moment:
    """The moment at which so many trials have ended."""
    return lambda run: sum(one.is_over for one in read_trials(run)) >= num


def asking(first: int) -> Moment:
    """The moment at which a trial, this one or a later one, is being drawn: no record says yet that it runs."""

    def is_asking(run: RunDir) -> bool:
        if not (run.path / "study.json").exists():
            return False
        settings, trials = Study.open(run).settings, {one.number: one for one in read_trials(run)}
        for number in range(first, settings.n_trials):
            seen = [trials.get(other) for other in range(number - settings.num_slots + 1)]
            if not all(one is not None and one.is_over for one in seen):
                return False
            if number not in trials or trials[number].state == "asking":
                return True
        return False

    return is_asking


def saving(num: int, folder: Path) -> Kill:
    """A kill of all in the middle of saving a checkpoint, when so many trials have ended; ``folder`` is the study's."""
    hold = folder / "hold_save"  # while it is there, no save ends

    def is_saving(run: RunDir) -> bool:
        if not hold.exists():
            if ended(num)(run):
                hold.touch()
            return False
        began = hold.stat().st_mtime
        with suppress(FileNotFoundError):
            return any(path.stat().st_mtime >= began for path in run.path.glob("checkpoints/*/saving"))
        return False

    return Kill(is_saving, then=hold.unlink)
