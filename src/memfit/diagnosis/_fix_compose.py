"""Correct a Compose file by edits of single lines: comments, order and anchors stay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from memfit.checks import Check
from memfit.diagnosis._fix import Draft, Fix
from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies import list_remedies, wanted_request, with_figures, write_size
from memfit.errors import ConfigError, UsageError
from memfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis

_RULE = "--fix changes services of a Compose file that are written in blocks, one key per line."


def fix_compose(path: Path, diagnosis: Diagnosis, job: Job) -> Fix:
    """Return the corrected file; unchanged if the diagnosis asks for nothing that it sets.

    Raises:
        UsageError: It is no Compose file, or no line of evidence names one of its services.
    """
    text, name, service = _read(path, diagnosis)
    draft = Draft(text.splitlines())
    known = with_figures(_limits(service).with_known(job), diagnosis)
    wanted = wanted_request(known) if diagnosis.kind == "host_cgroup" else None
    if wanted is not None and wanted[0] > (known.request_bytes or 0):
        size = write_size(wanted[0], ("g", "m"))
        _set(draft, service, "mem_limit", size, wanted[1], _limit_node(service))
    for remedy in list_remedies(diagnosis, known):
        if remedy.helps and diagnosis.kind == "shm" and "shm_size" in remedy.setting:
            size = remedy.setting.partition("shm_size: ")[2].partition(" ")[0]
            _set(draft, service, "shm_size", size, remedy.reason)
        elif remedy.helps and remedy.setting.startswith("export PYTORCH"):
            variable, _, value = remedy.setting.removeprefix("export ").partition("=")
            _set_env(draft, service, variable, value, remedy.reason)
    new = draft.text(lambda reason, line: f"{line[: len(line) - len(line.lstrip())]}# memfit: {reason}")
    return Fix(path, new if draft.edits else text, tuple(draft.edits), tuple(_checks(path, new, name)))


def job_of_compose(path: Path, diagnosis: Diagnosis) -> Job:
    """Return the limits of the service that died; nothing if the file does not show them."""
    try:
        return _limits(_read(path, diagnosis)[2])
    except UsageError:
        return Job()


def _read(path: Path, diagnosis: Diagnosis) -> tuple[str, str, yaml.MappingNode]:
    """The file's text, and the service that died: the only one, the one in the evidence, or the only one limited."""
    try:
        text = path.read_text(encoding="utf-8")
        services = _get(yaml.compose(text, Loader=yaml.SafeLoader), "services")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.", rule=_RULE, remedy="name the file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        remedy = "docker compose config shows the fault"
        raise UsageError(f"{path}: is no YAML: {error}", rule=_RULE, remedy=remedy) from error
    pairs = services.value if isinstance(services, yaml.MappingNode) else []
    found = {str(key.value): one for key, one in pairs if isinstance(one, yaml.MappingNode)}
    found = {name: node for name, node in found.items() if not node.flow_style and node.value}
    if not found:
        what = f"{path}: has no services that are written in blocks."
        raise UsageError(what, rule=_RULE, remedy="name the Compose file")
    evidence = " ".join(one.text for one in diagnosis.evidence)
    named = [name for name in found if name in evidence]
    limited = [name for name, node in found.items() if _limit_node(node) is not None]
    name = next((one[0] for one in (list(found), named, limited) if len(one) == 1), None)
    if name is None:
        raise UsageError(
            f"{path}: has {len(found)} services ({', '.join(found)}), and no line of evidence names one of them.",
            rule="only the service that died is changed.",
            remedy="give a log that names its container, or a file with that service alone",
        )
    return text, name, found[name]


def _get(node: Any, *names: str) -> Any:
    """The node below some keys; None without one."""
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for key, value in pairs if key.value == name), None)
    return node


def _limit_node(service: yaml.MappingNode) -> Any:
    return _get(service, "deploy", "resources", "limits", "memory") or _get(service, "mem_limit")


def _limits(service: yaml.MappingNode) -> Job:
    return Job(request_bytes=_size(_limit_node(service)), shm_bytes=_size(_get(service, "shm_size")))


def _size(node: Any) -> int | None:
    """A size of Compose, where kb, mb and gb count in 1024s too."""
    try:
        return parse_bytes(node.value.lower().removesuffix("b")) if isinstance(node, yaml.ScalarNode) else None
    except ConfigError:
        return None


def _set(draft: Draft, mapping: yaml.MappingNode, key: str, value: str, reason: str, node: Any = None) -> None:
    """Replace the value of a key, or add the key before the first one."""
    node = node or _get(mapping, key)
    mark = mapping.value[0][0].start_mark
    if isinstance(node, yaml.ScalarNode):
        draft.replace(node.start_mark.line, node.start_mark.column, node.end_mark.column, value, reason)
    elif node is None and not mapping.flow_style:
        draft.insert(mark.line - 1, f"{' ' * mark.column}{key}: {value}", reason)


def _set_env(draft: Draft, service: yaml.MappingNode, name: str, value: str, reason: str) -> None:
    environment = _get(service, "environment")
    if environment is None:
        indent = " " * (service.value[0][0].start_mark.column + 2)
        _set(draft, service, "environment", f'\n{indent}{name}: "{value}"', reason)
    elif isinstance(environment, yaml.MappingNode):
        _set(draft, environment, name, f'"{value}"', reason)
    elif isinstance(environment, yaml.SequenceNode) and environment.value and not environment.flow_style:
        old = next((one for one in environment.value if one.value.startswith(f"{name}=")), None)
        start = (old or environment.value[0]).start_mark
        if old is not None:
            draft.replace(start.line, start.column, old.end_mark.column, f"{name}={value}", reason)
        else:
            draft.insert(start.line - 1, f"{draft.lines[start.line][: start.column]}{name}={value}", reason)


def _checks(path: Path, text: str, name: str) -> list[Check]:
    """Whether the new text is what was meant."""
    try:
        service = yaml.safe_load(text)["services"][name]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        what = f"{path}: could not be changed: {error}"
        raise UsageError(what, rule=_RULE, remedy="change it by the remedies") from error
    found = [Check("service", "ok", f"{name} is the service that died", "only it is changed")]
    shm, limit = service.get("shm_size"), service.get("mem_limit")
    if shm and limit:
        sizes = [parse_bytes(str(one).lower().removesuffix("b")) for one in (shm, limit)]
        said = f"/dev/shm of {format_bytes(sizes[0])} within a limit of {format_bytes(sizes[1])}"
        is_good = sizes[0] < sizes[1]
        found.append(Check("/dev/shm", "ok" if is_good else "problem", said, "files there count towards the limit"))
    return found
