"""Run a config in processes of its own, SIGKILL all or some of them at chosen moments, and tell what the run left."""

import hashlib
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
from pyarrow import feather

from memfit.pipeline import Output
from memfit.rundir import RunDir

Events = Sequence[Mapping[str, Any]]
Moment = Callable[[RunDir], bool]
Victims = Literal["all", "supervisor", "jobs"]

_RUN = "import sys, memfit; sys.exit(memfit.run(sys.argv[1], overrides=sys.argv[2:]).exit_code)"
#: The same for a study.
TUNE = "import sys, memfit.tuning as m; sys.exit(m.tune(sys.argv[1], overrides=sys.argv[2:]).exit_code)"
_VARIABLE = "TEST_KILLS_ID"
_LIMIT_SECONDS = 240.0  # whole runs beside other tests on two cores
#: Columns of a table that differ from run to run.
_MEASURED = ["seconds", "peak_private_bytes"]


class Kill(NamedTuple):
    """When to kill which processes: ``jobs`` are all watchers and what they watch, without the supervisor.

    ``then`` is called after the kill, before the next start.
    """

    moment: Moment
    victims: Victims = "all"
    then: Callable[[], object] = bool


def later(moment: Moment, seconds: float) -> Moment:
    """The moment so many seconds after another one."""
    seen: list[float] = []

    def is_over(run: RunDir) -> bool:
        if not seen and moment(run):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + seconds

    return is_over


def completed(job: str) -> Moment:
    """The moment at which a job's result counts."""
    return lambda run: any(
        event["kind"] == "stage" and event["state"] == "completed" and job in event["jobs"] for event in run.events()
    )


def epoch(job: str, number: int) -> Moment:
    """The moment at which a job's training has saved an epoch."""
    return lambda run: (job, number) in epochs(run)


def printed(job: str, text: str) -> Moment:
    """The moment at which a command has printed a text."""
    path = f"jobs/{job}/out.log"
    return lambda run: (run.path / path).exists() and text in (run.path / path).read_text()


def run(
    folder: Path,
    config: str = "config.yaml",
    *overrides: str,
    kill_at: Sequence[Moment | Kill] = (),
    program: str = _RUN,
    limit_seconds: float = _LIMIT_SECONDS,
) -> RunDir:
    """Run a config in its folder. At each moment processes of the run are killed, and it is started again.

    Args:
        folder: The current folder of the run; its runs lie in ``runs``.
        config: The config, relative to the folder.
        overrides: Settings.
        kill_at: The moments, one after the other; a moment alone kills all processes. When the jobs alone were killed,
            their supervisor goes on.
        program: What runs the config.
        limit_seconds: How long a moment may take to come, and the last start to end.

    Returns:
        The run, after a last start that was left alone.
    """
    words, token = [sys.executable, "-c", program, config, *overrides], uuid.uuid4().hex
    process = _start(folder, words, token)
    for kill in (one if isinstance(one, Kill) else Kill(one) for one in kill_at):
        end = time.monotonic() + limit_seconds
        while not any(kill.moment(found) for found in _runs(folder)):
            assert process.poll() is None, "the run ended before it was to be killed"
            assert time.monotonic() < end, "the moment to kill the run did not come"
            time.sleep(0.02)
        if kill.victims == "jobs":
            _kill_jobs(token)
            kill.then()
            continue
        process.kill()
        process.wait()
        if kill.victims == "all":
            _kill(token)
        kill.then()
        process = _start(folder, words, token)
    assert process.wait(limit_seconds) == 0, (folder / "supervisor.log").read_text()[-2000:]
    (found,) = _runs(folder)
    return found


def _runs(folder: Path) -> list[RunDir]:
    return [RunDir(path.parent) for path in folder.glob("runs/*/run_*/run.json")]


def _start(folder: Path, words: Sequence[str], token: str) -> subprocess.Popen[bytes]:
    env = os.environ | {_VARIABLE: token}
    with open(folder / "supervisor.log", "ab") as log:
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)


def _kill(token: str) -> None:
    """Kill all processes that inherited the token, until none is left: the supervisor, its watchers and its jobs."""
    while found := [process for process in psutil.process_iter() if _has_token(process, token)]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _kill_jobs(token: str) -> None:
    """Kill the watchers that inherited the token, each before its job, so that it writes no outcome."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if _has_token(process, token) and "shim" in (*process.cmdline(), *process.name().split()):
                below = process.children(recursive=True)
                for one in (process, *below):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()


def _has_token(process: psutil.Process, token: str) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(_VARIABLE) == token and process.status() != psutil.STATUS_ZOMBIE
    return False


def epochs(run: RunDir) -> Counter[tuple[str, int]]:
    """The epochs of each job that were trained to their end and saved, each once: a kill right after one repeats it."""
    ends = [one for one in run.events() if one["kind"] == "checkpoint" and one["epoch"] and not one["epoch_step"]]
    return Counter({(one["job"], one["epoch"]) for one in ends})


def left_by(run: RunDir) -> dict[str, Any]:
    """What a run left: the result and the outputs of each job, the tensors of its checkpoints, the tables of units."""
    found: dict[str, Any] = {}
    for path in sorted(run.path.glob("checkpoints/*.json")):
        manifest = Output(path).facts
        # A checkpoint's file also says when it was written: its tensors are compared below.
        changing = {True: {"sha256": "", "bytes": 0, "identity": ""}, False: {"identity": ""}}
        outputs = [{**one, **changing[one["path"].endswith(".pt")]} for one in manifest["outputs"]]
        found[path.stem] = {"status": manifest["status"], "result": manifest["result"], "outputs": outputs}
    for path in sorted(run.path.glob("checkpoints/*/*.pt")):
        found[f"{path.parent.name}/{path.name}"] = _tensors_in(path)
    for path in sorted(run.path.glob("*_results.feather")):
        table = feather.read_table(path)
        found[path.name] = table.drop_columns([name for name in _MEASURED if name in table.column_names]).to_pydict()
    return found


def numbers_in(run_dir: Path) -> dict[str, Any]:
    """The result of each job and the tensors of its checkpoints: what the same stages leave in whatever process."""
    found: dict[str, Any] = {path.stem: Output(path).result for path in sorted(run_dir.glob("checkpoints/*.json"))}
    saved = [path for name in ("*.pt", "best", "latest") for path in sorted(run_dir.glob(f"checkpoints/*/{name}"))]
    return found | {f"{at.parent.name}/{at.name}": _tensors_in(at) for at in saved}


def _tensors_in(path: Path) -> list[str]:
    import torch

    from memfit.training import load_checkpoint

    digests: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray):
            digests.append(hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, Mapping):
            for one in value.values():
                collect(one)
        elif isinstance(value, list | tuple):
            for one in value:
                collect(one)

    collect(load_checkpoint(path))
    return digests
