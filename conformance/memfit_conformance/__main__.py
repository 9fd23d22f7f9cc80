"""``python -m memfit_conformance huggingface|lightning|accelerate [--with-memfit]``, or ``table FILE...``."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FRAMEWORKS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


def main(words: Sequence[str] | None = None) -> int:
    """Run the moments and print what differs; return the exit status."""
    parser = argparse.ArgumentParser("memfit_conformance", description=__doc__)
    parser.add_argument("framework", choices=[*FRAMEWORKS, "table"])
    parser.add_argument("files", nargs="*", type=Path, help="of table: results that --json wrote")
    parser.add_argument("--with-memfit", action="store_true", help="train by memfit.integrations, exact")
    parser.add_argument("--moments", default="", help="such as 7,18-27; all by default")
    parser.add_argument("--plain", action="store_true", help="a collator that draws nothing, in place of random masks")
    parser.add_argument("--pairwise", action="store_true", help="each moment with pairs of the other dimensions")
    parser.add_argument("--processes", type=int, default=2, help="rows at the same time")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args(words)
    if given.framework == "table":
        from memfit_conformance._report import markdown

        print(markdown([json.loads(file.read_text()) for file in given.files]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _measure(given)
    except KeyboardInterrupt:
        return 130


def _measure(given: argparse.Namespace) -> int:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # two threads that spin take 20 s where other processes run too
    for name in ("torch._dynamo", "transformers.trainer"):  # optimizers and models import them: once, for all runs
        importlib.import_module(name)
    importlib.import_module(f"memfit_conformance.{given.framework}")
    versions = {name: importlib.metadata.version(name) for name in (FRAMEWORKS[given.framework], "torch")}
    if given.with_memfit:
        importlib.import_module(f"memfit.integrations.{given.framework}")
        versions["memfit"] = importlib.metadata.version("memfit")
    versions |= {"python": platform.python_version()}
    rows = list(_rows(given))
    gc.collect()
    gc.freeze()  # else each run collects what was imported, and so copies it
    place = Path(tempfile.mkdtemp(prefix="memfit-conformance-"))
    try:
        found = _run_all(rows, place, given.processes)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    results = {"framework": given.framework, "versions": versions, "rows": found}
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    from memfit_conformance._report import print_table

    print_table(results, Console())
    return int(given.with_memfit and not all(one["is_good"] for one in found))


def _rows(given: argparse.Namespace) -> Iterator[Any]:
    from memfit_conformance._combinations import DIMENSIONS, pairwise
    from memfit_conformance._moments import MOMENTS
    from memfit_conformance._runs import Row
    from memfit_conformance._task import Options

    wanted = set(_numbers(given.moments))
    moments = [one for one in MOMENTS if not wanted or int(one.number.rstrip("bcd")) in wanted]
    combinations = [{"moment": one, "masks": not given.plain} for one in moments]
    if given.pairwise:
        combinations = pairwise({"moment": moments, **DIMENSIONS})
    for one in combinations:
        moment = one.pop("moment")
        options = replace(Options(), **(one.pop("loading", {}) | one))
        yield Row(given.framework, given.with_memfit, moment, replace(options, **moment.options))


def _numbers(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _run_all(rows: Sequence[Any], place: Path, processes: int) -> list[Any]:
    """Run the unbroken trainings, then the rows; return the results in their order."""
    from memfit_conformance._runs import Cell, as_json

    references: dict[Any, Any] = {}  # by options
    found: list[Any] = []
    jobs = []
    for number, row in enumerate(rows):
        if row.moment.is_run(row.framework, row.with_memfit):
            reference = row.reference()
            job = (reference, place / f"reference-{len(references)}", None)
            _, path, _ = references.setdefault(reference.options, job)
            jobs.append((row, place / f"row-{number}", path))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        _work(list(references.values()), processes, progress, "unbroken trainings")
        _work(jobs, processes, progress, "rows")
    for number, row in enumerate(rows):
        file = place / f"row-{number}" / "cell.json"
        if file.exists():
            found.append(json.loads(file.read_text()))
        else:
            why = row.moment.why_absent(row.framework, row.with_memfit)
            found.append(as_json(row, Cell(f"not there: {why}" if why else "suite: no result", bool(why), [])))
    return found


def _work(jobs: Sequence[Any], processes: int, progress: Progress, what: str) -> None:
    """Do the jobs in forked processes, so many at a time; at an interrupt, end them and what they started."""
    left, alive = list(jobs), set()
    task = progress.add_task(what, total=len(jobs))
    try:
        while left or alive:
            while left and len(alive) < processes:
                job = left.pop(0)
                process = os.fork()
                if process == 0:
                    _job(*job)
                alive.add(process)
            ended, _ = os.wait()
            if ended in alive:
                alive.remove(ended)
                progress.advance(task)
    finally:
        for process in alive:
            os.kill(process, signal.SIGTERM)
        for process in alive:
            os.waitpid(process, 0)


def _job(row: Any, place: Path, reference: Path | None) -> None:
    """Do one row and write its cell; never return."""
    import pickle

    from memfit_conformance._runs import as_json, run_row

    code = 1
    try:
        os.setpgid(0, 0)  # a Ctrl-C at the terminal reaches the process that started this one, which ends it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        unbroken = None if reference is None else pickle.loads((reference / "run").read_bytes())
        cell, runs = run_row(row, place, unbroken)
        if reference is None:
            (place / "run").write_bytes(pickle.dumps(runs[-1]))
        else:
            (place / "cell.json").write_text(json.dumps(as_json(row, cell)))
            shutil.rmtree(place / "out", ignore_errors=True)
        code = 0
    except SystemExit:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
