"""``memfit estimate CONFIG``: the same for the step of a config's workload, which says all else by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from memfit.errors import UsageError
from memfit.estimation import ALLOCATOR_VARIABLES

#: The flags that go with a config; the others describe a model that is no workload's.
_OF_CONFIGS = ("config", "gpu", "allocator", "time_limit", "set_", "as_json")


def check_what_to_estimate(context: typer.Context, config: Path | None, hf_config: Path | None) -> None:
    """Refuse no model, two, and flags that have no effect on the one that is given."""
    if (config is None) == (hf_config is None):
        raise UsageError(
            "memfit estimate was given neither a config nor --hf-config."
            if config is None
            else f"memfit estimate was given both a config ({config}) and --hf-config {hf_config}.",
            rule="it takes a config, whose workload names its step, or a model's config.json.",
            remedy="write memfit estimate config.yaml, or memfit estimate --hf-config config.json --batch 8",
        )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    others = [name for name in given if name not in _OF_CONFIGS]
    if config is not None and others:
        flags = " and ".join(f"--{name.strip('_').replace('_', '-')}" for name in others)
        raise UsageError(
            f"beside a config {flags} {'has' if len(others) == 1 else 'have'} no effect.",
            rule="the workload's own step says how it trains, and its loader what a batch is.",
            remedy=f"leave out {flags}, or set the workload's own: --set params.NAME=VALUE",
        )
    if config is None and "set_" in given:
        raise UsageError(
            "beside --hf-config --set has no effect.",
            rule="it sets what a config holds.",
            remedy="leave out --set; memfit estimate --help lists the flags of a training",
        )


def own_allocator(allocator: str | None) -> str | None:
    """What torch's allocator is told: by the flag, else by the user's own variables."""
    return allocator or next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), None)


def answer_for_workload(
    config: Path,
    gpu: tuple[str | None, int | None, Sequence[str]],
    allocator: str | None,
    overrides: Sequence[str],
    time_limit: float,
) -> dict[str, Any]:
    """The estimate; ``gpu`` is the device's name, what is free of it, and notes on both."""
    from memfit.pipeline import estimate_workload

    name, available, notes = gpu
    answer = estimate_workload(
        config,
        gpu=name,
        available_bytes=available,
        allocator=own_allocator(allocator),
        overrides=overrides,
        time_limit=time_limit,
    )
    answer["notes"] += notes
    return answer
