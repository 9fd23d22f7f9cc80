"""The table of remedies: by kind of memory, by the phase in which a device was full, by cause, and by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

#: What a remedy costs in speed, the cheapest first.
Cost = Literal[
    "none",
    "hardly any",
    "a few per cent",
    "5 to 15 %",
    "25 to 33 %",
    "fewer devices at once",
    "not known",
    "another training",
]
COSTS: tuple[Cost, ...] = get_args(Cost)
Edit = Literal["", "variable", "batch", "checkpointing", "none"]


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Attributes:
        title: What to do, in words.
        setting: What to write: a directive, an option, a line of code; empty where there is none.
        cost: What it costs in speed.
        reason: Why it helps, or why not, with numbers.
        place: ``host``, ``device``, ``shm`` or ``none``.
        saves_bytes: The bytes that are needed less or may be used more; None if unknown.
        enough: Whether it is enough by itself; None if unknown.
        helps: False for common advice that would change nothing here.
        edit: What ``--fix`` does for it in a batch script: it sets the variable of ``setting``, halves the batch or
            turns checkpointing on; ``none`` where no script can do it.

    Example:
        >>> Remedy("request more", "--mem=8G", "none", "it was killed at 4 GiB", "host", 4 << 30).to_dict()["cost"]
        'none'
    """

    title: str
    setting: str = ""
    cost: Cost = "not known"
    reason: str = ""
    place: Literal["host", "device", "shm", "none"] = "none"
    saves_bytes: int | None = None
    enough: bool | None = None
    helps: bool = True
    edit: Edit = ""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        found = asdict(self)
        del found["edit"]
        return found


_RESUME = "memfit resume RUN"
_SIGTERM = "SIGTERM comes from a person or a service manager."
TABLE: Mapping[str, tuple[Remedy, ...]] = {
    "validate": (
        Remedy("turn autograd off in validation", "with torch.inference_mode():", "none",
               "With autograd on, every activation is kept for a backward pass that never comes.", "device"),
        Remedy("move predictions to the host after each batch", "outputs.append(prediction.cpu())", "hardly any",
               "Predictions kept on the device grow with the validation set.", "device"),
        Remedy("use a smaller validation batch", "--per_device_eval_batch_size 1", "a few per cent",
               "It changes no result.", "device"),
    ),
    "checkpoint": (
        Remedy("load checkpoints into host memory", "torch.load(path, map_location='cpu', mmap=True)", "none",
               "Otherwise the file's tensors are loaded onto the device beside the model.", "device"),
        Remedy("copy to the host tensor by tensor when saving",
               "{name: tensor.cpu() for name, tensor in model.state_dict().items()}", "hardly any",
               "A gathered or cloned state dict needs the model's memory a second time.", "device"),
    ),
    "build": (
        Remedy("load the weights in 16 bits", "torch_dtype=torch.bfloat16", "none",
               "The weights did not fit; 16 bits take half the bytes of fp32.", "device"),
        Remedy("shard the model over devices", "fully_shard(model), or device_map='auto' for inference", "not known",
               "Each device holds a part.", "device"),
    ),
    "host_kernel": (
        Remedy("run fewer jobs at once on this machine", "memfit run -- COMMAND, or --max-parallel 1",
               "fewer devices at once", "The whole machine ran out of memory, so other processes count too.", "host"),
    ),
    "host_alloc": (
        Remedy("build the array in pieces, or with a smaller dtype", "np.memmap, chunks, float32 instead of float64",
               "hardly any", "One request was refused. Half the width needs half the bytes.", "host"),
        Remedy("find the limit that refused it", "ulimit -v; cat /proc/sys/vm/overcommit_memory; memfit budget", "none",
               "A refusal without a kill comes from an address space limit or from overcommit_memory=2.", "host"),
    ),
    "pinned": (
        Remedy("pin less memory", "pin_memory=False of the DataLoader, or a smaller prefetch_factor", "a few per cent",
               "Pinned pages cannot be swapped, and torch's pinned allocator does not give them back.", "host"),
        Remedy("raise the limit of locked memory", "ulimit -l unlimited", "none",
               "Only if ulimit -l shows a limit.", "host"),
    ),
    "killed": (
        Remedy("find out who killed it", "journalctl -k | grep -i 'killed process'; "
               "sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS,ReqMem",
               reason="A log does not name the sender of a SIGKILL; the kernel log and the accounting do."),
        Remedy("run it under memfit next time", "memfit run -- COMMAND",
               reason="memfit reads the kernel's kill counters before and after, so it can name the killer."),
    ),
    "preempted": (
        Remedy("checkpoint on its signal and requeue", "#SBATCH --requeue --signal=B:TERM@120",
               reason="The scheduler took the node back; nothing was wrong with the job."),
    ),
    "node_fail": (
        Remedy("submit it again without that node", "#SBATCH --exclude=NODE", reason="The node failed, not the job."),
    ),
    "cancelled": (
        Remedy("ask who cancelled it", "sacct -j JOBID --format=JobID,State%40,End", reason="State names the user."),
    ),
    "terminated": (Remedy("find who sent the signal", "sacct -j JOBID; journalctl --since", reason=_SIGTERM),),
    "hangup": (Remedy("run it detached from the terminal", "nohup, tmux, or sbatch", reason="Its terminal closed."),),
    "segfault": (
        Remedy("print the stack of the crash", "PYTHONFAULTHANDLER=1",
               reason="Its frames name the library that crashed."),
    ),
    "illegal_access": (
        Remedy("raise the error where it happens", "CUDA_LAUNCH_BLOCKING=1",
               reason="Kernels run later than the lines that launch them, so the traceback points to the wrong line."),
    ),
    "collective_timeout": (
        Remedy("find the rank that stopped first", "TORCH_NCCL_DUMP_ON_TIMEOUT=1; the log of the missing rank",
               reason="The other ranks only waited; a longer timeout only waits longer."),
    ),
    "disk_full": (
        Remedy("free space, or write elsewhere", "df -h; df -i; du -xsh",
               reason="Space or inodes ran out where it wrote."),
    ),
    "open_files": (
        Remedy("share tensors through files instead of descriptors",
               "torch.multiprocessing.set_sharing_strategy('file_system')",
               reason="Each tensor from a worker holds a descriptor."),
    ),
    "process_limit": (
        Remedy("use fewer threads in each process", "OMP_NUM_THREADS=1", reason="Threads count as processes."),
    ),
    "assertion": (
        Remedy("read the condition; on a device, repeat it on the CPU", "CUDA_LAUNCH_BLOCKING=1",
               reason="The values broke a rule."),
    ),
    "incomplete": (
        Remedy("continue from the last checkpoint", "the same command, with its option to resume",
               reason="It printed success but had not run all of its epochs."),
    ),
    "device_lost": (
        Remedy("check the driver and the torch build", "nvidia-smi; python -m torch.utils.collect_env",
               reason="The device, its driver or a torch build without CUDA refused, not the program."),
    ),
    "import_error": (
        Remedy("install it where the job runs", "python -m pip install NAME, with the job's interpreter",
               reason="The job's environment lacks it."),
    ),
    "missing_file": (Remedy("check the path where the job runs", "ls -l PATH on that node", reason="It is missing."),),
    "config_error": (Remedy("correct the setting that is named", reason="The program refused it at its start."),),
    "exit_status": (Remedy("read its last lines", reason="It ended by itself, without a traceback."),),
    "own_exception": (Remedy("read the innermost frame of its traceback", reason="The program raised it."),),
    "hang": (
        Remedy("see where each process waits", "py-spy dump --pid PID", reason="The frames tell who waits for whom."),
    ),
    "chip_memory": (
        Remedy("use smaller blocks or fewer stages in that kernel", "num_stages=1, a smaller BLOCK",
               reason="The multiprocessor's own memory ran out, not the device's."),
    ),
}  # fmt: skip

_of = partial(Remedy, place="device")
_LESS = (_of("ask for less at once", "a smaller batch, fewer rows or layers, a shorter context", "not known",
             "Data, weights and results are on the device at once."),)  # fmt: skip
#: Rows in the words of the library that printed the message, in place of those by phase.
BY_EMITTER: Mapping[str, tuple[Remedy, ...]] = {
    **dict.fromkeys(("cupy", "ggml", "ort", "other", "thrust"), _LESS),
    "jax": (_of("use activation checkpointing", "jax.checkpoint", "25 to 33 %", "It keeps fewer activations."), *_LESS),
    "rmm": (_of("let RMM's pool grow, or spill to the host", "maximum_pool_size=None; ManagedMemoryResource",
                "not known", "The pool, or the device below it, is full."), *_LESS),
    "tf": (_of("allocate without a pool", "TF_GPU_ALLOCATOR=cuda_malloc_async", "hardly any", "Pools break."), *_LESS),
    "vllm": (_of("give vLLM more of the device", "gpu_memory_utilization=0.95", "none", "Its cache gets the rest."),
             _of("shorten the context", "max_model_len=N", "none", "The cache must hold one request of that length."),
             _of("shard the model", "tensor_parallel_size=2", "not known", "Smaller weights leave more to the cache.")),
    "vllm.start": (_of("free the device, or give vLLM less of it", "nvidia-smi; gpu_memory_utilization=SHARE", "none",
                       "Something held memory of the device before vLLM started."),),
}  # fmt: skip

#: Other rows for a job that ran under memfit.
UNDER_MEMFIT: Mapping[str, tuple[Remedy, ...]] = {
    "host_kernel": (
        replace(TABLE["host_kernel"][0], setting="--max-parallel 1, or a larger --reserve (memfit run --help)"),
    ),
    "killed": (replace(TABLE["killed"][0], setting="journalctl -k | grep -i 'killed process'"),),
    "preempted": (Remedy("continue the run", _RESUME, reason="It stopped after a checkpoint."),),
    "node_fail": (Remedy("continue the run", _RESUME, reason="Its watcher died; the job did not fail."),),
    "cancelled": (Remedy("continue the run", _RESUME, reason="Ctrl-C or memfit stop ended it."),),
    "terminated": (Remedy("find who sent the signal", "journalctl --since", reason=_SIGTERM),),
}

#: Rows with places for the figures and names of a job.
_ROWS: Mapping[str, Remedy] = {
    "host_for_device": Remedy("more host memory ({flag}, fewer loader workers)", "", "not known",
                              "The device has its own memory.", "device", 0, False, False),
    "others": Remedy(
        "end your own processes that still hold memory of this device, or use another device",
        "{list}; ps -o pid,user,etime,cmd -p PID; kill PID", "none",
        "{who} {held} of its {total}. Do not reset the device: that ends everybody's work.", "device", edit="none"),
    "ranks": Remedy(
        "give each rank its own device", "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); {list}; ps -p PID",
        "none", "{who} {held} of its {total}. They may be ranks of this job: do not end those.", "device", edit="none"),
    "room": Remedy(
        "find what refused the request", "set_per_process_memory_fraction; ulimit -v; the paging file (Windows); "
        "memory= in .wslconfig (WSL)", "none", "The device had room. A limit of the process, a lack of host memory, or "
        "a process that came and went refuses so. A smaller request may pass.", "device"),
    "wrong_size": Remedy("find the size that was computed wrongly", "print the shapes of the failing line", "none",
                         "An overflow, or data from a broken file or another rank. No memory is short."),
    "segments": Remedy("let the allocator's segments grow", "export PYTORCH_{api}_ALLOC_CONF=expandable_segments:True",
                       "hardly any", "torch's allocator reserved {unused} ({share:.0%}) that no tensor uses. Set it "
                       "before Python starts.", "device", edit="variable"),
    "no_segments": Remedy("expandable_segments, max_split_size_mb or empty_cache()",
                          "PYTORCH_{api}_ALLOC_CONF=expandable_segments:True", "none", "{why}.", "device", 0, False,
                          False),
    "half_batch": Remedy("halve the batch, double the accumulation", "{options}", "a few per cent",
                         "Activations halve. Each update sees the same samples, so only batch norm and rounding "
                         "change.{hint}", "device", edit="batch"),
    "checkpointing": Remedy("use activation checkpointing", "--gradient_checkpointing True, or torch.utils.checkpoint",
                            "25 to 33 %", "The backward pass computes each block's activations again.{hint}", "device",
                            edit="checkpointing"),
    "shard": Remedy("shard gradients and optimizer states", "fully_shard(model), or ZeRO stage 2", "not known",
                    "Each of {devices} devices holds a part.", "device"),
    "estimated": Remedy("train with {options}", "{written}", "not known",
                        "An estimated {now} of the device becomes {then}, at most {upper}. Costs: {cost}.", "device"),
    "share_data": Remedy(
        "share the data between the {readers}",
        "one mapped file (np.memmap, Arrow, memfit panel build) instead of lists of Python objects", "none",
        "All readers of a mapped file share its pages. Python objects are copied page by page as soon as a worker "
        "touches their reference counts. How much of the memory is data was not measured.", "host"),
    "fewer_workers": Remedy("use {workers} loader workers", "num_workers={target}", "not known",
                            "It saves only what each worker holds of its own, which was not measured. Costs speed only "
                            "where the loader cannot keep up.", "host"),
    "validation_workers": Remedy("use few workers for validation, and start its loader once",
                                 "num_workers=1 of the validation's DataLoader", "hardly any",
                                 "The workers of both loaders are alive at once.", "host"),
    "request": Remedy("{title}", "{setting}", "none", "{why}", "host"),
    "fewer_tasks": Remedy("run {few} per node instead of {tasks}", "--ntasks-per-node={fit}",
                          "fewer devices at once", "{why}. The same number of tasks needs {times:.3g} times the nodes.",
                          "host", enough=True),
    "host_batch": Remedy("a smaller batch, or gradient accumulation", "{setting}", "a few per cent",
                         "Activations are in device memory. The host holds only num_workers x prefetch_factor + 1 "
                         "batches per task.", "host", helps=False),
    "end_workers": Remedy("end the loader workers after each epoch", "persistent_workers=False", "hardly any",
                          "Training's workers are gone while validation's run. They start again in each epoch.",
                          "host"),
    "workers_end": Remedy("persistent_workers=False", "persistent_workers=False", "none",
                          "No change: False is the default, or it was set before.", "host", 0, False, False),
    "shm": Remedy(
        "enlarge /dev/shm",
        "docker run --shm-size={size}, shm_size: {size} of Compose, an emptyDir of medium Memory of Kubernetes", "none",
        "Each worker keeps prefetch_factor batches there; a container has 64 MiB by default. The size of a batch was "
        "not measured: this is {rule}. It counts as host memory of the container.", "shm"),
    "host_shm": Remedy("use the host's /dev/shm", "docker run --ipc=host", "none",
                       "The host's is half of its memory by default.", "shm"),
    "shm_workers": Remedy("use {workers} loader workers", "num_workers={target}", "not known",
                          "Each worker has its own batches there; num_workers=0 uses no /dev/shm.", "shm"),
    "shm_files": Remedy("sharing through files", "torch.multiprocessing.set_sharing_strategy('file_system')",
                        "hardly any", "It helps where open files ran out; the same bytes stay in /dev/shm, also after "
                        "a kill.", "shm", 0, helps=False),
    "time": Remedy("request {time}", "--time={time}", reason="{why}"),
    "no_time": Remedy("request the time of all epochs + 20 %", "--time",
                      reason="How long an epoch takes is not in the logs."),
    "resume": Remedy("resume from a checkpoint in a job of the same length", _RESUME, reason="No work is lost."),
}  # fmt: skip


def row(name: str, saves: int | None = None, *, enough: bool | None = None, **values: object) -> Remedy:
    """Return a row by its name, with a job's figures and names in its words."""
    one = _ROWS[name]
    return replace(
        one,
        title=one.title.format(**values),
        setting=one.setting.format(**values),
        reason=one.reason.format(**values),
        saves_bytes=one.saves_bytes if saves is None else saves,
        enough=one.enough if enough is None else enough,
    )
