"""``memfit panel``: build, inspect and check panels; pack objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from memfit.cli._terminal import AsJson, answer, bar, console, heartbeat
from memfit.masking import mask
from memfit.units import format_bytes, format_count, list_some

if TYPE_CHECKING:
    from memfit.data import Panel

panel = typer.Typer(
    help="Build, inspect and check panels: dates x assets x features in mapped files.\n\n"
    "memfit panel build prices.parquet --index date,code --features 'f*' --targets ret -o panels/",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Where = Annotated[Path, typer.Argument(help="A panel's folder, or a cache folder: its newest panel.", metavar="PATH")]
Sources = Annotated[
    list[Path],
    typer.Argument(help="Parquet or Arrow files, or folders of them; rows in any order.", metavar="SOURCE..."),
]
_NUM_NAMED = 12
_IN_TITLE = ("path", "bytes", "num_dates", "num_assets", "reused")  # facts that the first line has


@panel.command(short_help="Build a panel, or find the one that is there.")
def build(
    sources: Sources,
    *,
    index: Annotated[str, Option(help="The columns of dates and of asset codes.", metavar="DATE,ASSET")],
    features: Annotated[list[str], Option(help="Names or quoted patterns, with commas: 'f*,g1'.", metavar="NAMES")],
    output: Annotated[Path, Option("--output", "-o", help="The cache folder.", metavar="FOLDER")],
    targets: Annotated[list[str] | None, Option(help="The same, for targets.", metavar="NAMES")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a panel from files, once; the same command again finds it, and checks every byte of it.

    memfit panel build prices.parquet --index date,code --features 'f*' --targets ret -o panels/

    The panel lies in FOLDER/<fingerprint>/: plain .npy files that any number of processes map and none copies. A
    pattern finds the columns of numbers that match it and are neither index nor target. Rows are read a few thousand at
    a time. A date and asset without a row, and a missing value, are NaN.

    Exit codes: 0 done, 2 bad input, a full disk, or a panel there that is damaged.
    """
    from memfit.data import Panel, match_columns

    keys = _words([index])
    wanted = match_columns(sources, _words(targets or []), taken=keys)
    found = match_columns(sources, _words(features), taken=[*keys, *wanted])
    with bar("building") as progress:
        built = Panel.build(sources, output, index=keys, features=found, targets=wanted, progress=progress)
    more = {"reused": built.reused, "changed": list(built.changed)}
    _tell(built, "was there already, " if built.reused else "built, ", more, as_json)


@panel.command(short_help="Show what a panel holds.")
def info(path: Where, as_json: AsJson = False) -> None:
    """Show a panel's dates, assets, columns, gaps and sizes.

    Exit codes: 0 done, 2 no panel there, or it is damaged.
    """
    _tell(_open(path), "", {}, as_json)


@panel.command(short_help="Read every byte of a panel and compare checksums.")
def verify(path: Where, as_json: AsJson = False) -> None:
    """Read every byte of a panel and compare it with the checksums that were taken when it was written.

    Exit codes: 0 whole, 2 damaged (the file and where in it are named), or no panel there.
    """
    found = _open(path)
    with bar("verifying") as progress:
        found.verify(progress=progress)
    facts = {"path": str(found.path), "whole": True, "bytes": found.nbytes}
    answer(facts, as_json, [f"{found.path}: {format_bytes(found.nbytes)}, every byte as it was written"])


@panel.command("pack", short_help="Turn pickles into one store that all processes map.")
def pack_(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Pickles, quoted patterns, or module:function, which gives an iterable.", metavar="SOURCE..."
        ),
    ],
    *,
    output: Annotated[Path, Option("--output", "-o", help="The folder to make.", metavar="FOLDER")],
    as_json: AsJson = False,
) -> None:
    """Pack pickles into one store, once; the same command again finds it, and checks every byte of it.

    memfit panel pack 'scenes/*.pkl' -o scenes.packed

    A pickle holds a list of items, or one item. One file at a time is in memory.

    A pickle runs code when it is loaded. So memfit loads your own files alone, in a child process without variables
    that hold secrets. That child can still do what you can: pack only files that you trust.

    Exit codes: 0 done, 2 bad input, a full disk, or something else is at FOLDER. Then nothing is left behind.
    """
    from memfit.data import remove_leftovers
    from memfit.jobs import call_in_child

    shown = mask(dict(os.environ))
    env = {name: value for name, value in os.environ.items() if shown[name] == value}
    kept = list_some([name for name in os.environ if name not in env])
    console(stderr=True).say(
        "memfit: a pickle runs code when it is loaded: pack only files that you trust. They are loaded in a child "
        f"process{f' without {kept}' if kept else ''}."
    )
    with heartbeat("packing"):
        try:
            found = call_in_child("memfit.data:pack_source", {"words": sources, "path": str(output)}, env)
        except BaseException:
            remove_leftovers(output)
            raise
    answer(found, as_json, _packed(found))


def _packed(found: dict[str, Any]) -> list[str]:
    items, files = format_count(found["num_items"], "item"), format_count(found["num_files"], "file")
    if found["reused"]:
        return [f"{found['path']}: was there already, {items}; every byte as it was written"]
    of = f" of {files} ({format_bytes(found['source_bytes'])})" if found["num_files"] else ""
    return [
        f"{found['path']}: packed, {items}{of}, {format_bytes(found['bytes'])}",
        f'  use it: PackedDataset.open("{found["path"]}")',
    ]


def _open(path: Path) -> Panel:
    from memfit.data import Panel

    return Panel.newest(path)


def _words(texts: list[str]) -> list[str]:
    """What stands between the commas.

    >>> _words(["f1, f2", "g*"])
    ['f1', 'f2', 'g*']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def _facts(found: Panel) -> dict[str, Any]:
    same = ("path", "fingerprint", "num_rows", "parameters")
    return {name: getattr(found, name) for name in same} | {
        "num_dates": found.shape[0],
        "first_date": found.dates[0],
        "last_date": found.dates[-1],
        "num_assets": found.shape[1],
        "num_listed_later": int((found.first_dates > found.dates[0]).sum()),
        "num_delisted": int((found.last_dates < found.dates[-1]).sum()),
        "features": found.feature_names,
        "targets": found.target_names,
        "bytes": found.nbytes,
    }


def _tell(found: Panel, done: str, more: dict[str, Any], as_json: bool) -> None:
    """Answer with a panel's facts and ``more``; to people with what was ``done`` and its shape first."""
    num_dates, num_assets, num_features = found.shape
    shape = f"{num_dates} dates x {num_assets} assets x {num_features} features"
    first = f"{found.path}: {done}{shape}, {format_bytes(found.nbytes)}"
    facts = _facts(found) | more
    told = {name: list_some(one, _NUM_NAMED) if isinstance(one, list | tuple) else one for name, one in facts.items()}
    lines = [f"  {name}: {one}" for name, one in told.items() if one and name not in _IN_TITLE]
    answer(facts, as_json, [first, *lines])
