"""Where the jobs of a run take place: on this host within control groups, or in Slurm's queue."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from memfit import config, slurm
from memfit.errors import DoesNotFitError, UsageError
from memfit.jobs import SHIM, Backend, LocalBackend, Parent, SlurmBackend
from memfit.memory import Budget, Claims, Limit, Walls, lock_file, sweep_entries, sweep_groups, why_no_walls
from memfit.pipeline._config import RunConfig, StageSettings
from memfit.rundir import EventWriter, RunDir, liveness
from memfit.units import format_count

#: What runs the jobs, and what this run says to others of its memory.
Place = Iterator[tuple[Backend, Claims]]
#: How often Slurm's controller is asked before a run gives up; one call takes up to ten seconds.
_MOST_ASKED, _AGAIN_SECONDS = 5, 3.0


@contextmanager
def local_place(run: RunDir, settings: RunConfig, events: EventWriter, parent: Parent | None) -> Place:
    """Remove what dead runs of this host left; make the claims, and the backend with control groups if it can."""
    for entry in sweep_entries():
        with suppress(OSError), ExitStack() as held:
            descriptor = lock_file(entry.run / "supervisor.lock", 0.0)
            if descriptor is not None:  # no other supervisor starts with this run now
                held.callback(os.close, descriptor)
                if entry.group:
                    sweep_groups(Path(entry.group), uid=os.geteuid())
    claims, budget, group = Claims(run.path), read_budget(settings), ""
    if claims.problem:
        print(f"memfit: your runs on this host do not share one budget: {claims.problem}", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        # Called last: a run that still has processes or groups stays on the list, so that a later run sweeps it.
        stack.callback(lambda: claims.close(keep=Path(group).is_dir() if group else bool(liveness(run).jobs)))
        # The path's hash makes the name unique on this host.
        walls = Walls.build(f"{run.path.name}-{config.fingerprint(str(run.path))[:8]}", max(1, budget.lendable_bytes))
        facts = budget.to_dict() | {"permission": "none", "group": group}
        if walls is not None:
            stack.callback(walls.close)
            group = str(walls.parent.path)
            facts |= {"permission": walls.permission, "group": group}
        elif budget.permission != "none":
            why = why_no_walls() or "the kernel refused one"
            facts["promise"] = (
                f"no cgroup limits, although groups can be made here ({why}): jobs are admitted by measured "
                "non-reclaimable bytes and watched by sampling"
            )
        if parent is not None and parent.refused:
            events.write("plan", text=f"jobs start in new interpreters: {parent.refused}")
            parent = None
        backend = LocalBackend(run, grace_seconds=settings.grace_seconds, walls=walls, parent=parent)
        backend.say = lambda text: events.write("plan", text=text)
        stack.callback(backend.close)
        claims.write(used=Counter(), unused=Counter(), group=group)
        events.write("budget", **facts)
        yield backend, claims


@contextmanager
def slurm_place(run: RunDir, settings: RunConfig, events: EventWriter, _: Parent | None) -> Place:
    events.write("budget", **read_budget(settings).to_dict(), group="", backend="slurm")
    queue = SlurmBackend(
        run,
        settings.slurm,
        grace_seconds=settings.grace_seconds,
        max_parallel=settings.most_at_once,
        by_stage={name: settings.slurm_of(name) for name in settings.stages},
    )
    queue.say = lambda text: events.write("plan", text=text)
    try:
        yield queue, Claims(run.path, boot="that of no job's host")
    finally:
        queue.close()


#: By the setting ``backend``.
PLACES = {"local": local_place, "slurm": slurm_place}


def read_budget(settings: RunConfig, in_use_bytes: int = 0, *, last: Budget | None = None) -> Budget:
    """Read the budget under the user's own limit: of this host, or of the largest node that Slurm may give one job."""
    memory = settings.memory
    if settings.backend == "slurm":
        return last or _read_node_budget(settings)
    return Budget.read(cap_bytes=memory.limit, cap_used_bytes=in_use_bytes, reserve_bytes=memory.reserve, last=last)


def _read_node_budget(settings: RunConfig) -> Budget:
    if settings.memory.gpu_job or any(one.gpu_memory for one in settings.stages.values()):
        raise UsageError(
            "memfit cannot choose a GPU by its memory in Slurm.",
            rule="--gpu-memory and gpu_memory hold on this host: Slurm does not say what memory a node's GPUs have.",
            remedy="leave it out, and ask for a kind of node: --set 'slurm.extra=[--constraint=a100]'",
        )
    for num_left in reversed(range(_MOST_ASKED)):  # a controller that restarts is back soon
        try:
            partitions = {settings.slurm_of(name).partition for name in ("", *settings.stages)}
            nodes = {name: slurm.read_largest_node(name) for name in partitions}
            break
        except slurm.NoAnswerError as error:
            if not num_left:
                raise UsageError(
                    f"Slurm does not answer: {error}.",
                    rule="the largest node of the partition is the most that one job can ask for.",
                    remedy="give the same command again when sinfo works",
                ) from error
            time.sleep(_AGAIN_SECONDS)
    for name in ("", *settings.stages):
        _check_nodes(settings, name, nodes)
    largest = max(nodes.values(), key=attrgetter("memory.bytes"))
    size = max(1, min((largest.memory - SHIM).bytes, settings.memory.limit or largest.memory.bytes))
    node = Limit("largest node", f"Slurm partition {largest.partition}", size, 0, size, "job")
    return replace(
        Budget.read(),
        limits=(node,),
        reserve_bytes=0,
        reserve_note="none: Slurm holds each job to its request",
        devices=(),
        permission="none",
        promise="Slurm holds each job to its own request",
    )


def _check_nodes(settings: RunConfig, name: str, largest: Mapping[str, slurm.LargestNode]) -> None:
    """Refuse ranks and GPUs of a stage's jobs that their nodes cannot share; without a name, of stages in general."""
    stage, asked = settings.stages.get(name, StageSettings()), settings.slurm_of(name)
    nodes, most = asked.nodes, largest[asked.partition].num_gpus
    ranks, total = (stage.resources or settings.resources).ranks, stage.num_gpus
    total, who = settings.memory.num_gpus if total is None else total, f"a job{f' of stage {name}' if name else ''}"
    each, rest = divmod(total, nodes)
    if settings.target and nodes > 1 and ranks == 1 and (not name or stage.slurm):
        raise UsageError(
            "a stage that is a function was given several nodes of Slurm.",
            rule="on several nodes a command starts once on each; a function runs on each rank, and it has one.",
            remedy=f"give it ranks: --nproc {nodes}, or leave slurm.nodes out",
        )
    if ranks > 1 and ranks % nodes:
        raise UsageError(
            f"{ranks} ranks cannot be spread over {nodes} nodes{f' (stage {name})' if name else ''}.",
            rule="each node has as many ranks as every other: resources.ranks is a multiple of slurm.nodes.",
            remedy=f"ask for {nodes * -(-ranks // nodes)} ranks, or for another number of nodes",
        )
    if rest:
        raise UsageError(
            f"{who} asks for {format_count(total, 'GPU')} on {nodes} nodes.",
            rule="each node gives a job as many GPUs as every other.",
            remedy=f"ask for {nodes * (each + 1)}: --num-gpus counts those of all nodes together",
        )
    if each > most:
        raise DoesNotFitError(
            f"{who} asks for {format_count(total, 'GPU')} on {format_count(nodes, 'node')}: {each} on each, "
            f"and no node of partition {largest[asked.partition].partition} has more than {most}.",
            rule="Slurm gives a job GPUs of its own nodes: sinfo -o '%P %G' lists them.",
            remedy="ask for fewer GPUs, or for more nodes: --set slurm.nodes=N",
        )
