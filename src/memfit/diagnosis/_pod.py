"""Read what Kubernetes says of a pod: ``kubectl get pod -o json`` or ``-o yaml``. ``describe`` is read as a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream
from memfit.errors import ConfigError
from memfit.units import format_bytes, format_count, parse_bytes

POD = "kubernetes"
#: What the kubelet says of a volume that grew over its ``sizeLimit``. Source: pkg/kubelet/eviction, Kubernetes 1.31.
_VOLUME = re.compile(r'[Uu]sage of EmptyDir volume "(?P<name>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"')
_OVER_DISK = ("ephemeral-storage", "ephemeral local storage", "nodefs", "imagefs", "DiskPressure")
_SIGKILL = 137


def read_pods(stream: Stream) -> list[Sign] | None:
    """Return how the containers of the pods in a text ended; None if it is no status of a pod."""
    lines = stream.lines
    if not any("containerStatuses" in line.text or "podIP" in line.text for line in lines):
        return None
    try:  # JSON is YAML too
        found = YAML(typ="safe", pure=True).load("\n".join(line.text for line in lines))
    except (YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    items = _list(found, "items") if "items" in found else [found]  # a list of pods, or one
    pods = [one for one in items if one.get("kind", "Pod") == "Pod"]
    return [sign for pod in pods for sign in _signs(pod, lines)] if pods else None


def _part(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = found.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    part = found.get(name)
    return [one for one in part if isinstance(one, Mapping)] if isinstance(part, list) else []


def _signs(pod: Mapping[str, Any], lines: Sequence[Line]) -> Iterator[Sign]:
    spec, status, name = _part(pod, "spec"), _part(pod, "status"), _part(pod, "metadata").get("name", "")
    values: dict[str, Any] = {"node": spec.get("nodeName"), "who": "the kubelet"}
    if status.get("reason") == "Evicted":
        message = str(status.get("message") or "")
        volume, volumes = _VOLUME.search(message), _list(spec, "volumes")
        in_memory = [one.get("name") for one in volumes if _part(one, "emptyDir").get("medium") == "Memory"]
        of_disk = volume or any(word in message for word in _OVER_DISK)
        heading = "shm" if volume and volume["name"] in in_memory else "disk_full" if of_disk else "global_kill"
        values |= {"limit_bytes": size} if volume and (size := _bytes(volume["limit"])) else {}
        line = _line(lines, "Evicted", f"pod {name}: Evicted: {message}")
        yield Sign(heading, (line,), values, emitter=POD)
    given = {str(one.get("name")): one for kind in ("initContainers", "containers") for one in _list(spec, kind)}
    found = [one for kind in ("initContainerStatuses", "containerStatuses") for one in _list(status, kind)]
    for one in sorted(found, key=lambda one: [*given, str(one.get("name"))].index(str(one.get("name")))):
        ends = (_part(_part(one, state), "terminated") for state in ("state", "lastState"))
        end = next((end for end in ends if _heading(end)), None)
        if end is None:
            continue
        limits = _part(_part(given.get(str(one.get("name")), {}), "resources"), "limits")
        limit = _bytes(str(limits.get("memory") or ""))
        text = f"container {one.get('name')} of pod {name}: {end.get('reason')}, exit code {end.get('exitCode')}"
        text += f", finished {end['finishedAt']}" if end.get("finishedAt") else ""
        text += f", {format_count(one.get('restartCount') or 0, 'restart')}"
        text += f", limit {format_bytes(limit)} of the container" if limit else ", no limit of memory"
        own = values | {"who": "the kernel"} | ({"limit_bytes": limit} if limit else {})
        yield Sign(_heading(end), (_line(lines, str(end.get("reason")), text),), own, emitter=POD)


def _heading(end: Mapping[str, Any]) -> str:
    return "cgroup_kill" if end.get("reason") == "OOMKilled" else "killed" if end.get("exitCode") == _SIGKILL else ""


def _bytes(text: str) -> int | None:
    """Return a quantity of Kubernetes in bytes.

    >>> _bytes("32Gi") == 32 << 30, _bytes("500M"), _bytes("134217728"), _bytes("1.5G"), _bytes("half")
    (True, 500000000, 134217728, 1500000000, None)
    """
    with suppress(ConfigError):
        return None if text.endswith("m") else parse_bytes(f"{text}B")
    return None


def _line(lines: Sequence[Line], word: str, text: str) -> Line:
    """Return what was read, at the first line that has a word of it."""
    first = next((line for line in lines if word in line.text), lines[0])
    return Line(first.file, first.number, text)
