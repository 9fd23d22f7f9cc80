"""Stages in the process of the tests: one by one, or as the jobs of a run with its real supervisor and folders."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from memfit.files import write_json
from memfit.jobs import Counters, Death, JobStatus, LocalBackend, Parent, explain_death, load_target
from memfit.jobs import __main__ as program
from memfit.memory import Footprint
from memfit.pipeline import Context, Output, Stop, Workload
from memfit.units import MIB

#: How the files of each kind of output end.
KINDS = {".panel.json": "panel", ".feather": "table", ".arrays": "arrays", ".json": "json"}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StagesHere:
    """A run of some stages of a workload with folds, without a supervisor, jobs or a check of what is valid.

    The folds are those that the stage ``folds_of`` returns.
    """

    def __init__(
        self, folder: Path, workload: Workload[Any], params: Any, *, seed: int = 3, folds_of: str = "prepare"
    ) -> None:
        self.workload, self.params, self.seed, self.folds_of = workload, params, seed, folds_of
        self.panels_dir, self.run_dir = folder / "panels", folder / "runs" / "here" / "run_1"

    def manifest(self, name: str, fold: int | None = None) -> Path:
        """Where a stage's manifest lies."""
        return self.run_dir / "checkpoints" / f"{f'stage_{name}' if fold is None else f'{name}_{fold}'}.json"

    def folds(self) -> list[dict[str, Any]]:
        """The units."""
        return list(Output(self.manifest(self.folds_of)).result["folds"])

    def context(self, name: str, fold: int | None = None, *, folder: Path | None = None) -> Context:
        """What a stage gets; prepare is run if it was not."""
        stage = self.workload.stage(name)
        if "prepare" in stage.needs and not self.manifest("prepare").exists():
            self.run("prepare")
        needs, choose = {}, self.workload.choose
        for other in stage.needs if choose is None else [one for one in stage.needs if one in choose(self.params)]:
            folds = [None] if self.workload.stage(other).each is None else [one["fold"] for one in self.folds()]
            chosen = [fold] if stage.each and folds != [None] else folds[:1] if stage.holds else folds
            needs[other] = [Output(self.manifest(other, one)) for one in chosen]
        folder = folder or self.manifest(name, fold).with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        return Context(
            unit=None if fold is None else self.folds()[fold - 1],
            own_seed=lambda: int(np.random.SeedSequence([self.seed, *([fold] if fold else [])]).generate_state(1)[0]),
            dir=folder,
            panels_dir=self.panels_dir,
            needs=needs,
            meets=frozenset(one for one in stage.needs if stage.each and self.workload.stage(one).each == stage.each),
        )

    def run(self, name: str, fold: int | None = None, context: Context | None = None) -> Output:
        """Run a stage, and leave its manifest; of one that stopped the run too."""
        context = context or self.context(name, fold)
        stage, settings = self.workload.stage(name), type(self.params).model_fields
        reads = settings if stage.reads is None else stage.reads
        status, why, exit_code = "completed", "", 0
        assert callable(stage.run)
        try:
            params = self.params.model_copy()
            for hidden in settings.keys() - set(reads):
                del params.__dict__[hidden]
            result = stage.run(context, params) or {}
        except Stop as stop:
            status, why, exit_code, result = "stopped", str(stop), stop.exit_code, stop.result
        facts = {"schema_version": 1, "stage": name, "unit": context.unit, "job": name, "key": "", "parts": {}}
        facts |= {"settings": {}, "code": {}, "unforeseen": {}, "reused_from": None, "seconds": 0.0}
        ended = {"status": status, "why": why, "exit_code": exit_code}
        outputs = [output_of(context.dir, name, path) for name, path in context.saved.items()]
        path = context.dir.with_suffix(".json")
        made = {"result": json.loads(json.dumps(dict(result))), "outputs": outputs}
        path.write_text(json.dumps(facts | ended | made | {"digest": digest_of(**made)}))
        return Output(path)


def digest_of(result: Any, outputs: list[dict[str, Any]]) -> str:
    """The digest of a result and its outputs, as a manifest holds it."""
    parts = [result, sorted([one["name"], one["kind"], one["sha256"]] for one in outputs)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def output_of(folder: Path, name: str, path: Path) -> dict[str, Any]:
    """An output as a manifest describes it."""
    kind = next((kind for ending, kind in KINDS.items() if path.name.endswith(ending)), "path")
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    hashes = [[str(one.relative_to(path)), hashlib.sha256(one.read_bytes()).hexdigest()] for one in files]
    sha = json.loads(path.read_text())["fingerprint"] if kind == "panel" else hashes[0][1]
    if path.is_dir():
        sha = hashlib.sha256(json.dumps(hashes, separators=(",", ":")).encode()).hexdigest()
    size = sum(one.stat().st_size for one in files)
    relative = str(path.relative_to(folder))
    return {"name": name, "kind": kind, "path": relative, "bytes": size, "sha256": sha, "sample": ""}


# Runs


@contextlib.contextmanager
def runs_here() -> Iterator[None]:
    """In this block `memfit.run` calls functions in this process; a command is the only process that starts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Parent, "start", lambda target, env: Here(env))
        patched.setattr(LocalBackend, "look_seconds", 0.0)  # a job has ended when it is looked for
        yield


class Here:
    """Stands in for `Parent`: what that does in its forks, this does itself, before it returns.

    So jobs run one after another, in the order in which they are submitted. Each takes 32 MiB, as nobody measures it.
    """

    pid, refused, used_bytes = 0, "", 0

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def load(self, *modules: str, uses: Sequence[str] = ()) -> None:
        """Do nothing: each call imports what it needs."""

    def takes(self, env: Mapping[str, str]) -> bool:
        """Return True: no variable is read at a start."""
        return True

    def close(self, *, now: bool = False) -> None:
        """Do nothing: there is nothing to end."""

    def call(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Return what a function returns; raise what it raises."""
        with _as_if_new(self._env, Path.cwd()):
            return json.loads(json.dumps(load_target(target)(**arguments)))

    def start_shim(self, job_dir: Path, lock: int) -> int:
        """Run the job of a folder to its end, and write its outcome; return the number of no process."""
        job, started = json.loads((job_dir / "job.json").read_text()), time.time()
        for name in ("result.json", "error.json"):
            (job_dir / name).unlink(missing_ok=True)
        with open(job_dir / "out.log", "a") as out, open(job_dir / "err.log", "a") as err:
            run = _call if job["target"] else _start
            code = run(job, job_dir, out, err)
        error = json.loads(path.read_text()) if (path := job_dir / "error.json").exists() else None
        has_result, said = not job["target"] or (job_dir / "result.json").exists(), (job_dir / "err.log").read_text()
        death = Death(code, None, Counters(), Counters(), error, has_result, 32 * MIB, None, last_words=said)
        state, cause, ended_by = explain_death(death)
        status = JobStatus(job_dir.name, state, "train", settled=True, peak_bytes=32 * MIB, exit_code=code, cause=cause)
        own = {"attempt": job["attempt"], "started": started, "ended": time.time(), "ended_by": ended_by}
        write_json(job_dir / "outcome.json", {**status.to_dict(), **own, "footprint": Footprint(32 * MIB).to_dict()})
        return 1 << 30


def _call(job: Mapping[str, Any], job_dir: Path, out: Any, err: Any) -> int:
    write_json(job_dir / "request.json", {"target": job["target"], "arguments": job["arguments"]})
    new = _as_if_new(job["env"], Path(job["cwd"]))
    with new, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        program.main(["child", str(job_dir)])
    return int(ended.value.code or 0)


def _start(job: Mapping[str, Any], job_dir: Path, out: Any, err: Any) -> int:
    env = {**os.environ, **job["env"]}
    return subprocess.run(
        job["command"], cwd=job["cwd"], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    ).returncode


@contextlib.contextmanager
def _as_if_new(env: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Be a new interpreter as far as the user's modules go: none is loaded before, and none afterwards."""
    path, modules = list(sys.path), dict(sys.modules)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    sys.path[:0] = [one for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    _forget(modules)
    importlib.invalidate_caches()
    try:
        with patch.dict(os.environ, env), contextlib.chdir(folder), patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        _forget(sys.modules.copy())
        sys.modules.update({name: module for name, module in modules.items() if name not in sys.modules})
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _forget(modules: Mapping[str, Any]) -> None:
    """Unload the user's modules, and what memfit has kept of their files."""
    for name, module in modules.items():
        path, top = getattr(module, "__file__", None) or "", name.partition(".")[0]
        is_library = "/site-packages/" in path or top in sys.stdlib_module_names or top == "memfit"
        if path.endswith(".py") and not is_library and name != "__main__":
            del sys.modules[name]
        if name.startswith("memfit.pipeline."):
            for cached in [one for one in vars(module).values() if hasattr(one, "cache_clear")]:
                cached.cache_clear()
