"""``memfit average``: average checkpoints of one training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memfit.errors import UsageError
from memfit.masking import strip_controls
from memfit.pipeline import expand, fill
from memfit.units import format_count, natural_order


def average(
    inputs: Annotated[list[str], typer.Argument(help="Checkpoints or snapshots; a quoted * finds all that match.")],
    output: Annotated[str, typer.Option(help="The file to write.", metavar="FILE")],
    param: Annotated[
        list[str] | None,
        typer.Option(help="One average for each value: fold=1..5. Repeatable.", metavar="NAME=VALUES"),
    ] = None,
    integer_buffers: Annotated[
        Literal["equal", "last"],
        typer.Option(help="Tensors without a mean, such as counters: refuse if they differ, or take the last file's."),
    ] = "equal",
    allow_unrelated: Annotated[
        bool, typer.Option("--allow-unrelated", help="Average files of different trainings, or that do not say which.")
    ] = False,
) -> None:
    """Average the weights of several checkpoints of one training.

    \b
    memfit average 'ema_epoch_*.pt' --output blended.pt
    memfit average --param fold=1..5 'fold_{fold}/ema_*.pt' --output 'blended_fold{fold}.pt'

    Names, shapes and types must agree in all files. Checkpoints of different trainings are refused: their mean is not
    a good model. Compare the result with the last checkpoint on validation data.

    Exit codes: 0 done, 2 bad input.
    """
    from memfit_workloads.averages import average_checkpoints  # loads torch

    combinations = expand([*inputs, output], param or [])
    outputs = [fill([output], combination)[0] for combination in combinations]
    if len(set(outputs)) < len(outputs):
        raise UsageError(
            f"{len(outputs)} averages would be written to {output}.",
            rule="each average has a file of its own, so every parameter stands in its name.",
            remedy="write for example --output 'blended_fold{fold}.pt'",
        )
    groups = [expand_files(fill(inputs, combination)) for combination in combinations]
    lines = []
    for paths, name in zip(groups, outputs, strict=True):
        sources = average_checkpoints(paths, name, integer_buffers=integer_buffers, allow_unrelated=allow_unrelated)
        lines.append(f"{name}: the mean of {format_count(len(sources), 'file')}")
        for source in sources:
            epoch = "" if source.epoch is None else f"  after epoch {source.epoch}"
            lines.append(f"  {source.path}{epoch}  sha256 {source.sha256[:12]}")
    typer.echo(strip_controls("\n".join(lines)))


def expand_files(words: tuple[str, ...]) -> list[Path]:
    """The files that words name: a word that is not there and holds ``*``, ``?`` or ``[`` names all that match."""
    found: list[Path] = []
    for word in words:
        path, anchor = Path(word), Path(Path(word).anchor)
        files = [path] if path.exists() else sorted(anchor.glob(str(path.relative_to(anchor))), key=natural_order)
        if not files:
            there = sorted((entry.name for entry in path.parent.glob("*.pt")), key=natural_order)
            raise UsageError(
                f"{word} is not there; {path.parent} has {', '.join(there[:10]) or 'no *.pt'}.",
                rule="every name is a file and every pattern finds one: a training that stopped early has not written "
                "the snapshots of later epochs.",
                remedy="name the snapshots that are there, or take all that are by a pattern: 'ema_epoch_*.pt'",
            )
        found += files
    return found
