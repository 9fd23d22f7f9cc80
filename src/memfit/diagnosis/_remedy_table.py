"""The table of remedies, and who speaks in a log: advice is given in the words of those who are there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

#: What a remedy costs in speed, the cheapest first.
Cost = Literal["none", "hardly any", "a few per cent", "25 to 33 %", "fewer devices at once", "not known"]
COSTS: tuple[Cost, ...] = get_args(Cost)


@dataclass(frozen=True)
class Remedy:
    """One thing to do."""

    title: str  # what to do, in words
    setting: str = ""  # what to write: a directive, an option, a line of code
    reason: str = ""  # why it helps, or why not, with numbers
    cost: Cost = "not known"  # in speed
    whom: str = ""  # who must speak in the log, or with ``-`` must not, for it to be advised
    saves_bytes: int | None = None  # that are needed less or may be used more; None if unknown
    enough: bool | None = None  # by itself; None if unknown
    helps: bool = True  # False for common advice that would change nothing here
    #: What ``--fix`` does: ``variable`` sets that of ``setting``; ``none`` where no script can help.
    edit: Literal["", "variable", "batch", "checkpointing", "none"] = ""

    def concerns(self, whom: Collection[str]) -> bool:
        """Return whether it is advice for a log in which these speak."""
        return all((one.lstrip("-") in whom) != one.startswith("-") for one in self.whom.split())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        found = asdict(self)
        del found["edit"], found["whom"]
        return found


#: Words of each in the text of a log, in lower case and without white space.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "dask": ("distributed.nanny", "distributed.worker", "dask"),
    "yarn": ("yarn", "isrunningbeyond"),
    "condor": ("condor", "request_memory", "jobhasgoneover"),
    "lsf": ("term_memlimit", "lsbatch", "lsfmemory"),
    "sge": ("h_vmem", "s_vmem", "h_rss", "gridengine"),
    "pbs": ("pbs:", "pbsjob", "pbsserver", "torque", "resources_used.", "under_oom"),
    "slurm": ("slurm", "srun:", "sbatch", "sacct", "stepid="),
    "kubernetes": ("kubelet", "kubectl", "kubepods", "containerstatus", "reason:oomkilled", "pod/"),
    "docker": ("docker", "podman", "containeroom", "containerkilledduetomemory", '"oomkilled"'),
    "wsl": ("wsl2", "microsoft-standard", "/mnt/c/"),
    "windows": ("winerror", "dllloadfailed", ":\\", "pagingfile", "auslagerungsdatei"),
    "transformers": ("transformers", "per_device_", "evaluation_loop"),
    "loader": ("dataloader", "num_workers", "data/_utils/", "loaderworker"),
    "numpy": ("foranarraywithshape", "numpy"),
    "torch": ("torch", "cuda"),
    "quota": ("quotaexceeded", "errno122"),
    "xid": ("nvrm:xid", "fallenoffthebus"),
    "ordinal": ("deviceordinal",),
    "tls": ("statictlsblock",),
    "maps": ("unabletommap",),
    "oomd": ("systemd-oomd",),
    "device": ("cuda", "device-side", ".cu:"),
}
#: Those with a limit of memory of their own; and those that only the deciding line can name.
SYSTEMS, _DECIDING = tuple(_WORDS)[:9], tuple(_WORDS)[-7:]


def find_whom(flat: Iterable[str], evidence: str) -> tuple[str, ...]:
    """Return who speaks in these texts; of systems with a limit, the one that the evidence names, if it names one."""
    said, whole = "".join(evidence.lower().split()), tuple(flat)
    texts = {name: (said,) if name in _DECIDING else (*whole, said) for name in _WORDS}
    found = [name for name, words in _WORDS.items() if any(word in text for word in words for text in texts[name])]
    named = {name for name in SYSTEMS if any(word in said for word in _WORDS[name])}
    return tuple(name for name in found if not named or name in named or name not in SYSTEMS)


_R, _SIGTERM, _WHO = Remedy, "SIGTERM comes from a person or a service manager.", "find out who killed it"
_LESS = (_R("ask for less at once", "a smaller batch, fewer rows or layers, a shorter context",
            "Data, weights and results are on the device at once."),)  # fmt: skip
#: By kind of memory, by the phase in which a device was full, and by cause.
REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    "validate": (
        _R("move the predictions to the host in parts", "--eval_accumulation_steps 16",
           "Trainer keeps the predictions of all batches on the device without it.", "hardly any", "transformers"),
        _R("keep only what the metric needs", "Trainer(preprocess_logits_for_metrics=lambda x, _: x.argmax(-1))",
           "Logits are as many times larger as the vocabulary is wide.", "none", "transformers"),
        _R("turn autograd off in validation", "with torch.inference_mode():",
           "With autograd on, activations are kept for a backward pass that never comes.", "none", "-transformers"),
        _R("move predictions to the host after each batch", "outputs.append(prediction.cpu())",
           "Predictions kept on the device grow with the validation set.", "hardly any", "-transformers"),
        _R("use a smaller validation batch", "--per_device_eval_batch_size 1, or the batch_size of its DataLoader",
           "It changes no result.", "a few per cent"),
    ),
    "checkpoint": (
        _R("load checkpoints into host memory", "torch.load(path, map_location='cpu', mmap=True)",
           "Otherwise the file's tensors are loaded onto the device beside the model.", "none"),
        _R("copy to the host tensor by tensor when saving", "{name: tensor.cpu() for name, tensor in "
           "model.state_dict().items()}", "A cloned state dict needs the model's memory a second time.", "hardly any"),
    ),
    "build": (
        _R("load the weights in 16 bits", "torch_dtype=torch.bfloat16", "16 bits take half the bytes of fp32.", "none"),
        _R("shard the model over devices", "fully_shard(model), or device_map='auto' for inference"),
    ),
    "host_kernel": (
        _R("start it outside of the desktop's session", "systemd-run --user --scope COMMAND, or a system service",
           "systemd-oomd kills a whole unit for memory pressure.", "none", "oomd"),
        _R("run fewer jobs or workers at once on this machine, or take a larger one",
           "ps aux --sort=-rss | head; memfit run -- COMMAND",
           "The whole machine ran out of memory, so other processes count too.", "fewer devices at once", "-memfit"),
        _R("run fewer jobs at once on this machine", "--max-parallel 1, or a larger --reserve (memfit run --help)",
           "The whole machine ran out of memory, so other processes count too.", "fewer devices at once", "memfit"),
    ),
    "host_alloc": (
        _R("enlarge the paging file", "sysdm.cpl, Advanced, Performance, Virtual memory",
           "Windows refuses memory that it has not reserved there.", "none", "windows"),
        _R("give WSL more memory", "memory=SIZE in .wslconfig, then wsl --shutdown",
           "WSL has half of the machine's memory by default.", "none", "wsl"),
        _R("build the array in pieces, or with a smaller dtype", "np.memmap, chunks, float32 instead of float64",
           "One request was refused. Half the width needs half the bytes.", "hardly any", "numpy"),
        _R("ask for less at once", "smaller pieces, fewer workers or jobs at once", "One request was refused.",
           "hardly any", "-numpy"),
        _R("find the limit that refused it", "ulimit -v; cat /proc/sys/vm/overcommit_memory; memfit budget",
           "A refusal without a kill comes from an address space limit or overcommit_memory=2.", "none", "-windows"),
    ),
    "pinned": (
        _R("pin less memory", "pin_memory=False, a smaller prefetch_factor, host cache or offload buffer",
           "Pinned pages cannot be swapped, and torch does not give them back.", "a few per cent"),
        _R("raise the limit of locked memory", "ulimit -l unlimited", "Only if ulimit -l shows a limit.",
           "a few per cent", "-windows"),
    ),
    "growth": (
        _R("go on from its newest checkpoint, if any, with this memory", "memfit resume RUN, or the same command",
           "A new process begins as small as the first. More memory delays its end.", "none"),
        _R("find what is kept from step to step", "loss.item() where a loss is summed with its graph; outputs kept in "
           "a list; a cache without a bound", "It ends what grows.", "none"),
    ),
    "killed": (
        _R(_WHO, "sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS,ReqMem",
           "A log does not name the sender of a SIGKILL; the accounting may.", whom="slurm"),
        _R(_WHO, "journalctl -k | grep -i 'killed process'",
           "A log does not name the sender of a SIGKILL; the kernel's log does.", whom="-windows"),
        _R("run it under memfit next time", "memfit run -- COMMAND",
           "memfit reads the kernel's kill counters before and after, so it can name the killer.", whom="-memfit"),
    ),
    "limit_touched": (_R("request more memory if its output is not whole", "--mem", "The cache touches it too."),),
    "preempted": (
        _R("checkpoint on its signal and requeue", "#SBATCH --requeue --signal=B:TERM@120",
           "The scheduler took the node back; nothing was wrong with the job.", whom="slurm"),
        _R("checkpoint on its signal, and start it again", "trap on SIGTERM; see memfit's docs/your-script.md",
           "The machine was taken back; nothing was wrong with the job.", whom="-slurm"),
    ),
    "node_fail": (_R("submit it again without that node", "#SBATCH --exclude=NODE", "The node failed, not the job."),),
    "cancelled": (
        _R("ask who cancelled it", "sacct -j JOBID --format=JobID,State%40,End", "State names the user.", whom="slurm"),
        _R("start it again", "the same command", "A person ended it.", whom="-slurm"),
    ),
    "terminated": (
        _R("find why Dask ended it: its memory limit, or close()", "memory_limit= of the worker; the lines before",
           "The nanny sends SIGTERM to a worker over 95 % of its limit.", whom="dask"),
        _R("find who sent the signal", "sacct -j JOBID", _SIGTERM, whom="slurm"),
        _R("find who sent the signal", "journalctl --since", _SIGTERM, whom="-slurm"),
    ),
    "hangup": (_R("run it detached from the terminal", "tmux, screen or sbatch",
                  "Its terminal closed. nohup does not help torchrun, which heeds the signal itself."),),
    "segfault": (_R("print the stack of the crash", "PYTHONFAULTHANDLER=1", "It names the library that crashed."),),
    "aborted": (_R("read the message above the abort, and print its stack", "PYTHONFAULTHANDLER=1",
                   "A library ended the process by itself, for what it wrote before."),),
    "bus_error": (_R("look at the file that it mapped, and at the space of its disk", "ls -l FILE; df -h FILE /dev/shm",
                     "A mapped file that was cut short, or a full disk or /dev/shm, ends a process so."),),
    "worker_exited": (_R("see the worker's own error", "num_workers=0", "Then it is raised in your process."),),
    "illegal_access": (_R("raise the error where it happens", "CUDA_LAUNCH_BLOCKING=1",
                          "Kernels run later than the lines that launch them, so the traceback may mislead."),),
    "collective_timeout": (_R("find the rank that stopped first", "TORCH_NCCL_DUMP_ON_TIMEOUT=1; its log",
                              "The other ranks only waited; a longer timeout only waits longer."),),
    "disk_full": (
        _R("free space of your quota, or write elsewhere", "quota -s; lfs quota -h -u $USER .; du -xsh",
           "Your quota is full; df shows the whole disk.", whom="quota"),
        _R("free space, or write elsewhere", "df -h; df -i; du -xsh", "Space or inodes ran out.", whom="-quota"),
    ),
    "open_files": (
        _R("raise the limit of open files", "ulimit -n 65536, before the command", "", "none"),
        _R("share tensors through files instead of descriptors", "torch.multiprocessing.set_sharing_strategy("
           "'file_system')", "Each tensor from a worker holds a descriptor.", whom="torch"),
    ),
    "process_limit": (_R("use fewer threads in each process", "OMP_NUM_THREADS=1; ulimit -u", "Threads count too."),),
    "assertion": (
        _R("read the condition that failed", "the line above the message", "The values broke a rule."),
        _R("repeat it on the CPU", "CUDA_VISIBLE_DEVICES= , or CUDA_LAUNCH_BLOCKING=1",
           "There the traceback names the line: often a label or an index out of range.", whom="device"),
    ),
    "incomplete": (_R("continue from the last checkpoint", "the same command, with its option to resume",
                      "It printed success but had not run all of its epochs."),),
    "device_lost": (
        _R("take another node, and report this one", "#SBATCH --exclude=NODE; dmesg | grep Xid",
           "The card or its driver failed, not the program.", whom="xid"),
        _R("check the driver and the torch build", "nvidia-smi; python -m torch.utils.collect_env",
           "The device, its driver or a torch build without CUDA refused, not the program.", whom="-xid"),
    ),
    "import_error": (
        _R("load that library first", "LD_PRELOAD=/PATH/OF/THE/LIBRARY.so, or import it before the others",
           "Its thread-local data must be placed at the start. No memory is short.", whom="tls"),
        _R("install it where the job runs", "python -m pip install NAME, with the job's interpreter", whom="-tls"),
    ),
    "build_mismatch": (_R("install the build for this Python, torch and CUDA, or build it here", "python -m pip install"
                          " --force-reinstall --no-binary NAME NAME", "It is there, for another build."),),
    "no_kernel": (_R("install a build that has kernels for this GPU", "python -c 'import torch; print(torch.cuda."
                     "get_arch_list(), torch.cuda.get_device_capability())'"),),
    "port_in_use": (_R("use a free port for each job", "torchrun --master-port=0 --rdzv-endpoint=localhost:0; ss -ltnp",
                       "Another job, or an earlier one that still runs, has it."),),
    "diverged": (
        _R("find the first loss that is not finite", "torch.autograd.set_detect_anomaly(True)",
           "The program stops by itself: its loss became NaN or infinite, or its loss scale 0."),
        _R("lower the learning rate, or use bf16 in place of fp16", "bf16=True", "fp16 overflows at 65504."),
    ),
    "missing_file": (_R("check the path where the job runs", "ls -l PATH on that node", "It is missing."),),
    "config_error": (
        _R("start as many processes as there are visible GPUs", "--nproc_per_node=N; echo $CUDA_VISIBLE_DEVICES; "
           "nvidia-smi -L", "A rank asked for a GPU that is not there; the others are healthy.", whom="ordinal"),
        _R("give the share of its limit at which Dask ends a worker", "distributed.worker.memory.terminate: 0.95",
           "It is 0, or its limit is.", whom="dask"),
        _R("correct the setting that the line names", "", "It was refused at the start.", whom="-ordinal -dask"),
    ),
    "exit_status": (_R("read its last lines", "", "It ended by itself, without a traceback."),),
    "own_exception": (
        _R("raise the error where it happens", "CUDA_LAUNCH_BLOCKING=1", "Kernels run late.", whom="device"),
        _R("read the innermost frame of its traceback", "", "The program raised it."),
    ),
    "hang": (_R("see where each process waits", "py-spy dump --pid PID", "The frames tell who waits for whom."),),
    "chip_memory": (_R("use smaller blocks or fewer stages in that kernel", "num_stages=1, a smaller BLOCK",
                       "The multiprocessor's own memory ran out, not the device's."),),
}  # fmt: skip

#: Rows in the words of the library that printed the message, in place of those by phase.
BY_EMITTER: Mapping[str, tuple[Remedy, ...]] = {
    **dict.fromkeys(("cupy", "ggml", "ort", "other", "thrust", "metal"), _LESS),
    "jax": (_R("use activation checkpointing", "jax.checkpoint", "It keeps fewer.", "25 to 33 %"), *_LESS),
    "rmm": (_R("let RMM's pool grow, or spill to the host", "maximum_pool_size=None; ManagedMemoryResource",
               "The pool, or the device below it, is full."), *_LESS),
    "tf": (_R("allocate without a pool", "TF_GPU_ALLOCATOR=cuda_malloc_async", "Pools break.", "hardly any"), *_LESS),
    "paddle": (_R("let Paddle use more of the device", "FLAGS_fraction_of_gpu_memory_to_use=0.92",
                  "It takes this share of the device and no more.", "none"), *_LESS),
    "tpu": (_R("change the shapes of that operation, or report it", "smaller tiles; the XLA dump of the program",
               "The compiler put more into the core's own memory than it has."),),
    "vllm": (_R("give vLLM more of the device", "gpu_memory_utilization=0.95", "Its cache gets the rest.", "none"),
             _R("shorten the context", "max_model_len=N", "The cache must hold a request of that length.", "none"),
             _R("shard the model", "tensor_parallel_size=2", "Smaller weights leave more to the cache.")),
    "vllm.start": (_R("free the device, or give vLLM less of it", "nvidia-smi; gpu_memory_utilization=SHARE",
                      "Something held memory of the device before vLLM started.", "none"),),
}  # fmt: skip

#: Rows with places for the figures and names of a job.
_ROWS: Mapping[str, Remedy] = {
    "continue": _R("continue the run", "memfit resume RUN", "It was stopped, or its node failed; the job did not."),
    "look": _R("see who holds memory of the device; end what is yours", "{list}", "{why}.", "none"),
    "others": _R("end your own processes that still hold memory of this device, or use another device",
                 "{list}; ps -o pid,user,etime,cmd -p PID; kill PID", "{who} {held} of its {total}. Do not reset the "
                 "device: that ends everybody's work.", "none", edit="none"),
    "ranks": _R("give each rank its own device", "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); {list}",
                "{who} {held} of its {total}. They may be ranks of this job: do not end those.", "none", edit="none"),
    "room": _R("find what refused the request", "set_per_process_memory_fraction; ulimit -v; the paging file (Windows);"
               " memory= in .wslconfig (WSL)", "The device had room. A limit of the process, a lack of host memory, or "
               "a process that came and went refuses so. A smaller request may pass.", "none"),
    "one_request": _R("make that one tensor smaller: compute it in parts", "print its shapes; torch.chunk",
                      "One request of {tried} is larger than the device, which has {total}. No other process and no "
                      "batch size explains that."),
    "wrong_size": _R("find the size that was computed wrongly", "print the shapes of the failing line",
                     "An overflow, or data from a broken file or another rank. No memory is short.", "none"),
    "segments": _R("let the allocator's segments grow", "export PYTORCH_{api}_ALLOC_CONF=expandable_segments:True",
                   "torch's allocator reserved {unused} ({share:.0%}) that no tensor uses. Set it before Python "
                   "starts.", "hardly any", edit="variable"),
    "no_segments": _R("expandable_segments, max_split_size_mb or empty_cache()", "PYTORCH_{api}_ALLOC_CONF="
                      "expandable_segments:True", "{why}.", helps=False),
    "half_batch": _R("halve the batch, double the accumulation", "{options}", "Activations halve. Each update sees "
                     "the same samples, so only batch norm and rounding change. memfit estimate gives the bytes.",
                     "a few per cent", edit="batch"),
    "checkpointing": _R("use activation checkpointing", "{how}", "The backward pass computes each block's activations "
                        "again.", "25 to 33 %", edit="checkpointing"),
    "shard": _R("shard gradients and optimizer states", "fully_shard(model), or ZeRO stage 2",
                "Each of {devices} devices holds a part."),
    "share_data": _R("share the data between the {readers}", "one mapped file (np.memmap, Arrow, memfit panel build) "
                     "instead of lists of Python objects", "All readers of a mapped file share its pages. Python "
                     "objects are copied page by page as soon as a worker touches their reference counts. How much of "
                     "the memory is data was not measured.", "none"),
    "fewer_workers": _R("use {workers} loader workers", "num_workers={target}", "It saves only what each worker holds "
                        "of its own, which was not measured. Costs speed only where the loader cannot keep up."),
    "request": _R("{title}", "{setting}", "{why}", "none"),
    "fewer_tasks": _R("run {few} per node instead of {tasks}", "--ntasks-per-node={fit}", "{why}. The same number of "
                      "tasks needs {times:.3g} times the nodes.", "fewer devices at once", enough=True),
    "host_batch": _R("a smaller batch, or gradient accumulation", "", "Activations are in device memory. The host "
                     "holds only num_workers x prefetch_factor + 1 batches per task.", helps=False),
    "shm": _R("enlarge /dev/shm", "docker run --shm-size=2g, shm_size: 2g of Compose, an emptyDir of medium Memory of "
              "Kubernetes", "Each worker keeps prefetch_factor batches there; a container has 64 MiB by default. The "
              "size of a batch was not measured: 2 GiB is a start, of the container's memory.", "none", "-maps"),
    "host_shm": _R("use the host's /dev/shm", "docker run --ipc=host", "It is half of the host's memory by default.",
                   "none", "-maps"),
    "maps": _R("allow more mappings, or share fewer and larger tensors", "sysctl -w vm.max_map_count=1048576",
               "Each shared tensor is a mapping; a process may have 65530. /dev/shm need not be full.", "none", "maps"),
    "shm_workers": _R("use {workers} loader workers", "num_workers={target}",
                      "Each worker has its own batches there; num_workers=0 uses no /dev/shm."),
    "shm_files": _R("sharing through files", "torch.multiprocessing.set_sharing_strategy('file_system')",
                    "It helps where open files ran out; the same bytes stay in /dev/shm.", helps=False),
    "time": _R("request {time}", "--time={time}", "{why}"),
    "no_time": _R("request the time of all epochs + 20 %", "--time", "How long an epoch takes is not in the logs."),
    "resume": _R("resume from a checkpoint in a job of the same length", "{how}", "No work is lost."),
}  # fmt: skip


def row(name: str, saves: int | None = None, *, enough: bool | None = None, **values: object) -> Remedy:
    """Return a row by its name, with a job's figures and names in its words."""
    one = _ROWS[name]
    return replace(
        one,
        **{part: getattr(one, part).format(**values) for part in ("title", "setting", "reason")},
        saves_bytes=one.saves_bytes if saves is None else saves,
        enough=one.enough if enough is None else enough,
    )
