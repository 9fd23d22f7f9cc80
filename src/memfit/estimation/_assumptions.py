"""What an estimate assumes, and which share of the weights moves: an update under half a digit rounds to nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memfit.estimation._setup import NOT_COMPILED, Setup

#: Digits of a weight, in bits; a sum moves it if it is above half of the last one.
_DIGITS = {"bf16": 8, "fp16": 11}
#: The rate of most fine-tuning, where none is named, and how large weights are (``initializer_range`` of most models).
TYPICAL_RATE, _SIZE = 1e-4, 0.02
#: Adam's update where gradients are noise, for each unit of the rate: the root of (1 - beta1) / (1 + beta1).
_OF_NOISE = 0.23
_STEPS, _SAMPLE = 20, 1024
#: A training of which fewer weights move in a step than this share does not learn.
LEAST_SHARE = 0.5


def list_assumptions(setup: Setup) -> tuple[str, ...]:
    found = [NOT_COMPILED] if setup.compiled else []
    full = not setup.lora_rank and setup.optimizer != "none"
    if setup.dtype == "bf16" and full and not setup.master_weights:
        share, how = share_that_moves(setup)
        moving = f": {how}, about {share * 100:.0f} % of the weights move in a step" if how else ""
        found.append(
            f"pure bf16 loses every update smaller than about 1/256 of its weight{moving}; "
            "use --train master_weights=true or --dtype bf16-amp"
        )
    if setup.optimizer.startswith("paged"):
        found.append("paged: moments of 100,000 numbers or more take free room alone, and leave it for tensors")
    if setup.is_sharded:
        found.append("loading is not counted: build on the meta device and load shard by shard")
    if setup.quantization != "none" and setup.autocasts:
        found.append("what is not in 4 bits is in fp32 under autocast, as after prepare_model_for_kbit_training")
    return tuple(found)


def share_that_moves(setup: Setup, weights: Any = "") -> tuple[float, str]:
    """Return the share of the trained weights that a step of Adam or Adafactor moves, and how it was found: by dry
    steps on samples of ``weights``, tensors or a folder's ``.safetensors``, with drawn gradients; else by a rule.

    >>> [round(share_that_moves(Setup(dtype="bf16", learning_rate=rate))[0], 2) for rate in (1e-5, 1e-4, 1e-3)]
    [0.03, 0.25, 0.85]
    """
    rate = setup.learning_rate or TYPICAL_RATE
    is_narrow = setup.dtype in _DIGITS and not setup.master_weights and not setup.lora_rank
    if not is_narrow or setup.optimizer in ("sgd", "momentum", "none"):  # their updates are as large as the gradients
        return 1.0, ""
    with contextlib.suppress(ImportError, FileNotFoundError):  # no torch, no weights
        return _step_dry(_draw_samples(weights), setup, rate), "by dry steps on the real weights"
    # Of two normal numbers, the share that is above a multiple of the other. Adafactor's update grows with the weights.
    update = rate if setup.optimizer == "adafactor" else _OF_NOISE * rate / _SIZE
    how = f"by a rule of format, rate ({rate:g}{'' if setup.learning_rate else ', assumed'}) and size"
    return 2 / math.pi * math.atan(update * 2 ** (_DIGITS[setup.dtype] + 0.5)), how


def _draw_samples(weights: Any) -> Iterator[tuple[Any, int]]:
    """Yield some numbers of each tensor, and how many it has."""
    if not isinstance(weights, Path | str):
        for one in weights:
            yield one.detach().flatten()[:: 1 + one.numel() // _SAMPLE].cpu(), one.numel()
        return
    for file in sorted(Path(weights).glob("*.safetensors")) if weights else ():
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                rows, shape = opened.get_slice(name), opened.get_slice(name).get_shape()
                if shape and (size := math.prod(shape)):
                    yield rows[: 1 + _SAMPLE * shape[0] // size].flatten()[:_SAMPLE], size


def _step_dry(samples: Iterable[tuple[Any, int]], setup: Setup, rate: float) -> float:
    import torch

    from memfit.estimation._program import DTYPES

    generator, found = torch.Generator().manual_seed(0), list(samples)
    if not found:
        raise FileNotFoundError
    weights = [torch.nn.Parameter(sample.to(DTYPES[setup.dtype])) for sample, _ in found]
    kind: Any = torch.optim.Adafactor if setup.optimizer == "adafactor" else torch.optim.AdamW
    optimizer = kind(weights, lr=rate, weight_decay=0.0, foreach=True)
    for _ in range(_STEPS):
        before = [one.detach().clone() for one in weights]
        for one in weights:
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
        optimizer.step()
    shares = [float((one.detach() != was).float().mean()) for one, was in zip(weights, before, strict=True)]
    sizes = [size for _, size in found]
    return sum(map(math.prod, zip(shares, sizes, strict=True))) / sum(sizes)
