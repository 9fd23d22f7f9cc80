"""What the jobs of a study report: numbers after each epoch, from events, and a command's last line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from memfit.files import fits, parse_json
from memfit.pipeline import Watcher
from memfit.rundir import Event
from memfit.tuning._settings import NUMBER


class Reports(Watcher):
    """What the jobs of a run reported so far, from its events."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.values: dict[str, dict[int, float]] = defaultdict(dict)
        self.trainers: dict[str, Event] = {}
        self.shrunk: dict[str, str] = {}

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event, str(event.get("job")))

    def _take(self, event: Event, job: str) -> None:
        kind = event["kind"]
        if kind == "trainer":
            self.trainers[job] = event
        elif kind in ("oom", "rollback"):
            self.shrunk[job] = str(event.get("text") or event.get("error") or "")
        found: tuple[Any, Any] = (None, None)
        if kind == "report" and event.get("name") == self._name:
            found = event.get("step"), event.get("value")
        elif kind == "epoch" and self._name in event:
            found = event.get("epoch"), event[self._name]
        if fits(found[0], int) and found[0] >= 0 and type(found[1]) in (int, float):
            self.values[job][found[0]] = float(found[1])


def read_number(line: str, name: str) -> float | None:
    """Return a number from a line: of a JSON object, behind its name, or alone.

    >>> read_number('{"loss": 0.25}', "loss"), read_number("epoch 3 loss: 2.5e-1", "loss"), read_number("0.25", "loss")
    (0.25, 0.25, 0.25)
    >>> read_number("done", "loss") is None
    True
    """
    try:
        found = parse_json(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        found = found.get(name)
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    match = re.search(rf"\b{re.escape(name)}\b\W{{0,3}}?\s*({NUMBER})", line)
    return float(match[1]) if match else None
