"""``memfit estimate``: the device memory of a training, before it runs and without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from pydantic import Field, create_model

from memfit.checks import check_one_given
from memfit.cli._settings import Text, flag, join, set_flag, settings_of, spell, tight_flag, with_flags
from memfit.cli._terminal import AsJson, answer, heartbeat
from memfit.config import DEFAULT, Settings, resolve
from memfit.errors import ConfigError, DoesNotFitError, UsageError
from memfit.estimation import ALLOCATOR_VARIABLES, TIME_LIMIT, Optimizer, Setup, split_batch
from memfit.memory import Budget

#: The flags that go with a workload's config; the others describe a model's config.json.
_OF_CONFIGS = ("gpu", "allocator", "formula", "time_limit", "accept_tight", "set_", "as_json")


@dataclass(frozen=True)
class Flags:
    """The flags of this verb. One that gives a field of ``Setup`` its value names it behind its option."""

    hf_config: Path | None = flag("The model's config.json, or its folder.", "FILE")
    batch: Text = flag("Samples of a microbatch, or as many as fit; 1.", "N|auto", "batch")
    microbatches: Text = flag("Forward and backward passes an update; 1.", "N", "num_microbatches")
    global_batch: int | None = flag("Samples an update, over all devices.", "N", min=1)
    seq_len: Text = flag("Tokens of a sample, padding included; 512.", "N", "seq_len")
    dtype: Text = flag("bf16, fp32, fp16 (weights too), bf16-amp, fp16-amp (weights in fp32); bf16.", "DTYPE", "dtype")
    optimizer: Text = flag(f"{', '.join(get_args(Optimizer))}; adamw.", "NAME", "optimizer")
    gradient_checkpointing: bool = flag("Keep only the inputs of blocks.", None, "gradient_checkpointing=full")
    lora: Text = flag("The rank of LoRA adapters.", "N", "lora_rank")
    world_size: Text = flag("Devices; 1.", "N", "world_size")
    strategy: Text = flag("ddp, fsdp.", "NAME", "strategy")
    train: list[str] | None = flag("Another field, such as attention=eager (docs/estimate.md).", "KEY=VALUE")
    gpu: Text = flag("Such as A100-80GB or 24GiB; none: any; by default GPU 0 of this machine.", "NAME|SIZE")
    allocator: Text = flag("Settings of torch's allocator, in place of PYTORCH_CUDA_ALLOC_CONF.", "KEY:VALUE,...")
    formula: bool = flag("Use a formula; do not trace the model.")
    time_limit: float = flag("CPU time for the trace; then the formula answers.", "SECONDS", default=TIME_LIMIT, min=0)
    accept_tight: bool = tight_flag()
    set_: list[str] | None = set_flag()
    as_json: AsJson = False

    def setup(self) -> Setup:
        """Return the setup; its batch is 1 where the largest is asked for.

        Raises:
            UsageError: A field or value is not known, or two contradict each other.
        """
        given = settings_of(self)
        given.pop("accept_tight", None)
        if self.batch == "auto":
            del given["batch"]
        found = resolve(_model_of_setup(), env={}, overrides=join(given, self.train, "--train"))
        setup = Setup(**dict(found.value))
        if setup.world_size > 1 and found.origins["strategy"] == DEFAULT:
            setup = replace(setup, strategy="ddp")
        check_one_given(
            {
                "--microbatches": found.origins["num_microbatches"] != DEFAULT,
                f"--global-batch {self.global_batch}": self.global_batch,
            },
            rule="samples an update = samples of a microbatch x microbatches x devices.",
            remedy="leave one of them out",
        )
        if self.global_batch is not None and self.batch != "auto":
            setup = replace(setup, num_microbatches=split_batch(self.global_batch, setup.batch, setup.world_size))
        return setup


def _model_of_setup() -> type[Settings]:
    """Return a model of settings with the fields of ``Setup``, whose whole numbers begin at 1."""
    hints = get_type_hints(Setup)
    made: dict[str, Any] = {}
    for one in fields(Setup):
        least = 0 if one.name == "lora_rank" else 1
        is_count = hints[one.name] in (int, int | None)
        made[one.name] = (hints[one.name], Field(one.default, ge=least if is_count else None))
    return create_model("Train", __base__=Settings, **made)


@with_flags
def estimate(
    config: Annotated[Path | None, typer.Argument(help="A YAML config.", show_default=False)] = None,
    *,
    flags: Flags,
) -> None:
    """Estimate the device memory of a training step, with an upper bound for each figure.

    \b
    memfit estimate --hf-config config.json --batch 8 --seq-len 512 --gpu A100-80GB
    memfit estimate config.yaml --gpu 24GiB

    The step runs on fake tensors, without a GPU, within a minute of CPU time. Where that takes longer, a formula gives
    a wider bound. The figures are allocated (tensors), reserved (torch's allocator) and device (as nvidia-smi shows
    it). With --gpu it says whether it fits, and the changes after which it does and learns. Beside a config only
    --gpu, --allocator, --formula, --time-limit, --accept-tight, --set and --json count.

    Exit codes: 0 done, 2 bad config or input, 3 it does not fit, only may, or is tight (under 5 % left).
    """
    from memfit.planning import find_this_gpu
    from memfit.reports import view_estimate

    if config is not None and config.suffix == ".py":
        raise UsageError(
            f"{config} is a Python script.",
            rule="an estimate is made from a config, or from a model's config.json.",
            remedy=f"measure the script: memfit run -- python {config}",
        )
    _check_source(config, flags)
    gpu, available, others = flags.gpu, None, list[str]()
    if gpu is None:
        gpu, available, others = find_this_gpu(Budget.read())
    how: dict[str, Any] = {
        "gpu": None if gpu is not None and gpu.lower() == "none" else gpu,
        "available_bytes": available,
        "allocator": flags.allocator or next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), None),
        "time_limit": flags.time_limit,
    }
    with heartbeat("estimating"):
        if flags.hf_config is None:
            from memfit.pipeline import estimate_workload

            settings = join(settings_of(flags), flags.set_)
            found = estimate_workload(config or "", overrides=settings, formula=flags.formula, **how)
        else:
            found = _of_model(_read_model_config(flags.hf_config), flags, how)
    found["notes"] += others
    answer(found, flags.as_json, view_estimate(found))
    fitting = (None, "fits", *(["tight"] if found.get("accept_tight", flags.accept_tight) else []))
    raise typer.Exit(0 if found["verdict"] in fitting else DoesNotFitError.exit_code)


def _check_source(config: Path | None, flags: Flags) -> None:
    """Refuse no model, two models, and flags without effect."""
    check_one_given(
        {f"a config ({config})": config, f"--hf-config {flags.hf_config}": flags.hf_config},
        none="memfit estimate was given neither a config nor --hf-config",
        rule="it takes a config, whose workload names its step, or a model's config.json.",
        remedy="write memfit estimate config.yaml, or memfit estimate --hf-config config.json --batch 8",
    )
    useless = [one.name for one in fields(flags) if one.name not in _OF_CONFIGS] if config else ["set_"]
    if given := [spell(name) for name in useless if getattr(flags, name)]:
        raise UsageError(
            f"{' and '.join(given)} beside {'a config' if config else '--hf-config'}.",
            rule="a config's workload says how it trains, and --set changes that; flags describe a config.json.",
            remedy="leave that out" + ("; set the workload's own: --set params.NAME=VALUE" if config else ""),
        )


def _of_model(model: dict[str, Any], flags: Flags, how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer for a model's config.json; ``how`` names the device and the time limit."""
    from memfit.planning import Question, ask

    more: dict[str, Any] = {
        "formula": flags.formula,
        "largest_batch": flags.batch == "auto",
        "global_batch": flags.global_batch,
    }
    return ask(Question(model, flags.setup(), weights=str(flags.hf_config), **more, **how)) | {"data": None}


def _read_model_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json, given the file or its folder."""
    file, what = path / "config.json" if path.is_dir() else path, "is no JSON object"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        what = f"is no JSON: {error}"
    rule = "--hf-config takes a model's config.json, or the folder that holds it."
    remedy = "download all of it from the model's page, or save it: model.config.save_pretrained(folder)"
    raise ConfigError(f"{file} {what}.", rule=rule, remedy=remedy)
