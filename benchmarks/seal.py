"""What a seal costs: a checkpoint of 8 GiB written and forced to disk, sealed, and checked before it is loaded.

    python benchmarks/seal.py [--gib 8] [--files 1] [--folder DIR] [--json FILE]

The peer is the same writing with ``fsync`` and no seal, in turns with it. It needs twice the size on the disk of
``--folder``, and 64 MiB of memory beside the page cache. Exit status 0: a seal costs at most as much again as writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from memfit.training import SealedFolder

_CHUNK_BYTES = 64 << 20


def write(folder: Path, num_bytes: int, num_files: int) -> None:
    """Write a checkpoint's files, without forcing them to disk."""
    chunk = os.urandom(_CHUNK_BYTES)
    for number in range(num_files):
        with open(folder / f"part_{number}.bin", "wb") as file:
            for _ in range(num_bytes // num_files // _CHUNK_BYTES):
                file.write(chunk)


def force(folder: Path) -> None:
    """Force the files to disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the checkpoint")
    parser.add_argument("--files", type=int, default=1, help="in so many files")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, in turns")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the temporary one)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    num_bytes = int(args.gib * (1 << 30))
    root = Path(tempfile.mkdtemp(dir=args.folder))
    found: dict[str, list[float]] = {"written, forced to disk": [], "written, sealed": [], "checked by its seal": []}
    try:
        for _ in range(args.rounds):
            plain = root / "plain"
            plain.mkdir()
            began = time.monotonic()
            write(plain, num_bytes, args.files)
            force(plain)
            found["written, forced to disk"].append(time.monotonic() - began)
            shutil.rmtree(plain)
            folder = SealedFolder(root / "sealed")
            began = time.monotonic()
            write(folder.begin(1), num_bytes, args.files)
            folder.seal(1, {})
            found["written, sealed"].append(time.monotonic() - began)
            began = time.monotonic()
            assert folder.newest() is not None
            found["checked by its seal"].append(time.monotonic() - began)
            shutil.rmtree(root / "sealed")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in medians.items():
        print(f"{name:26} {seconds:7.1f} s  {num_bytes / seconds / 1e9:6.2f} GB/s")
    ratio = medians["written, sealed"] / medians["written, forced to disk"]
    print(f"with a seal: {ratio:.2f} times the time of writing ({args.gib:g} GiB in {args.files} files)")
    if args.json:
        args.json.write_text(json.dumps({"seconds": found, "ratio": ratio, "gib": args.gib, "files": args.files}))
    return 0 if ratio <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
