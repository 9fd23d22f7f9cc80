"""Work out how a config is started elsewhere: its plan, and what its block ``launch`` says."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from memfit import config
from memfit.amounts import Amount, Layout
from memfit.errors import ConfigError, DoesNotFitError, UsageError
from memfit.jobs import SHIM, start_env
from memfit.masking import mask
from memfit.memory import why_tight
from memfit.pipeline._command import PLACEHOLDER, fill
from memfit.pipeline._config import RunConfig, resolve_settings
from memfit.pipeline._order import Order, order_of_config
from memfit.pipeline._plan_run import plan_run
from memfit.planning import Forecast, Launch, LaunchFormat, Machine, shm_bytes
from memfit.units import MIB, format_bytes, round_up_size

_WATCHING = SHIM + Amount(96 * MIB, "node")  # what `memfit run` itself takes on each node
_BOUNDLESS = 1 << 50  # more than any node has: a launch is planned for the machine that its config asks for
_SHELL = re.compile(r"[;&|<>$`\n]")


class _Planned(NamedTuple):
    """What the stage that takes most needs on a node: its forecast, so many jobs at once, and who says so."""

    forecast: Forecast
    jobs: int
    origin: str

    def needs(self, slack: float, watching: Amount) -> Amount:
        ledger = self.forecast.ledger
        return ledger.peak.scaled(self.jobs * (1 + slack)) + ledger.mapped + watching


def plan_launch(
    source: Path,
    *,
    overrides: Sequence[config.Override] = (),
    form: LaunchFormat = "sbatch",
) -> Launch:
    """Return how a config is started elsewhere, with its sizes; start and write nothing.

    Memory is that of the stage that takes most on a node by the plan, with ``memory.slack`` on top: of one job, or of
    ``max_parallel`` jobs if that is a number.
    """
    settings = resolve_settings(file=source, overrides=overrides).value
    nodes, own = settings.slurm.nodes, settings.launch
    by_srun = own.start_with == "srun"
    if nodes > 1 and not by_srun:
        raise ConfigError(
            f"slurm.nodes is {nodes}, and launch.start_with is memfit.",
            rule="the file starts memfit run on one node; over several nodes Slurm starts each rank of one command.",
            remedy="let Slurm start the ranks: --set launch.start_with=srun; or submit the jobs instead: memfit run "
            "CONFIG --backend slurm (docs/slurm.md)",
        )
    place: config.Override = ("memfit launch", f"backend={'slurm' if nodes > 1 else 'local'}")
    order = order_of_config(source, overrides=[*overrides, place])
    gpus, ranks = max(order.gpus_of(one)[0] for one in order.stages), max(map(order.ranks_of, order.stages))
    layout = Layout(nodes, math.ceil(ranks / nodes), gpus_per_node=math.ceil(gpus / nodes))
    planned = _largest(order, layout, source)
    watching = Amount(0, "node") if by_srun else _WATCHING
    memory, memory_why = _memory(settings, planned, watching)
    shm, shm_why, cpus = _shm_and_cpus(settings, planned)
    env = start_env(tight_malloc=False, cuda_allocator=settings.memory.cuda_allocator)
    env |= {"OMP_NUM_THREADS": str(settings.threads_per_job)}
    launch = Launch(
        re.sub(r"[^a-z0-9]+", "-", settings.experiment.lower())[:52].strip("-") or "memfit",
        own,
        tuple(_rank_words(order) if by_srun else _run_words(source, settings, overrides, form)),
        replace(layout, cpus_per_task=cpus * planned.jobs, gpus_per_node=math.ceil(gpus / nodes) * planned.jobs),
        planned.forecast,
        memory,
        memory_why,
        shm,
        shm_why,
        settings.slurm.time,
        settings.grace_seconds,
        (env if by_srun else {}) | own.env,  # else `memfit run` sets them
        settings.slurm.options,
        settings.slurm.extra,
    )
    _refuse_secrets(launch)
    return launch


def _largest(order: Order, layout: Layout, source: Path) -> _Planned:
    """Plan the stages; return that which takes most on a node."""
    tasks, gpus = layout.tasks_per_node or 1, layout.gpus_per_node or 0
    each = math.ceil(gpus / tasks)
    machine = Machine(
        nodes=layout.nodes or 1,
        tasks_per_node=tasks,
        gpus_per_task=each,
        gpu="1TiB" if each else None,
        node_memory=_BOUNDLESS,
    )
    found: list[_Planned] = []
    plan = plan_run(order, new=True, on=machine)
    for stage in plan.stages:
        most, forecast = order.settings.max_parallel, stage.forecast
        jobs = 1 if most == "auto" else min(most, stage.num_runs or most)
        if forecast is not None and forecast.ledger.peak.bytes:
            found.append(_Planned(forecast, jobs, stage.origin.partition("; its lines")[0]))
    if not found or any(one.forecast.uncounted for one in found):
        measured = f"memfit run {shlex.quote(str(source))} --plan"
        raise ConfigError(
            f"the memory of {', '.join(stage.name for stage in plan.stages)} is not known.",
            rule="a request follows from the plan: what was measured, declared, or counted line by line.",
            remedy=f"measure it: {measured}; or declare one rank with its workers: --set resources.memory=8GiB",
        )
    return max(found, key=lambda one: one.needs(0.0, _WATCHING).bytes)


def _memory(settings: RunConfig, planned: _Planned, watching: Amount) -> tuple[Amount, str]:
    """Return what to request of a node, and how it follows; refuse what is tight for a peak that was declared."""
    slack, ledger = planned.forecast.slack, planned.forecast.ledger
    size = Amount(round_up_size(planned.needs(slack, watching).bytes), "node")
    why = f"{f'{planned.jobs} jobs x ' * (planned.jobs > 1)}{format_bytes(ledger.peak.bytes)} ({planned.origin})"
    why += f", {slack:.0%} more" if slack else ""
    why += f", {format_bytes(ledger.mapped.bytes)} of mapped files" if ledger.mapped.bytes else ""
    why += f", {format_bytes(watching.bytes)} for memfit" if watching.bytes else ""
    is_measured = planned.origin.startswith(("measured", "first steps"))
    tight = "" if is_measured else why_tight(planned.needs(0.0, watching).bytes, size.bytes)
    if tight and not settings.accept_tight:
        raise DoesNotFitError(
            f"{settings.experiment} is tight: {tight}.",
            rule="a peak that was declared, not measured, leaves 5 % or more of the memory that is requested.",
            remedy="request more: --set memory.slack=0.25; or accept it: --accept-tight",
        )
    return size, why


def _shm_and_cpus(settings: RunConfig, planned: _Planned) -> tuple[Amount, str, int]:
    """Return what /dev/shm of a node must hold, how that follows, and the cores of a rank."""
    ledger = planned.forecast.ledger
    counted = planned.forecast.settings.get("workers") or 0
    workers = max((line.number for line in ledger.lines if line.name.endswith("workers")), default=counted)
    cpus = settings.launch.cpus_per_rank or max(settings.threads_per_job, workers + 1)
    if settings.launch.shm is not None:
        return Amount(settings.launch.shm, "node"), "as launch.shm says", cpus
    batches = ledger.shm.scaled(planned.jobs).bytes
    size = shm_bytes(batches, settings.memory.slack)
    if not batches:
        return Amount(size, "node"), "Docker's own: the plan counts no batches of loader workers", cpus
    why = f"{format_bytes(batches)} of batches by the plan, {settings.memory.slack:.0%} more"
    return Amount(round_up_size(size), "node"), why, cpus


def _run_words(
    source: Path, settings: RunConfig, overrides: Sequence[config.Override], form: LaunchFormat
) -> list[str]:
    """Return the command that runs the config on one node, with the settings that were given here."""
    path = source if form == "sbatch" else Path(os.path.relpath(source))
    if path.parts[:1] == ("..",):
        raise UsageError(
            f"{source} lies outside of the current folder.",
            rule="an image holds the current folder, and the config is read in it.",
            remedy="give the command in the folder of the code, above the config",
        )
    texts = [one if isinstance(one, str) else one[1] for one in overrides]
    given = [text for text in texts if not text.startswith(("launch.", "slurm."))]
    given += ["backend=local"] if settings.backend != "local" else []
    return ["memfit", "run", str(path), *(word for text in given for word in ("--set", text))]


def _rank_words(order: Order) -> list[str]:
    """Return the command of one rank, which Slurm starts; refuse a config that is more than one command."""
    stage, *others = order.stages
    words = list(stage.command or ())
    names = {name for word in words for name in PLACEHOLDER.findall(word)}
    reasons = {
        "has several stages": others,
        "has units": stage.each or stage.units,
        "has a target": stage.command is None,
        "has a line that only a shell reads": stage.shell and _SHELL.search(words[0]),
        "names a folder of the run": names & {"dir", "unit"},
    }
    if unfit := next((why for why, found in reasons.items() if found), ""):
        raise ConfigError(
            f"the config {unfit}, and its ranks are to be started by srun.",
            rule="with srun a batch script starts one command as it is, as each rank.",
            remedy="submit its jobs instead: memfit run CONFIG --backend slurm (docs/slurm.md); or give one stage with "
            "a list of words: run: [python, train.py]",
        )
    words = shlex.split(words[0]) if stage.shell else words
    own = {f"params.{name}": str(value) for name, value in stage.settings.items()}
    return list(fill(words, own | {"seed": str(order.settings.seed)}))


def _refuse_secrets(launch: Launch) -> None:
    shown: Mapping[str, object] = mask({"env": launch.env, "command": list(launch.command)})
    masked = shown["env"]
    bad = [name for name, value in launch.env.items() if isinstance(masked, Mapping) and masked[name] != value]
    if bad or shown["command"] != list(launch.command):
        raise ConfigError(
            f"{f'launch.env.{bad[0]}' if bad else 'the command'} looks like a secret.",
            rule="a file that is written holds the names of secrets and no values.",
            remedy=f"name the variable below launch.pass_env: [{bad[0] if bad else 'API_TOKEN'}]",
        )
