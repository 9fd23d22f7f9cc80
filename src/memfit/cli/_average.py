"""``memfit average``: one model from several checkpoints of one training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from memfit.cli._terminal import console
from memfit.errors import UsageError
from memfit.pipeline import expand, fill

_NUM_NAMED = 10


def average(
    inputs: Annotated[list[str], typer.Argument(help="Checkpoints or snapshots; a quoted * finds all that match.")],
    output: Annotated[str, typer.Option(help="The file to write.", metavar="FILE")],
    param: Annotated[
        list[str] | None,
        typer.Option(help="One average for each value of {NAME}: fold=1..5. Repeatable.", metavar="NAME=VALUES"),
    ] = None,
    integer_buffers: Annotated[
        Literal["equal", "last"],
        typer.Option(help="Tensors without a mean, such as counters: refuse if they differ, or take the last file's."),
    ] = "equal",
    allow_unrelated: Annotated[
        bool, typer.Option("--allow-unrelated", help="Average files of different trainings, or that do not say which.")
    ] = False,
) -> None:
    """Average the weights of checkpoints of one training into one checkpoint.

    memfit average --param fold=1..5 'fold_{fold}/ema_epoch_*.pt' --output 'blended_fold{fold}.pt'

    Names, shapes and types must agree in all files, and the files must be of one training: late snapshots average well,
    while the weights of two trainings, two folds for example, have no mean that is a good model. The output lists its
    sources. Compare it on validation with the last weights before you use it.

    Exit codes: 0 done, 2 bad input.
    """
    from memfit.training import average_checkpoints

    combinations = expand([*inputs, output], param or [])
    outputs = [fill([output], combination)[0] for combination in combinations]
    if len(set(outputs)) < len(outputs):
        raise UsageError(
            f"{len(outputs)} averages would be written to {output}.",
            rule="each average has a file of its own, so every parameter stands in its name.",
            remedy="write for example --output 'blended_fold{fold}.pt'",
        )
    groups = [expand_files(fill(inputs, combination)) for combination in combinations]
    log = console()
    for paths, name in zip(groups, outputs, strict=True):
        sources = average_checkpoints(paths, name, integer_buffers=integer_buffers, allow_unrelated=allow_unrelated)
        log.print(f"{name}: the mean of {len(sources)} file{'s' if len(sources) > 1 else ''}", markup=False)
        for source in sources:
            epoch = "" if source.epoch is None else f"  after epoch {source.epoch}"
            log.print(f"  {source.path}{epoch}  sha256 {source.sha256[:12]}", markup=False)


def expand_files(words: tuple[str, ...]) -> list[Path]:
    """The files that words name: a word that is no file and holds ``*``, ``?`` or ``[`` names all that match."""
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_file():
            found.append(path)
            continue
        anchor = Path(path.anchor)
        matches = anchor.glob(str(path.relative_to(anchor))) if set("*?[") & set(word) else ()
        files = sorted(matches, key=_natural)
        if not files:
            there = sorted((entry.name for entry in path.parent.glob("*.pt")), key=lambda name: _natural(Path(name)))
            raise UsageError(
                f"{word} is not there" + (f"; {path.parent} has {', '.join(there[:_NUM_NAMED])}." if there else "."),
                rule="every name is a file and every pattern finds one: a training that stopped early has not written "
                "the snapshots of later epochs.",
                remedy="name the snapshots that are there, or take all that are by a pattern: 'ema_epoch_*.pt'",
            )
        found += files
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    """The key that sorts ``epoch_3`` before ``epoch_10``.

    >>> sorted([Path("epoch_10"), Path("epoch_3")], key=_natural)
    [PosixPath('epoch_3'), PosixPath('epoch_10')]
    """
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]
