"""Models of several kinds with their batches, for ``benchmarks/gpu.py``: what is estimated is what is trained there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.estimation import Setup


@dataclass(frozen=True)
class Case:
    """A model, a batch on the CPU, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    setup: Setup


class Recurrent(nn.Module):
    """Layers that cuDNN runs; input (N, length, 256), output (N, 8)."""

    def __init__(self, layers: nn.Module, width: int = 1024) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x)[0][:, -1])
        return out


class Encoder(nn.Module):
    """Torch's own transformer over float sequences; input and output (N, length, 512)."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of its output."""
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    found: torch.Tensor = output.loss if hasattr(output, "loss") else output.float().square().mean()
    return found


def _vision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision  # type: ignore[import-not-found, import-untyped, unused-ignore]

        model: nn.Module = getattr(torchvision.models, name)()
        return model

    return build


def _text(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        ending = "ForConditionalGeneration" if name == "T5" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model: nn.Module = getattr(transformers, name + ending)(config)
        return model

    return build


def _pictures(num: int) -> Callable[[], Any]:
    return lambda: torch.randn(num, 3, 224, 224)


def _tokens(num: int, length: int, vocabulary: int) -> Callable[[], Any]:
    def make() -> Any:
        tokens = torch.randint(vocabulary, (num, length))
        return {"input_ids": tokens, "labels": tokens}

    return make


def _sequences() -> torch.Tensor:
    return torch.randn(64, 256, 256)


_FP32, _AMP = Setup(dtype="fp32"), Setup(dtype="bf16-amp")
_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
#: Convolutional nets first: nobody documents the scratch memory of their algorithms.
CASES = (
    Case("resnet50, 64", _vision("resnet50"), _pictures(64), _FP32),
    Case("resnet50, 64, amp", _vision("resnet50"), _pictures(64), _AMP),
    Case("vgg16, 32", _vision("vgg16"), _pictures(32), _FP32),
    Case("efficientnet_b0, 64", _vision("efficientnet_b0"), _pictures(64), _FP32),
    Case("mobilenet_v3_large, 128, amp", _vision("mobilenet_v3_large"), _pictures(128), _AMP),
    Case("convnext_tiny, 64, amp", _vision("convnext_tiny"), _pictures(64), _AMP),
    Case("vit_b_16, 64, amp", _vision("vit_b_16"), _pictures(64), _AMP),
    Case("lstm, 64 x 256", lambda: Recurrent(nn.LSTM(256, 1024, 2, batch_first=True)), _sequences, _FP32),
    Case("lstm, 64 x 256, amp", lambda: Recurrent(nn.LSTM(256, 1024, 3, batch_first=True)), _sequences, _AMP),
    Case(
        "gru, both directions, 64 x 256",
        lambda: Recurrent(nn.GRU(256, 512, 2, batch_first=True, bidirectional=True, dropout=0.1)),
        _sequences,
        _FP32,
    ),
    Case("encoder, 64 x 256", Encoder, lambda: torch.randn(64, 256, 512), _FP32),
    Case("gpt2, 8 x 1024, amp", _text("GPT2"), _tokens(8, 1024, 50257), _AMP),
    Case("llama 0.2B, 4 x 2048, bf16", _text("Llama", **_LLAMA), _tokens(4, 2048, 32000), Setup(dtype="bf16")),
    Case("t5 small, 16 x 512", _text("T5", decoder_start_token_id=0), _tokens(16, 512, 32128), _FP32),
)
