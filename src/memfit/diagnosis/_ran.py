"""What a run was and did, from what it left: the accounting, its own lines, its checkpoints' names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import islice
from pathlib import Path

import yaml

from memfit.diagnosis._batch_script import read_script
from memfit.diagnosis._job import (
    SETTINGS,
    Job,
    job_of_rows,
    job_of_script,
    job_of_shape,
    most_of_node,
    truth,
    whole,
)
from memfit.diagnosis._progress import Progress, read_progress
from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.slurm import parse_node_limits, parse_sacct, parse_shapes

_KEYS = {key: name for name, keys in SETTINGS.items() for key in keys if key not in ("batch", "workers")}
_PRINTED = re.compile(
    r"(?<![\w])(?P<key>" + "|".join(sorted(_KEYS, key=len, reverse=True)) + r")['\"]?\s*[:=]\s*['\"]?"
    r"(?P<value>\d+|[Tt]rue|[Ff]alse)\b"
)
_SAMPLES = re.compile(
    r"Num examples = (?P<first>[\d,]+)|(?P<second>\d[\d,]*) (?:train(?:ing)? )?(?:samples|examples)\b"
    r"|train\w*(?: set| data ?set)?(?: size| samples| examples| length)\W{1,3}(?P<third>\d[\d,]*)",
    re.IGNORECASE,
)
_VALIDATION = re.compile(r"\bval(?:id\w*)?\b|\beval\w*|\btest\b", re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"\b(?P<name>PYTORCH\w*ALLOC_CONF|OMP_NUM_THREADS|NCCL_\w+)['\"]?\s*[:=]\s*['\"]?(?P<value>[^\s'\",;]+)"
)
_LOGS = (".log", ".out", ".err", ".txt", ".gz", ".json")
_END_BYTES = 8 << 20
_MOST_FILES, _MOST_FOLDERS = 200, 2000


@dataclass(frozen=True)
class Source:
    """A value that a run showed, and where.

    Attributes:
        value: As written.
        where: The file and line, or the file's name.
    """

    value: str
    where: str


@dataclass(frozen=True)
class Ran:
    """What a run showed of itself.

    Attributes:
        job: Its shape, its memory and its settings as far as they were shown.
        progress: How far it came.
        printed: Settings that its lines or its config name, by the field of `Job`; several values of one where the
            lines differ.
        env: Environment variables that its lines name.
        checkpoints: Names of checkpoint files, with their sizes in bytes.
        files: What was read.
    """

    job: Job = field(default_factory=Job)
    progress: Progress = field(default_factory=Progress)
    printed: dict[str, list[Source]] = field(default_factory=dict)
    env: dict[str, Source] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def newest(self) -> str:
        """The name of the checkpoint with the most steps."""
        return max(self.checkpoints, key=lambda name: ([int(one) for one in re.findall(r"\d+", name)][-1:], name))

    @property
    def steps_per_epoch(self) -> int | None:
        """By its bars; else by the name of a checkpoint such as ``epoch=39-step=9680``, counted from epoch 0."""
        if self.progress.steps_per_epoch:
            return self.progress.steps_per_epoch
        for name in sorted(self.checkpoints):
            found = re.search(r"epoch[=_](\d+)[-_]step[=_](\d+)", name)
            if found and int(found[2]) % (int(found[1]) + 1) == 0:
                return int(found[2]) // (int(found[1]) + 1)
        step, epochs = self.progress.global_step, self.progress.num_epochs
        return step // epochs if step and epochs and step % epochs == 0 else None


def read_ran(paths: Iterable[Path], accounting: str = "") -> Ran:
    """What runs left in logs, folders and run directories.

    Args:
        paths: Logs, or folders of them.
        accounting: What ``sacct`` printed of the job, and ``scontrol`` and ``sinfo`` behind it.

    Raises:
        OSError: A log cannot be opened.
    """
    files, checkpoints = _find(paths)
    lines: list[Line] = []
    printed: dict[str, list[Source]] = {}
    for path in files:
        if path.suffix in (".yaml", ".yml"):
            _read_config(path, printed)
            continue
        lines += _lines(path)
    texts = [line.text for line in lines]
    other = [*texts, *accounting.split("\n")]
    job = job_of_rows(parse_sacct(accounting or texts))
    for shape in parse_shapes(other)[-1:]:
        job = job_of_shape(shape).with_known(job)
    job = replace(job, most_bytes=most_of_node(parse_node_limits(other), job.partition))
    env: dict[str, Source] = {}
    _read_lines(lines, printed, env)
    progress = read_progress(Stream(lines))
    job = _with_settings(job, printed, progress, _samples(lines))
    return Ran(job, progress, printed, env, checkpoints, tuple(map(str, files)))


def _lines(path: Path) -> list[Line]:
    """A log's lines; of a very long one those of its beginning, where settings stand, and of its end."""
    size = path.stat().st_size
    if size <= 4 * _END_BYTES or path.suffix == ".gz":
        return [line for stream in read_streams(path) for line in stream.lines]
    with open(path, "rb") as file:
        head = file.read(_END_BYTES)
        skipped, at = head.count(b"\n"), _END_BYTES
        while at < size - _END_BYTES:
            piece = file.read(min(1 << 20, size - _END_BYTES - at))
            skipped, at = skipped + piece.count(b"\n"), at + max(len(piece), 1)
        tail = file.read(_END_BYTES)
    found = [line for stream in read_streams(path, BytesIO(head)) for line in stream.lines]
    ends = (line for stream in read_streams(path, BytesIO(tail)) for line in stream.lines)
    return found + [replace(line, number=line.number + skipped) for line in ends]


def job_of(ran: Ran, script: Path | None = None) -> Job:
    """What is known of a job: its memory and its tasks as they were, its settings as its batch script has them.

    Args:
        ran: What it left.
        script: The script that it was started with; of a Compose file nothing is read here.

    Raises:
        UsageError: The script cannot be read.
    """
    if script is None or script.suffix.lower() in (".yml", ".yaml"):
        return ran.job
    asked = job_of_script(read_script(script))
    return replace(asked, request_bytes=None, tasks_per_node=None).with_known(ran.job).with_known(asked)


def _find(paths: Iterable[Path]) -> tuple[list[Path], dict[str, int]]:
    files: list[Path] = []
    checkpoints: dict[str, int] = {}
    for path in paths:
        if not path.is_dir():
            files += [path] if str(path) != "-" else []
            continue
        for folder, names, found in islice(os.walk(path), _MOST_FOLDERS):
            names.sort()
            for name in sorted(found):
                one = Path(folder, name)
                if one.suffix in (".ckpt", ".pt", ".pth", ".safetensors"):
                    checkpoints[name] = one.stat().st_size
                elif one.suffix in _LOGS or (one.suffix in (".yaml", ".yml") and one.stem in ("config", "hparams")):
                    files.append(one)
    return files[:_MOST_FILES], checkpoints


def _read_config(path: Path, printed: dict[str, list[Source]]) -> None:
    """The settings of a run's config, by the last part of each key."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    stack = [found]
    while stack:
        one = stack.pop()
        for key, value in one.items() if isinstance(one, dict) else ():
            if isinstance(value, dict):
                stack.append(value)
            elif str(key) in _KEYS and isinstance(value, int):
                _add(printed, str(key), str(value), str(path))


def _read_lines(lines: Sequence[Line], printed: dict[str, list[Source]], env: dict[str, Source]) -> None:
    for line in lines:
        if "=" not in line.text and ":" not in line.text:
            continue
        where = f"{line.file}:{line.number}"
        for found in _PRINTED.finditer(line.text):
            _add(printed, found["key"], found["value"], where)
        for found in _ENVIRONMENT.finditer(line.text):
            env[found["name"]] = Source(found["value"], where)


def _add(printed: dict[str, list[Source]], key: str, value: str, where: str) -> None:
    known = printed.setdefault(_KEYS[key], [])
    if value not in [one.value for one in known]:
        known.append(Source(value, where))


def _samples(lines: Sequence[Line]) -> int | None:
    """The samples of an epoch, by the first line that tells of training's, else of any but validation's."""
    found = list(_sample_counts(lines))
    return next((count for is_train, count in found if is_train), next((count for _, count in found), None))


def _sample_counts(lines: Sequence[Line]) -> Iterator[tuple[bool, int]]:
    for line in lines:
        found = _SAMPLES.search(line.text) if "ampl" in line.text or "train" in line.text.lower() else None
        if found and not _VALIDATION.search(line.text):
            count = next(group for group in found.groups() if group).replace(",", "")
            yield "train" in line.text.lower() or "Num examples" in line.text, int(count or 0)


def _with_settings(job: Job, printed: dict[str, list[Source]], progress: Progress, samples: int | None) -> Job:
    """A job with the settings that only one value was shown of, and its pace."""
    sole = {name: found[0].value for name, found in printed.items() if len(found) == 1}
    return replace(
        job,
        batch=whole(sole.get("batch")),
        accumulate=whole(sole.get("accumulate")),
        workers=whole(sole.get("workers")),
        prefetch=whole(sole.get("prefetch")),
        persistent_workers=truth(sole.get("persistent_workers", "")),
        epochs=progress.num_epochs or whole(sole.get("epochs")),
        steps_per_epoch=progress.steps_per_epoch,
        epoch_seconds=progress.epoch_seconds,
        samples=samples,
        mentioned=tuple(printed),
    )
