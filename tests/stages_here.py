"""Stages of a workload, run in the process of the tests: their contexts, and what they leave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from memfit.pipeline import Context, Output, Stop, Workload

#: How the files of each kind of output end.
KINDS = {".panel.json": "panel", ".feather": "table", ".arrays": "arrays", ".json": "json"}


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
