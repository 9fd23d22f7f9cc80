"""Stop or lose one of several ranks in ``DistributedDataParallel``, start all again, and compare with an unbroken run.

``python -m memfit_conformance.ranks FRAMEWORK... [--with-memfit] [--sizes 2,4]``. A row is good if each
rank saw the same samples, inputs and losses in each step, and ends with the same hash of all states.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from memfit_conformance._runs import Run
from memfit_conformance._strike import Strike, Trace, install
from memfit_conformance._task import Options

#: So long one run may take, in seconds.
LIMIT = 120
#: What strikes rank 1, and the options that it needs. With 48 samples a rank an epoch has 6 steps.
MOMENTS = {
    "SIGTERM in mid epoch": (Strike("batch", 8, 1, "TERM"), {}),
    "SIGKILL in mid epoch": (Strike("batch", 11, 1, "KILL"), {}),
    "SIGKILL at an epoch's end": (Strike("epoch end", 6, 0, "KILL"), {}),
    "SIGKILL in an evaluation": (Strike("evaluation", 6, 0, "KILL"), {"evaluate": "epoch"}),
    "SIGKILL in a save": (Strike("file", 10, 0, "KILL"), {}),
}


def main() -> int:
    """Print a table of Markdown; return 1 if memfit's result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=["huggingface", "lightning", "accelerate"])
    parser.add_argument("--with-memfit", action="store_true")
    parser.add_argument("--sizes", default="2,4")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("torch._dynamo", "transformers.trainer"):  # optimizers and models import them: once, for all runs
        importlib.import_module(name)
    is_good = True
    print("| framework | ranks | moment, of rank 1 | ends | after the next start |\n|---|---|---|---|---|")
    for framework in given.frameworks:
        module = importlib.import_module(f"memfit_conformance.{framework}")
        if given.with_memfit:
            importlib.import_module(f"memfit.integrations.{framework}")
        gc.collect()
        gc.freeze()  # else each rank collects what was imported, and so copies it
        for size in map(int, given.sizes.split(",")):
            unbroken: dict[Options, Sequence[Run]] = {}
            for name, (strike, more) in MOMENTS.items():
                options = Options(samples=48 * size, **more)
                if options not in unbroken:
                    with tempfile.TemporaryDirectory() as place:
                        unbroken[options] = _run(module, Path(place, "whole"), size, options, None, given.with_memfit)
                ends, text = _row(module, size, options, strike, given.with_memfit, unbroken[options])
                is_good &= text == "same"
                print(f"| {framework} | {size} | {name} | {', '.join(map(str, ends))} | {text} |", flush=True)
    return int(given.with_memfit and not is_good)


def _row(
    module: Any, size: int, options: Options, strike: Strike, with_memfit: bool, unbroken: Sequence[Run]
) -> tuple[list[int], str]:
    if any(one.exit_code for one in unbroken):
        return [one.exit_code for one in unbroken], f"the unbroken run failed: {unbroken[0].log}"
    with tempfile.TemporaryDirectory() as place:
        struck = _run(module, Path(place, "struck"), size, options, strike, with_memfit)
        resumed = _run(module, Path(place, "struck"), size, options, None, with_memfit)
    found = []
    for whole, first, last in zip(unbroken, struck, resumed, strict=True):
        if last.exit_code or not last.has("end"):
            found.append(f"crash: exit {last.exit_code}")
        elif first.batches() | last.batches() != whole.batches():
            found.append("samples or losses")
        elif last.lines[-1] != whole.lines[-1]:
            found.append("hash")
    return [one.exit_code for one in struck], ", ".join(dict.fromkeys(found)) or "same"


def _run(
    module: Any, folder: Path, size: int, options: Options, strike: Strike | None, with_memfit: bool
) -> Sequence[Run]:
    """Train on ranks that are forked from here; return what each did."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=folder.parent))
    processes = []
    for rank in range(size):
        if (process := os.fork()) == 0:
            _rank(module, place, folder, (rank, size), options, (strike,) if strike and rank == 1 else (), with_memfit)
        processes.append(process)
    runs = []
    for rank, process in enumerate(processes):
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        trace, log = place / f"trace-{rank}", place / f"log-{rank}"
        lines = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
        runs.append(Run(code, lines, log.read_text()[-500:], 0))
    return runs


def _rank(
    module: Any,
    place: Path,
    folder: Path,
    rank: tuple[int, int],
    options: Options,
    strikes: tuple[Strike, ...],
    with_memfit: bool,
) -> NoReturn:
    number, size = rank
    code = 1
    try:
        signal.alarm(LIMIT)
        log = os.open(place / f"log-{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        torch.set_num_threads(1)
        store = dist.FileStore(str(place / "store"), size)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        trace = Trace(place / f"trace-{number}", folder, options, strikes)
        install(trace)
        module.run(folder, options, trace, with_memfit)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
