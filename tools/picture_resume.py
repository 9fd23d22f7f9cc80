"""The picture of a resume: a training of transformers, killed at step 730, goes on to the same bytes.

    python tools/picture_resume.py [--svg FILE]

`examples/huggingface/train.py` runs three times under `memfit run`: killed with SIGKILL once step 730 is saved; again,
by the same command; and in another folder without a kill. What is drawn is what the commands printed, without the lines
between the first and the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

EXAMPLE = Path("examples/huggingface/train.py")
PICTURE = Path("docs/resume.svg")
COMMAND = ["memfit", "run", "--", "python", "train.py"]
KILL_AFTER_STEP = 730
_HASH = "SHA-256 of the weights"
_COLUMNS = 104
_STEP = re.compile(r"step \d+/\d+  loss ")
_NUM_STEPS_SHOWN = 2


class Killer(threading.Thread):
    """Sends SIGKILL to the job of a run once a checkpoint of it is sealed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.ended = folder, threading.Event()

    def run(self) -> None:
        seal = self.folder / "out" / f"checkpoint-{KILL_AFTER_STEP}" / "SEAL.json"
        while not seal.exists() and not self.ended.is_set():
            time.sleep(0.001)
        for status in self.folder.glob("runs/train/*/jobs/*/status.json") if seal.exists() else ():
            os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)


def start(folder: Path) -> list[str]:
    """Give the command in a folder; return the lines that it printed."""
    words = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        COMMAND, cwd=folder, env=os.environ | {"PATH": words}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.stdout.splitlines()


def shorten(lines: Sequence[str], folder: Path) -> list[str]:
    """Return the lines without those between the first and the last steps, and without the folder's path."""
    steps = [place for place, line in enumerate(lines) if _STEP.match(line)]
    left_out = range(steps[_NUM_STEPS_SHOWN], steps[-_NUM_STEPS_SHOWN])
    found = [line.replace(f"{folder}/", "") for place, line in enumerate(lines) if place not in left_out]
    found.insert(left_out.start, "...")
    while found and not found[-1]:
        found.pop()
    return [line for line, before in zip(found, ["", *found], strict=False) if line or before]


def hash_of(lines: Sequence[str]) -> str:
    return next((line.partition(": ")[2] for line in lines if line.startswith(_HASH)), "")


def draw(console: Console, title: str) -> str:
    """Return what a console shows as a picture that needs no font from elsewhere."""
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


def show(console: Console, prompt: str, lines: Sequence[str]) -> None:
    console.print(Text(f"$ {prompt}", style="bold green"))
    for line in lines:
        is_hash, is_kill = line.startswith(_HASH), "SIGKILL" in line
        style = "bold" if is_hash else "red" if is_kill else "cyan" if "begins after step" in line else ""
        console.print(Text(line, style=style, no_wrap=True, overflow="ellipsis"))
    console.print()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--svg", type=Path, help=f"draw the terminal into this file, such as {PICTURE}")
    options = parser.parse_args()
    console = Console(width=_COLUMNS, record=True, force_terminal=True)
    with tempfile.TemporaryDirectory() as place:
        killed, whole = Path(place) / "killed", Path(place) / "whole"
        for folder in (killed, whole):
            folder.mkdir()
            shutil.copy(EXAMPLE, folder)
        killer = Killer(killed)
        killer.start()
        first = start(killed)
        killer.ended.set()
        killer.join()
        show(console, " ".join(COMMAND), shorten(first, killed))
        second = start(killed)
        show(console, " ".join(COMMAND), shorten(second, killed))
        third = start(whole)
        unbroken = [line for line in third if line.startswith(_HASH)]
        show(console, f"cd ../whole; {' '.join(COMMAND)} | tail -1  # never killed", unbroken)
    if options.svg:
        options.svg.write_text(draw(console, "killed, and the same command again"))
    is_same = hash_of(second) == hash_of(third) != "" and not hash_of(first)
    print("the same bytes" if is_same else "OTHER BYTES")
    return int(not is_same)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
