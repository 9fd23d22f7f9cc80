"""Strike a training at a named point: by a signal, a disk that refuses, or a folder that is already there."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit_conformance._task import Options, digest

_SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL, "INT": signal.SIGINT, "USR1": signal.SIGUSR1}


@dataclass(frozen=True)
class Strike:
    """Where a run is struck, and by what.

    Attributes:
        point: The name of the point.
        step: The optimizer steps that were made by then; None: any number of them.
        nth: The visits to that point, at that step, before the one that is struck.
        action: A signal to the process (``TERM``, ``KILL``, ``INT``, ``USR1``), ``stop`` (the signal of the
            combination), ``GROUP`` (SIGTERM to the process group, from outside), ``WORKER`` (SIGKILL to a worker),
            ``ENOSPC`` or ``EACCES`` (the write fails), ``FOLDER`` (a folder with a foreign file is there already).
    """

    point: str
    step: int | None = 7
    nth: int = 0
    action: str = "stop"


class Trace:
    """Write what a run does to a file, line by line, and strike it."""

    def __init__(self, path: Path, folder: Path, options: Options, strikes: tuple[Strike, ...]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._process = os.getpid()
        self._folder, self._options = folder, options
        self._left = list(strikes)
        self._visits: Counter[tuple[str, int]] = Counter()
        self.position: Callable[[], int] = lambda: 0
        self._at = 0
        self.has_begun = False

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    def begin_batch(self) -> None:
        """Note that a micro-batch of the step under way begins."""
        self._at, self.has_begun = self.position(), True
        self.reach("batch")

    def end_batch(self, batch: dict[str, torch.Tensor], loss: Any) -> None:
        """Write what a micro-batch was, and its loss."""
        seen = digest(batch["input_ids"], batch["labels"])[:16]
        self.write("batch", step=self._at, ids=batch["ids"].tolist(), inputs=seen, loss=repr(float(loss.detach())))

    def end(self, *states: Any) -> None:
        """Write the hash of weights, optimizer and schedule."""
        self.write("end", step=self.position(), hash=digest(*states))

    def reach(self, point: str) -> None:
        """Strike here if a strike is due."""
        if os.getpid() != self._process:  # a worker
            return
        step = self.position()
        visit = self._visits[point, step]
        self._visits[point, step] += 1
        for strike in list(self._left):
            if strike.point == point and strike.step in (None, step) and strike.nth == visit:
                self._left.remove(strike)
                self.write("struck", point=point, step=step)
                self._act(self._options.signal if strike.action == "stop" else strike.action)

    def _act(self, action: str) -> None:
        if action == "GROUP":
            _signal_group_from_outside()
        elif action == "WORKER":
            worker = multiprocessing.active_children()[0]
            os.kill(int(worker.pid or 0), signal.SIGKILL)
        elif action in ("ENOSPC", "EACCES"):
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))
        elif action == "FOLDER":
            for name in ("checkpoint-10", "step-10", "step_20"):
                (self._folder / name).mkdir(exist_ok=True)
                (self._folder / name / "left.txt").write_text("from another time")
        else:
            os.kill(os.getpid(), _SIGNALS[action])


def _signal_group_from_outside() -> None:
    """Send SIGTERM to this process and its workers from a process that is not their parent, as Slurm does."""
    group = os.getpgid(0)
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        os.killpg(group, signal.SIGTERM)
        os._exit(0)
    while True:
        with contextlib.suppress(InterruptedError):
            os.waitpid(child, 0)
            break
    time.sleep(0.1)  # the workers' deaths, if they die, come before the next batch


def install(trace: Trace) -> None:
    """Let the points that belong to no framework be reached: in torch, in what writes files, and in workers."""
    _after(multiprocessing.process.BaseProcess, "start", trace, "worker started")
    _before(torch, "load", trace, "load")
    _before(torch.Tensor, "backward", trace, "backward")
    _everywhere(torch.nn.utils, "clip_grad_norm_", lambda real: _hooked(real, trace, before="clip"))
    _before(torch.optim.AdamW, "_init_group", trace, "in optimizer")
    register_optimizer_step_pre_hook(lambda *_: trace.reach("optimizer"))
    register_optimizer_step_post_hook(lambda *_: trace.reach("schedule"))
    _after(torch.optim.lr_scheduler.LRScheduler, "step", trace, "counter")
    _after(torch, "save", trace, "file", before="write")
    import safetensors.torch

    _everywhere(safetensors.torch, "save_file", lambda real: _hooked(real, trace, before="write", after="file"))
    _before(os, "fsync", trace, "fsync")
    _before(shutil, "rmtree", trace, "removal")
    _before(os, "remove", trace, "removal")
    replace = os.replace

    def sealing(source: Any, target: Any, **options: Any) -> None:
        is_seal = Path(target).name == "SEAL.json"
        if is_seal:
            trace.reach("seal")
        replace(source, target, **options)
        if is_seal:
            trace.reach("sealed")

    os.replace = sealing


def watch_model(net: torch.nn.Module, trace: Trace) -> None:
    """Let the points within a model's passes be reached."""
    next(net.parameters()).register_hook(lambda _: trace.reach("in backward"))

    def forward(module: torch.nn.Module, _: Any) -> None:
        is_tried = not trace.has_begun or not torch.is_grad_enabled()
        trace.reach("evaluation" if not module.training else "rehearsal" if is_tried else "forward")

    net.register_forward_pre_hook(forward)


def _hooked(real: Any, trace: Trace, *, before: str = "", after: str = "") -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if before:
            trace.reach(before)
        found = real(*args, **kwargs)
        if after:
            trace.reach(after)
        return found

    return hooked


def _before(holder: Any, name: str, trace: Trace, point: str) -> None:
    setattr(holder, name, _hooked(getattr(holder, name), trace, before=point))


def _after(holder: Any, name: str, trace: Trace, point: str, before: str = "") -> None:
    setattr(holder, name, _hooked(getattr(holder, name), trace, after=point, before=before))


def _everywhere(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change a function in each module that has imported it by name."""
    real = getattr(module, name)
    changed = change(real)
    for one in list(sys.modules.values()):
        for known in (name, f"safe_{name}"):
            if getattr(one, "__dict__", {}).get(known) is real:
                setattr(one, known, changed)
