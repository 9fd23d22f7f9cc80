"""Read what Kubernetes says of a pod: ``kubectl get pod -o json`` or ``-o yaml``, and ``kubectl describe pod``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream
from memfit.units import format_bytes, format_count

#: The emitter of its signs: advice is in the words of a manifest.
POD = "kubernetes"
_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][\w .-]*?):(?:\s+(?P<value>\S.*))?\s*$")
#: What the kubelet says of a volume that grew over its ``sizeLimit``. Source: pkg/kubelet/eviction, Kubernetes 1.31.
_VOLUME = re.compile(r'[Uu]sage of EmptyDir volume "(?P<name>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"')
_OVER_DISK = ("ephemeral-storage", "ephemeral local storage", "nodefs", "imagefs", "DiskPressure")
_SIGKILL = 137
#: What `kubectl describe` says of an end, by its names in the API.
_ENDS = {"Reason": "reason", "Exit Code": "exitCode", "Finished": "finishedAt"}


@dataclass
class _Container:
    """A container: its limit of memory as written, its restarts, and its ends, the last one first."""

    name: str
    limit: str = ""
    restarts: int = 0
    ends: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Pod:
    name: str = ""
    node: str | None = None
    reason: str = ""
    message: str = ""
    containers: dict[str, _Container] = field(default_factory=dict)
    in_memory: set[str] = field(default_factory=set)  # its volumes of medium Memory

    def container(self, name: str) -> _Container:
        return self.containers.setdefault(name, _Container(name))


def read_pods(stream: Stream) -> list[Sign] | None:
    """Return how the containers of the pods in a text ended; None if it is no status of a pod.

    A limit is that of the container, as ``limit_bytes``.
    """
    lines = stream.lines
    heads = [line.text for line in lines if line.text.strip()][:1]
    if any("containerStatuses" in line.text or "podIP" in line.text for line in lines):
        pods = _of_document("\n".join(line.text for line in lines))
    elif heads and re.match(r"Name:\s", heads[0]) and any(line.text.startswith("Containers:") for line in lines):
        pods = list(_of_description(lines))
    else:
        return None
    return [sign for pod in pods for sign in _signs(pod, lines)] if pods else None


def _of_document(text: str) -> list[_Pod]:
    """Read JSON, which is YAML too, or YAML: a pod, or a list of them."""
    try:
        found = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return []
    items = found.get("items", [found]) if isinstance(found, Mapping) else []
    return [_of_mapping(one) for one in items if isinstance(one, Mapping) and one.get("kind", "Pod") == "Pod"]


def _of_mapping(found: Mapping[str, Any]) -> _Pod:
    spec, status = _part(found, "spec"), _part(found, "status")
    pod = _Pod(str(_part(found, "metadata").get("name", "")), spec.get("nodeName"))
    pod.reason, pod.message = str(status.get("reason") or ""), str(status.get("message") or "")
    pod.in_memory = {
        str(one.get("name")) for one in _list(spec, "volumes") if _part(one, "emptyDir").get("medium") == "Memory"
    }
    for one in (*_list(spec, "initContainers"), *_list(spec, "containers")):
        limit = _part(_part(one, "resources"), "limits").get("memory")
        pod.container(str(one.get("name"))).limit = str(limit or "")
    for one in (*_list(status, "initContainerStatuses"), *_list(status, "containerStatuses")):
        container = pod.container(str(one.get("name")))
        container.restarts = one.get("restartCount") or 0
        ends = (_part(_part(one, name), "terminated") for name in ("state", "lastState"))
        container.ends = [dict(end) for end in ends if end]
    return pod


def _part(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = found.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(found: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [one for one in found.get(name) or [] if isinstance(one, Mapping)]


def _of_description(lines: Sequence[Line]) -> Iterator[_Pod]:
    """Read what ``kubectl describe pod`` prints, of one pod or several: keys, by their indent."""
    pod, section = _Pod(), ""
    path: list[str] = ["", ""]  # the container or volume, and the key below it
    for found in filter(None, (_KEY.match(line.text) for line in lines)):
        indent, key, value = len(found["indent"]), found["key"], found["value"] or ""
        if indent == 0:
            if key == "Name" and pod.name:
                yield pod
            if key == "Name":
                pod = _Pod(value)
            section, path = key, ["", ""]
            pod.node = value.partition("/")[0] or None if key == "Node" else pod.node
            pod.reason = value if key == "Reason" else pod.reason
            pod.message = value if key == "Message" else pod.message
        elif section in ("Containers", "Init Containers"):
            _read_container(pod, path, indent, key, value)
        elif section == "Volumes":
            path[0] = key if indent == 2 else path[0]
            pod.in_memory |= {path[0]} if (key, value) == ("Medium", "Memory") else set()
    yield pod


def _read_container(pod: _Pod, path: list[str], indent: int, key: str, value: str) -> None:
    """Take one line of a container; ``path`` names it, and the key that the line is below."""
    if indent == 2 and not value:
        path[:] = [key, ""]
        return
    if not path[0]:
        return
    container = pod.container(path[0])
    if indent == 4:
        path[1] = f"{key} {value}" if "State" in key else key
        container.ends += [{}] if value == "Terminated" else []
        container.restarts = int(value) if key == "Restart Count" and value.isdigit() else container.restarts
    elif path[1].endswith("Terminated") and key in _ENDS:
        container.ends[-1][_ENDS[key]] = int(value) if value.isdigit() else value
    elif path[1] == "Limits" and key == "memory":
        container.limit = value


def _signs(pod: _Pod, lines: Sequence[Line]) -> Iterator[Sign]:
    """Yield how the pod was evicted, and how each of its containers was killed last."""
    values: dict[str, Any] = {"node": pod.node, "who": "the kubelet"}
    if pod.reason == "Evicted":
        volume = _VOLUME.search(pod.message)
        name = "shm" if volume and volume["name"] in pod.in_memory else "disk_full" if volume else "global_kill"
        name = "disk_full" if any(word in pod.message for word in _OVER_DISK) else name
        values |= {"limit_bytes": size} if volume and (size := _bytes(volume["limit"])) else {}
        line = _line(lines, "Evicted", f"pod {pod.name}: Evicted: {pod.message}")
        yield Sign(name, (line,), values, emitter=POD)
    for one in pod.containers.values():
        end = next((end for end in one.ends if _heading(end)), None)
        if end is None:
            continue
        limit = _bytes(one.limit)
        text = f"container {one.name} of pod {pod.name}: {end.get('reason')}, exit code {end.get('exitCode')}"
        text += f", finished {end['finishedAt']}" if end.get("finishedAt") else ""
        text += f", {format_count(one.restarts, 'restart')}"
        text += f", limit {format_bytes(limit)} of the container" if limit else ", no limit of memory"
        own = {"who": "the kernel", "exit_code": end.get("exitCode"), "text": text}
        own |= {"limit_bytes": limit} if limit else {}
        yield Sign(_heading(end), (_line(lines, str(end.get("reason")), text),), values | own, emitter=POD)


def _heading(end: Mapping[str, Any]) -> str:
    """Return the heading of an end; empty for one that was no kill."""
    if end.get("reason") == "OOMKilled":
        return "cgroup_kill"
    return "killed" if end.get("exitCode") == _SIGKILL else ""


def _bytes(text: str) -> int | None:
    """Return a quantity of Kubernetes in bytes.

    >>> _bytes("32Gi") == 32 << 30, _bytes("500M"), _bytes("134217728"), _bytes("1.5G"), _bytes("half")
    (True, 500000000, 134217728, 1500000000, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMGTP]?)(i?)", text)
    if found is None:
        return None
    power = " KMGTP".index(found[2].upper() or " ")
    return round(float(found[1]) * float(1024 if found[3] else 1000) ** power)


def _line(lines: Sequence[Line], word: str, text: str) -> Line:
    """Return what was read, at the first line that has a word of it."""
    first = next((line for line in lines if word in line.text), lines[0])
    return Line(first.file, first.number, text)
