"""Find the phase of a job at a moment: by the frames of a traceback, else by the lines around it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from memfit.diagnosis._signatures import MARK
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Stream

JobPhase = Literal["load", "build", "train", "validate", "checkpoint", "unknown"]

#: How many lines before a line may belong to its traceback, and how many printed ones are looked at.
_REACH, _PRINTED_BEFORE, _PRINTED_BEHIND = 120, 40, 4
_FRAME = re.compile(
    r"(?:File )?[\"']?(?P<file>[^\"'\s│|][^\"'\n]{0,300}?(?:\.pyx?|<ipython-input[^>]*>|Cell In\[\d+\]))[\"']?"
    r"(?:(?:, line |:)\d+,?:?)?(?:\s*in\s+(?P<name>[\w<>.]+)|(?<=\d)$)"
)
_HEADER = re.compile(r"Traceback \(most recent call (?:last|first)\)")

#: Words of function names and of calls that mean a phase, and files that do; those first that say more.
_MEANING: tuple[tuple[JobPhase, str, str], ...] = (
    ("build", r"from_pretrained|load_state_dict_into\w*|load_pretrained\w*", r"transformers/modeling_utils|_init_utils"),
    ("checkpoint",
     r"save|restore|resume|checkpoint|ckpt|state_dict|torch\.load|torch\.save|snapshot|consolidate",
     r"torch/serialization|distributed/checkpoint|_state_dict_utils|checkpoint_\w+\.py"),
    ("validate",
     r"valid|validate|validation|val|eval|evaluate|evaluation|test|predict\w*|prediction|sanity",
     r"evaluation\w*\.py|/evaluation/|prediction_loop|eval_hooks?"),
    ("load",
     r"getitem|collate|dataset|datasets|dataloader|dataloaders|data|loader|preprocess|prepro|tokenize\w*|augment|fetch"
     r"|worker_loop|read_\w+|np\.load|pickle\.load|imread|images?",
     r"utils/data/|data_?loader|/datasets?/|(?:^|/)data(?:set|_utils|module)?\w*\.py|popen_(?:fork|spawn)|/pandas/|/PIL/|/h5py/"
     r"|torchvision/transforms|/pyarrow/|webdataset"),
    ("build",
     r"(?:model|net|network|encoder|decoder|backbone|module|net[A-Z]|vae|unet)\.(?:to|cuda|half|float|bfloat16)",
     r"(?!)"),
    ("train",
     r"train|training|fit|backward|step|optimizer|optimize|epoch|learn|loss|clip_grad\w*|update",
     r"torch/optim/|/autograd/|(?:training|fit|train)_\w*loop|based_runner"),
    ("build",
     r"build|create|make|init|initialize|setup|(?:get|load)_model|weights|cuda|_apply|convert|wrap|fsdp|ddp|fully_shard|quantize|process_group"
     r"|distributedDataParallel|DistributedDataParallel|deepspeed|memory_available|profile_run|sync",
     r"model_loader|memory_pool|_fully_shard|accelerate/|big_modeling|model_executor"),
)  # fmt: skip
_GROUPS = tuple(
    (phase, re.compile(rf"(?:^|[\W_])(?:{words})(?=$|[_(])"), re.compile(file)) for phase, words, file in _MEANING
)
_MOVES = re.compile(r"^(?:_apply|convert|to|cuda|half|float)$")
#: Frames that mean no phase: what calls a module, threads, launchers.
_NEUTRAL = re.compile(
    r"torch/(?:nn/|_tensor|tensor|functional|cuda/|utils/(?:_contextlib|checkpoint|_device)|_ops|_dynamo|_inductor|_jit|jit"
    r"|storage|_utils|multiprocessing/)|threading\.py|runpy|torchrun|distributed/(?:run|launch|elastic)|concurrent/futures"
    r"|site-packages/(?:click|hydra|fire|typer|ray)/|multiprocessing/(?:process|queues|connection|pool|spawn)"
)
_VALIDATES = re.compile(r"\b_?(?:valid\w*|val|eval\w*)(?:_\w+)?\(")
#: Deaths of a loader's worker, whatever the frames of the main thread say.
_OF_WORKER = re.compile(r"encountered in worker|DataLoader worker|worker.{0,40}DataLoader")

#: What programs print of what they do.
_WORDS: tuple[tuple[JobPhase, str], ...] = (
        ("checkpoint",
            r"\bsav(?:e|ing)\b.{0,30}(?:model|checkpoint|ckpt|state|weights)|writing checkpoint|Failed to clone\(\)|Op:(?:Save|Restore)V2"
            r"|loading (?:from )?(?:the )?(?:model )?checkpoint(?! shards)|resum(?:e|ing) (?:from|training)|restoring"
            r"|loading (?:optimizer|state)"),
        ("build",
            r"loading checkpoint shards|(?:creat|build)ing (?:the )?model|initializ\w+ (?:the )?(?:model|engine|distributed"
            r"|process group|a V\d)|loading (?:the )?(?:pre-?trained )?(?:model|weights|safetensors)|loading .{0,20}modules"
            r"|DeepSpeedZeRoOffload|NCCL INFO|compiling|Model loading took|capturing|Loading extension module"),
        ("validate", r"(?<!preparing )\bvalid(?:ation|ating|ate)?\b(?! '|_)|\beval(?:uat\w+)?\b|\bval\b|sanity check|\btesting\b"
         r"|\binference\b|predicting"),
        ("train", r"\bepoch\b|\btrain(?:ing)?\b|\bsteps?\b.{0,30}\d|\biter(?:ation)?s?\b.{0,20}\d|\bloss\b|\blr\b"
         r"|'learning_rate'|ppl=|policy gradient|num_updates|in forward/backward|during optimization|skipping batch"
         r"|retrying batch|\bETA\b"),
        ("load", r"load(?:ed|ing) \d+|preparing|reading|tokeniz|preprocess|caching|decod|dataset|\.astype\(|\bmap\b.{0,30}%"
         r"|loading (?:images|features|embeddings|samples)"),
)  # fmt: skip
_PRINTED = tuple((phase, re.compile(words, re.IGNORECASE)) for phase, words in _WORDS)
#: What a tool such as cat says of a file; the words in its path do not say what a training did.
_TOOL = re.compile(r"\s*[a-z][\w-]*: .*: [A-Z][a-z ]+$")
_HAPPENED = re.compile(
    r"finished|completed|\bdone\b|saved|(?:validation|evaluation) (?:summary|result)|valid_loss|val_loss|val/|test_loss"
    r"|loaded model weights|took \d",
    re.IGNORECASE,
)
#: Lines of others than the job: launchers, schedulers, kernels, tables of states, settings.
_FOREIGN = re.compile(
    r"^\s*(?:srun:|slurmstepd|sbatch:|#SBATCH|Job(?:ID|Id)\b|\d+(?:\.\w+)?\s+\S+\s+\S+\s+[A-Z_+]{6,}|Namespace\(|--\w|python\d? "
    r"|args:|WARNING:torch\.distributed|=>> PBS|TERM_|Warning: |usage:)|oom-killer|Killed process|total-vm|\bnode\(s\)"
    r"|[Cc]ontainer|^(?:Name|Status):|kubelet|memory budget|distributed\.(?:nanny|worker)|raylet|systemd|earlyoom|kubectl"
    r"|namespace|READY|OOMKilled|Reason:|NCCL WARN|ProcessGroupNCCL|exitcode|UserWarning: (?!Failed to clone)"
    r"|If you encounter|\bmay fail\b"
)
_CUT = re.compile(
    r"RuntimeError|\w*OutOfMemory|slurmstepd|slurm_script|Traceback|THCuda|ERROR:|(?:CUDA|HIP|XPU) out of memory"
    r"|MemoryError|\bKilled\b|XlaRuntimeError|OSError"
)


class Frame(NamedTuple):
    file: str
    name: str
    source: str


def find_phase(streams: Sequence[Stream], sign: Sign) -> JobPhase:
    stream = streams[sign.stream]
    frames, in_nccl = _frames(stream, sign), "nccl" in sign.text.lower()
    is_loading = bool(frames) and frames[-1].source.startswith(
        ("import ", "from ")
    )  # its modules, whatever their names
    if is_loading or (not frames and (sign.name == "exit_status" or _TOOL.match(stream.lines[sign.place].text))):
        return "unknown"
    of_worker = "mmap" not in sign.text and ((sign.name == "shm" and not in_nccl) or _OF_WORKER.search(sign.text))
    forked = sign.name in ("no_fork", "process_limit") and any(one.source.startswith("for ") for one in frames)
    if of_worker or forked or sign.name == "open_files":
        return "validate" if any(_VALIDATES.search(f"{one.name}( {one.source}") for one in frames) else "load"
    if sign.name == "shm" and in_nccl:
        return "build"
    found = _by_frames(frames)
    return found if found != "unknown" else _by_words(stream, sign)


def is_source(stream: Stream, place: int) -> bool:
    text = stream.lines[place].text
    above = stream.lines[place - 1].text if place else ""
    return text[:1] in (" ", "\t") and bool(re.match(r"\s*File \".*, line \d+", above))


def _frames(stream: Stream, sign: Sign) -> list[Frame]:
    """The frames of the traceback that a sign ends, outermost first; none where it ends none."""
    texts = [line.text for line in stream.lines]
    headers = [at for at in range(max(0, sign.place - _REACH), sign.place + 1) if _HEADER.search(texts[at])]
    while len(headers) > 1 and "Original Traceback" in texts[headers[-1]]:
        headers.pop()
    begin = headers[-1] + 1 if headers else max(0, sign.place - 45)
    found: list[Frame] = []
    for at, text in enumerate(texts[begin : sign.place + 1], begin):
        match = _frame_in(text)
        if match is None and text.lstrip().startswith("File ") and at < sign.place:  # the console wrapped it
            match = _frame_in(text + texts[at + 1])
        if match:
            found.append(Frame(match["file"].replace("\\", "/"), (match["name"] or "").rpartition(".")[2], ""))
        elif found and not found[-1].source and text[:1] in (" ", "\t") and not set(text.strip()) <= set("^~ "):
            found[-1] = Frame(found[-1].file, found[-1].name, text.strip("│ \t"))
    return found


def _frame_in(text: str) -> re.Match[str] | None:
    text = text[:600]
    return _FRAME.search(text) if ".py" in text or "Cell In" in text or "<ipython" in text else None


def _by_frames(frames: list[Frame]) -> JobPhase:
    for frame in reversed(frames):
        if frame.file.endswith("nn/modules/module.py") and _MOVES.match(frame.name):
            return "build"
        if _NEUTRAL.search(frame.file):
            continue
        said = f"{frame.name}( {frame.source}"
        for phase, words, file in _GROUPS:
            if file.search(frame.file) or words.search(said):
                is_data = any("__getitem__" in one.name or "utils/data/" in one.file for one in frames)
                return "load" if phase == "checkpoint" and is_data else phase
    names = {one.name for one in frames}
    if "forward" in names and any(re.search(r"train|tune|sft", one.file) for one in frames):
        return "train"
    return "build" if "__init__" in names else "unknown"


def _by_words(stream: Stream, sign: Sign) -> JobPhase:
    """The phase that the nearest line names: its own, one before it, or one shortly behind, for bars are flushed late."""
    own = stream.lines[sign.place]
    before = stream.lines[max(0, sign.place - _PRINTED_BEFORE) : sign.place + 1]
    behind = stream.lines[sign.place + 1 : sign.place + 1 + _PRINTED_BEHIND]
    for line in [one for one in (*reversed(before), *behind) if not _frame_in(one.text)]:  # a file's name says nothing
        text = line.text if sign.meaning.tier == MARK else _CUT.split(line.text)[0]
        if not text.strip() or (_HAPPENED.search(text) and line is not own) or _FOREIGN.search(text):
            continue
        for phase, regex in _PRINTED:
            if regex.search(text):
                return phase
    return "unknown"
