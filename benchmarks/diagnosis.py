"""How often `memfit diagnose` names the right cause of excerpts that people have labelled, beside a rule of substrings.

    python benchmarks/diagnosis.py [--corpus FILE] [--json] [--stream-gb 2]

Without ``--corpus`` it scores ``tests/diagnosis/signatures.jsonl``: messages in the formats of the programs that print
them, composed or recorded while the rules were written. So this figure says that the rules do what they were written
for, and nothing about logs that nobody has seen. For that, FILE holds logs of others.

A corpus has one JSON object a line: ``id``, ``text``, ``label`` (``oom``, ``recovered``, ``kind``, ``phase``, ``cause``
and four figures in GiB) and ``notes``; or ``name``, ``text`` and ``want``, which is the label. What a label does not
name does not count. Excerpts whose notes begin with AMBIGUOUS are scored apart: there the text does not decide, and
right is the label or "killed, sender unknown". A phase counts where the label knows one. Figures are exact when
each is within a thousandth, and None where the label says so. Beside it stands the rule that looks for five substrings
anywhere in the text, as training code in the field does.

With ``--stream-gb``, a log of that size is written to a scratch folder, diagnosed, and deleted.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.diagnosis import Diagnosis, diagnose
from memfit.reports import wilson_interval

#: What is asked: shares of kinds and phases, of figures, the false alarms, and the memory of a large log in MiB.
KINDS, PHASES, FIGURES, FALSE_ALARMS, STREAM_MIB = 0.95, 0.90, 1.0, 0, 200
#: The messages that the rules were written with.
OWN = Path(__file__).resolve().parents[1] / "tests" / "diagnosis" / "signatures.jsonl"
SUBSTRINGS = ("out of memory", "cuda out of memory", "oom", "memory allocation failed", "allocation failed")
_NAMES = ("device_total_gib", "allocated_gib", "reserved_gib", "tried_gib")


@dataclass(frozen=True)
class Score:
    """One excerpt's marks.

    Attributes:
        name: Its id.
        label: Its label.
        found: What was found, as JSON.
        ambiguous: Whether its text does not decide.
        kind: Whether kind, ``oom`` and ``recovered`` are right; None where the label names no kind.
        cause: Whether the cause is; None where the label names none.
        phase: Whether the phase is; None where the label knows none.
        figures: Whether all that the label names are exact; None where it names none.
        substring: What the rule of substrings says.
    """

    name: str
    label: dict[str, Any]
    found: dict[str, Any]
    ambiguous: bool
    kind: bool | None
    cause: bool | None
    phase: bool | None
    figures: bool | None
    substring: bool


def score(excerpt: dict[str, Any]) -> Score:
    """The marks of one excerpt."""
    label, text = excerpt.get("label") or excerpt["want"], excerpt["text"]
    if (kind := label.get("kind")) is not None:
        label = {"oom": kind != "none"} | label
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        found = diagnose(path).to_dict()
    right = all(found[name] == label[name] for name in ("oom", "recovered", "kind") if name in label)
    ambiguous = excerpt.get("notes", "").startswith("AMBIGUOUS")
    if ambiguous:
        right = found["kind"] == label["kind"] or found["cause"] == "killed"
    return Score(
        excerpt.get("id") or excerpt["name"],
        label,
        found,
        ambiguous,
        None if kind is None else right,
        found["cause"] == label["cause"] if "cause" in label else None,
        None if label.get("phase", "unknown") == "unknown" else found["phase"] == label["phase"],
        all(_same(found[name], label[name]) for name in named) if (named := label.keys() & set(_NAMES)) else None,
        any(word in text.lower() for word in SUBSTRINGS),
    )


def _same(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return abs(found - expected) <= max(2e-4, 1e-3 * expected)


def summarize(scores: Sequence[Score]) -> dict[str, Any]:
    """Counts and shares of all marks."""
    clear = [one for one in scores if not one.ambiguous and one.kind is not None]
    caused = [one for one in scores if one.cause is not None]
    known = [one for one in scores if one.phase is not None]
    sized = [one for one in scores if one.figures is not None]
    healthy = [one for one in clear if not one.label["oom"]]
    alarms = [one for one in healthy if one.found["oom"]]
    totals = Counter(one.label["kind"] for one in clear)
    hits = Counter(one.label["kind"] for one in clear if one.kind)
    silent = [one for one in scores if one.label.get("phase") == "unknown"]
    marks = [(one.name, (one.kind, one.cause, one.phase, one.figures)) for one in scores]
    return {
        "kinds": {kind: [hits[kind], totals[kind]] for kind in sorted(totals)},
        "kind": [sum(bool(one.kind) for one in clear), len(clear)],
        "cause": [sum(bool(one.cause) for one in caused), len(caused)],
        "phase": [sum(bool(one.phase) for one in known), len(known)],
        "phase_unknown": [sum(one.found["phase"] == "unknown" for one in silent), len(silent)],
        "figures": [sum(bool(one.figures) for one in sized), len(sized)],
        "false_oom": [len(alarms), len(healthy)],
        "false_oom_interval": wilson_interval(len(alarms), len(healthy)),
        "ambiguous": [sum(bool(one.kind) for one in scores if one.ambiguous), sum(one.ambiguous for one in scores)],
        "substrings": [sum(one.substring == one.label["oom"] for one in clear), len(clear)],
        "substrings_false_oom": [sum(one.substring for one in healthy), len(healthy)],
        "wrong": [name for name, of_one in marks if False in of_one],
    }


def verdicts(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each thing asked, and whether it is met."""

    asked = []
    for name, text, least in (
        ("kind", "kind right", KINDS),
        ("cause", "cause right", KINDS),
        ("phase", "phase right", PHASES),
        ("figures", "figures exact", FIGURES),
    ):
        hits, total = found[name]
        if total:
            asked.append((f"{text} in {hits / total:.1%} of {total} (asked: {least:.0%})", hits / total >= least))
    false, healthy = found["false_oom"]
    asked.append((f"false 'out of memory': {false} of {healthy} (asked: {FALSE_ALARMS})", false <= FALSE_ALARMS))
    if "stream" in found:
        peak = found["stream"]["peak_mib"]
        asked.append(
            (f"a log of {found['stream']['gb']} GB in {peak:.0f} MiB (asked: {STREAM_MIB})", peak < STREAM_MIB)
        )
    return asked


def stream(gigabytes: float, folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of diagnosing a log of that size whose cause stands in its middle."""
    path = folder / "large.log"
    block = "".join(f"step {at} loss 0.{at:05d} lr 1e-4 data 0.01 s mem 71.2 GB eta 3:12:00\n" for at in range(20000))
    count = max(2, int(gigabytes * 1e9 / len(block)))
    with open(path, "wb") as file:
        for at in range(count):
            file.write(block.encode())
            if at == count // 2:
                file.write(b'Traceback (most recent call last):\n  File "train.py", line 7, in train\n')
                file.write(b"    loss.backward()\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    start = time.perf_counter()
    diagnosis: Diagnosis = diagnose(path)
    seconds = time.perf_counter() - start
    size = path.stat().st_size
    path.unlink()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"gb": round(size / 1e9, 2), "seconds": round(seconds, 1), "peak_mib": peak, "kind": diagnosis.kind}


def report(found: dict[str, Any]) -> str:
    """The table for people."""
    lines = [] if not found["is_own"] else [f"The messages that the rules were written with: {OWN}", ""]
    lines += [f"{'kind':20} {'right':>6} {'of':>4}"]
    lines += [f"{kind:20} {hits:6} {total:4}" for kind, (hits, total) in found["kinds"].items()]
    low, high = found["false_oom_interval"]
    lines += [
        "",
        f"false 'out of memory': {found['false_oom'][0]} of {found['false_oom'][1]} (95 %: {low:.1%} to {high:.1%})",
        f"phase 'unknown' where the label knows none: {found['phase_unknown'][0]} of {found['phase_unknown'][1]}",
        f"ambiguous, label or 'killed, sender unknown': {found['ambiguous'][0]} of {found['ambiguous'][1]}",
        f"five substrings: out of memory or not right in {found['substrings'][0]} of {found['substrings'][1]},"
        f" false 'out of memory' {found['substrings_false_oom'][0]} of {found['substrings_false_oom'][1]}",
    ]
    if "stream" in found:
        lines.append(
            "large log: {gb} GB in {seconds} s, peak {peak_mib:.0f} MiB, found {kind}".format(**found["stream"])
        )
    if found["wrong"]:
        lines.append(f"not all right: {', '.join(found['wrong'])}")
    return "\n".join([*lines, "", *(f"{'met   ' if met else 'MISSED'} {text}" for text, met in verdicts(found))])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 when everything asked is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--corpus", type=Path, default=OWN, help="labelled logs; by default the rules' own messages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stream-gb", type=float, default=0.0)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the large log")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {"is_own": options.corpus == OWN}
    if options.stream_gb > 0:  # first, so that the peak is its own
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            found["stream"] = stream(options.stream_gb, Path(folder))
    excerpts = [json.loads(line) for line in options.corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    found |= summarize([score(excerpt) for excerpt in excerpts])
    print(json.dumps(found, indent=1) if options.json else report(found))
    return 0 if all(met for _, met in verdicts(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
