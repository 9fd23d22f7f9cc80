"""A diagnosis, its remedies, a fix and its verification: on a terminal, and as an incident report in Markdown."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from memfit.masking import mask, strip_controls
from memfit.reports._parts import Inset, Note, Part, to_text
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.checks import Check
    from memfit.diagnosis import Diagnosis, Fix, Remedy

_MOST_EVIDENCE, _MOST_WIDTH, _MOST_ACTIONS = 8, 400, 3
_NOT_KNOWN = "Not known. No line that was read shows a cause; give more files, such as the kernel's log or sacct."
_STYLES = {"problem": "bold red", "warning": "yellow", "ok": ""}


def view_diagnosis(diagnosis: Diagnosis, remedies: Sequence[Remedy], *, verbose: bool = False) -> Iterator[Part]:
    """Yield what happened, the line that proves it and at most three actions; with ``verbose`` all that is known."""
    is_known = diagnosis.cause != "unknown"
    style = "bold yellow" if diagnosis.recovered or not is_known else "bold red" if diagnosis.oom else "bold"
    yield Note(diagnosis.headline + ("; the work went on" if diagnosis.recovered else ""), style)
    arithmetic = diagnosis.arithmetic if verbose else diagnosis.arithmetic[:1]
    yield Inset([diagnosis.facts, *arithmetic, *diagnosis.notes], 2)
    most = _MOST_EVIDENCE if verbose or not is_known else 1
    proofs = [f"{one.file}:{one.line}  {one.text.strip()[:_MOST_WIDTH]}" for one in diagnosis.evidence[:most]]
    if 1 < most < len(diagnosis.evidence):
        proofs.append(f"and {len(diagnosis.evidence) - most} more lines; --json lists all")
    yield from _titled("evidence" if is_known else "nearest lines", proofs) if most > 1 else (Inset(proofs, 2),)
    helpful = [one for one in remedies if one.helps]
    if verbose:
        times = [f"{one.time or '-':<20}  {one.what}: {one.text.strip()[:120]}" for one in diagnosis.timeline]
        yield from _titled("timeline", times)
        yield from _all(remedies)
    else:
        actions = [f"{one.title}{f': {one.setting}' if one.setting else ''}" for one in helpful[:_MOST_ACTIONS]]
        yield from _titled("what to do", [f"{number}. {text}" for number, text in enumerate(actions, 1)])
    yield from _titled("to check", diagnosis.checks if verbose or not is_known else ())
    if not verbose and is_known:
        yield Note("\n--verbose: timeline, arithmetic, what each action costs, what would change nothing", "dim")


def _titled(title: str, parts: Sequence[Part]) -> Iterator[Part]:
    if parts:
        yield from (Note(f"\n{title}", "bold"), Inset(parts, 2))


def _all(remedies: Sequence[Remedy]) -> Iterator[Part]:
    costs = [_costs(one, f"{number}. ") for number, one in enumerate((one for one in remedies if one.helps), 1)]
    yield from _titled("what to do, the cheapest in speed first", costs)
    yield from _titled("would change nothing here", [_costs(one, "- ") for one in remedies if not one.helps])


def _costs(one: Remedy, sign: str) -> Part:
    setting = [Note(one.setting, "cyan")] if one.helps and one.setting else []
    reason = [Note(one.reason, "dim")] if one.reason else []
    saves = f", saves {format_bytes(one.saves_bytes)}" if one.saves_bytes else ""
    enough = {True: ", enough by itself", False: ", not enough by itself", None: ""}[one.enough]
    title = f"{sign}{one.title}" + (f" (costs {one.cost}{saves}{enough})" if one.helps else "")
    return Inset([title, Inset([*setting, *reason], 3)], 0)


def explain_in_a_line(diagnosis: Diagnosis) -> str:
    phase = f" in phase {diagnosis.phase}" if diagnosis.phase != "unknown" else ""
    proof = diagnosis.evidence[0] if diagnosis.evidence else None
    where = f"; line {proof.line}: {proof.text.strip()[:160]}" if proof else ""
    return f"{diagnosis.happened}{phase} ({diagnosis.confidence}){where}"


def view_fix(fix: Fix) -> Iterator[Part]:
    if not fix.edits:
        why = "" if any(check.verdict != "ok" for check in fix.checks) else f": nothing in {fix.path} causes it"
        yield Note(f"\nno file was written{why}", "bold")
    else:
        yield from (Note(f"\nwrote {fix.new_path}", "bold"), fix.diff)
        yield Inset([f"line {edit.line}: {edit.reason}" for edit in fix.edits], 2)
    yield from view_checks([check for check in fix.checks if check.verdict != "ok"])


def view_checks(checks: Sequence[Check], *, reasons: bool = False) -> Iterator[Part]:
    """Yield each check with what to do, and with ``reasons`` also why and where from."""
    width = max((len(check.check) for check in checks), default=0)
    for check in checks:
        yield Note(f"{check.verdict:<7} {check.check:<{width}} {check.finding}", _STYLES[check.verdict])
        more = (("why", check.reason), ("do", check.remedy), ("from", check.source))
        shown = [(name, text) for name, text in more if text and (reasons or (name == "do" and check.verdict != "ok"))]
        yield Inset([f"{name:<4} {text}" for name, text in shown], 8 + width + 1)


def view_verification(checks: Sequence[Check]) -> Iterator[Part]:
    from memfit.diagnosis import is_any_shown

    yield from view_checks(checks)
    if not is_any_shown(checks):
        yield Note("nothing that was read shows any of these settings", "bold")
    num = Counter(check.verdict for check in checks if check.source or check.verdict != "ok")
    yield f"in force: {num['ok']}, not in force: {num['problem']}, not shown: {num['warning']}"


def write_incident(diagnosis: Diagnosis, remedies: Sequence[Remedy], fix: Fix | None = None) -> str:
    """Return the incident report in Markdown: symptom, hypothesis, experiment, and a result to fill in."""
    hypothesis = {
        "proved": f"The job was {diagnosis.happened}. The lines above prove it.",
        "likely": f"The job was probably {diagnosis.happened}. The lines above suggest it, and none proves it.",
    }.get(diagnosis.confidence if diagnosis.cause != "unknown" else "", _NOT_KNOWN)
    sections = {
        "Symptom": _block(view_diagnosis(diagnosis, (), verbose=True)),
        "Hypothesis": hypothesis,
        "Experiment": f"Change one thing, and run again.\n{_block([*_all(remedies), *(view_fix(fix) if fix else ())])}",
        "Result": "- Did the job end by itself?\n- Its peak memory, and the limit:\n- Does the hypothesis hold?",
    }
    text = "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items())
    return str(mask(strip_controls(f"# Incident: {diagnosis.headline}\n{text}")))


def _block(parts: Iterable[Part]) -> str:
    file = io.StringIO()
    to_text(parts, Console(file=file, width=_MOST_WIDTH))
    return "\n```text\n{}\n```".format(file.getvalue().strip().replace("```", "'''"))
