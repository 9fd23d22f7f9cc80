"""Write the file that starts a training elsewhere, a batch script or what a container needs, with computed sizes."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from posixpath import join, normpath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from memfit.amounts import Amount, Layout
from memfit.checks import check_one_given
from memfit.config import ByteSize, Settings, write_yaml
from memfit.errors import ConfigError, DoesNotFitError, UsageError
from memfit.jobs import SHIM_BYTES, SlurmPlace, render_script
from memfit.masking import mask
from memfit.memory import why_tight
from memfit.planning._ledger import Forecast, Ledger, Line, shm_bytes
from memfit.planning._machine import Machine
from memfit.slurm import format_time
from memfit.units import MIB, format_bytes, round_up_size, write_size

LaunchFormat = Literal["sbatch", "compose", "dockerfile", "dockerignore", "env"]
#: What an image must not hold: keys, the history of old ones, and what runs leave.
_NOT_IN_IMAGES = (
    "**/.env",
    "**/.env.*",
    "**/.git",
    "runs",
    "panels",
    "**/.venv",
    "**/__pycache__",
)
#: What `memfit run` itself takes on each node.
_WATCHING_BYTES = SHIM_BYTES + 96 * MIB
#: Slurm may send a signal up to a minute early.
_EARLY_SECONDS = 60
_MOST_REQUEUES, _MOST_RESTARTS = 20, 5
_HOME = "/app"  # where the code lies in an image
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
_Count = Annotated[int, Field(ge=1)]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
_Folder = Annotated[str, Field(pattern=r"^[\w./][\w./ +@=,-]*$")]


class LaunchMemory(Settings):
    """What the training takes on the host; give ``rank`` or ``node``, or a size alone, which is that of one rank.

    Attributes:
        rank: The peak of one rank with its loader workers and their batches in /dev/shm.
        node: The peak of all ranks of one node together.
        shared: What the ranks of a node map together, such as a panel; counted once.
        slack: What is requested on top, as a share.
    """

    rank: ByteSize | None = None
    node: ByteSize | None = None
    shared: ByteSize = ByteSize(0)
    slack: Annotated[float, Field(ge=0.0, le=10.0)] = 0.25


def _split(command: object) -> object:
    """Split a command that is one text; refuse what only a shell does."""
    if isinstance(command, str) and re.search(r"[;&|<>$`]", command):
        raise ValueError("no shell reads the command: give a list of words, such as [sh, -c, 'a && b']")
    return shlex.split(command) if isinstance(command, str) else command


class LaunchConfig(Settings):
    """A training that is to be started elsewhere.

    Attributes:
        schema_version: The version of this format.
        name: Names the job, the service and its runs.
        command: The command of one rank, as one text or as a list of words.
        num_nodes, ranks_per_node, gpus_per_node: The shape of the job.
        start_with: ``torchrun`` starts the ranks of a node, or Slurm starts each as a task (``srun``), as Lightning and
            Accelerate expect it.
        num_workers: Loader workers of each rank.
        batch_bytes: One batch, as a worker hands it over.
        prefetch_factor: Batches that each worker makes ahead.
        memory: What the training takes on the host.
        num_epochs, epoch_seconds: For the time limit, where ``time`` does not say it.
        time: The time limit, as ``sbatch --time`` takes it.
        checkpoint_seconds: How long the training takes to save and end after SIGTERM.
        slurm: Where a batch script runs.
        image: The image that a container starts from.
        requirements: The file of packages that the image gets, memfit among them.
        data: Folders that the training reads. A container gets them read-only.
        outputs: Folders that it writes beside ``runs``, such as ``checkpoints``.
        env: Variables and their values. No secrets.
        secrets: Names of variables that whoever starts the job has set.
        cuda_allocator: The settings of torch's CUDA allocator.
        accept_tight: Also write a file whose memory limit is less than 5 % above the peak that the settings give.
    """

    schema_version: Literal[1] = 1
    name: _Name
    command: Annotated[list[Annotated[str, Field(pattern=r"^[^\x00]*$")]], Field(min_length=1), BeforeValidator(_split)]
    num_nodes: _Count = 1
    ranks_per_node: _Count = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    start_with: Literal["torchrun", "srun"] = "torchrun"
    num_workers: Annotated[int, Field(ge=0)] = 0
    batch_bytes: ByteSize = ByteSize(0)
    prefetch_factor: _Count = 2
    memory: Annotated[
        LaunchMemory, BeforeValidator(lambda one: {"rank": one} if isinstance(one, str | int) else one)
    ] = LaunchMemory()
    num_epochs: _Count | None = None
    epoch_seconds: Annotated[float, Field(gt=0)] | None = None
    time: str = ""
    checkpoint_seconds: Annotated[float, Field(gt=0)] = 60.0
    slurm: SlurmPlace = SlurmPlace()
    image: Annotated[str, Field(pattern=r"^(\w[\w./:@-]*)?$")] = ""
    requirements: Annotated[str, Field(pattern=r"^([\w./][\w./+-]*)?$")] = "requirements.txt"
    data: list[_Folder] = Field(default_factory=list)
    outputs: list[_Folder] = Field(default_factory=list)
    env: dict[_Variable, _Line] = Field(default_factory=dict)
    secrets: list[_Variable] = Field(default_factory=list)
    cuda_allocator: _Line | None = None
    accept_tight: bool = False


@dataclass(frozen=True)
class Measured:
    """What an earlier run of the same training took.

    Attributes:
        node_bytes: The peak of its largest job, without mapped files.
        shared_bytes: What that job mapped.
        epoch_seconds: The mean time of an epoch; None if it recorded none.
        where: The run.
    """

    node_bytes: int
    shared_bytes: int
    epoch_seconds: float | None
    where: str


@dataclass(frozen=True)
class Launch:
    """A training with its sizes worked out; each ``_why`` says how a figure follows, in words.

    ``ledger`` holds what the ranks, memfit and what they share take, with the slack that is requested on top.
    ``memory_bytes`` is what each node or container needs, and ``shm_bytes`` the part of it that /dev/shm must hold. An
    empty ``time`` stands for the partition's own limit.
    """

    config: LaunchConfig
    ledger: Ledger
    memory_bytes: int
    memory_why: str
    shm_bytes: int
    shm_why: str
    cpus_per_task: int
    time: str
    time_why: str

    @classmethod
    def of(cls, config: LaunchConfig, measured: Measured | None = None, form: LaunchFormat = "sbatch") -> Launch:
        """Work out the sizes for a file of this form.

        Raises:
            ConfigError: The memory is not known, a secret stands in the settings, or the allocator's are at fault.
            DoesNotFitError: The limit that the file sets is tight for a peak that the settings give (`why_tight`).
        """
        _check(config)
        own, why = _private(config, measured)
        shared = measured.shared_bytes if measured and not config.memory.shared else config.memory.shared
        watching = _WATCHING_BYTES if form != "sbatch" or config.start_with == "torchrun" else 0
        size = round_up_size(math.ceil(own * (1 + config.memory.slack)) + shared + watching)
        is_declared = config.memory.rank is not None or config.memory.node is not None
        tight = why_tight(own + shared + watching, size) if is_declared else ""
        if tight and not config.accept_tight:
            raise DoesNotFitError(
                f"{config.name} is tight: {tight}.",
                rule="a peak that was declared, not measured, leaves 5 % or more of the memory that is requested.",
                remedy="request more: --set memory.slack=0.25; or accept it: --accept-tight",
            )
        if config.memory.slack:
            why += f", {config.memory.slack:.0%} more"
        if shared:
            why += f", {format_bytes(shared)} that they share"
        if watching:
            why += f", {format_bytes(watching)} for memfit"
        num_queued = config.ranks_per_node * config.num_workers * config.prefetch_factor
        shm = shm_bytes(num_queued * config.batch_bytes, config.memory.slack)
        queue = f"{config.ranks_per_node} x {config.num_workers} x {config.prefetch_factor} batches"
        shm_why = f"ranks x workers x prefetch: {queue} of {format_bytes(config.batch_bytes)}"
        if not num_queued or not config.batch_bytes:
            shm_why = "no worker keeps a batch there" if not num_queued else "batch_bytes is not given: Docker's own"
        cpus = config.num_workers + 1
        time, time_why = _time(config, measured)
        each = Amount(math.ceil(own * (1 + config.memory.slack) / config.ranks_per_node), "task")
        lines = [Line("ranks", each, why, "declared" if is_declared else "measured", "RSS" if is_declared else "PSS")]
        for name, extra in (("shared", shared), ("memfit", watching)):
            lines.append(Line(name, Amount(extra, "node"), why, "declared"))
        return cls(
            config,
            Ledger(Layout(config.num_nodes, config.ranks_per_node), tuple(lines)),
            size,
            why,
            round_up_size(shm) if num_queued and config.batch_bytes else shm,
            shm_why,
            cpus if config.start_with == "srun" else cpus * config.ranks_per_node,
            time,
            time_why,
        )

    def check_node(self, limit_bytes: int, where: str, num_nodes: int = 0) -> None:
        """Refuse more memory than one node has, of so many nodes (those of the file if 0).

        Raises:
            DoesNotFitError: With the arithmetic, and the smallest change that would fit.
        """
        if self.memory_bytes > limit_bytes:
            ranks, nodes = self.config.num_nodes * self.config.ranks_per_node, num_nodes or self.config.num_nodes
            raise DoesNotFitError(
                f"{self.config.name} needs {format_bytes(self.memory_bytes)} on each node: {self.memory_why}.",
                rule=f"{where} has {format_bytes(limit_bytes)}.",
                remedy=Forecast(
                    self.ledger, Amount(limit_bytes, "node"), where, num_ranks=ranks, num_nodes=nodes
                ).change,
            )

    def check_machine(self, machine: Machine, where: str) -> None:
        """Refuse what a described machine lacks: nodes, tasks, GPUs, memory or /dev/shm.

        Raises:
            UsageError: If the machine has fewer nodes, tasks or GPUs than the file asks for.
            DoesNotFitError: If a node has too little memory, or /dev/shm.
        """
        config = self.config
        asked = {"num_nodes": config.num_nodes, "ranks_per_node": config.ranks_per_node}
        asked["gpus_per_node"] = config.gpus_per_node
        has = (machine.nodes, machine.tasks_per_node, machine.gpus_per_task * machine.tasks_per_node)
        if lacks := [
            f"{name}: {asked[name]} of {most}" for name, most in zip(asked, has, strict=True) if asked[name] > most
        ]:
            raise UsageError(
                f"{config.name} asks for more than {where} has: {', '.join(lacks)}.",
                rule="each rank is one task of the machine.",
                remedy="ask for less, or describe the machine that you mean: memfit budget --as-machine",
            )
        self.check_node(machine.node_memory, where, machine.nodes)
        if machine.shm is not None and self.shm_bytes > machine.shm:
            raise DoesNotFitError(
                f"{config.name} needs {format_bytes(self.shm_bytes)} in /dev/shm of each node: {self.shm_why}.",
                rule=f"{where} has {format_bytes(machine.shm)}.",
                remedy="use fewer loader workers, a smaller prefetch_factor or batch, or a larger /dev/shm",
            )

    def figures(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        config, sizes = (
            self.config,
            {name: value for name, value in vars(self).items() if name not in ("config", "ledger")},
        )
        return {"num_nodes": config.num_nodes, "num_ranks": config.num_nodes * config.ranks_per_node} | sizes

    def render(self, form: LaunchFormat) -> str:
        """Return the file."""
        writers = {
            "sbatch": self._sbatch,
            "compose": self._compose,
            "dockerfile": self._dockerfile,
            "dockerignore": lambda: "\n".join([*_NOT_IN_IMAGES, *self.config.data, *self.config.outputs, ""]),
            "env": self._env,
        }
        return writers[form]()

    def _variables(self) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": "1"} | self.config.env
        return own | ({_ALLOCATOR: self.config.cuda_allocator} if self.config.cuda_allocator else {})

    def _sbatch(self) -> str:
        config = self.config
        tasks = config.ranks_per_node if config.start_with == "srun" else 1
        options: dict[str, str | None] = {
            "job-name": config.name,
            **config.slurm.options,
            "nodes": str(config.num_nodes),
            "ntasks": str(config.num_nodes * tasks),
            "ntasks-per-node": str(tasks),
            "cpus-per-task": str(self.cpus_per_task),
            "gres": f"gpu:{config.gpus_per_node}" if config.gpus_per_node else "",
            "mem": write_size(self.memory_bytes),
            "time": self.time,
            # To the ranks and not to this script, which has to start the job again.
            "signal": f"TERM@{math.ceil(config.checkpoint_seconds) + _EARLY_SECONDS}",
            "requeue": None,
            "open-mode": "append",
            "output": f"{config.name}_%j.log",
        }
        notes = [f"# memory: {self.memory_why}", *([f"# time: {self.time_why}"] if self.time_why else [])]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self._variables().items()]
        needed = [f': "${{{name}:?set it before sbatch}}"' for name in config.secrets]
        again = f'[ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_MOST_REQUEUES} ]'
        body = [
            *notes,
            *needed,
            *exports,
            *self._start(),
            "code=$?",
            "# 75: it was stopped, and has saved. It goes on where it stood.",
            f'if {again}; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
        ]
        return render_script(options, config.slurm.extra, "\n".join(body))

    def _start(self) -> list[str]:
        """Return the lines that start the ranks: under memfit on each node, or each as a task of Slurm's."""
        config = self.config
        step = "srun --kill-on-bad-exit=1 --wait=60"
        if config.start_with == "srun":
            return [f"{step} {shlex.join(config.command)}"]
        words, lines = shlex.join(config.command), []
        if config.num_nodes > 1 or config.ranks_per_node > 1:
            head, rendezvous = f"torchrun --nproc-per-node={config.ranks_per_node}", "--standalone"
            if config.num_nodes > 1:
                # This script runs on the first node.
                lines = ['export RENDEZVOUS="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"']
                rendezvous = (
                    f'--nnodes={config.num_nodes} --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" '
                    '--rdzv-endpoint="$RENDEZVOUS" --max-restarts=0'
                )
            words = f"{head} {rendezvous} {shlex.join(_without_python(config.command))}"
        if not _is_memfit(config.command):
            # All nodes start again together, so memfit restarts none by itself.
            flags = f"--retries 0 --grace {config.checkpoint_seconds:g}"
            words = f"memfit run {flags} --name {config.name}-$SLURM_JOB_ID-$SLURM_NODEID -- {words}"
        return [*lines, f"{step} sh -c {shlex.quote(f'exec {words}')}"]

    def _local(self) -> list[str]:
        """Return the command in a container: all ranks of one node, under memfit."""
        config, words = self.config, self.config.command
        if config.ranks_per_node > 1:
            words = ["torchrun", "--standalone", f"--nproc-per-node={config.ranks_per_node}", *_without_python(words)]
        elif _is_memfit(words):
            return words
        return ["memfit", "run", "--grace", f"{config.checkpoint_seconds:g}", "--name", config.name, "--", *words]

    def _compose(self) -> str:
        config = self.config
        memory, shm = (write_size(size, ("g", "m")) for size in (self.memory_bytes, self.shm_bytes))
        last = {name: f"${{{name}:?set it in the environment or in .env}}" for name in config.secrets}
        last["MEMFIT_RUNS_DIR"] = f"{_HOME}/runs"
        folders = {"runs": ""} | dict.fromkeys(config.outputs, "") | dict.fromkeys(config.data, ":ro")
        service: dict[str, Any] = {"build": "."} if config.image else {"image": config.name}
        service |= {
            "command": [word.replace("$", "$$") for word in self._local()],
            "restart": f"on-failure:{_MOST_RESTARTS}",
            "volumes": [f"{join('.', one)}:{normpath(join(_HOME, one))}{mode}" for one, mode in folders.items()],
            "mem_limit": memory,
            "memswap_limit": memory,
            "shm_size": shm,
            "environment": {name: value.replace("$", "$$") for name, value in self._variables().items()} | last,
            "stop_grace_period": f"{math.ceil(config.checkpoint_seconds) + 10}s",
        }
        if config.gpus_per_node:
            devices = [{"driver": "nvidia", "count": config.gpus_per_node, "capabilities": ["gpu"]}]
            service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
        notes = [
            f"# restart: after a stop (exit code 75), a kill or an error, {_MOST_RESTARTS} times at most; it goes on",
            "# volumes: these folders outlive the container; data: and outputs: name more of them",
            f"# mem_limit: {self.memory_why}",
            "# memswap_limit: the same, so no swap",
            f"# shm_size: {self.shm_why}; it counts towards mem_limit",
        ]
        return "\n".join([*notes, write_yaml({"services": {config.name: service}})])

    def _dockerfile(self) -> str:
        config = self.config
        if not config.image:
            raise ConfigError(
                "image is not given.",
                rule="an image starts from another one, such as pytorch/pytorch.",
                remedy="name it: --set image=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
            )
        lines, packages = [f"FROM {config.image}", f"WORKDIR {_HOME}"], config.requirements
        if packages:
            lines += [f"COPY {packages} {packages}", f"RUN pip install --no-cache-dir -r {packages}"]
        lines += [
            "RUN memfit --version  # the command runs under it",
            "# Write .dockerignore first (--format dockerignore): without it the image holds .env and .git.",
            "COPY . .",
        ]
        guarded = {name: re.sub(r'(["\\$])', r"\\\1", value) for name, value in self._variables().items()}
        lines += [f'ENV {name}="{value}"' for name, value in guarded.items()]
        if config.secrets:
            lines += [f"# Set when it is started, never here: {', '.join(config.secrets)}"]
        return "\n".join([*lines, f"CMD {json.dumps(self._local())}", ""])

    def _env(self) -> str:
        head = "# For docker compose: fill in, and keep it out of version control."
        return "\n".join([head, *(f"{name}=" for name in self.config.secrets), ""])


def _check(config: LaunchConfig) -> None:
    from memfit.estimation import check_allocator

    shown: Mapping[str, Any] = mask({"env": config.env, "command": config.command})
    bad = [name for name, value in config.env.items() if shown["env"][name] != value]
    if bad or list(shown["command"]) != config.command:
        raise ConfigError(
            f"{f'env.{bad[0]}' if bad else 'command'} looks like a secret.",
            rule="a file that is written holds the names of secrets and no values.",
            remedy=f"name the variable below secrets: secrets: [{bad[0] if bad else 'API_TOKEN'}]",
        )
    if config.cuda_allocator:
        check_allocator(config.cuda_allocator, name="cuda_allocator")


def _private(config: LaunchConfig, measured: Measured | None) -> tuple[int, str]:
    """Return the peak of all ranks of a node, and how it follows."""
    memory, sizes = config.memory, {"memory.rank": config.memory.rank, "memory.node": config.memory.node}
    check_one_given(
        sizes,
        none="" if measured else "the memory of the training is not known",
        rule="a request follows from the peak of one rank, or of all ranks of a node.",
        remedy="run it once under memfit and give --measured RUN, or give --set memory.rank=8GiB",
        error=ConfigError,
    )
    if memory.rank is not None:
        return memory.rank * config.ranks_per_node, f"{config.ranks_per_node} x {format_bytes(memory.rank)}"
    if memory.node is not None:
        return memory.node, f"{format_bytes(memory.node)} for all ranks of a node"
    assert measured is not None  # checked above
    return measured.node_bytes, f"{format_bytes(measured.node_bytes)} measured in {measured.where!r}"


def _time(config: LaunchConfig, measured: Measured | None) -> tuple[str, str]:
    seconds = config.epoch_seconds or (measured.epoch_seconds if measured else None)
    if config.time or not config.num_epochs or not seconds:
        return config.time, ""
    total = math.ceil(config.num_epochs * seconds * (1 + config.memory.slack) / 60) * 60
    return format_time(total), f"{config.num_epochs} epochs of {seconds:.0f} s, {config.memory.slack:.0%} more"


def _is_memfit(command: list[str]) -> bool:
    return command[0].rpartition("/")[2] == "memfit" or command[1:3] == ["-m", "memfit"]


def _without_python(command: list[str]) -> list[str]:
    """Return what torchrun is given: the script and its arguments.

    >>> _without_python(["python", "-u", "train.py", "--epochs", "3"])
    ['train.py', '--epochs', '3']
    >>> _without_python(["python", "-m", "pkg.train"])
    ['-m', 'pkg.train']
    >>> _without_python(["./train"])
    ['--no-python', './train']
    """
    if not command[0].rpartition("/")[2].startswith("python"):
        return ["--no-python", *command]
    rest = command[1:]
    while rest and rest[0] in ("-u", "-B", "-O"):
        rest = rest[1:]
    return rest
