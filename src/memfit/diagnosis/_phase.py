"""The phase that a job was in at a moment: by the frames of a traceback, else by what was printed before."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.diagnosis._facts import Fact
from memfit.diagnosis._text import Line, Stream

JobPhase = Literal["load", "build", "train", "validate", "checkpoint", "unknown"]

_REACH = 120
_FRAME = re.compile(
    r"^\s*(?:[│|] ?)?(?:File )?[\"']?(?P<file>[^\"'\s][^\"']{0,300}?\.(?:py|pyx))[\"']?(?:, line "
    r"|:)\d+(?:[,:]?\s*in\s+(?P<name>[\w<>.]+))?"
    r"|^\s*(?P<cell>\S{1,300}\.py|<ipython-input[^>]*>|Cell In\[\d+\]\S*)(?:, line \d+)? in (?P<where>[\w<>.]+)"
)
_HEADER = re.compile(r"Traceback \(most recent call last\)|Traceback \(most recent call first\)")
_CHAINED = re.compile(r"direct cause of the following|During handling of the above")
_MARK = re.compile(r"^\s*(?:❱ *\d+ [│|]?|-+> ?\d+ )")


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback.

    Attributes:
        file: The path of its file.
        name: Its function.
        source: Its source line; empty without.
    """

    file: str
    name: str
    source: str


_CHECKPOINT_NAME = re.compile(
    r"^(?:_?(?:fsdp_|full_|maybe_)?(?:save|dump|write|store|load|restore|resume|auto_resume"
    r"|read)_?(?:from_|the_|last_|best_|latest_|training_|full_)?"
    r"(?:checkpoint|ckpt|ckp|state|states|snapshot|trainer_state|optimizer_state)\w*|save\w*"
    r"|restore\w*|resume\w*|consolidate\w*|state_dict|load_state_dict"
    r"|_?(?:rng|optim)_state_dict\w*|\w*_state_dict_hook\w*|load_from_checkpoint|persistent_load"
    r"|_load_checkpoint\w*|dump_checkpoint|_save\w*)$"
)
_CHECKPOINT_SOURCE = re.compile(
    r"torch\.save\(|\.state_dict\(\)|\.load_state_dict\(|save_(?:checkpoint|ckpt|model|state"
    r"|pretrained|weights)\w*\(|load_(?:checkpoint|ckpt)\w*\("
    r"|torch\.load\(|\.restore\(|resume(?:_from)?\w*\(|load_from_checkpoint\(|consolidate_state_dict\(|\.save\("
)
_CHECKPOINT_FILE = re.compile(
    r"torch/serialization\.py|distributed/checkpoint/|checkpoint_(?:io|connector|engine|saver"
    r"|hook)\w*\.py|_state_dict_utils\.py"
)
_VALIDATE_NAME = re.compile(
    r"^_?(?:valid(?:ate|ation)?(?:_\w+)?|evaluat(?:e|ion)(?:_\w+)?|eval(?:_\w+)?|val(?:_\w+)?"
    r"|\w+_(?:eval|evaluate|evaluation|val|validate|validation|valid)"
    r"|test(?:_\w+)?|do_(?:eval|test)|_?predict(?:_\w+|ions?)?|prediction_(?:step|loop)"
    r"|run_(?:validation|evaluation|sanity_check|eval\w*|test\w*)"
    r"|_?run_(?:sanity_check|validation|evaluate)|on_valid\w*|inference_on_dataset|sanity_check"
    r"|single_gpu_test|multi_gpu_test|compute_metrics)$"
)
_VALIDATE_SOURCE = re.compile(
    r"\b(?:validate|evaluate|eval_step|val_step|validation_step|val_epoch|test_epoch|evaluation"
    r"|run_eval\w*|do_eval|inference_on_dataset|_run_sanity_check)\w*\("
    r"|\.test\(\)|\bval_\w+ ?= |\b(?:val|valid|test|eval|validation)_?(?:loader|dataloader|iter|loop"
    r"|dl|data)\b|evaluation_loop"
)
_VALIDATE_FILE = re.compile(
    r"evaluation_loop\.py|/evaluation/|prediction_loop\.py|evaluation_epoch_loop\.py|/eval_hooks?\.py"
)
_LOAD_NAME = re.compile(
    r"^(?:__getitem__|__getitems__|collate\w*|\w*_collate(?:_fn)?|(?:_?load|read|get|prepare|make"
    r"|build|create|init|setup|cache|parse|preload|generate)_?"
    r"(?:\w*_)?(?:data|dataset|datasets|dataloader|dataloaders|loader|loaders|samples?|images?"
    r"|features?|batch(?:es)?|files?|csv|examples?|corpus|fold|annotations|embeddings?|vocab)(?:_\w+)?"
    r"|preprocess\w*|prepro|tokenize\w*|augment\w*|_worker_loop|fetch|default_(?:collate|convert)"
    r"|pin_memory|_pin_memory_loop|do_one_step|prepare|read_data|load_raw_data|imread)$"
)
_LOAD_SOURCE = re.compile(
    r"read_csv\(|read_parquet\(|load_dataset\(|\bDataLoader\(|Dataset\(|\bnp\.load\(|load_data\w*\("
    r"|pickle\.load\(|json\.load\(|h5py\.|(?:train|test)_(?:images|data|x|features) ?="
)
_LOAD_FILE = re.compile(
    r"utils/data/|data_?loader\w*\.py|/datasets?/|(?:^|/)data(?:set|sets|_utils|_loader|_module"
    r"|module)?\w*\.py|popen_(?:fork|spawn)|site-packages/datasets/"
    r"|/pandas/|/h5py/|/PIL/|torchvision/transforms|prep(?:ro|rocess)\w*\.py|/pyarrow/|webdataset"
)
_TRAIN_NAME = re.compile(
    r"^_?(?:train(?:_\w+)?|\w+_train(?:_\w+)?|training_step\w*|fit\w*|learn\w*|do_train\w*"
    r"|run_(?:training\w*|epoch|step|iter|batch|one_epoch)|optimize\w*|optimizer_step|backward\w*"
    r"|step|update_\w+"
    r"|_?inner_training_loop|one_epoch|train_one_epoch|compute_loss|forward_backward|clip_grad\w*"
    r"|make_experience|training_loop|\w*train_step\w*)$"
)
_TRAIN_SOURCE = re.compile(
    r"\.backward\(|optimizer\.step\(|optim\.step\(|\btrain\(|\.fit\(|train_(?:one_)?(?:epoch"
    r"|step)\w*\(|training_step\(|scaler\.step\(|clip_grad_norm|run_step\(|loss ?= |\.learn\("
)
_TRAIN_FILE = re.compile(
    r"torch/optim/|/autograd/|training_epoch_loop\.py|training_loop\.py|fit_loop\.py|train_loop\.py"
    r"|epoch_based_runner\.py|iter_based_runner\.py"
)
_BUILD_NAME = re.compile(
    r"^_?(?:from_pretrained|from_config|_apply|cuda|build\w*|create_\w+|get_(?:model|peft_model"
    r"|network)\w*|load_(?:model|weights|pretrained|lora|llm|pipeline|base)\w*|init_\w+|initialize\w*"
    r"|setup\w*|set_up\w*"
    r"|create_weights|wrap(?!per\b|ped)\w*|broadcast_coalesced|_sync_\w+|_ddp_init_helper|init_process_group"
    r"|_configure_\w+|load_model\w*|_load_pretrained_model\w*|_load_state_dict_into\w*"
    r"|_load_state_dict_into_meta_model"
    r"|set_module_tensor_to_device|dispatch_model|profile_run|determine_\w*available\w*|capture_model"
    r"|auto_wrap|quantize\w*|make_model\w*)$"
)
_BUILD_SOURCE = re.compile(
    r"(?:model|net|network|encoder|decoder|backbone|module|generator|discriminator|net[A-Z]|vae|unet"
    r"|llm|critic|actor|self)\b[\w.]*\.(?:to|cuda|half|float|bfloat16)\(|from_pretrained\("
    r"|DistributedDataParallel\("
    r"|FullyShardedDataParallel\(|\bFSDP\(|\bDDP\(|DataParallel\(|fully_shard\("
    r"|deepspeed\.initialize\(|init_process_group\(|accelerator\.prepare\(|build_model\("
    r"|create_model\(|get_model\("
    r"|(?:Model|Net|Network|Transformer|Encoder|LLM)\([^)]*\)(?:\.(?:to|cuda))?"
)
_BUILD_FILE = re.compile(
    r"transformers/modeling_utils\.py|accelerate/(?:utils/modeling|big_modeling)\.py|model_loader"
    r"|memory_pool|_fully_shard|/fsdp/_init_utils|model_executor/layers"
)

_GROUPS: tuple[tuple[JobPhase, re.Pattern[str], re.Pattern[str], re.Pattern[str]], ...] = (
    (
        "build",
        _BUILD_FILE,
        re.compile(r"^(?:_load_state_dict_into\w*|_load_pretrained_model\w*|from_pretrained)$"),
        re.compile(r"(?!)"),
    ),
    ("checkpoint", _CHECKPOINT_FILE, _CHECKPOINT_NAME, _CHECKPOINT_SOURCE),
    ("validate", _VALIDATE_FILE, _VALIDATE_NAME, _VALIDATE_SOURCE),
    ("load", _LOAD_FILE, _LOAD_NAME, _LOAD_SOURCE),
    ("build", re.compile(r"(?!)"), re.compile(r"(?!)"), _BUILD_SOURCE),
    ("train", _TRAIN_FILE, _TRAIN_NAME, _TRAIN_SOURCE),
    ("build", re.compile(r"(?!)"), _BUILD_NAME, re.compile(r"(?!)")),
)
#: Frames that say nothing: torch's own calls, thread and launcher code.
_NEUTRAL = re.compile(
    r"torch/(?:nn/(?:modules/(?!module\.py)|functional|parallel)|_tensor|tensor|functional|cuda/"
    r"|utils/(?:_contextlib|checkpoint|_device|_python_dispatch)|_ops|_dynamo|_inductor|_jit|jit"
    r"|storage|_utils|multiprocessing/(?:spawn|queue))"
    r"|threading\.py|runpy|torchrun|distributed/(?:run|launch|elastic|launcher)|concurrent/futures"
    r"|site-packages/(?:click|hydra|fire|typer|ray)/|multiprocessing/(?:process|queues|connection"
    r"|pool|spawn)"
)
#: Functions that only call the next one.
_PASSING = frozenset({"_wrapped_call_impl", "_call_impl", "decorate_context", "_fn", "inner", "wrapper", "wrapped"})
_LOADING = re.compile(
    r"utils/data/|data_?loader|DataLoader|popen_fork|w\.start\(\)|multiprocessing/(?:context|process|popen)|pin_memory"
)
_ENTRY = re.compile(
    r"(?:^|/)(?:\w*train\w*|finetune\w*|fine_tun\w*|run_(?:clm|mlm|glue|squad|ner|seq2seq)\w*|sft\w*"
    r"|pretrain\w*)\.py$|_trainer\.py$"
)
_FORWARD = re.compile(r"\b(?:model|net|module|criterion|loss\w*|net[A-Z]\w*)\w*(?:\.forward)?\(|\bforward\(")
_LAST_FILES = re.compile(r"(?:^|/)(?:test|val|eval|evaluate|evaluation|evaluator|validate)\.py$")


def find_phase(streams: list[Stream], fact: Fact) -> JobPhase:
    """The phase of a job at the moment of a fact."""
    stream = streams[fact.stream]
    frames = _frames(stream, fact)
    worker = fact.kind in ("worker_killed", "shm_bus", "shm_write", "shm_map", "worker_exited")
    worker |= any("worker" in line.text and "DataLoader" in line.text for line in fact.lines)
    worker |= any("encountered in worker" in line.text for line in fact.lines)
    if frames:
        loading = any(_LOADING.search(f"{one.file} {one.source}") for one in frames)
        forked = fact.kind in ("errno_12", "process_limit") and (
            loading or any(one.source.startswith("for ") for one in frames)
        )
        if forked or (worker and (loading or fact.kind != "shm_map")):
            return "validate" if any(_names_validation(one) for one in frames) else "load"
        found = _by_frames(frames)
        if found != "unknown" or fact.kind == "open_files":
            return "load" if found == "unknown" else found
    elif (worker and fact.kind != "shm_map") or fact.kind == "open_files":
        return "build" if any("nccl" in line.text.lower() for line in fact.lines) else "load"
    return _by_words(stream, fact)


def _names_validation(frame: Frame) -> bool:
    """Whether a frame is in a function of validation, or calls one, and not only lists its data."""
    return bool(_VALIDATE_NAME.match(frame.name)) or bool(re.search(r"\b(?:validate|evaluate)\(", frame.source))


def _frames(stream: Stream, fact: Fact) -> list[Frame]:
    """The frames of the traceback that a fact ends, outermost first; none where it ends none."""
    lines = stream.lines
    start = max(0, fact.place - _REACH)
    headers = [at for at in range(start, fact.place + 1) if _HEADER.search(lines[at].text)]
    if headers:
        begin = headers[-1]
        while "Original Traceback" in lines[begin].text and len(headers) > 1:
            headers.pop()
            begin = headers[-1]
    else:
        first = next(
            (at for at in range(max(0, fact.place - 45), fact.place + 1) if _FRAME.match(lines[at].text)), None
        )
        if first is None:
            return []
        begin = first - 1
    found = _parse(lines[begin + 1 : fact.place + 1])
    following = lines[fact.place + 1 : fact.place + 40]
    innocent = (
        fact.kind in ("worker_killed", "shm_bus", "worker_exited") or "killed by signal" in lines[fact.place].text
    )
    if innocent and any(_CHAINED.search(line.text) for line in following[:14]):
        found = [*_parse(following), *found]
    return found


def _parse(lines: list[Line]) -> list[Frame]:
    """Frames with the first line of source below each."""
    found: list[Frame] = []
    skipped = -1
    for at, line in enumerate(lines):
        match = _FRAME.match(line.text)
        if match is None and line.text.lstrip().startswith("File ") and at + 1 < len(lines):  # the console wrapped it
            match = _FRAME.match(line.text + lines[at + 1].text)
            skipped = at + 1 if match else skipped
        if match:
            file = (match["file"] or match["cell"]).replace("\\", "/")
            found.append(Frame(file, (match["name"] or match["where"] or "").rpartition(".")[2], ""))
        elif at != skipped and found and _is_source(line.text, found[-1]):
            found[-1] = Frame(found[-1].file, found[-1].name, _MARK.sub("", line.text).strip("│ \t"))
    return found


def _is_source(text: str, frame: Frame) -> bool:
    """Whether a line below a frame is its line of source."""
    marked = bool(_MARK.match(text))
    return (marked or (not frame.source and text[:1] in (" ", "\t"))) and not set(text.strip()) <= set("^~ ")


def _by_frames(frames: list[Frame]) -> JobPhase:
    """The phase of the innermost frame that means one."""
    for frame in reversed(frames):
        if _NEUTRAL.search(frame.file) or frame.name in _PASSING:
            continue
        for phase, file, name, source in _GROUPS:
            if file.search(frame.file) or name.match(frame.name) or (frame.source and source.search(frame.source)):
                if phase == "checkpoint" and any(
                    _LOAD_FILE.search(one.file) or one.name == "__getitem__" for one in frames
                ):
                    return "load"
                return phase
    text = "\n".join(one.source for one in frames)
    if any(_ENTRY.search(one.file) for one in frames) and (
        _FORWARD.search(text) or any(one.name in ("forward", "__call__") for one in frames)
    ):
        return "train"
    if any(frame.name == "__init__" and not re.search(r"data|loader", frame.file, re.I) for frame in frames):
        return "build"
    return "validate" if any(_LAST_FILES.search(one.file) for one in frames) else "unknown"


def warns_of_clone(stream: Stream, fact: Fact) -> bool:
    """Whether a fact stands in FSDP's warning that it could not copy a tensor of a checkpoint."""
    start = stream.start_of(fact.place)
    return "Failedtoclone()tensor" in stream.squeezed[max(0, start - 900) : start + 400]


_PRINTED: tuple[tuple[JobPhase, re.Pattern[str]], ...] = (
    (
        "checkpoint",
        re.compile(
            r"\bsav(?:e|ing)\b.{0,30}(?:model|checkpoint|ckpt|state|weights)|writing checkpoint"
            r"|loading (?:from )?(?:the )?(?:model )?checkpoint(?! shards)"
            r"|resum(?:e|ing) (?:from|training)|restoring|Failed to clone\(\)|loading (?:optimizer|state)",
            re.I,
        ),
    ),
    (
        "load",
        re.compile(
            r"prepar(?:e|ing) (?:the )?(?:train|test|val)\w* (?:set|data)|(?:loading|reading|caching"
            r"|scanning) (?:the )?'?(?:data|train|test|val)\w*",
            re.I,
        ),
    ),
    (
        "build",
        re.compile(
            r"loading checkpoint shards|creating (?:the )?model|building (?:the )?model"
            r"|loading (?:the )?(?:pre-?trained )?(?:model|weights|safetensors)"
            r"|initializ\w+ (?:the )?(?:model|engine|distributed|process group|a V\d)"
            r"|DeepSpeedZeRoOffload|NCCL INFO|compiling|Loading extension module"
            r"|Model loading took|AutoBatch|Computing optimal batch size|capturing|loading .{0,20}modules",
            re.I,
        ),
    ),
    (
        "validate",
        re.compile(
            r"(?<!preparing )\bvalid(?:ation|ating|ate)?\b(?! '|_)|\beval(?:uation|uating|uate)?\b"
            r"|\bval\b|sanity check|\btesting\b|\binference\b|predicting",
            re.I,
        ),
    ),
    (
        "train",
        re.compile(
            r"\bepoch\b|\btrain(?:ing)?\b|\bstep(?:s)?\b.{0,30}\d|\biter(?:ation)?s?\b.{0,20}\d"
            r"|\bloss\b|\blr\b|'learning_rate'|ppl=|policy gradient|num_updates"
            r"|in forward/backward|during optimization|skipping batch|retrying batch|\bETA\b",
            re.I,
        ),
    ),
    (
        "load",
        re.compile(
            r"loading (?:data|dataset|train|images|features|embeddings|samples)|load(?:ed|ing) \d+"
            r"|preparing .{0,20}(?:set|data)"
            r"|prepar\w+ data|reading|tokeniz|preprocess|caching|decod|dataset|Skipping token"
            r"|\.astype\(|\bmap\b.{0,30}%|bathroom",
            re.I,
        ),
    ),
)
_HAPPENED = re.compile(
    r"finished|completed|\bdone\b|saved|=+ ?(?:validation|evaluation) (?:summary|result)|valid_loss"
    r"|val_loss|val/|test_loss|loaded model weights|took \d",
    re.I,
)
#: Lines of others than the job: launchers, schedulers, kernels, tables of states, settings.
_FOREIGN = re.compile(
    r"^\s*(?:srun:|slurmstepd|sbatch:|#SBATCH|Job(?:ID|Id)\b|\d+(?:\.\w+)?\s+\S+\s+\S+\s+[A-Z_+]{6,}"
    r"|Namespace\(|--\w|python\d? |args:|WARNING:torch\.distributed"
    r"|=>> PBS|TERM_|Warning: |usage:)|oom-killer|Killed process|total-vm|\bnode\(s\)|[Cc]ontainer|^Name:|^Status:"
    r"|kubelet|memory budget|distributed\.(?:nanny|worker)|raylet"
    r"|systemd|earlyoom|kubectl|namespace|READY|OOMKilled|Reason:|NCCL WARN|ProcessGroupNCCL|exitcode"
    r"|UserWarning: (?!Failed to clone)|If you encounter|\bmay fail\b"
)
_CUT = re.compile(
    r"RuntimeError|\w*OutOfMemory|slurmstepd|slurm_script|Traceback|THCuda|ERROR:|CUDA out of memory"
    r"|HIP out of memory|XPU out of memory|MemoryError|\bKilled\b|XlaRuntimeError|OSError"
)


def _by_words(stream: Stream, fact: Fact) -> JobPhase:
    """The phase that the nearest line before names, its own first."""
    if warns_of_clone(stream, fact):
        return "checkpoint"
    start = max(0, fact.place - 40)
    own = stream.lines[fact.place]
    before = list(reversed(stream.lines[start : fact.place + 1]))
    # The path of a file says less than what was printed.
    for line in sorted(before, key=lambda line: bool(_FRAME.match(line.text))):
        text = line.text if fact.kind in ("progress", "pressure", "skipped_batches") else _CUT.split(line.text)[0]
        if not text.strip() or (_HAPPENED.search(text) and line is not own) or _FOREIGN.search(text):
            continue
        for phase, regex in _PRINTED:
            if regex.search(text):
                return phase
    return "unknown"
