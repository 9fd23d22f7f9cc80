"""``memfit estimate``: the device memory of a training, before it runs and without a GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from memfit.checks import check_one_given
from memfit.cli._files import read_model_config
from memfit.cli._settings import AcceptTight, Set, with_flags
from memfit.cli._terminal import AsJson, answer, console
from memfit.cli._training import Training
from memfit.errors import DoesNotFitError, UsageError
from memfit.estimation import ALLOCATOR_VARIABLES, TIME_LIMIT
from memfit.memory import Budget

#: How often a trace says that it goes on.
_TELL_SECONDS = 4.0
#: The flags that go with a workload's config; the others describe a model's config.json.
_OF_CONFIGS = ("config", "gpu", "allocator", "formula", "time_limit", "accept_tight", "set_", "as_json")


@dataclass(frozen=True)
class Flags(Training):
    """The flags of this verb."""

    gpu: Annotated[
        str | None,
        Option(help="Such as A100-80GB or 24GiB; none: any; by default GPU 0 of this machine.", metavar="NAME|SIZE"),
    ] = None
    allocator: Annotated[
        str | None,
        Option(help="Settings of torch's allocator, in place of PYTORCH_CUDA_ALLOC_CONF.", metavar="KEY:VALUE,..."),
    ] = None
    formula: Annotated[bool, Option("--formula", help="Use a formula; do not trace the model.")] = False
    time_limit: Annotated[
        float,
        Option(min=0, help="CPU time for traces. A longer one is extrapolated from smaller sizes.", metavar="SECONDS"),
    ] = TIME_LIMIT
    accept_tight: AcceptTight = False
    set_: Set = None
    as_json: AsJson = False

    @property
    def allocator_text(self) -> str | None:
        """The settings of torch's allocator: the flag, else the user's own variables."""
        return self.allocator or next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), None)


@with_flags
def estimate(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A YAML config.", show_default=False)] = None,
    hf_config: Annotated[
        Path | None,
        Option("--hf-config", help="The model's config.json, or its folder.", metavar="FILE", show_default=False),
    ] = None,
    *,
    flags: Flags,
) -> None:
    """Estimate the device memory of a training step, with an upper bound for each figure.

    \b
    memfit estimate --hf-config config.json --batch 8 --seq-len 512 --gpu A100-80GB
    memfit estimate config.yaml --gpu 24GiB

    The step runs on fake tensors, without a GPU, within a minute of CPU time. One that takes longer, such as a loop
    over time, runs at smaller sizes and is extrapolated. If that fails, a formula gives a wider bound. The figures
    are allocated (tensors), reserved (torch's allocator) and device (as nvidia-smi shows it). With --gpu it says
    whether the training fits, and the cheapest change after which it does. Beside a config only --gpu, --allocator,
    --formula, --time-limit, --accept-tight, --set and --json have an effect.

    Exit codes: 0 done, 2 bad config or input, 3 it does not fit, only may, or is tight (under 5 % left).
    """
    if config is not None and config.suffix == ".py":
        raise UsageError(
            f"{config} is a Python script.",
            rule="an estimate is made from a config, or from a model's config.json.",
            remedy=f"measure the script: memfit run -- python {config}",
        )
    _check_source(context, config, hf_config)
    gpu, available, others = _this_gpu(flags.gpu)
    how: dict[str, Any] = {
        "gpu": gpu,
        "available_bytes": available,
        "allocator": flags.allocator_text,
        "time_limit": flags.time_limit,
    }
    if hf_config is None:
        from memfit.pipeline import estimate_workload

        settings = [*(flags.set_ or []), *(["accept_tight=true"] if flags.accept_tight else [])]
        with _tracing(flags.time_limit):
            found = estimate_workload(config or "", overrides=settings, formula=flags.formula, **how)
    else:
        found = _of_model(read_model_config(hf_config), flags, how)
    found["notes"] += others
    from memfit.reports import print_estimate

    answer(found, flags.as_json, partial(print_estimate, found))
    fitting = (None, "fits", *(["tight"] if found.get("accept_tight", flags.accept_tight) else []))
    raise typer.Exit(0 if found["verdict"] in fitting else DoesNotFitError.exit_code)


def _check_source(context: typer.Context, config: Path | None, hf_config: Path | None) -> None:
    """Refuse no model, two models, and flags without effect."""
    check_one_given(
        {f"a config ({config})": config, f"--hf-config {hf_config}": hf_config},
        none="memfit estimate was given neither a config nor --hf-config",
        rule="it takes a config, whose workload names its step, or a model's config.json.",
        remedy="write memfit estimate config.yaml, or memfit estimate --hf-config config.json --batch 8",
    )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    others = [one.opts[0] for one in context.command.params if one.name in given and one.name not in _OF_CONFIGS]
    beside, useless = ("a config", others) if config else ("--hf-config", ["--set"] if "set_" in given else [])
    if useless:
        flags = " and ".join(useless)
        raise UsageError(
            f"beside {beside} {flags} {'has' if len(useless) == 1 else 'have'} no effect.",
            rule="a config's workload says how it trains, and --set changes that; flags describe a config.json.",
            remedy=f"leave out {flags}" + ("; set the workload's own: --set params.NAME=VALUE" if config else ""),
        )


def _of_model(model: dict[str, Any], flags: Flags, how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer for a model's config.json; ``how`` names the device and the time limit."""
    from memfit.estimation import describe_batches, read_lengths
    from memfit.planning import Question, ask

    setup = flags.setup()
    lengths = None if flags.lengths is None else read_lengths(flags.lengths)
    if lengths is not None:
        setup = replace(setup, seq_len=min(max(1, int(lengths.max())), flags.seq_len))
    more: dict[str, Any] = {
        "formula": flags.formula,
        "largest_batch": flags.is_auto,
        "global_batch": flags.global_batch,
    }
    with _tracing(flags.time_limit):
        found = ask(Question(model, setup, **more, **how))
    batch = found["setup"]["batch"]
    data = None if lengths is None else describe_batches(lengths, batch=batch, max_length=flags.seq_len)
    return found | {"data": data}


def _this_gpu(gpu: str | None) -> tuple[str | None, int | None, list[str]]:
    """Return a GPU's name or size, its free bytes and who uses the rest; by default of this machine's first GPU."""
    if gpu is not None:
        return (None if gpu.lower() == "none" else gpu), None, []
    from memfit.planning import find_this_gpu

    return find_this_gpu(Budget.read())


@contextmanager
def _tracing(time_limit: float) -> Iterator[None]:
    """Say how long the trace takes: anew each second on a terminal, elsewhere in a line from time to time."""
    log, ended, begin = console(stderr=True), threading.Event(), time.monotonic()
    text = f"tracing two training steps on fake tensors, for at most {time_limit:.0f} s of CPU"
    with log.status(text) as shown:

        def tell() -> None:
            while not ended.wait(1.0 if log.is_terminal else _TELL_SECONDS):
                so_far = f"{text}; {time.monotonic() - begin:.0f} s so far"
                shown.update(so_far) if log.is_terminal else log.say(so_far)

        threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
