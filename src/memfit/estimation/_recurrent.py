"""Recurrent layers as cuDNN runs them: one operation for all layers and times, with a reserve that it keeps; and what
oneDNN keeps of an LSTM on the CPU.

cuDNN publishes neither the size of its reserve nor that of its workspace. The numbers were fitted to what an H100
showed with cuDNN 9.19 for fourteen stacks of layers. `benchmarks/gpu.py` sets estimates of three others beside a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: By kind, numbers for each value of a layer's output: of each layer in reserve and output; of all in the workspace.
RECURRENT = {"lstm": (6, 5.1), "gru": (7, 4.2), "rnn_tanh": (2, 3.6), "rnn_relu": (2, 3.6)}
#: The workspace of two directions, and the share of it that the weights add.
_OF_BOTH, _OF_WEIGHTS = 1.5, 1.3
_PAGE = 4096


class _Layers(torch.autograd.Function):
    """Forward and backward pass of a stack of layers: input (time, batch, features), states, weights."""

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, int, int], num_states: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        output_size, reserve_size, workspace_size = sizes
        x_TNF, states = tensors[0], tensors[1 : 1 + num_states]
        output_TNH = x_TNF.new_empty(*x_TNF.shape[:2], output_size)
        reserve = x_TNF.new_empty(reserve_size)
        x_TNF.new_empty(workspace_size)  # born and gone at once
        ctx.workspace_size, ctx.num_states = workspace_size, num_states
        ctx.save_for_backward(output_TNH, reserve, *tensors)
        return output_TNH, *(torch.empty_like(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, x_TNF, *rest = ctx.saved_tensors
        states, weights = rest[: ctx.num_states], rest[ctx.num_states :]
        x_TNF.new_empty(ctx.workspace_size)
        of_weights = x_TNF.new_empty(sum(one.numel() for one in weights))  # one buffer, as the weights have
        parts = of_weights.split([one.numel() for one in weights])
        found = [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]
        return None, None, torch.empty_like(x_TNF), *map(torch.empty_like, states), *found


def run_recurrent(kind: str, x: Tensor, state: Any, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Run ``lstm.input``, ``gru.input``, ``rnn_tanh.input`` or ``rnn_relu.input``; return what they return."""
    _, num_layers, dropout, train, is_bidirectional, is_batch_first = options
    states = [state] if isinstance(state, Tensor) else list(state)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, states, weights = x.to(dtype), [one.to(dtype) for one in states], [one.to(dtype) for one in weights]
    x_TNF = x.transpose(0, 1) if is_batch_first else x
    directions = 2 if is_bidirectional else 1
    output_size = directions * states[0].shape[-1]
    unit = x_TNF.shape[0] * x_TNF.shape[1] * directions * states[-1].shape[-1]  # an LSTM's output may be narrower
    kept, passing = RECURRENT[kind]
    factor = passing * (_OF_BOTH if is_bidirectional else 1) + (num_layers - 1) * (dropout > 0)
    workspace = factor * unit + 2 * x.numel() + _OF_WEIGHTS * sum(one.numel() for one in weights)
    reserve = (kept * num_layers - 1) * unit if train else 0
    sizes = output_size, reserve, int(workspace)
    output, *last = _Layers.apply(sizes, len(states), x_TNF, *states, *weights)  # type: ignore[no-untyped-call]
    return (output.transpose(0, 1) if is_batch_first else output, *last)


def count_onednn(args: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of oneDNN's workspace for a layer of an LSTM in training, which live until its backward pass,
    and of its scratch memory: gates, states, their gradients, all in whole pages, and weights in wider rows. Fitted to
    torch 2.13, and equal to its workspaces (oneDNN's rnn/rnn_utils.cpp)."""
    steps, batch, features = args[0].shape
    size = args[2].shape[1]
    of_gates, of_states, wide = batch * steps, 2 * batch * (steps + 1), _row(max(features, size))
    rows = [(of_gates, _row(4 * size)), (of_gates, _row(size)), *[(of_states, wide)] * 3, *[(of_states, size)] * 2]
    gates, *others = [-(-4 * number * row // _PAGE) * _PAGE for number, row in rows]
    return gates + sum(others), gates + 4 * (features + size) * _row(4 * size) + 4 * _PAGE


def _row(size: int) -> int:
    """Return how many numbers a row takes: whole cache lines, and one more where 1 KiB divides them."""
    size = -(-size // 16) * 16
    return size if size % 256 else size + 16
