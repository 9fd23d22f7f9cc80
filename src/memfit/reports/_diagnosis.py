"""A diagnosis, its remedies, a fix and its verification: on a terminal, and as an incident report in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.masking import mask, strip_controls
from memfit.reports._parts import say
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.checks import Check
    from memfit.diagnosis import Diagnosis, Fix, Remedy

_MOST_EVIDENCE, _MOST_WIDTH, _MOST_ACTIONS = 8, 400, 3
_NOT_KNOWN = "Not known. No line that was read shows a cause; give more files, such as the kernel's log or sacct."
_STYLES = {"problem": "bold red", "warning": "yellow", "ok": "green"}


def print_diagnosis(
    diagnosis: Diagnosis, remedies: Sequence[Remedy], console: Console, *, verbose: bool = False
) -> None:
    """Print what happened, the line that proves it and at most three actions; with ``verbose`` all that is known."""
    is_known = diagnosis.cause != "unknown"
    style = "bold yellow" if diagnosis.recovered or not is_known else "bold red" if diagnosis.oom else "bold"
    recovered = "; the work went on" if diagnosis.recovered else ""
    say(console, f"{diagnosis.headline}{recovered}", style)
    say(console, f"  {diagnosis.facts}")
    for text in (*(diagnosis.arithmetic if verbose else diagnosis.arithmetic[:1]), *diagnosis.notes):
        say(console, f"  {text}")
    title = "evidence" if is_known else "nearest lines"
    _evidence(diagnosis, console, _MOST_EVIDENCE if verbose or not is_known else 1, title)
    if verbose and diagnosis.timeline:
        console.print("\ntimeline", style="bold")
        for moment in diagnosis.timeline:
            say(console, f"  {moment.time or '-':<20}  {moment.what}: {moment.text.strip()[:120]}")
    helpful = [one for one in remedies if one.helps]
    if verbose:
        _remedies("what to do, the cheapest in speed first", helpful, console)
        _remedies("would change nothing here", [one for one in remedies if not one.helps], console)
    elif helpful:
        console.print("\nwhat to do", style="bold")
        for number, one in enumerate(helpful[:_MOST_ACTIONS], 1):
            say(console, f"  {number}. {one.title}{f': {one.setting}' if one.setting else ''}")
    if diagnosis.checks and (verbose or not is_known):
        console.print("\nto check", style="bold")
        for line in diagnosis.checks:
            say(console, f"  {line}")
    if not verbose and is_known:
        console.print(
            "\n--verbose: timeline, arithmetic, what each action costs, what would change nothing", style="dim"
        )


def explain_in_a_line(diagnosis: Diagnosis) -> str:
    """Return the diagnosis and its first piece of evidence in one line."""
    phase = f" in phase {diagnosis.phase}" if diagnosis.phase != "unknown" else ""
    proof = diagnosis.evidence[0] if diagnosis.evidence else None
    where = f"; line {proof.line}: {proof.text.strip()[:160]}" if proof else ""
    return f"{diagnosis.happened}{phase} ({diagnosis.confidence}){where}"


def print_fix(fix: Fix, console: Console) -> None:
    """Print where the corrected file is, its diff, the reasons and its checks."""
    console.print()
    if not fix.edits:
        why = "" if any(check.verdict != "ok" for check in fix.checks) else f": nothing in {fix.path} causes it"
        say(console, f"no file was written{why}", "bold")
    else:
        say(console, f"wrote {fix.new_path}", "bold")
        if console.is_terminal:
            from rich.syntax import Syntax

            console.print(Syntax(fix.diff, "diff", background_color="default", word_wrap=True))
        else:
            say(console, fix.diff)
        for edit in fix.edits:
            say(console, f"  line {edit.line}: {edit.reason}")
    print_checks([check for check in fix.checks if check.verdict != "ok"], console)


def print_checks(checks: Sequence[Check], console: Console, *, reasons: bool = False) -> dict[str, int]:
    """Print each check with what to do, and with ``reasons`` also why and where from; return the number by verdict."""
    width = max((len(check.check) for check in checks), default=0)
    for check in checks:
        head = ((f"{check.verdict:<7} ", _STYLES[check.verdict]), (f"{check.check:<{width}} ", "bold"))
        console.print(Text.assemble(*head, check.finding), soft_wrap=True)
        table = Table.grid(padding=(0, 1))
        for name, text in (("why", check.reason), ("do", check.remedy), ("from", check.source)):
            if text and (reasons or (name == "do" and check.verdict != "ok")):
                table.add_row(Text(name, "dim"), Text(text))
        console.print(Padding(table, (0, 0, 0, 8 + width + 1), expand=False), end="" if not table.row_count else "\n")
    return {verdict: sum(check.verdict == verdict for check in checks) for verdict in _STYLES}


def print_verification(checks: Sequence[Check], console: Console) -> None:
    """Print whether each setting was in force, and what shows it."""
    from memfit.diagnosis import is_any_shown

    num = print_checks(checks, console)
    if not is_any_shown(checks):
        console.print("nothing that was read shows any of these settings", style="bold")
    console.print(f"in force: {num['ok']}, not in force: {num['problem']}, not shown: {num['warning']}")


def _evidence(diagnosis: Diagnosis, console: Console, most: int, title: str) -> None:
    if most > 1 and diagnosis.evidence:
        console.print(f"\n{title}", style="bold")
    for one in diagnosis.evidence[:most]:
        place = Text(f"  {one.file}:{one.line}  ", style="dim")
        console.print(place + Text(one.text.strip()[:_MOST_WIDTH]), soft_wrap=True)
    if 1 < most < len(diagnosis.evidence):
        console.print(f"  and {len(diagnosis.evidence) - most} more lines; --json lists all")


def _remedies(title: str, some: Sequence[Remedy], console: Console) -> None:
    if some:
        console.print(f"\n{title}", style="bold")
    for number, one in enumerate(some, 1):
        say(console, f"  {number}. {one.title} ({_terms(one)})" if one.helps else f"  - {one.title}")
        for text, style in ((one.setting if one.helps else "", "cyan"), (one.reason, "dim")):
            if text:
                say(console, f"     {text}", style)


def _terms(one: Remedy) -> str:
    """What a remedy costs and saves."""
    saves = f", saves {format_bytes(one.saves_bytes)}" if one.saves_bytes else ""
    return (
        f"costs {one.cost}{saves}" + {True: ", enough by itself", False: ", not enough by itself", None: ""}[one.enough]
    )


def write_incident(diagnosis: Diagnosis, remedies: Sequence[Remedy], fix: Fix | None = None) -> str:
    """Return the incident report in Markdown: symptom, hypothesis, experiment, and a result to fill in."""
    hypothesis = {
        "proved": f"The job was {diagnosis.happened}. The lines above prove it.",
        "likely": f"The job was probably {diagnosis.happened}. The lines above suggest it, and none proves it.",
    }.get(diagnosis.confidence if diagnosis.cause != "unknown" else "", _NOT_KNOWN)
    edits = [f"- line {edit.line}: `{edit.new}`: {edit.reason}" for edit in fix.edits] if fix else []
    sections = {
        "## Symptom": [
            f"{diagnosis.facts}{', the work went on' if diagnosis.recovered else ''}.",
            "",
            *(f"- {_cited(one.file, one.line, one.text)}" for one in diagnosis.evidence),
        ],
        "### Timeline": [
            f"- {one.time or 'no time'}: {one.what}, {_cited(one.file, one.line, one.text)}"
            for one in diagnosis.timeline
        ],
        "### Memory": [f"- {line}" for line in (*diagnosis.arithmetic, *diagnosis.notes)],
        "## Hypothesis": [hypothesis],
        "## Experiment": ["Change one thing, and run again.", "", *map(_option, remedies)],
        "### Fix": [*edits, "", "```diff", fix.diff, "```"] if fix and edits else [],
        "## Result": [
            "- Did the job end by itself?",
            "- Its peak memory, and the limit:",
            "- Does the hypothesis hold?",
        ],
    }
    text = [f"# Incident: {diagnosis.headline}", ""]
    for heading, lines in sections.items():
        text += [heading, "", *(lines or ["Nothing in what was read."]), ""]
    return str(mask(strip_controls("\n".join(text))))


def _cited(file: str, line: int, text: str) -> str:
    shown = text.strip().replace("`", "'")[:300]
    return f"`{file}:{line}` `{shown}`"


def _option(one: Remedy) -> str:
    if not one.helps:
        return f"- {one.title}, would change nothing: {one.reason}"
    return f"- {one.title}{f': `{one.setting}`' if one.setting else ''} ({_terms(one)}): {one.reason}"
