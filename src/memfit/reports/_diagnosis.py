"""A diagnosis, its remedies, a fix and its verification, as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.checks import Check
    from memfit.diagnosis import Diagnosis, Fix, Remedy

_MOST_EVIDENCE, _MOST_WIDTH, _MOST_ACTIONS = 8, 400, 3
_STYLES = {"problem": "bold red", "warning": "yellow", "ok": "green"}


def print_diagnosis(
    diagnosis: Diagnosis, remedies: Sequence[Remedy], console: Console, *, verbose: bool = False
) -> None:
    """Print what happened, the line that proves it and at most three actions; with ``verbose`` all that is known."""
    from memfit.diagnosis import facts_of, headline_of

    is_known = diagnosis.cause != "unknown"
    style = "bold yellow" if diagnosis.recovered or not is_known else "bold red" if diagnosis.oom else "bold"
    recovered = "; the work went on" if diagnosis.recovered else ""
    console.print(Text(f"{headline_of(diagnosis)}{recovered}", style=style), soft_wrap=True)
    console.print(Text(f"  {facts_of(diagnosis)}"), soft_wrap=True)
    for text in diagnosis.arithmetic if verbose else diagnosis.arithmetic[:1]:
        console.print(f"  {text}", markup=False, soft_wrap=True)
    _evidence(diagnosis, console, _MOST_EVIDENCE if verbose else 1)
    if verbose and diagnosis.timeline:
        console.print("\ntimeline", style="bold")
        for moment in diagnosis.timeline:
            text = f"  {moment.time or '-':<20}  {moment.what}: {moment.text.strip()[:120]}"
            console.print(text, markup=False, soft_wrap=True)
    helpful = [one for one in remedies if one.helps]
    if verbose:
        _remedies("what to do, the cheapest in speed first", helpful, console)
        _remedies("would change nothing here", [one for one in remedies if not one.helps], console)
    elif helpful:
        console.print("\nwhat to do", style="bold")
        for number, one in enumerate(helpful[:_MOST_ACTIONS], 1):
            text = f"  {number}. {one.title}{f': {one.setting}' if one.setting else ''}"
            console.print(text, markup=False, soft_wrap=True)
    if diagnosis.checks and (verbose or not is_known):
        console.print("\nto check", style="bold")
        for line in diagnosis.checks:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    if not verbose and is_known:
        console.print(
            "\n--verbose: timeline, arithmetic, what each action costs, what would change nothing", style="dim"
        )


def explain_in_a_line(diagnosis: Diagnosis) -> str:
    """The diagnosis and its first piece of evidence in one line.

    >>> from memfit.diagnosis import Diagnosis
    >>> explain_in_a_line(Diagnosis(False, False, "none", "unknown", "unknown", "not shown"))
    'unknown'
    """
    from memfit.diagnosis import what_happened

    if diagnosis.cause == "unknown":
        return "unknown"
    phase = f" in phase {diagnosis.phase}" if diagnosis.phase != "unknown" else ""
    proof = diagnosis.evidence[0] if diagnosis.evidence else None
    where = f"; line {proof.line}: {proof.text.strip()[:160]}" if proof else ""
    return f"{what_happened(diagnosis)}{phase} ({diagnosis.confidence}){where}"


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


def _evidence(diagnosis: Diagnosis, console: Console, most: int) -> None:
    if most > 1 and diagnosis.evidence:
        console.print("\nevidence", style="bold")
    for one in diagnosis.evidence[:most]:
        place = Text(f"  {one.file}:{one.line}  ", style="dim")
        console.print(place + Text(one.text.strip()[:_MOST_WIDTH]), soft_wrap=True)
    if 1 < most < len(diagnosis.evidence):
        console.print(f"  and {len(diagnosis.evidence) - most} more lines; --json lists all")


def _remedies(title: str, some: Sequence[Remedy], console: Console) -> None:
    if some:
        console.print(f"\n{title}", style="bold")
    for number, one in enumerate(some, 1):
        saves = f", {format_bytes(one.saves_bytes)}" if one.saves_bytes else ""
        enough = {True: ", enough by itself", False: ", not enough by itself", None: ""}[one.enough]
        words = f"{number}. {one.title} (costs {one.cost}{saves}{enough})" if one.helps else f"- {one.title}"
        console.print(f"  {words}", markup=False, soft_wrap=True)
        for text, style in ((one.setting if one.helps else "", "cyan"), (one.reason, "dim")):
            if text:
                console.print(f"     {text}", markup=False, soft_wrap=True, style=style)
