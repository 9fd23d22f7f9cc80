"""Write down what filled the memory when an allocation failed: the flight record, one JSON file per failure."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.files import write_json
from memfit.masking import mask
from memfit.memory import Budget, TreeMeter, read_heap
from memfit.rundir import current_run, record
from memfit.training._exactness import place
from memfit.training._oom import OomKind, device_bytes

MAX_RECORDS = 200
_MAX_SNAPSHOTS = 5
_MAX_TENSORS = 30
_MAX_TEXT = 8000
_NUM_EVENTS = 20
_TAIL_BYTES = 1 << 14
_RECORD_NAME = re.compile(r"oom_(\d+)\.json")


def record_oom(text: str, kind: OomKind, *, model: Any, optimizer: Any, where: Mapping[str, Any]) -> None:
    first_line = text.partition("\n")[0]
    size = f", microbatch size {where['microbatch_size']}" if where.get("microbatch_size") else ""
    told = f"is out of {kind} memory in phase {where.get('phase')}, {place(where)}{size}: {first_line}"
    record("oom", memory=str(kind), error=first_line, **where, text=told)
    path = write_flight_record(text, kind, model=model, optimizer=optimizer, where=where)
    if path is not None:
        record("flight_record", file=path.name, **where)


def write_flight_record(
    error_text: str,
    kind: OomKind,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    where: Mapping[str, Any],
) -> Path | None:
    """Write what is alive now as ``oom_<n>.json`` into the job's folder of the run. The largest tensors are those that
    Python knows: what autograd saved for itself is the difference to a device's ``allocated_bytes``. It never raises,
    and returns None if nothing was written."""
    try:
        if (current := current_run()) is None:
            return None
        folder = current[0].job_dir(current[1])
        taken = [int(found[1]) for path in folder.iterdir() if (found := _RECORD_NAME.fullmatch(path.name))]
        number = max(taken, default=0) + 1
        if number > MAX_RECORDS:
            return None
        if len(error_text) > _MAX_TEXT:
            error_text = f"{error_text[: _MAX_TEXT // 2]}\n...\n{error_text[-_MAX_TEXT // 2 :]}"
        content = {
            "time": time.time(),
            "pid": os.getpid(),
            "kind": str(kind),
            "error": mask(error_text),
            "where": dict(where),
            "devices": _or_reason(device_bytes),
            "host": _or_reason(_host),
            "tensors": _or_reason(lambda: _largest_tensors(_owners(model, optimizer))),
            "limits": _or_reason(lambda: Budget.read().to_dict()["limits"]),
            "events": _or_reason(lambda: _last_events(current[0].events_dir)),
        }
        path = folder / f"oom_{number}.json"
        write_json(path, content, durable=False)
        if number <= _MAX_SNAPSHOTS and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            snapshot = folder / f"oom_{number}_snapshot.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        return path
    except Exception:  # a record that cannot be written must not end a training that can go on
        return None


def _or_reason(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return f"not read: {type(error).__name__}: {error}"


def _host() -> dict[str, int]:
    """Return the bytes of this process and its children (loader workers), and of this process's heap."""
    sample = TreeMeter(os.getpid()).sample()
    names = ("num_processes", "private_bytes", "pss_bytes", "rss_bytes") if sample is not None else ()
    return {**{name: getattr(sample, name) for name in names}, **read_heap()}


def _owners(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[tuple[str, int], str]:
    """Return what each storage belongs to, by its device and address."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owned: list[tuple[str, Any]] = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    for name, parameter in model.named_parameters():
        owned += [(f"parameter {name}", parameter), (f"gradient {name}", parameter.grad)]
    for key, state in optimizer.state.items() if optimizer is not None else ():
        name = names.get(id(key), "of a parameter outside the model")
        owned += [(f"optimizer {what} {name}", value) for what, value in state.items()]
    return {place: name for name, tensor in owned if (place := _storage(tensor)) is not None}


def _storage(tensor: Any) -> tuple[str, int] | None:
    """Return where a tensor's bytes lie; None if it has none, as on ``meta``, or is no tensor."""
    if not issubclass(type(tensor), torch.Tensor):  # isinstance() would ask foreign objects for their __class__
        return None
    try:
        pointer = tensor.untyped_storage().data_ptr()
        return (str(tensor.device), pointer) if pointer else None
    except Exception:  # a subclass, a fake or a half-made tensor may refuse in any way; the others are still told
        return None


def _largest_tensors(owners: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Return all living storages by device, and the largest; equal ones without an owner are one line."""
    seen: set[tuple[str, int]] = set()
    groups: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    totals: dict[str, int] = {}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    for tensor in (one for one in objects if type(one) in kinds):
        key = _storage(tensor)
        if key is None or key in seen:
            continue
        try:
            num_bytes = int(tensor.untyped_storage().nbytes())
            shape = tuple(int(size) for size in tensor.shape)
        except Exception:  # of a traced tensor a size may be a symbol
            continue
        seen.add(key)
        totals[key[0]] = totals.get(key[0], 0) + num_bytes
        group = (owners.get(key, "other"), key[0], shape, str(tensor.dtype).removeprefix("torch."))
        groups.setdefault(group, []).append(num_bytes)
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:_MAX_TENSORS]
    return {
        "num_tensors": len(seen),
        "tensors_bytes": totals,
        "largest": [
            {"owner": owner, "device": device, "shape": shape, "dtype": dtype, "count": len(sizes), "bytes": sum(sizes)}
            for (owner, device, shape, dtype), sizes in largest
        ],
    }


def _last_events(events_dir: Path) -> list[dict[str, Any]]:
    lines: list[bytes] = []
    for path in sorted(events_dir.glob(f"{socket.gethostname()}-{os.getpid()}-*.jsonl")):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines += file.read().splitlines()
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")][-_NUM_EVENTS:]
