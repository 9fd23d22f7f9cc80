"""Commands that burst, leak and fill /dev/shm under one real memory.max: none is killed, and every result is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

from memfit.memory import JobGroup
from vm.guest.groups import MIB, events, groups_below, made_group

# Takes so many MiB at once, little by little, or as a file in /dev/shm; then reads all of it, and prints the sum.
TAKES = """
import pathlib, sys, time
kind, mib = sys.argv[1].split()
mib = int(mib)
piece = bytes(range(256)) * 4096
if kind == "shm":
    path = pathlib.Path("/dev/shm", f"check-map-{mib}")
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(piece)
    with path.open("rb") as file:
        held = [file.read(1)[0] + len(file.read((1 << 20) - 1)) for _ in range(mib)]
    path.unlink()
else:
    pieces = []
    for _ in range(mib):
        pieces.append(bytearray(piece))
        time.sleep(0.02 if kind == "leak" else 0)
    held = [one[0] + len(one) - 1 for one in pieces]
time.sleep(1)
print(kind, mib, sum(held))
"""
JOBS = [("burst", 90), ("leak", 90), ("shm", 40)]
LIMIT_BYTES = 288 * MIB


def test_commands_that_take_more_than_they_say_and_there_is_all_complete_and_none_is_killed(tmp_path):
    jobs = ",".join(f"{kind} {mib}" for kind, mib in JOBS)
    options = ["--param", f"job={jobs}", "--memory", "40MiB", "--reserve", "64MiB"]
    words = ["run", *options, "--", sys.executable, "-c", TAKES]
    shared_before = sorted(Path("/dev/shm").iterdir())
    with made_group(memory_max=LIMIT_BYTES) as group:
        result = subprocess.run(
            [sys.executable, "-m", "memfit", *words, "{job}"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            preexec_fn=JobGroup(group, 2).enter,
        )
        counted = events(group)
        left = groups_below(group)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (counted["oom"], counted["oom_kill"]) == (0, 0)
    assert left == []
    written = [path.read_text() for path in tmp_path.glob("runs/*/*/events/*.jsonl")]
    met = [event for text in written for event in map(json.loads, text.splitlines()) if event["kind"] == "grow"]
    assert met, "no job met its wall: the test shows nothing"
    lines = sorted(path.read_text() for path in tmp_path.glob("runs/*/*/jobs/*/out.log"))
    assert lines == sorted(f"{kind} {mib} {mib * ((1 << 20) - 1)}\n" for kind, mib in JOBS)
    assert sorted(Path("/dev/shm").iterdir()) == shared_before
