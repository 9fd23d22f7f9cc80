"""How often `memfit diagnose` names the right cause of excerpts that people have labelled, beside a rule of substrings.

    python benchmarks/diagnosis.py [--corpus FILE] [--json FILE] [--stream-gb 2]

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

from harness import parser, print_table, told, write_json
from memfit.diagnosis import Diagnosis, diagnose

#: What is asked: shares of kinds and phases, of figures, the false alarms, and the memory of a large log in MiB.
KINDS, PHASES, FIGURES, FALSE_ALARMS, STREAM_MIB = 0.95, 0.90, 1.0, 0, 200
#: The messages that the rules were written with.
OWN = Path(__file__).resolve().parents[1] / "tests" / "diagnosis" / "signatures.jsonl"
SUBSTRINGS = ("out of memory", "cuda out of memory", "oom", "memory allocation failed", "allocation failed")
_NAMES = ("device_total_gib", "allocated_gib", "reserved_gib", "tried_gib")


@dataclass(frozen=True)
class Score:
    """One excerpt's marks; a mark is None where the label names nothing of it."""

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
    """The marks of one excerpt; of an ambiguous one the text does not decide."""
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
    def count(name: str, chosen: Sequence[Score] = scores) -> list[int]:
        marks = [getattr(one, name) for one in chosen if getattr(one, name) is not None]
        return [sum(marks), len(marks)]

    clear = [one for one in scores if not one.ambiguous and one.kind is not None]
    healthy = [one for one in clear if not one.label["oom"]]
    alarms = sum(one.found["oom"] for one in healthy)
    totals = Counter(one.label["kind"] for one in clear)
    hits = Counter(one.label["kind"] for one in clear if one.kind)
    silent = [one for one in scores if one.label.get("phase") == "unknown"]
    return {
        "kinds": {kind: [hits[kind], totals[kind]] for kind in sorted(totals)},
        "kind": count("kind", clear),
        "cause": count("cause"),
        "phase": count("phase"),
        "phase_unknown": [sum(one.found["phase"] == "unknown" for one in silent), len(silent)],
        "figures": count("figures"),
        "false_oom": [alarms, len(healthy)],
        "ambiguous": count("kind", [one for one in scores if one.ambiguous]),
        "substrings": [sum(one.substring == one.label["oom"] for one in clear), len(clear)],
        "substrings_false_oom": [sum(one.substring for one in healthy), len(healthy)],
        "wrong": [one.name for one in scores if False in (one.kind, one.cause, one.phase, one.figures)],
    }


def verdicts(found: dict[str, Any]) -> list[tuple[bool, str]]:
    asked = []
    for name, text, least in (
        ("kind", "kind right", KINDS),
        ("cause", "cause right", KINDS),
        ("phase", "phase right", PHASES),
        ("figures", "figures exact", FIGURES),
    ):
        hits, total = found[name]
        if total:
            asked.append((hits / total >= least, f"{text} in {hits / total:.1%} of {total} (asked: {least:.0%})"))
    false, healthy = found["false_oom"]
    asked.append((false <= FALSE_ALARMS, f"false 'out of memory': {false} of {healthy} (asked: {FALSE_ALARMS})"))
    if "stream" in found:
        peak, size = found["stream"]["peak_mib"], found["stream"]["gb"]
        asked.append((peak < STREAM_MIB, f"a log of {size} GB in {peak:.0f} MiB (asked: {STREAM_MIB})"))
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


def report(found: dict[str, Any]) -> None:
    print(f"The messages that the rules were written with: {OWN}\n" if found["is_own"] else "")
    print_table([("kind", "right", "of"), *((kind, *counts) for kind, counts in found["kinds"].items())])
    texts = {
        "phase_unknown": "\nphase 'unknown' where the label knows none",
        "ambiguous": "ambiguous, label or 'killed, sender unknown'",
        "substrings": "five substrings: out of memory or not right",
        "substrings_false_oom": "five substrings: false 'out of memory'",
    }
    for name, text in texts.items():
        print("{}: {} of {}".format(text, *found[name]))
    if "stream" in found:
        print("large log: {gb} GB in {seconds} s, peak {peak_mib:.0f} MiB, found {kind}".format(**found["stream"]))
    if found["wrong"]:
        print(f"not all right: {', '.join(found['wrong'])}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 when everything asked is met."""
    options = parser(__doc__)
    options.add_argument("--corpus", type=Path, default=OWN, help="labelled logs; by default the rules' own messages")
    options.add_argument("--stream-gb", type=float, default=0.0)
    options.add_argument("--scratch", type=Path, default=None, help="folder for the large log")
    args = options.parse_args(argv)
    found: dict[str, Any] = {"is_own": args.corpus == OWN}
    if args.stream_gb > 0:  # first, so that the peak is its own
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            found["stream"] = stream(args.stream_gb, Path(folder))
    excerpts = [json.loads(line) for line in args.corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    found |= summarize([score(excerpt) for excerpt in excerpts])
    report(found)
    write_json(args.json, found)
    asked = [told(is_met, text) for is_met, text in verdicts(found)]
    return 0 if all(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
