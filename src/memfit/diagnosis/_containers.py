"""What container runtimes, Kubernetes and Ray say of a death, as documents and tables; parsed purely.

``OOMKilled: true`` proves the container's own limit. ``false`` rules nothing out: podman 4.3 on cgroup v1 writes it
beside exit code 137 while the kernel's log holds the kill in that very container (measured); and an exit code of 137
alone is any SIGKILL. Kubernetes writes OOMKilled beside exit code 1 when a child was killed and its parent gave up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.diagnosis._facts import Fact, FactKind
from memfit.diagnosis._kernel_log import KernelKill
from memfit.diagnosis._text import Line
from memfit.units import GIB, KIB, MIB, TIB

_SIGKILL_CODE = 137


@dataclass(frozen=True)
class ContainerEnd:
    """The end of a container, or of a pod that was thrown off its node.

    Attributes:
        who: ``Docker``, ``podman``, ``Kubernetes``.
        name: As written.
        id: In full, where it is told.
        reason: ``OOMKilled``, ``Evicted``, ``Error`` ...; empty when not told.
        oom_killed: What the runtime says; None when it does not say. False rules nothing out.
        exit_code: As written; None while it runs.
        limit_bytes: The container's memory limit; None without one, or when not told.
        restarts: How often it was started again.
        message: What was said of it.
        line: Where it stands.
    """

    who: str
    name: str
    id: str = ""
    reason: str = ""
    oom_killed: bool | None = None
    exit_code: int | None = None
    limit_bytes: int | None = None
    restarts: int = 0
    message: str = ""
    line: Line | None = None


def parse_quantity(text: str) -> int | None:
    """Bytes of a quantity of Kubernetes; None for none.

    >>> parse_quantity("25Mi"), parse_quantity("500M"), parse_quantity("1e3"), parse_quantity("x")
    (26214400, 500000000, 1000, None)
    """
    factors = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?(?:[eE]\d{1,2})?)([mkMGT]?|[KMGT]i)", str(text).strip())
    return round(float(found[1]) * factors[found[2]]) if found else None


def parse_documents(text: str, file: str = "-") -> list[ContainerEnd]:
    """The containers in JSON: ``docker inspect``, ``podman inspect``, ``kubectl get pod -o json``, their events.

    >>> parse_documents('[{"Id": "ab", "Name": "/train", "State": {"OOMKilled": true, "ExitCode": 137}}]')[0].name
    'train'
    """
    found: list[ContainerEnd] = []
    for number, document in _documents(text):
        for one in document if isinstance(document, list) else [document]:
            if isinstance(one, dict):
                found += _one(one, Line(file, number, ""), text)
    return found


def _documents(text: str) -> Iterator[tuple[int, Any]]:
    try:
        yield 1, json.loads(text)
        return
    except ValueError:
        pass
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip()[:1] in ("{", "["):
            try:
                yield number, json.loads(line)
            except ValueError:
                continue


def _one(one: Mapping[str, Any], at: Line, text: str) -> Iterator[ContainerEnd]:
    if isinstance(one.get("State"), dict) and "ExitCode" in one["State"]:
        yield _inspected(one, at, text)
    elif one.get("kind") == "List" or "items" in one:
        for item in one.get("items") or []:
            yield from _one(item, at, text)
    elif isinstance(one.get("status"), dict):
        yield from _pod(one, at, text)
    elif one.get("Action") or one.get("Status") or isinstance(one.get("status"), str):
        yield from _event_document(one, at)
    elif one.get("kind") == "Event" and one.get("reason") in _REASONS:
        name = str((one.get("involvedObject") or {}).get("name", ""))
        message = str(one.get("message", ""))
        line = Line(at.file, at.number, f"{one['reason']}: {message}")
        yield ContainerEnd("Kubernetes", name, reason=str(one["reason"]), message=message, line=line)


def _inspected(one: Mapping[str, Any], at: Line, text: str) -> ContainerEnd:
    state, host = one["State"], one.get("HostConfig") or {}
    killed = state.get("OOMKilled")
    number, _ = _where(text, '"OOMKilled"', at.number)
    said = f'"OOMKilled": {str(killed).lower()}, "ExitCode": {state.get("ExitCode")}'
    who = "podman" if "OciVersion" in state or "Rootfs" in one else "Docker"
    return ContainerEnd(
        who,
        str(one.get("Name", "")).lstrip("/"),
        str(one.get("Id", "")),
        "OOMKilled" if killed else "",
        bool(killed) if killed is not None else None,
        None if state.get("Running") else int(state.get("ExitCode") or 0),
        int(host.get("Memory") or 0) or None,
        int(one.get("RestartCount") or 0),
        str(state.get("Error") or ""),
        Line(at.file, number, said),
    )


def _pod(one: Mapping[str, Any], at: Line, text: str) -> Iterator[ContainerEnd]:
    status, name = one["status"], str((one.get("metadata") or {}).get("name", ""))
    if status.get("reason") in _REASONS:
        number, said = _where(text, f'"reason": "{status["reason"]}"', at.number)
        message = str(status.get("message", ""))
        yield ContainerEnd(
            "Kubernetes", name, reason=status["reason"], message=message, line=Line(at.file, number, said)
        )
    limits = {
        container.get("name"): ((container.get("resources") or {}).get("limits") or {}).get("memory", "")
        for container in (one.get("spec") or {}).get("containers") or []
    }
    for container in status.get("containerStatuses") or []:
        for which in ("state", "lastState"):
            ended = (container.get(which) or {}).get("terminated")
            if not ended:
                continue
            reason = str(ended.get("reason", ""))
            number, said = _where(text, f'"reason": "{reason}"', at.number)
            yield ContainerEnd(
                "Kubernetes",
                f"{name}/{container.get('name')}",
                str(container.get("containerID", "")).rpartition("//")[2],
                reason,
                reason == "OOMKilled" or None,
                ended.get("exitCode"),
                parse_quantity(limits.get(container.get("name")) or ""),
                int(container.get("restartCount") or 0),
                str(ended.get("message", "")),
                Line(at.file, number, said or f"{which}: {reason}"),
            )


def _event_document(one: Mapping[str, Any], at: Line) -> Iterator[ContainerEnd]:
    actor = one.get("Actor") or {}
    attributes = actor.get("Attributes") or one.get("Attributes") or {}
    verb = str(one.get("Action") or one.get("Status") or one.get("status"))
    name = str(attributes.get("name") or one.get("Name") or "")
    number = str(attributes.get("exitCode") or one.get("ContainerExitCode") or "")
    who = "podman" if "Status" in one else "Docker"
    if verb in _VERBS:
        yield ContainerEnd(
            who,
            name,
            str(actor.get("ID") or one.get("ID") or one.get("id") or ""),
            "OOMKilled" if verb == "oom" else "",
            True if verb == "oom" else None,
            int(number) if number.isdigit() else None,
            line=Line(at.file, at.number, f"container {verb} {name}"),
        )


def _where(text: str, words: str, number: int) -> tuple[int, str]:
    """The line of a document in which words stand."""
    at = text.find(words)
    if at < 0 and '": ' in words:
        words = words.replace('": ', '":')
        at = text.find(words)
    if at < 0:
        return number, words
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    said = text[start : end if end >= 0 else len(text)].strip()
    return text.count("\n", 0, at) + 1, said if len(said) < 400 else words


_VERBS = ("oom", "die", "died", "kill")
_REASONS = ("OOMKilled", "OOMKilling", "Evicted", "SystemOOM", "NodeLost", "Preempting", "Preempted")
_EVENT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ][\d:.]+\S*(?: [+-]\d{4} \w+)?) "
    r"container (?P<verb>oom|died?|kill) (?P<id>[0-9a-f]{12,64})(?: \((?P<rest>.*)\))?"
)
_FIELD = re.compile(r"^(?P<indent> *)(?P<key>[A-Z][\w /]*?):(?:\s+(?P<value>\S.*))?$")
_CONTAINER = re.compile(r"^(?P<indent> {2,})(?P<name>[a-z0-9][a-z0-9.-]*):\s*$")
_POD_ROW = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]+)\s+\d+/\d+\s+(?P<reason>OOMKilled|Evicted)\s+(?P<restarts>\d+)")
_POD_EVENT = re.compile(r"(?:Warning|Normal)\s+(?P<reason>OOMKilling|Evicted|SystemOOM|Preempt\w+)\s+(?P<rest>\S.*)")


def parse_lines(lines: Sequence[Line]) -> list[ContainerEnd]:
    """The containers in text: ``docker events``, ``kubectl get pods``, ``kubectl describe pod`` and its events.

    >>> parse_lines([Line("-", 1, "trainer-x7   0/1   OOMKilled   1   10s")])[0].reason
    'OOMKilled'
    """
    found: list[ContainerEnd] = []
    for line in lines:
        if match := _EVENT.search(line.text):
            fields = dict(re.findall(r"(\w+)=([^,)]*)", match["rest"] or ""))
            is_oom, code = match["verb"] == "oom", fields.get("exitCode") or fields.get("containerExitCode") or ""
            number = int(code) if code.isdigit() else None
            said = ("OOMKilled" if is_oom else "", True if is_oom else None, number)
            who = "podman" if match["verb"] == "died" else "Docker"
            found.append(ContainerEnd(who, fields.get("name", ""), match["id"], *said, line=line))
        elif match := _POD_ROW.search(line.text):
            reason, restarts = match["reason"], int(match["restarts"])
            killed = reason == "OOMKilled" or None
            found.append(ContainerEnd("Kubernetes", match["name"], "", reason, killed, restarts=restarts, line=line))
        elif match := _POD_EVENT.search(line.text):
            found.append(ContainerEnd("Kubernetes", "", reason=match["reason"], message=match["rest"], line=line))
    return [*found, *_described(lines)]


class _Described:
    """What was read of ``kubectl describe pod`` so far.

    Attributes:
        top: The pod's own Name, Status, Reason and Message, with their lines.
        ends: The states that say Terminated, now and last.
    """

    def __init__(self) -> None:
        self.top: dict[str, tuple[str, Line]] = {}
        self.ends: list[dict[str, Any]] = []
        self._container = self._state = self._block = ""

    def read(self, line: Line) -> None:
        """Take from a line what it says."""
        if named := _CONTAINER.match(line.text):
            self._container, self._state = named["name"], ""
        elif (limit := re.match(r"\s+memory:\s+(\S+)", line.text)) and self._block == "Limits":
            for end in self.ends:
                if end["container"] == self._container:
                    end["limit"] = parse_quantity(limit[1])
        elif match := _FIELD.match(line.text):
            self._block = match["key"]
            if not match["indent"]:
                self.top.setdefault(match["key"], (match["value"] or "", line))
                self._state = ""
            else:
                self._field(match["key"], match["value"] or "", line)

    def _field(self, key: str, value: str, line: Line) -> None:
        if key in ("State", "Last State"):
            self._state = value
            if value == "Terminated":
                self.ends.append({"container": self._container, "line": line})
        elif self._state == "Terminated" and key in ("Reason", "Exit Code", "Message"):
            self.ends[-1].setdefault(key, value)
            if key == "Reason":
                self.ends[-1]["line"] = line
        elif key == "Restart Count":
            for end in self.ends:
                end.setdefault("restarts", value)


def _described(lines: Sequence[Line]) -> Iterator[ContainerEnd]:
    """The states of ``kubectl describe pod``: now and last, each with its reason, code and the container's limit."""
    found = _Described()
    for line in lines:
        found.read(line)
    pod = found.top["Name"][0] if "Name" in found.top else ""
    if found.top.get("Reason", ("", None))[0] in _REASONS:
        reason, where = found.top["Reason"]
        message = found.top["Message"][0] if "Message" in found.top else ""
        yield ContainerEnd("Kubernetes", pod, reason=reason, message=message, line=where)
    for end in found.ends:
        reason, code, restarts = (str(end.get(key, "")) for key in ("Reason", "Exit Code", "restarts"))
        yield ContainerEnd(
            "Kubernetes",
            "/".join(filter(None, (pod, end["container"]))),
            "",
            reason,
            reason == "OOMKilled" or None,
            int(code) if code.isdigit() else None,
            end.get("limit"),
            int(restarts) if restarts.isdigit() else 0,
            str(end.get("Message", "")),
            end["line"],
        )


def container_facts(ends: Sequence[ContainerEnd], kills: Sequence[KernelKill] = (), index: int = 0) -> list[Fact]:
    """What each end says.

    An eviction for memory is the node's shortage, one for disk is none; OOMKilling in a pod's events is the
    container's own limit.

    Args:
        ends: The containers.
        kills: What the kernel's log tells, which knows better than a flag that is false.
        index: The number of the stream.
    """
    found = []
    for end in ends:
        if end.line is None:
            continue
        values: dict[str, Any] = {"who": end.who, "name": end.name, "id": end.id, "exit_code": end.exit_code}
        if end.limit_bytes:
            values["limit_bytes"] = end.limit_bytes
        kill = next((kill for kill in kills if end.id and _is_in(kill, end.id)), None)
        kind = _kind_of(end)
        if kill is not None and kind == "sigkill":
            kind = "global_kill" if kill.scope == "global" else "cgroup_kill"
        if kind == "cgroup_kill":
            values["who"] = f"the limit of a container of {end.who}'s"
        elif kind == "global_kill":
            values["who"] = "the kubelet" if kill is None else "the kernel"
        if kind:
            lines = (end.line, *(kill.lines[:1] if kill else ()))
            found.append(Fact(kind, lines, values, index, end.line.number - 1))
    return found


def _is_in(kill: KernelKill, container: str) -> bool:
    inside = kill.owner.get("container", "")
    return bool(inside) and inside[:12] == container[:12]


def _kind_of(end: ContainerEnd) -> FactKind | None:
    if end.oom_killed or end.reason in ("OOMKilled", "OOMKilling"):
        return "cgroup_kill"
    if end.reason == "SystemOOM" or (end.reason == "Evicted" and re.search(r"\bmemory\b", end.message)):
        return "global_kill"
    if end.reason == "Evicted" and re.search(r"ephemeral-storage|disk|inodes", end.message):
        return "disk_full"
    if end.reason.startswith("Preempt"):
        return "preempted"
    if end.reason == "NodeLost":
        return "node_fail"
    if end.exit_code == _SIGKILL_CODE:
        return "sigkill"
    return "success" if end.exit_code == 0 and end.who != "Kubernetes" else None


_RAY = re.compile(
    r"where the (?:task|actor|lease) ?(?:\((?P<what>.*?)\))? ?was running was "
    r"(?P<used>\d{1,9}(?:\.\d+)?)GB / (?P<total>\d{1,9}(?:\.\d+)?)GB \([\d.]+\)"
    r"(?:, which exceeds the memory usage threshold of (?P<share>\d+(?:\.\d+)?))?"
)
_USER = re.compile(r"^\s*(?P<pid>\d+)\s+(?P<size>\d{1,9}\.\d+)\s+(?P<command>\S.*)$")
