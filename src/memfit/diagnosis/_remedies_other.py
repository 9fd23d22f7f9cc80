"""What to do where no memory was short: one way on for each cause, none of which hides it."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.diagnosis._job import Job
from memfit.diagnosis._remedy import Remedy
from memfit.units import format_duration

#: Of what the job needed by its own pace, so much is asked for above it.
TIME_RESERVE = 0.2
_WAYS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "preempted": (
        ("checkpoint on its signal and let it be requeued", "#SBATCH --requeue --signal=B:TERM@120",
         "the scheduler took its place back; nothing was wrong with the job"),
    ),
    "node_fail": (
        ("submit it again from its last checkpoint, without that node", "#SBATCH --exclude=NODE",
         "the node failed, not the job"),
    ),
    "cancelled": (("ask who cancelled it", "sacct -j JOBID --format=JobID,State%40,End", "State names the user"),),
    "terminated": (
        ("find who sent the signal", "sacct -j JOBID; journalctl --since", "SIGTERM comes from a person or a manager"),
    ),
    "hangup": (("run it where a closed terminal does not reach it", "nohup, tmux, or sbatch", "its terminal closed"),),
    "segfault": (
        ("have the stack printed", "PYTHONFAULTHANDLER=1", "the frames name the library that it died in"),
        ("rule out mixed builds", "pip check; memfit doctor -- COMMAND", "an extension was built for another one"),
    ),
    "illegal_access": (
        ("have the error raised where it happens", "CUDA_LAUNCH_BLOCKING=1",
         "kernels run later than the lines that start them, so the traceback names an innocent one"),
        ("check indices on the CPU", "the same step with device='cpu'", "an index out of range says so there"),
    ),
    "collective_timeout": (
        ("find the rank that stopped first", "TORCH_NCCL_DUMP_ON_TIMEOUT=1; the log of the rank that was waited for",
         "the others only say that they waited; a longer timeout waits longer"),
    ),
    "disk_full": (
        ("free space, or write elsewhere", "df -h; df -i; du -xsh", "space or inodes ran out where it wrote"),
    ),
    "open_files": (
        ("share tensors by files in place of descriptors", "torch.multiprocessing.set_sharing_strategy('file_system')",
         "each tensor from a worker holds a descriptor"),
        ("a higher limit", "ulimit -n 65536", "the soft limit may be raised up to the hard one"),
    ),
    "process_limit": (
        ("fewer threads in each process", "OMP_NUM_THREADS=1", "threads count as processes"),
        ("a higher limit", "ulimit -u; pids.max of the control group", "forks and threads were refused"),
    ),
    "assertion": (
        ("read the condition; on a device, repeat it on the CPU", "CUDA_LAUNCH_BLOCKING=1", "the values broke a rule"),
    ),
    "incomplete": (
        ("go on from the last checkpoint", "the same command, with its option to resume",
         "a word of success is no proof: it had not run all of its epochs"),
    ),
    "device_lost": (
        ("see what the driver says, and which torch this is", "nvidia-smi; python -m torch.utils.collect_env",
         "the device, its driver or a build of torch without CUDA refused, not the program"),
    ),
    "import_error": (
        ("install it where the job runs", "python -m pip install NAME, by the interpreter of the job",
         "the environment of the job lacks it"),
    ),
    "missing_file": (("check the path where the job runs", "ls -l PATH on that node", "it is not there"),),
    "config_error": (("correct the setting that is named", "", "the program refused it before it began"),),
    "own_exception": (("read the innermost frame of its traceback", "", "the program raised it"),),
    "hang": (
        ("see where each process waits", "py-spy dump --pid PID", "the frames tell who waits for whom"),
        ("no fork after threads", "multiprocessing_context='spawn'", "a child inherits locks without their owners"),
    ),
    "chip_memory": (
        ("smaller blocks, or fewer stages, of that kernel", "num_stages=1, a smaller BLOCK",
         "it is the multiprocessor's own memory; the device's is another"),
    ),
}  # fmt: skip

#: The same for a job under memfit, which is asked of its run and not of Slurm.
_UNDER_MEMFIT: dict[str, tuple[tuple[str, str, str], ...]] = {
    "preempted": (("go on with the run", "memfit resume RUN", "it stopped after a checkpoint"),),
    "node_fail": (("go on with the run", "memfit resume RUN", "its watcher died, the job did not fail"),),
    "cancelled": (("go on with the run", "memfit resume RUN", "Ctrl-C or memfit stop ended it; nothing failed"),),
    "terminated": (("find who sent the signal", "journalctl --since", "SIGTERM comes from a person or a manager"),),
}


def other_remedies(cause: str, job: Job) -> Iterator[Remedy]:
    """Ways on for a job that did not run out of memory."""
    if cause == "walltime":
        yield from _more_time(job)
    if cause == "killed":
        yield Remedy(
            "find who killed it before anything is changed",
            "journalctl -k | grep -i 'killed process'"
            + ("" if job.under_memfit else "; sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS,ReqMem"),
            reason="SIGKILL has no sender in a log: the kernel's log and the accounting do",
        )
        if not job.under_memfit:
            yield Remedy(
                "run it under memfit next time",
                "memfit run -- COMMAND",
                reason="it reads the kernel's counters before and after, so the next death names its killer",
            )
    ways = (_WAYS | _UNDER_MEMFIT) if job.under_memfit else _WAYS
    for title, setting, reason in ways.get(cause, ()):
        yield Remedy(title, setting, reason=reason)


def wanted_time(job: Job) -> tuple[int, str] | None:
    """The seconds to ask for, in whole half hours, and the arithmetic; None when the pace is not known."""
    needed = job.needed_seconds
    if needed is None or not job.epochs or not job.epoch_seconds:
        return None
    size = int(-(-needed * (1 + TIME_RESERVE) // 1800) * 1800)
    return size, (
        f"{job.epochs} epochs x {format_duration(job.epoch_seconds)} = {format_duration(needed, short=True)}; "
        f"+ {TIME_RESERVE:.0%} = {format_duration(size, short=True)}"
    )


def slurm_time(seconds: int) -> str:
    """Seconds as ``--time`` takes them.

    >>> slurm_time(66600), slurm_time(180000)
    ('18:30:00', '2-02:00:00')
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _more_time(job: Job) -> Iterator[Remedy]:
    wanted = wanted_time(job)
    if wanted is not None:
        yield Remedy(f"ask for {slurm_time(wanted[0])}", f"--time={slurm_time(wanted[0])}", reason=wanted[1])
    else:
        yield Remedy(
            "ask for epochs x the time of one, and a fifth above",
            "--time",
            reason="how long an epoch takes is not in what was read",
        )
    yield Remedy("go on from a checkpoint in a job of the same length", "memfit resume RUN", reason="no work is lost")
