# mypy: disable-error-code="no-any-return, no-untyped-call"
"""Rows GM: convolutional networks by hand, with the in-place activations of those that ran.

torchvision's (itu-rad/GPUMemNet, Test_Pipeline/cnn_models: Adam, a plain loop).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from _ground_truth_programs._pieces import Spec, make_optimizer
from memfit.estimation import Program


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, 1, groups, bias=False)


def _conv_norm(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = None
) -> nn.Module:
    layers = [_conv(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = _conv(inputs, width, 1), _conv(width, width, 3, stride, 1)
        self.three = _conv(width, 4 * width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))
        self.short = _conv_norm(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.norms[0](self.one(x)), inplace=True)
        out = functional.relu(self.norms[1](self.two(out)), inplace=True)
        out = self.norms[2](self.three(out))
        out += self.short(x)
        return functional.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(3, 64, 7, 2, 1, nn.ReLU), nn.MaxPool2d(3, 2, 1))
        layers, inputs = list[nn.Module](), 64
        for number, depth in enumerate((3, 4, 6, 3)):
            for index in range(depth):
                layers.append(Bottleneck(inputs, 64 << number, 2 if number and index == 0 else 1))
                inputs = 4 * (64 << number)
        self.stages, self.fc = nn.Sequential(*layers), nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(x))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Inverted(nn.Module):
    def __init__(self, inputs: int, times: int, outputs: int, stride: int) -> None:
        super().__init__()
        act, wide = nn.ReLU6, inputs * times
        layers = [] if times == 1 else [_conv_norm(inputs, wide, 1, act=act)]
        self.body = nn.Sequential(*layers, _conv_norm(wide, wide, 3, stride, wide, act), _conv_norm(wide, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return x + out if self.adds else out


def make_mobilenet_v2() -> nn.Module:
    layers: list[nn.Module] = [_conv_norm(3, 32, 3, 2, 1, nn.ReLU6)]
    inputs = 32
    for times, outputs, number, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for index in range(number):
            layers.append(Inverted(inputs, times, outputs, stride if index == 0 else 1))
            inputs = outputs
    layers += [_conv_norm(320, 1280, 1, act=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, 1000))


def classify(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def make_classifier(build: Callable[[], nn.Module], batch: int, optimizer: str) -> Program:
    """The program of a classifier of 224 x 224 images."""
    model = build()
    data = {"images": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    return Program(model, data, classify, make_optimizer(optimizer, model))


def by_adam(build: Callable[[], nn.Module], batch: int) -> Spec:
    # The smallest networks on that machine, by nvidia-smi: 1,237 MiB with one neuron; 1,731 with convolutions, timm's
    # test_vit at a batch of eight (Related_works/FakeTensor/fake_tensor.xlsx), of which 62 are its tensors.
    make = partial(make_classifier, build, batch, "adam")
    return Spec(make, "device", "A100-40GB", context_gib=1237 / 1024, cudnn_gib=432 / 1024)


SPECS: dict[str, Spec] = {
    "GM-03": by_adam(ResNet, 32),
    "GM-04": by_adam(ResNet, 128),
    "GM-07": by_adam(make_mobilenet_v2, 32),
    "GM-08": by_adam(make_mobilenet_v2, 128),
}
