"""What other estimators say of the same program, in GiB; or why one says nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from _ground_truth_programs._spec import GIB, Spec
from memfit.estimation import Program


def _ask_mem_tracker(program: Program) -> float:
    """PyTorch's own tracker of tensors (torch/distributed/_tools/mem_tracker.py), over two iterations."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(program.model)
    with tracker:
        for _ in range(2):
            loss = program.loss(program.model, program.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if program.optimizer is not None:
                program.optimizer.step()
                program.optimizer.zero_grad()
            tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return sum(sizes["Total"] for sizes in peaks.values()) / GIB


def _ask_accelerate(program: Program) -> float | str:
    """The formula of ``accelerate estimate-memory``: training with Adam takes four times the weights."""
    if find_spec("accelerate") is None:
        formula = 4.0
    else:
        from accelerate.commands.estimate import estimate_training_usage

        weights = sum(parameter.nbytes for parameter in program.model.parameters())
        usage = estimate_training_usage(weights, "float32")
        return float(max(usage.values())) / GIB
    return formula * sum(parameter.nbytes for parameter in program.model.parameters()) / GIB


def _ask_deepspeed(program: Program) -> float:
    """DeepSpeed's ``estimate_zero3_model_states_mem_needs`` on one device without offload: 18 bytes a parameter, and
    the largest layer once more in 16 bit (deepspeed/runtime/zero/stage3.py)."""
    total = sum(parameter.numel() for parameter in program.model.parameters())
    largest = max(
        sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in program.model.modules()
    )
    return (4 * largest + 18 * total) / GIB


def _ask_torchinfo(program: Program) -> float:
    """torchinfo's estimate: the parameters, the inputs, and twice the results of all layers."""
    from torch.utils._pytree import tree_leaves

    sizes: list[int] = []

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if not list(module.children()):
            sizes.extend(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

    hooks = [module.register_forward_hook(count) for module in program.model.modules()]
    with torch.no_grad():
        program.loss(program.model, program.batch)
    for hook in hooks:
        hook.remove()
    weights = sum(parameter.nbytes for parameter in program.model.parameters())
    return (weights + 2 * sum(sizes)) / GIB


PEERS: dict[str, Callable[[Program], float | str]] = {
    "MemTracker (torch)": _ask_mem_tracker,
    "estimate-memory (accelerate)": _ask_accelerate,
    "ZeRO-3 formula (DeepSpeed)": _ask_deepspeed,
    "torchinfo's formula": _ask_torchinfo,
}


def ask_peers(spec: Spec) -> dict[str, float | str]:
    """What each peer says of a row's program; an error's text where it cannot follow it."""
    answers: dict[str, float | str] = {}
    for name, ask in PEERS.items():
        try:
            with FakeTensorMode():
                answers[name] = ask(spec.make())
        except Exception as error:  # a peer may fail in any way: that is an answer too
            answers[name] = f"no answer: {type(error).__name__}: {error}"[:160]
    return answers
