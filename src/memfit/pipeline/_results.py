"""Find which results are valid, here or in an earlier run, and why the others are not.

A result is valid if its manifest holds the key of what is asked for now, its outputs are there, and no code that it
loaded without naming it has changed. Whether they are what was saved is read before a job uses them: each host reads
each output once, and again when a file of it changed.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from memfit.config import differences, fingerprint
from memfit.errors import DamagedError, DataError, MemfitError
from memfit.files import read_json
from memfit.jobs import JobStatus, read_status
from memfit.masking import mask
from memfit.pipeline._code import changed_code, check_code, code_of_command
from memfit.pipeline._describe import StageSpec
from memfit.pipeline._manifest import (
    describe_outputs,
    files_in,
    find_manifest,
    hash_output,
    identity_of,
    is_foreseen,
    key_of,
    write_result,
)
from memfit.pipeline._order import Order
from memfit.rundir import EventTail, RunDir

Count = Callable[[int], None]
HOST = socket.gethostname()
MOST_RUNS = 20  # earlier runs are looked at
NOT_MADE = "it was not made yet"  # why a result is made for the first time


@dataclass
class Unit:
    """One unit of a stage: one job.

    Its states are ``waiting``, ``ready`` (may run), ``running``, ``kept``, ``reused``, ``completed``, ``stopped``,
    ``passed``, ``skipped``, ``failed`` and ``cancelled``. ``inputs``, ``previous``, ``key`` and ``parts`` (all that its
    result depends on) are set when the units that it waits for have passed; ``made`` is its manifest, and
    ``elsewhere`` where another run has it.
    """

    stage: StageSpec
    index: int
    value: Any
    job_id: str
    label: str | None = None
    state: str = "waiting"
    why: str = ""
    inputs: Mapping[str, Sequence[Unit]] = field(default_factory=dict)
    previous: Unit | None = None
    key: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Path | None = None

    @property
    def digest(self) -> str:
        return str(self.made.get("digest", ""))

    @property
    def seconds(self) -> float:
        return float(self.made.get("seconds", 0.0))

    @property
    def result(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.made.get("result", {})
        return found

    @property
    def read(self) -> list[Unit]:
        """The units whose results it reads, as far as they are there."""
        units = [*(one for units in self.inputs.values() for one in units), *filter(None, [self.previous])]
        return [one for one in units if one.made]

    @property
    def facts(self) -> dict[str, Any]:
        found = {"stage": self.stage.name, "unit": self.value, "job": self.job_id, "key": self.key}
        return found | {"parts": dict(self.parts), "settings": mask(self.stage.settings), "code": self.stage.code}

    def manifest(self, run: RunDir) -> Path:
        return run.manifest_path(self.stage.name, self.job_id)


@dataclass(frozen=True)
class Ended:
    """How a unit ended: ``kept``, ``reused`` or ``completed`` by the manifest ``made``; ``failed`` or ``cancelled``."""

    state: str
    why: str = ""
    made: Mapping[str, Any] = field(default_factory=dict)


class Index:
    """The valid results of other runs by stage and key, and those of this run that all its graphs share.

    Several graphs of one run, as in a search, make each key once: ``making`` names the job that makes it now.
    """

    def __init__(self, runs: Sequence[RunDir] = ()) -> None:
        self.runs = list(runs)[:MOST_RUNS]
        self.making: dict[tuple[str, str], str] = {}
        self.proofs: Proofs | None = None

    @cached_property
    def known(self) -> dict[tuple[str, str], Path]:
        """The manifests of the results that are known, the newest of each key."""
        found = {}
        for run in reversed(self.runs):
            for path in (run.path / "checkpoints").glob("*.json"):
                if (made := find_manifest(path)) is not None:
                    found[made["stage"], made["key"]] = path
        return found


class Results:
    """The results of a run's units: those that are there, and those of other runs that ``index`` knows."""

    def __init__(self, order: Order, run: RunDir, index: Index | None = None) -> None:
        self.run, self.index = run, index or Index()
        self._common, (_, self._anew) = order.common, order.chosen()

    def find(self, unit: Unit) -> Ended | None:
        """Return a unit's valid result as ``kept`` or ``reused``, if it has one; set its key."""
        stage, previous = unit.stage, unit.previous
        unit.parts = {
            "settings": fingerprint(stage.settings),
            "code": fingerprint([stage.command, stage.code]),
            "data": stage.data,
            "unit": fingerprint(unit.value),
            "needs": fingerprint({name: [one.digest for one in units] for name, units in unit.inputs.items()}),
            "previous": previous.digest if previous else "",
            "seed": str(self._common["seed"]) if stage.seed else "",
            "threads": str(self._common["threads"]),
        }
        unit.key = fingerprint([stage.name, unit.parts])
        if stage.name in self._anew:
            return None
        if (found := _valid(unit.manifest(self.run), unit.key)) is not None:
            return Ended("kept", made=found)
        unit.elsewhere = self.index.known.get((stage.name, unit.key))
        if unit.elsewhere is None or (found := _valid(unit.elsewhere, unit.key)) is None:
            return None
        return Ended("reused", made=found | {"reused_from": found["reused_from"] or str(unit.elsewhere)})

    def take_left(self, unit: Unit) -> Ended | None:
        """Write the manifest of a command that completed while no supervisor ran; return it as ``kept``."""
        path = unit.manifest(self.run)
        if unit.stage.command is None or path.exists() or key_of(path) != unit.key or unit.stage.name in self._anew:
            return None
        if (status := read_status(self.run, unit.job_id)).state == "completed":
            with suppress(MemfitError):  # a bad result file: it runs again
                self.seal(unit, status)
        made = self.made(unit)
        return Ended("kept", made=made) if made is not None else None

    def why_not(self, unit: Unit) -> str:
        """Return why a unit runs, from the newest result of the same name."""
        path = unit.manifest(self.run)
        for run in [self.run, *self.index.runs]:
            before = find_manifest(unit.manifest(run))
            is_own = before is not None and before["parts"].get("unit") == unit.parts.get("unit")
            if before is not None and (is_own or run == self.run):  # of another run, train_1 may be another unit
                return _reason(before, unit)
        return NOT_MADE if not path.exists() else f"{path.name} is damaged, or an output is gone"

    def seal(self, unit: Unit, status: JobStatus) -> None:
        """Write the manifest of a command: its outputs are the files in its folder."""
        path, started = unit.manifest(self.run), status.started or 0.0
        found = code_of_command(unit.stage.code)
        now = {one: sha for one, sha in found.items() if Path(one).stat().st_mtime < started}
        check_code(unit.stage.name, {one: unit.stage.code[one] for one in now}, now)
        folder, seconds = path.with_suffix(""), (status.ended or 0.0) - started
        outputs = describe_outputs(folder, {str(one.relative_to(folder)): one for one in files_in(folder)})
        result = read_json(folder / "result.json") or {}
        write_result(path, unit.facts, result=result, outputs=outputs, seconds=seconds, host=HOST)

    def made(self, unit: Unit) -> Mapping[str, Any] | None:
        """Return the manifest that a unit's job has just left; None if it left none for this key."""
        found = find_manifest(unit.manifest(self.run))
        return found if found is not None and found["key"] == unit.key else None


def _valid(path: Path, key: str) -> dict[str, Any] | None:
    found = find_manifest(path)
    return found if found is not None and found["key"] == key and is_foreseen(found) else None


def changed_settings(before: Mapping[str, Any], stage: StageSpec) -> list[str]:
    changes = differences(before["settings"], mask(stage.settings))
    return [f"{one} {then!r:.40} -> {now!r:.40}" for one, then, now in changes]


def made_for(stage: StageSpec) -> dict[str, Any]:
    """Return what the config says of a stage: its settings, secrets masked, and a digest of its command."""
    return {"params": mask(stage.settings), "command": fingerprint(stage.command)}


def is_same_command(before: Mapping[str, Any], stage: StageSpec) -> bool:
    """Return whether a manifest was made by the command of a stage, whatever the code was that it ran."""
    return bool(before["parts"]["code"] == fingerprint([stage.command, before["code"]]))


def _reason(before: Mapping[str, Any], unit: Unit) -> str:
    """Return what changed since a result was made."""
    results = {"needs": " and ".join(unit.stage.needs), "previous": "the unit before"}
    found: list[str] = []
    for name, new in unit.parts.items():
        old = before["parts"].get(name)
        if old == new:
            continue
        if name == "settings":
            found += changed_settings(before, unit.stage) or ["a secret changed"]
        elif name == "code":
            found.append(changed_code(before.get("code") or {}, unit.stage.code) or "the command changed")
        elif name in ("seed", "threads"):
            found.append(f"{'threads_per_job' if name == 'threads' else name} {old} -> {new}")
        else:
            found.append(f"{results[name]} gave another result" if name in results else f"the {name} changed")
    return "; ".join(found[:4]) if found else "an output is gone, or code that it loaded changed"


class Proofs:
    """The hashes of outputs as this host read them, by the identities of their files: results that are damaged.

    They lie in the run directory, one file for each host, which the run's supervisor alone writes. Those of earlier
    runs count too, because a new run links their results. With ``anew`` none counts. ``looked`` has the manifests that
    are not looked at again.
    """

    def __init__(self, run: RunDir, earlier: Sequence[RunDir], *, anew: bool) -> None:
        *others, self._path = (one.path / "verified" / f"{HOST}.jsonl" for one in (*reversed(earlier), run))
        known = [] if anew else [one for path in (*others, self._path) for one in EventTail(path).read()]
        self._known = {str(one.get("identity")): str(one.get("sha256")) for one in known}
        self._anew, self.looked = anew, set[Path]()

    def why_damaged(self, manifest: Path, made: Mapping[str, Any], count: Count | None = None) -> str | None:
        """Return which output of a result is not what was saved; empty if all are.

        Reads what this host has not read, and tells ``count`` how many bytes. Without it nothing is read, and the
        answer is None where that is needed.
        """
        if count is None and manifest in self.looked:
            return ""
        for output in made["outputs"]:
            path = manifest.with_suffix("") / output["path"]
            try:
                if (found := self._hash(path, output, made.get("host"), count)) is None:
                    return None
                if found != output["sha256"]:
                    return f"{path} is damaged: it is not what {made['job']} saved"
            except DamagedError as error:  # a panel
                return f"{path} is damaged: {error.what}"
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return f"{path} is gone"
                raise DataError(
                    f"{path} cannot be read: {error.strerror}.",
                    rule="a result is compared with its hash before a job reads it.",
                    remedy="see to its disk or network drive, then give the same command again",
                ) from error
        self.looked.add(manifest)
        return ""

    def _hash(self, path: Path, output: Mapping[str, Any], host: object, count: Count | None) -> str | None:
        identity = identity_of(path)
        if identity in self._known:
            return self._known[identity]
        if host == HOST and output.get("identity") == identity and not self._anew:
            return str(output["sha256"])  # hashed here when it was made
        if count is None:
            return None
        found = hash_output(path, count)
        if identity_of(path) != identity:
            return "it is being written"
        self._known[identity] = found
        with suppress(OSError):  # on a full disk it is read again
            self._path.parent.mkdir(exist_ok=True)
            with open(self._path, "a") as file:
                file.write(json.dumps({"identity": identity, "sha256": found}) + "\n")
        return found
