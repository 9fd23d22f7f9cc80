"""A corrected Compose file: line edits, so that comments, order and anchors stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memfit.checks import Check
from memfit.diagnosis._fix import Draft, Fix, refuse
from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies import list_remedies, wanted_request, with_figures, write_size
from memfit.errors import ConfigError, UsageError
from memfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis

_RULE = "--fix changes services of a Compose file that are written in blocks, a key a line."


def fix_compose(path: Path, diagnosis: Diagnosis, job: Job) -> Fix:
    """The corrected file; unchanged when the diagnosis asks for nothing that it says.

    Raises:
        UsageError: It cannot be read, is no Compose file, or has several services and no sign of which one died.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise refuse(path, f"cannot be read: {error.strerror}.", _RULE, "name the Compose file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refuse(path, f"is no YAML: {error}", _RULE, "docker compose config shows the fault") from error
    name, service = _service(path, root, diagnosis)
    draft = Draft(text.splitlines())
    known = with_figures(_limits(service).with_known(job), diagnosis)
    if diagnosis.kind == "host_cgroup":
        _set_memory(draft, service, known)
    for remedy in list_remedies(diagnosis, known):
        if not remedy.helps:
            continue
        if diagnosis.kind == "shm" and "shm_size" in remedy.setting:
            size = remedy.setting.partition("shm_size: ")[2].partition(" ")[0]
            _set(draft, service, "shm_size", size, remedy.reason)
        elif remedy.setting.startswith("export PYTORCH"):
            variable, _, value = remedy.setting.removeprefix("export ").partition("=")
            _set_env(draft, service, variable, value, remedy.reason)
    new = draft.text(lambda reason, line: f"{line[: len(line) - len(line.lstrip())]}# memfit: {reason}")
    return Fix(path, new if draft.edits else text, tuple(draft.edits), tuple(_checks(path, new, name)))


def job_of_compose(path: Path, diagnosis: Diagnosis) -> Job:
    """What the service that died may take; nothing where the file does not tell it."""
    try:
        _, service = _service(path, yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), diagnosis)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, UsageError):
        return Job()
    return _limits(service)


def _service(path: Path, root: Any, diagnosis: Diagnosis) -> tuple[str, yaml.MappingNode]:
    services = _get(root, "services")
    found = {
        str(key.value): node
        for key, node in (services.value if isinstance(services, yaml.MappingNode) else [])
        if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value
    }
    if not found:
        raise refuse(path, "has no services that are written in blocks.", _RULE, "name the Compose file")
    said = " ".join(one.text for one in diagnosis.evidence)
    named = [name for name in found if name in said]
    limited = [name for name, node in found.items() if _limit_node(node) is not None]
    chosen = next((one for one in (list(found), named, limited) if len(one) == 1), None)
    if chosen is None:
        raise refuse(
            path,
            f"has {len(found)} services ({', '.join(found)}), and no line of evidence names one of them.",
            "only the service that died is changed.",
            "give a log that names its container, or a file with that service alone",
        )
    return chosen[0], found[chosen[0]]


def _get(node: Any, *names: str) -> Any:
    """The node below some keys; None without one."""
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for key, value in pairs if key.value == name), None)
    return node


def _limit_node(service: yaml.MappingNode) -> Any:
    return _get(service, "deploy", "resources", "limits", "memory") or _get(service, "mem_limit")


def _limits(service: yaml.MappingNode) -> Job:
    """What the service may take now."""
    return Job(request_bytes=_bytes(_limit_node(service)), shm_bytes=_bytes(_get(service, "shm_size")))


def _bytes(node: Any) -> int | None:
    """A size as Compose writes it, where kb, mb and gb count in 1024s too."""
    text = str(node.value).lower().removesuffix("b") if isinstance(node, yaml.ScalarNode) else ""
    try:
        return parse_bytes(text) if text else None
    except ConfigError:
        return None


def _set_memory(draft: Draft, service: yaml.MappingNode, job: Job) -> None:
    wanted = wanted_request(job)
    if wanted is None or (job.request_bytes and wanted[0] <= job.request_bytes):
        return
    node, size = _limit_node(service), write_size(wanted[0], ("g", "m"))
    if isinstance(node, yaml.ScalarNode):
        _replace(draft, node, size, wanted[1])
    else:
        _add(draft, service, f"mem_limit: {size}", wanted[1])


def _set(draft: Draft, service: yaml.MappingNode, name: str, value: str, reason: str) -> None:
    node = _get(service, name)
    if isinstance(node, yaml.ScalarNode):
        _replace(draft, node, value, reason)
    elif node is None:
        _add(draft, service, f"{name}: {value}", reason)


def _set_env(draft: Draft, service: yaml.MappingNode, name: str, value: str, reason: str) -> None:
    environment = _get(service, "environment")
    if environment is None:
        _add(draft, service, f'environment:\n{{indent}}  {name}: "{value}"', reason)
    elif isinstance(environment, yaml.MappingNode):
        node = _get(environment, name)
        if node is not None:
            _replace(draft, node, f'"{value}"', reason)
        elif not environment.flow_style:
            _add(draft, environment, f'{name}: "{value}"', reason)
    elif isinstance(environment, yaml.SequenceNode):
        old = next((one for one in environment.value if str(one.value).startswith(f"{name}=")), None)
        if old is not None:
            _replace(draft, old, f"{name}={value}", reason)
        elif environment.value and not environment.flow_style:
            first = environment.value[0].start_mark
            indent = draft.lines[first.line][: first.column].replace("-", " ", 1)
            dash = draft.lines[first.line][: first.column]
            draft.insert(first.line - 1, f"{dash if '-' in dash else indent + '- '}{name}={value}", reason)


def _replace(draft: Draft, node: Any, value: str, reason: str) -> None:
    start, end = node.start_mark, node.end_mark
    draft.replace(start.line, start.column, end.column, value, reason)


def _add(draft: Draft, mapping: yaml.MappingNode, text: str, reason: str) -> None:
    """A key before the first of a mapping, as far in."""
    mark = mapping.value[0][0].start_mark
    indent = " " * mark.column
    draft.insert(mark.line - 1, indent + text.replace("{indent}", indent), reason)


def _checks(path: Path, text: str, name: str) -> list[Check]:
    """Whether the new text is what was meant."""
    try:
        service = yaml.safe_load(text)["services"][name]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise refuse(path, f"could not be changed: {error}", _RULE, "change it by the remedies") from error
    found = [Check("service", "ok", f"{name} is the service that died", "only it is changed")]
    shm, limit = service.get("shm_size"), service.get("mem_limit")
    if shm and limit:
        sizes = [parse_bytes(str(one).lower().removesuffix("b")) for one in (shm, limit)]
        good = sizes[0] < sizes[1]
        said = f"/dev/shm of {format_bytes(sizes[0])} within a limit of {format_bytes(sizes[1])}"
        found.append(Check("/dev/shm", "ok" if good else "problem", said, "what lies there counts towards the limit"))
    return found
