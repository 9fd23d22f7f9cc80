"""A corrected Slurm script: only lines that the diagnosis or a contradiction asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.checks import Check
from memfit.diagnosis._batch_script import MEMORY, BatchScript, Setting, parse_script, read_script
from memfit.diagnosis._fix import Draft, Fix, refuse
from memfit.diagnosis._job import ACCUMULATE, BATCH, Job, bytes_of, job_of_script, twice_asked, whole
from memfit.diagnosis._remedies import list_remedies, with_figures
from memfit.diagnosis._remedies_host import slurm_size, wanted_request
from memfit.diagnosis._remedies_other import slurm_time, wanted_time
from memfit.units import GIB, format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis

_SIZE = re.compile(r"\d+[KMGTkmgt]?")
_ALLOCATOR = re.compile(r"export (PYTORCH\w*ALLOC_CONF)=(.+)")


def fix_script(path: Path, diagnosis: Diagnosis, job: Job, *, config: Mapping[str, Any] | None = None) -> Fix:
    """The corrected script; unchanged when the diagnosis asks for nothing that a script says.

    Raises:
        UsageError: It cannot be read, or asks Slurm for nothing.
    """
    script = read_script(path)
    if not script.directives and script.first_command is None:
        raise refuse(
            path,
            "has neither an #SBATCH line nor a command that starts a training.",
            "--fix corrects Slurm's batch scripts, and Compose files that end in .yaml or .yml.",
            "name the script that was given to sbatch",
        )
    asked = job_of_script(script)
    told = replace(asked, request_bytes=job.request_bytes).told_twice
    known = asked.with_known(with_figures(job, diagnosis))
    draft = Draft(list(script.lines))
    notes = [*_memory(script, draft, diagnosis, known, told)]
    _tasks(script, draft)
    _time(script, draft, diagnosis, known)
    if diagnosis.kind in ("gpu", "gpu_fragmentation", "other_accelerator"):
        notes += _device(script, draft, diagnosis, known, config)
    if diagnosis.kind == "shm":
        notes += _shm(script, draft, diagnosis, known)
    text = draft.text(lambda reason, line: f"# memfit: {reason}", script.command_of)
    fixed = replace(job_of_script(parse_script(text, path)), most_bytes=job.most_bytes)
    return Fix(path, text if draft.edits else _whole(script), tuple(draft.edits), (*check_script(fixed, text), *notes))


def _whole(script: BatchScript) -> str:
    return "\n".join(script.lines) + "\n"


def _set(script: BatchScript, draft: Draft, name: str, value: str, reason: str) -> None:
    """Give a directive another value, or add it behind the last one."""
    found = script.directives.get(name)
    if found is not None:
        draft.replace(found.line, found.start, found.end, value, reason)
        return
    last = max((one.line for one in script.directives.values()), default=0 if _has_shebang(script) else -1)
    draft.insert(last, f"#SBATCH --{name}={value}", reason)


def _has_shebang(script: BatchScript) -> bool:
    return bool(script.lines) and script.lines[0].startswith("#!")


def _memory(
    script: BatchScript, draft: Draft, diagnosis: Diagnosis, job: Job, told: tuple[int, int] | None
) -> Iterator[Check]:
    """What the step and the job ask for, where each says it; the job is never given less than before."""
    if told is not None:
        yield Check("memory", "warning", twice_asked(told), "the accounting is what was in force", "", "accounting")
    given = _without_others(script, draft)
    wanted = wanted_request(job) if diagnosis.kind == "host_cgroup" and diagnosis.cause != "limit_touched" else None
    most, now, limit = job.most_bytes, job.request_bytes, job.limit_bytes
    if wanted is not None and (limit is None or wanted[0] > limit):
        size, reason = wanted
        if most is not None and size > most:
            measured = job.node_bytes
            if measured is None or measured[0] > most:
                yield Check(
                    "memory",
                    "problem",
                    f"{slurm_size(size)} of each node is more than the {format_bytes(most)} that a node has",
                    reason,
                    "fewer tasks on a node, or a partition of larger nodes",
                    job.partition,
                )
                return
            size = most // GIB * GIB
            reason += f", but no node of {job.partition or 'the partition'} has more than {format_bytes(most)}"
        if job.step_bytes:
            _set_step(script, draft, job, size, reason)
            reason = f"the job holds at least what its srun asks for: {slurm_size(size)} of each node"
        least = max((now or 0, *(_bytes(one, job) for one in script.given if one.key in MEMORY)))
        if given is None or size > (now or 0) or least > (now or 0):
            _set_memory(script, draft, given, max(size, least), reason)
    elif given is not None and not _SIZE.fullmatch(given.value) and now:
        reason = f"--mem takes K, M, G or T: {given.value} is written {slurm_size(now)}"
        size = now if given.key == "mem" else now // _cpus_of_node(job)
        draft.replace(given.line, given.start, given.end, slurm_size(size), reason)
    elif given is not None and most is not None and now is not None and now > most:
        _set_memory(script, draft, given, most // GIB * GIB, f"no node has more than {format_bytes(most)}")


def _cpus_of_node(job: Job) -> int:
    return max((job.tasks_per_node or 1) * (job.cpus_per_task or 1), 1)


def _bytes(setting: Setting, job: Job) -> int:
    return bytes_of(setting, _cpus_of_node(job)) or 0


def _without_others(script: BatchScript, draft: Draft) -> Setting | None:
    """The directive of memory that Slurm takes, the later one; what contradicts it is taken out."""
    kept = script.memory
    for one in script.given:
        if kept is None or one.key not in MEMORY or one == kept or (one.key, one.value) == (kept.key, kept.value):
            continue
        line = script.lines[one.line]
        reason = (
            f"--{one.key}={one.value} contradicts --{kept.key}={kept.value} on line {kept.line + 1}, and Slurm takes "
            "one, the later, or refuses both: dropped here"
        )
        if line[: one.begin].split() == ["#SBATCH"] and not line[one.end :].partition("#")[0].strip():
            draft.replace(one.line, 0, 0, "#", reason)
        else:
            end = one.end + (len(line[one.end :]) - len(line[one.end :].lstrip()))
            draft.replace(one.line, one.begin if line[end:] else len(line[: one.begin].rstrip()), end, "", reason)
    return kept


def _set_step(script: BatchScript, draft: Draft, job: Job, size: int, reason: str) -> None:
    """Raise what the step asked for that died: by its size, else the last."""
    steps = [one for one in script.step_memory if _bytes(one, job)]
    died = [one for one in steps if _bytes(one, job) == job.step_bytes] or steps[-1:]
    for one in died:
        value = size if one.key == "mem" else -(-size // _cpus_of_node(job))
        draft.replace(one.line, one.start, one.end, slurm_size(value), f"this step's own limit: {reason}")


def _set_memory(script: BatchScript, draft: Draft, given: Setting | None, size: int, reason: str) -> None:
    if given is not None and given.key == "mem-per-cpu":
        line = script.lines[given.line]
        alone = line[: given.begin].split() == ["#SBATCH"] and not line[given.end :].partition("#")[0].strip()
        end = len(line) if alone else given.end
        draft.replace(given.line, given.begin, end, f"--mem={slurm_size(size)}", reason)
    else:
        _set(script, draft, "mem", slurm_size(size), reason)


def _tasks(script: BatchScript, draft: Draft) -> None:
    names = ("nodes", "ntasks", "ntasks-per-node")
    nodes, tasks, per_node = (whole(one.value) if (one := script.directives.get(name)) else None for name in names)
    if nodes and tasks and per_node and tasks != nodes * per_node:
        reason = f"{nodes} nodes x {per_node} tasks of each = {nodes * per_node}, not {tasks}"
        _set(script, draft, "ntasks", str(nodes * per_node), reason)


def _time(script: BatchScript, draft: Draft, diagnosis: Diagnosis, job: Job) -> None:
    wanted, needed = wanted_time(job), job.needed_seconds
    if wanted is None or needed is None or job.limit_seconds is None:
        return
    is_short = diagnosis.cause == "walltime" or needed > job.limit_seconds
    if is_short and wanted[0] > job.limit_seconds:
        _set(script, draft, "time", slurm_time(wanted[0]), wanted[1])


def _device(
    script: BatchScript, draft: Draft, diagnosis: Diagnosis, job: Job, config: Mapping[str, Any] | None
) -> Iterator[Check]:
    """The cheapest remedy that a script can say; one thing at a time, so that the next run tells what it did."""
    for remedy in list_remedies(diagnosis, job, config=config):
        if not remedy.helps or remedy.enough is False:
            continue
        if remedy.setting.startswith("nvidia-smi"):
            yield Check("device", "problem", remedy.reason, "no script can change that", remedy.setting)
            return
        if found := _ALLOCATOR.match(remedy.setting):
            _set_env(script, draft, found[1], found[2], remedy.reason)
            return
        if "batch_size" in remedy.setting and _halve(script, draft, job):
            return
        if "gradient_checkpointing" in remedy.setting and _checkpoint(script, draft, remedy.reason):
            return
    yield Check(
        "device", "problem", "the script names no setting of its memory that can be lowered", "see the remedies"
    )


def _halve(script: BatchScript, draft: Draft, job: Job) -> bool:
    """Half the batch and twice the accumulation, where the script names both or Hugging Face's names tell the other."""
    batch, steps = script.find(*BATCH), script.find(*ACCUMULATE)
    if batch is None or not job.batch or job.batch < 2:
        return False
    smaller = job.batch // 2
    more = (job.accumulate or 1) * -(-job.batch // smaller)
    same = smaller * more == job.batch * (job.accumulate or 1)
    reason = f"{smaller} x {more} samples an update on each device, {'as before' if same else f'before {job.batch}'}"
    named = next(one for one in reversed(script.settings) if one.name in BATCH)
    if steps is None and named.name != "per_device_train_batch_size":
        return False
    draft.replace(batch.line, batch.start, batch.end, str(smaller), reason)
    if steps is not None:
        draft.replace(steps.line, steps.start, steps.end, str(more), reason)
    else:
        draft.append_to(named.line, named.end, f" --gradient_accumulation_steps {more}", reason)
    return True


def _checkpoint(script: BatchScript, draft: Draft, reason: str) -> bool:
    """Turn gradient checkpointing on, where the script names it or its other options are Hugging Face's."""
    one = script.find("gradient_checkpointing")
    named = next((one for one in script.settings if one.name == "per_device_train_batch_size"), None)
    if one is not None and one.value.lower() == "false":
        draft.replace(one.line, one.start, one.end, "True", reason)
    elif one is None and named is not None:
        draft.append_to(named.line, named.end, " --gradient_checkpointing True", reason)
    else:
        return False
    return True


def _set_env(script: BatchScript, draft: Draft, name: str, value: str, reason: str) -> None:
    """Set a variable before the interpreter starts."""
    for known in (name, "PYTORCH_ALLOC_CONF"):
        if (found := script.env.get(known)) is not None:
            draft.replace(found.line, found.start, found.end, value, f"{reason}; in place of {found.value}")
            return
    at = script.first_command
    before = len(script.lines) if at is None else script.command_of(at)
    draft.insert(before - 1, f"export {name}={value}", reason)


def _shm(script: BatchScript, draft: Draft, diagnosis: Diagnosis, job: Job) -> Iterator[Check]:
    remedy = next(one for one in list_remedies(diagnosis, job) if "--shm-size" in one.setting)
    size = remedy.setting.partition("=")[2].partition(",")[0]
    found = script.find("shm_size")
    if found is not None:
        draft.replace(found.line, found.start, found.end, size, remedy.reason)
        return
    for at, line in enumerate(script.lines):
        if (docker := re.search(r"\b(?:docker|podman) run\b", line)) and not line.lstrip().startswith("#"):
            draft.append_to(at, docker.end(), f" --shm-size={size}", remedy.reason)
            return
    yield Check(
        "/dev/shm",
        "warning",
        "the script starts no container whose /dev/shm it could enlarge",
        remedy.reason,
        "torch.multiprocessing.set_sharing_strategy('file_system') in the program, or fewer workers",
    )


def check_script(job: Job, text: str) -> Iterator[Check]:
    """Whether what a script asks for goes together."""
    tasks = re.search(r"^#SBATCH\s+(?:--ntasks[= ]|-n ?)(\d+)", text, re.M)
    if tasks and job.nodes and job.tasks_per_node:
        total = job.nodes * job.tasks_per_node
        good = int(tasks[1]) == total
        yield Check(
            "tasks",
            "ok" if good else "problem",
            f"{job.nodes} nodes x {job.tasks_per_node} tasks = {total}; --ntasks={tasks[1]}",
            "Slurm places as many tasks on a node as fit when they disagree",
        )
    if job.workers is not None:
        need, have = job.workers + 1, job.cpus_per_task or 1
        said = "1 CPU, as none are asked for," if job.cpus_per_task is None else f"{have} CPUs"
        yield Check(
            "cpus",
            "ok" if have >= need else "warning",
            f"{said} of each task for {job.workers} workers and the training",
            "a worker without a CPU of its own is waited for",
            "" if have >= need else f"--cpus-per-task={need}",
        )
    if job.gpus_per_node and job.tasks_per_node and job.tasks_per_node > 1:
        good = job.gpus_per_node >= job.tasks_per_node
        yield Check(
            "devices",
            "ok" if good else "warning",
            f"{job.gpus_per_node} devices of a node for {job.tasks_per_node} tasks",
            "tasks that share a device share its memory",
            "" if good else f"--gres=gpu:{job.tasks_per_node}",
        )
    if job.request_bytes and job.most_bytes:
        good = job.request_bytes <= job.most_bytes
        yield Check(
            "memory",
            "ok" if good else "problem",
            f"{format_bytes(job.request_bytes)} of each node; a node has {format_bytes(job.most_bytes)}",
            "Slurm refuses what no node has",
        )
    if job.limit_seconds:
        yield Check("time", "ok", f"up to {format_duration(job.limit_seconds, short=True)}", "the script's --time")
