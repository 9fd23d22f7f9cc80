"""Real ranks for tests: forked from this process, so torch is there already, in a group of gloo."""

import gc
import hashlib
import multiprocessing
import os
import pickle
import signal
import traceback
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.optim.SGD([torch.zeros(1)])  # imports for seconds, once here and not on each rank


@dataclass
class End:
    """How a rank ended: its exit code (minus a signal's number), what the function returned, and what it raised."""

    code: int
    value: Any
    error: str


def run(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[End]:
    """Call ``function(rank, *arguments)`` on each rank; return how each ended."""
    store = str(folder / f"store-{uuid.uuid4().hex}")
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, store, sender, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    ends = []
    for receiver, process in zip(pipes, processes, strict=True):
        try:
            value, error = pickle.loads(receiver.recv_bytes())
        except EOFError:
            value, error = None, ""
        process.join(60)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        ends.append(End(process.exitcode, value, error))
    return ends


def values(ends: list[End]) -> list[Any]:
    """Return what the ranks returned; an error of one is an AssertionError here."""
    for rank, end in enumerate(ends):
        assert end.code == 0 and not end.error, f"rank {rank} ended with {end.code}\n{end.error}"
    return [end.value for end in ends]


def _rank(rank: int, size: int, store: str, sender: Any, function: Callable[..., Any], arguments: Any) -> None:
    gc.freeze()  # what an out-of-memory collects does not look through what was imported
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        sender.send_bytes(pickle.dumps((function(rank, *arguments), "")))
    except BaseException as error:
        sender.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
    sender.close()
    os._exit(0)


def digest(*states: Any) -> str:
    """The SHA-256 of all tensors and values."""
    sha = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(states):
        is_tensor = isinstance(leaf, torch.Tensor)
        sha.update(leaf.detach().contiguous().view(-1).numpy().tobytes() if is_tensor else repr(leaf).encode())
    return sha.hexdigest()
