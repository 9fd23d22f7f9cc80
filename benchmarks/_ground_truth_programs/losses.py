# mypy: disable-error-code="no-any-return, no-untyped-call"
"""Rows CE: the loss layer of Gemma 2 alone, as in the benchmark of Cut Cross-Entropy (apple/ml-cross-entropy).

Its figures leave out what was there before the pass: the hidden states, the classifier and the targets.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from _ground_truth_programs._pieces import Spec, default_dtype
from memfit.estimation import Program

TOKENS, DIM, VOCAB, SOFTCAP = 8192, 2304, 256000, 30.0


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.empty(TOKENS, DIM))
        self.classifier = nn.Parameter(torch.empty(VOCAB, DIM))


class _Stop(torch.autograd.Function):
    """Ends the graph: what follows in the backward pass takes no memory."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(held)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class _CutCrossEntropy(torch.autograd.Function):
    """One kernel a pass; two gradients, and an int32 lock for each 128 x 64 of each (cce_backward.py)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, classifier: torch.Tensor) -> torch.Tensor:
        logsumexp = hidden.new_empty(TOKENS, dtype=torch.float32)
        ctx.save_for_backward(hidden, classifier, logsumexp)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = []
        locks = []
        for operand in ctx.saved_tensors[:2]:
            grads.append(torch.empty_like(operand))
            locks.append(torch.empty(-(-operand.size(0) // 128), -(-DIM // 64), dtype=torch.int32))
        del locks
        return tuple(grads)


def _plain_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Classifier)
    logits = torch.tanh(model.hidden @ model.classifier.T / SOFTCAP) * SOFTCAP
    return functional.cross_entropy(logits.float(), batch)


def _forward_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return _Stop.apply(_plain_loss(model, batch), batch)


def _cut_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Classifier)
    return _CutCrossEntropy.apply(model.hidden, model.classifier)


def _make(loss: Any) -> Program:
    with default_dtype(torch.bfloat16):
        model = Classifier()
    return Program(
        model, torch.zeros(TOKENS, dtype=torch.long), loss, torch.optim.SGD(model.parameters(), foreach=False)
    )


SPECS: dict[str, Spec] = {
    name: Spec(partial(_make, loss), "allocated", "A100-80GB", minus_inputs=True)
    for name, loss in {"CE-01": _forward_loss, "CE-02": _plain_loss, "CE-05": _cut_loss}.items()
}
