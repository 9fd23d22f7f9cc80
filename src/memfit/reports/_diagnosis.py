"""A diagnosis, its remedies, a fix and its verification, as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.diagnosis import Check, Diagnosis, Fix, Remedy

_MOST_EVIDENCE, _MOST_WIDTH = 8, 400
_STYLES = {"problem": "bold red", "warning": "yellow", "ok": "green"}


def print_diagnosis(diagnosis: Diagnosis, remedies: Sequence[Remedy], console: Console) -> None:
    """Print what happened, the lines that prove it, the arithmetic, and what to do, the cheapest first."""
    from memfit.diagnosis import what_happened

    is_known = diagnosis.cause != "unknown"
    head = what_happened(diagnosis) if is_known else "unknown: no line that was read proves a cause"
    style = "bold yellow" if diagnosis.recovered or not is_known else "bold red" if diagnosis.oom else "bold"
    recovered = "; recovered, the work went on" if diagnosis.recovered else ""
    console.print(Text(f"{head}{recovered}", style=style), soft_wrap=True)
    facts = [("kind", f"{diagnosis.kind}, {diagnosis.cause}, confidence {diagnosis.confidence:.2f}")]
    place = ", ".join(f"{name} {value}" for name, value in diagnosis.where.items() if value is not None)
    facts += [("where", place)] if place else []
    facts.append(("phase", diagnosis.phase))
    facts += [("", line) for line in diagnosis.arithmetic]
    _rows(facts if is_known else facts[-1:], console)
    _evidence(diagnosis, console)
    if diagnosis.timeline:
        console.print("\ntimeline", style="bold")
        for moment in diagnosis.timeline:
            console.print(
                f"  {moment.time or '-':<20}  {moment.what}: {moment.text.strip()[:120]}", markup=False, soft_wrap=True
            )
    _remedies(remedies, console)
    if diagnosis.checks:
        console.print("\nto check", style="bold")
        for line in diagnosis.checks:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def explain_in_a_line(diagnosis: Diagnosis) -> str:
    """The diagnosis and its first piece of evidence in one line.

    >>> from memfit.diagnosis import Diagnosis
    >>> explain_in_a_line(Diagnosis(False, False, "none", "unknown", "unknown", 0.0))
    'unknown'
    """
    from memfit.diagnosis import what_happened

    if diagnosis.cause == "unknown":
        return "unknown"
    phase = f" in phase {diagnosis.phase}" if diagnosis.phase != "unknown" else ""
    proof = diagnosis.evidence[0] if diagnosis.evidence else None
    where = f"; line {proof.line}: {proof.text.strip()[:160]}" if proof else ""
    return f"{what_happened(diagnosis)}{phase} (confidence {diagnosis.confidence:.2f}){where}"


def print_fix(fix: Fix, console: Console) -> None:
    """Print where the corrected file is, its diff, the reasons and its checks."""
    console.print()
    if not fix.edits:
        console.print(f"nothing in {fix.path} causes it: no file was written", style="bold", markup=False)
    else:
        console.print(f"wrote {fix.new_path}", style="bold", markup=False, soft_wrap=True)
        if console.is_terminal:
            from rich.syntax import Syntax

            console.print(Syntax(fix.diff, "diff", background_color="default", word_wrap=True))
        else:
            console.print(fix.diff, markup=False, soft_wrap=True)
        for edit in fix.edits:
            console.print(f"  line {edit.line}: {edit.reason}", markup=False, soft_wrap=True)
    print_verification([check for check in fix.checks if check.verdict != "ok"], console, counts=False)


def print_verification(checks: Sequence[Check], console: Console, *, counts: bool = True) -> None:
    """Print whether each setting was in force, and what shows it."""
    width = max((len(check.check) for check in checks), default=0)
    for check in checks:
        style = _STYLES[check.verdict]
        head = f"[{style}]{check.verdict:<7}[/{style}] [bold]{escape(check.check):<{width}}[/bold]"
        console.print(f"{head} {escape(check.finding)}", soft_wrap=True)
        if check.verdict != "ok" and check.remedy:
            console.print(f"{'':{width + 9}}do {check.remedy}", markup=False, soft_wrap=True)
    if counts:
        from memfit.diagnosis import is_any_shown

        if not is_any_shown(checks):
            console.print("nothing that was read shows any of these settings", style="bold")
        num = {verdict: sum(check.verdict == verdict for check in checks) for verdict in _STYLES}
        console.print(f"in force: {num['ok']}, not in force: {num['problem']}, not shown: {num['warning']}")


def _rows(rows: Sequence[tuple[str, str]], console: Console) -> None:
    for name, text in rows:
        console.print(Text.assemble((f"  {name:<6}", "dim"), text), soft_wrap=True)


def _evidence(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.evidence:
        return
    console.print("\nevidence", style="bold")
    for one in diagnosis.evidence[:_MOST_EVIDENCE]:
        console.print(
            Text.assemble((f"  {one.file}:{one.line}  ", "dim"), one.text.strip()[:_MOST_WIDTH]), soft_wrap=True
        )
    if len(diagnosis.evidence) > _MOST_EVIDENCE:
        console.print(f"  and {len(diagnosis.evidence) - _MOST_EVIDENCE} more lines; --json lists all")


def _remedies(remedies: Sequence[Remedy], console: Console) -> None:
    for title, some in (
        ("what to do, the cheapest in speed first", [one for one in remedies if one.helps]),
        ("would change nothing here", [one for one in remedies if not one.helps]),
    ):
        if not some:
            continue
        console.print(f"\n{title}", style="bold")
        for number, one in enumerate(some, 1):
            saves = f", {format_bytes(one.saves_bytes)}" if one.saves_bytes else ""
            enough = {True: ", enough by itself", False: ", not enough by itself", None: ""}[one.enough]
            cost = f" (costs {one.cost}{saves}{enough})" if one.helps else ""
            mark = f"{number}." if one.helps else "-"
            console.print(f"  {mark} {one.title}{cost}", markup=False, soft_wrap=True)
            if one.helps and one.setting:
                console.print(f"     {one.setting}", markup=False, soft_wrap=True, style="cyan")
            if one.reason:
                console.print(f"     {one.reason}", markup=False, soft_wrap=True, style="dim")
