"""Write the mean of the weights of several checkpoints of one training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from memfit.errors import UsageError
from memfit.training import checkpoint_path, load_checkpoint, save_checkpoint

IntegerBuffers = Literal["equal", "last"]

_WRAPPERS = ("model", "model_state_dict", "state_dict", "module")
_PREFIXES = ("module.", "_orig_mod.")
_NUM_NAMED = 5


@dataclass(frozen=True)
class Source:
    """A file that went into an average; ``epoch`` and ``fit``, the training, are None where it does not say."""

    path: str
    sha256: str
    epoch: int | None
    fit: str | None


def average_checkpoints(
    inputs: Sequence[Path | str],
    output: Path | str,
    *,
    integer_buffers: IntegerBuffers = "equal",
    allow_unrelated: bool = False,
) -> tuple[Source, ...]:
    """Write the mean of the weights of checkpoints of *one* training, tensor by tensor, summed in float64.

    The inputs are mapped, not loaded: beside the result, memory holds one tensor of each at a time. They are
    checkpoints and snapshots of memfit's, or files of ``torch.save`` with a state dict, bare or under ``model``,
    ``model_state_dict``, ``state_dict`` or ``module``; the prefixes ``module.`` and ``_orig_mod.`` are dropped. The
    output is written aside and renamed: its ``model`` is the averaged state dict and its ``sources`` are the inputs,
    which are returned. Tensors without a mean, such as counters, must be ``equal``, or are taken from the ``last``
    input.

    Raises:
        UsageError: If names, shapes or types differ, values are not numbers, or the files are unrelated.
        DamagedError: If a file is cut short or differs from its checksums.

    Source: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407.
    """
    paths, output = [Path(path) for path in inputs], Path(output)
    _check_paths(paths, output)
    contents = [load_checkpoint(path, mmap=True) for path in paths]
    states = [_state_of(path, content) for path, content in zip(paths, contents, strict=True)]
    sources = tuple(map(_source_of, paths, contents))
    if not allow_unrelated:
        _check_related(paths, contents)
    for path, state in zip(paths[1:], states[1:], strict=True):
        _check_names(paths[0], states[0], path, state)
    averaged = {name: _mean(name, [state[name] for state in states], paths, integer_buffers) for name in states[0]}
    is_one = len({source.fit for source in sources}) == 1
    state = {
        "model": averaged,
        "fit": sources[0].fit if is_one else None,
        "identity": contents[0].get("identity"),
        "provenance": contents[0].get("provenance") if is_one else None,
        "epoch": max((source.epoch for source in sources if source.epoch is not None), default=None),
        "sources": [asdict(source) for source in sources],
        "integer_buffers": integer_buffers,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(output, state, prove=True)
    return sources


def _check_paths(paths: Sequence[Path], output: Path) -> None:
    resolved = [path.resolve() for path in [*paths, output]]
    twice = next((path for path in resolved if resolved.count(path) > 1), None)
    if not paths or twice is not None:
        raise UsageError(
            "There is nothing to average." if twice is None else f"{twice} is named twice.",
            rule="each file counts once in a mean, which is written to a file of its own.",
            remedy="name each file once, and another --output",
        )


def _source_of(path: Path, content: Mapping[str, Any]) -> Source:
    place = checkpoint_path(path)
    with open(place / "SEAL.json" if place.is_dir() else place, "rb") as file:  # the seal has the digests of all parts
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Source(str(path), digest, content.get("epoch"), content.get("fit"))


def _state_of(path: Path, content: Any) -> dict[str, Any]:
    """Return the state dict in a file's content, without the prefixes of wrapped modules."""
    inner: Any = content if isinstance(content, Mapping) else {}
    inner = next((inner[name] for name in _WRAPPERS if isinstance(inner.get(name), Mapping)), inner)
    state = {name: value for name, value in inner.items() if name != "n_averaged"}  # of torch's AveragedModel
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        found = f"the keys {list(content)[:_NUM_NAMED]}" if isinstance(content, Mapping) else type(content).__name__
        raise UsageError(
            f"{path} holds no state dict of tensors: found {found}.",
            rule=f"weights are looked for at the top, and under {', '.join(_WRAPPERS)}.",
            remedy="save the model's state_dict() with torch.save",
        )
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _check_related(paths: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> None:
    fits = [content.get("fit") for content in contents]
    others = [path for path, fit in zip(paths[1:], fits[1:], strict=True) if fit is None or fit != fits[0]]
    if others:
        named = ", ".join(map(str, others[:_NUM_NAMED]))
        raise UsageError(
            f"{named}: nothing there says that it is of the training that wrote {paths[0]} ({fits[0] or 'not said'}).",
            rule="a mean of weights means something along one training; between trainings, folds included, it lies "
            "where none of them is good.",
            remedy="average the predictions of different trainings instead; or pass --allow-unrelated if the files "
            "began from the same weights",
        )


def _check_names(first: Path, expected: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    faults = [f"'{name}' is only in {first if name in expected else path}" for name in expected.keys() ^ state.keys()]
    for name in expected.keys() & state.keys():
        if (a := _describe(expected[name])) != (b := _describe(state[name])):
            faults.append(f"'{name}' is {a} in {first} and {b} in {path}")
    if faults:
        more = f"; and {len(faults) - _NUM_NAMED} more" if len(faults) > _NUM_NAMED else ""
        raise UsageError(
            f"{'; '.join(sorted(faults)[:_NUM_NAMED])}{more}.",
            rule="names, shapes and types of all tensors are the same in all files.",
            remedy="average files of one model",
        )


def _describe(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _mean(
    name: str, values: list[torch.Tensor], paths: Sequence[Path], integer_buffers: IntegerBuffers
) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        other = next((index for index, value in enumerate(values) if not torch.equal(first, value)), None)
        if other is not None and integer_buffers == "equal":
            both = f": {first.item()} and {values[other].item()}" if first.numel() == 1 else ""
            raise UsageError(
                f"'{name}' differs between {paths[0]} and {paths[other]}{both}.",
                rule="what has no mean, such as a counter, must be equal in all files.",
                remedy="pass --integer-buffers last to take such tensors from the last file",
            )
        return values[-1].clone()
    total = first.to(torch.complex128 if first.is_complex() else torch.float64, copy=True)
    for value in values[1:]:
        total += value.to(total.dtype)
    mean = total.div_(len(values)).to(first.dtype)
    if bool(mean.isnan().any()):
        bad = next((path for path, value in zip(paths, values, strict=True) if bool(value.isnan().any())), paths[0])
        raise UsageError(
            f"'{name}' has no mean: {bad} holds values that are not numbers.",
            rule="one such weight would spoil the average.",
            remedy="leave that file out",
        )
    return mean
