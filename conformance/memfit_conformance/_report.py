"""Print the results as a table, and as the Markdown of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from memfit_conformance._faults import FAULTS
from memfit_conformance._task import Options


def print_table(results: Mapping[str, Any], console: Console) -> None:
    """Print what differs in each row, and how many are good."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    rows = results["rows"]
    mode = "with memfit" if rows and rows[0]["with_memfit"] else "alone"
    table = Table("moment", "", "what differs", "exit codes", "combination", title=f"{versions}, {mode}")
    usual = combination(asdict(Options()))
    for row in rows:
        color, mixed = "" if row["is_good"] else "red", combination(row["options"])
        exits = " ".join(map(str, row["exits"]))
        mixed = "" if mixed == usual else mixed
        table.add_row(row["moment"], row["name"], row["text"], exits, mixed, style=color)
    console.print(table)
    for row in rows:
        if row["text"].startswith("suite") or (row["with_memfit"] and not row["is_good"]):
            console.print(f"moment {row['moment']}: ...{row['log'][-1500:]}", markup=False)
    console.print(f"Where no combination is said: {usual}.")
    console.print(count(rows))


def combination(options: Mapping[str, Any]) -> str:
    """Return a combination in few words."""
    loading = f"{options['workers']}{' persistent' if options['persistent'] else ''} workers"
    masks = "masks" if options["masks"] else "no draws"
    numbers = f"dropout {options['dropout']}, warm-up {options['warmup']}, accumulation {options['accumulation']}"
    return f"{loading}, {masks}, {numbers}, {options['signal']}"


def count(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts of what was found."""
    same = sum(row["text"] == "same" for row in rows)
    refused = sum(row["text"].startswith("refused") for row in rows)
    absent = sum(row["text"].startswith("not there") for row in rows)
    other = len(rows) - same - refused - absent
    return f"{len(rows)} rows: {same} same, {refused} refused before step 1, {absent} not there, {other} other"


def markdown(all_results: Sequence[Mapping[str, Any]]) -> str:
    """Return two tables for each framework: what differs, alone and with memfit side by side, and its faults."""
    parts = []
    for framework in dict.fromkeys(results["framework"] for results in all_results):
        mine = [results for results in all_results if results["framework"] == framework]
        versions = {name: version for results in mine for name, version in results["versions"].items()}
        columns: dict[str, dict[str, Any]] = {}
        for row in (row for results in mine for row in results["rows"]):
            columns.setdefault(_column(row), {})[row["moment"]] = row
        titles = sorted(columns)
        parts += [f"### {framework}", "", ", ".join(f"{name} {one}" for name, one in versions.items()), ""]
        parts += [f"| moment | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
        names = {number: row["name"] for title in titles for number, row in columns[title].items()}
        for number in sorted(names, key=lambda number: (int(number.rstrip("bcd")), number)):
            texts = [columns[title].get(number, {"text": ""})["text"] for title in titles]
            parts.append(f"| {number} {names[number]} | {' | '.join(texts)} |")
        parts += ["", *(f"- {title}: {count(list(columns[title].values()))}" for title in titles)]
        parts += ["", "| line | what happens | moments |", "|---|---|---|"]
        for fault in (one for one in FAULTS if one.framework == framework):
            where = f"`{fault.file}:{fault.line() or 'not in this version'}`"
            parts.append(f"| {where} | {fault.what} | {', '.join(fault.moments)} |")
        parts.append("")
    return "\n".join(parts)


def _column(row: Mapping[str, Any]) -> str:
    mode = "with memfit" if row["with_memfit"] else "alone"
    return mode if row["options"]["masks"] else f"{mode}, no masks drawn"
