"""Rows GM, TM and MM: convolutional networks by hand, with the in-place activations of the ones that ran.

torchvision's for rows GM (itu-rad/GPUMemNet, Test_Pipeline/cnn_models: Adam, a plain loop), but Xception, which is
timm's; timm's for rows TM; mmsegmentation's PSPNet with its auxiliary head for rows MM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from _ground_truth_programs._pieces import distribute, make_optimizer
from _ground_truth_programs._spec import Spec
from memfit.estimation import Program


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Conv2d:
    padding = (kernel - 1) // 2 * dilation
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)


def _conv_norm(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = None
) -> nn.Module:
    layers = [_conv(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


class Basic(nn.Module):
    """The block of ResNet-18."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        self.one, self.two = _conv(inputs, width, 3, stride, 1, dilation), _conv(width, width, 3, 1, 1, dilation)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.short = _conv_norm(inputs, width, 1, stride) if stride > 1 or inputs != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.norms[0](self.one(x)), inplace=True)
        out = self.norms[1](self.two(out))
        out += self.short(x)
        return functional.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """The block of ResNet-50 and up."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        self.one, self.two = _conv(inputs, width, 1), _conv(width, width, 3, stride, 1, dilation)
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
    """A ResNet; with ``dilated`` its last two stages keep the stride of 8 and all four are given back (PSPNet's)."""

    def __init__(self, block: Any, depths: tuple[int, ...], *, dilated: int = 0, deep_stem: bool = False) -> None:
        super().__init__()
        if deep_stem:
            act = nn.ReLU
            parts = [
                _conv_norm(3, 32, 3, 2, 1, act),
                _conv_norm(32, 32, 3, 1, 1, act),
                _conv_norm(32, 64, 3, 1, 1, act),
            ]
            self.stem: nn.Module = nn.Sequential(*parts, nn.MaxPool2d(3, 2, 1))
        else:
            self.stem = nn.Sequential(_conv_norm(3, 64, 7, 2, 1, nn.ReLU), nn.MaxPool2d(3, 2, 1))
        self.stages, inputs = nn.ModuleList(), 64
        for number, depth in enumerate(depths):
            width = 64 << number
            keeps = dilated == 8 and number >= 2
            stride = 1 if number == 0 or keeps else 2
            layers = []
            for index in range(depth):
                dilation = 2 ** (number - 1) if keeps else 1
                layers.append(block(inputs, width, stride if index == 0 else 1, dilation))
                inputs = width * block.expansion
            self.stages.append(nn.Sequential(*layers))
        self.fc = nn.Identity() if dilated else nn.Linear(inputs, 1000)
        self.dilated = dilated

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        if self.dilated:
            return found
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Separable(nn.Module):
    """Depthwise, then pointwise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.depth, self.point = _conv(inputs, inputs, 3, 1, inputs), _conv(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.point(self.depth(x))
        return out


class XceptionBlock(nn.Module):
    """timm's block: its first activation is not in place."""

    def __init__(self, sizes: tuple[int, ...], stride: int = 1, *, starts_with_relu: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(pairwise(sizes)):
            if number or starts_with_relu:
                layers.append(nn.ReLU(inplace=number > 0))
            layers += [Separable(inputs, outputs), nn.BatchNorm2d(outputs)]
        if stride > 1:
            layers.append(nn.MaxPool2d(3, stride, 1))
        self.body = nn.Sequential(*layers)
        self.short = (
            _conv_norm(sizes[0], sizes[-1], 1, stride) if stride > 1 or sizes[0] != sizes[-1] else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        out += self.short(x)
        return out


class Xception(nn.Module):
    """The 71-layer network."""

    def __init__(self) -> None:
        super().__init__()
        relu = partial(nn.ReLU, inplace=True)
        stem = [nn.Conv2d(3, 32, 3, 2, 0, bias=False), nn.BatchNorm2d(32), relu()]
        stem += [nn.Conv2d(32, 64, 3, bias=False), nn.BatchNorm2d(64), relu()]
        blocks = [
            XceptionBlock((64, 128, 128), 2, starts_with_relu=False),
            XceptionBlock((128, 256, 256), 2),
            XceptionBlock((256, 728, 728), 2),
            *(XceptionBlock((728, 728, 728, 728)) for _ in range(8)),
            XceptionBlock((728, 728, 1024), 2),
        ]
        end = [Separable(1024, 1536), nn.BatchNorm2d(1536), relu(), Separable(1536, 2048), nn.BatchNorm2d(2048), relu()]
        self.body = nn.Sequential(*stem, *blocks, *end, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int, inner: int, act: Any, gate: Any) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)
        self.act, self.gate = act(inplace=True), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * self.gate(self.up(self.act(self.down(x.mean((2, 3), keepdim=True)))))
        return out


class Inverted(nn.Module):
    """The block of MobileNetV2, V3 and EfficientNet."""

    def __init__(self, sizes: tuple[int, int, int], kernel: int, stride: int, act: Any, squeeze: int = 0) -> None:
        super().__init__()
        inputs, wide, outputs = sizes
        layers = [] if inputs == wide else [_conv_norm(inputs, wide, 1, act=act)]
        layers.append(_conv_norm(wide, wide, kernel, stride, wide, act))
        if squeeze:
            efficient = act is nn.SiLU
            layers.append(
                Squeeze(wide, squeeze, act if efficient else nn.ReLU, nn.Sigmoid if efficient else nn.Hardsigmoid)
            )
        layers.append(_conv_norm(wide, outputs, 1))
        self.body, self.adds = nn.Sequential(*layers), stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return x + out if self.adds else out


def _finish(inputs: int, wide: int, act: Any, *rest: nn.Module) -> list[nn.Module]:
    return [_conv_norm(inputs, wide, 1, act=act), nn.AdaptiveAvgPool2d(1), *rest]


def make_mobilenet_v2() -> nn.Module:
    """torchvision's."""
    layers: list[nn.Module] = [_conv_norm(3, 32, 3, 2, 1, nn.ReLU6)]
    inputs = 32
    for times, outputs, number, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for index in range(number):
            layers.append(Inverted((inputs, inputs * times, outputs), 3, stride if index == 0 else 1, nn.ReLU6))
            inputs = outputs
    layers += _finish(320, 1280, nn.ReLU6, nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000))
    return nn.Sequential(*layers)


def make_mobilenet_v3() -> nn.Module:
    """timm's ``mobilenetv3_large_100``."""
    swish, relu = nn.Hardswish, nn.ReLU
    layers: list[nn.Module] = [_conv_norm(3, 16, 3, 2, 1, swish)]
    for inputs, wide, outputs, kernel, stride, act, squeeze in (
        (16, 16, 16, 3, 1, relu, 0), (16, 64, 24, 3, 2, relu, 0), (24, 72, 24, 3, 1, relu, 0),
        (24, 72, 40, 5, 2, relu, 24), (40, 120, 40, 5, 1, relu, 32), (40, 120, 40, 5, 1, relu, 32),
        (40, 240, 80, 3, 2, swish, 0), (80, 200, 80, 3, 1, swish, 0), (80, 184, 80, 3, 1, swish, 0),
        (80, 184, 80, 3, 1, swish, 0), (80, 480, 112, 3, 1, swish, 120), (112, 672, 112, 3, 1, swish, 168),
        (112, 672, 160, 5, 2, swish, 168), (160, 960, 160, 5, 1, swish, 240), (160, 960, 160, 5, 1, swish, 240),
    ):  # fmt: skip
        layers.append(Inverted((inputs, wide, outputs), kernel, stride, act, squeeze))
    ends = [nn.Conv2d(960, 1280, 1), nn.Hardswish(inplace=True), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, *_finish(160, 960, swish, *ends))


def make_efficientnet() -> nn.Module:
    """timm's ``efficientnet_b0``."""
    layers: list[nn.Module] = [_conv_norm(3, 32, 3, 2, 1, nn.SiLU)]
    inputs = 32
    for times, outputs, number, kernel, stride in (
        (1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1), (6, 192, 4, 5, 2),
        (6, 320, 1, 3, 1),
    ):  # fmt: skip
        for index in range(number):
            sizes = (inputs, inputs * times, outputs)
            layers.append(Inverted(sizes, kernel, stride if index == 0 else 1, nn.SiLU, max(inputs // 4, 1)))
            inputs = outputs
    return nn.Sequential(*layers, *_finish(320, 1280, nn.SiLU, nn.Flatten(), nn.Linear(1280, 1000)))


class PyramidNet(nn.Module):
    """mmsegmentation's PSPNet and its FCN head, over a ResNet with three convolutions at its start."""

    def __init__(self, block: Any, depths: tuple[int, ...], *, stride: int) -> None:
        super().__init__()
        self.backbone = ResNet(block, depths, dilated=stride, deep_stem=True)
        last, width = 512 * block.expansion, 128 * block.expansion
        act = nn.ReLU
        self.pools = nn.ModuleList(_conv_norm(last, width, 1, act=act) for _ in range(4))
        self.join = _conv_norm(last + 4 * width, width, 3, act=act)
        self.classify = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, 19, 1))
        aux = _conv_norm(last // 2, width // 2, 3, act=act)
        self.aux = nn.Sequential(aux, nn.Dropout2d(0.1), nn.Conv2d(width // 2, 19, 1))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        features = self.backbone(x)
        last, size = features[3], features[3].shape[2:]
        levels = [last]
        for pool, scale in zip(self.pools, (1, 2, 3, 6), strict=True):
            small = pool(functional.adaptive_avg_pool2d(last, scale))
            levels.append(functional.interpolate(small, size=size, mode="bilinear", align_corners=False))
        return [self.classify(self.join(torch.cat(levels, dim=1))), self.aux(features[2])]


def classify(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a classifier."""
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def _segment(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    size, losses = batch["images"].shape[2:], []
    for logits in model(batch["images"]):
        whole = functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)
        losses.append(functional.cross_entropy(whole, batch["labels"], reduction="none", ignore_index=255).mean())
    return losses[0] + 0.4 * losses[1]


def make_classifier(build: Callable[[], nn.Module], batch: int, optimizer: str) -> Program:
    """The program of a classifier of 224 x 224 images."""
    model = build()
    data = {"images": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    return Program(model, data, classify, make_optimizer(optimizer, model))


def _make_by_timm(build: Callable[[], nn.Module], batch: int) -> Program:
    """As timm's ``train.py`` runs it by default: SGD with momentum and weight decay, of which foreach makes a copy of
    all gradients, and a loader that brings the next images, as bytes and as numbers, while these are used."""
    model = build()
    images = torch.empty(batch, 3, 224, 224)
    data = {"images": images, "next": torch.empty_like(images), "bytes": images.to(torch.uint8)}
    data["labels"] = torch.zeros(batch, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-5, foreach=True)
    return Program(model, data, classify, optimizer)


def _make_segmenter(block: Any, depths: tuple[int, ...], size: tuple[int, int], stride: int, amp: bool) -> Program:
    model = PyramidNet(block, depths, stride=stride)
    data = {"images": torch.empty(2, 3, *size), "labels": torch.zeros(2, *size, dtype=torch.long)}
    program = Program(model, data, _segment, make_optimizer("momentum", model))
    program.autocast_dtype = torch.float16 if amp else None
    return distribute(program, 4, dtype="fp32")


def measured_by_gpumemnet(make: Callable[[], Program], assumed: str = "") -> Spec:
    """A row of GPUMemNet."""
    # The smallest networks on that machine, by nvidia-smi: 1,237 MiB with one neuron; 1,731 with convolutions, timm's
    # test_vit at a batch of eight (Related_works/FakeTensor/fake_tensor.xlsx), of which 62 are its tensors.
    return Spec(make, "device", "A100-40GB", assumed=assumed, context_gib=1237 / 1024, cudnn_gib=432 / 1024)


def by_adam(build: Callable[[], nn.Module], batch: int) -> Spec:
    """A row of its paper: Adam and a plain loop."""
    return measured_by_gpumemnet(partial(make_classifier, build, batch, "adam"))


def by_timm(build: Callable[[], nn.Module], batch: int) -> Spec:
    """A row of its table of timm's networks."""
    assumed = "timm's defaults in fp32; they let cuDNN try algorithms with larger workspaces"
    return measured_by_gpumemnet(partial(_make_by_timm, build, batch), assumed)


_R18, _R50 = partial(ResNet, Basic, (2, 2, 2, 2)), partial(ResNet, Bottleneck, (3, 4, 6, 3))
_R152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))


def _spec(block: Any, depths: tuple[int, ...], size: tuple[int, int], stride: int = 8, *, amp: bool = False) -> Spec:
    make = partial(_make_segmenter, block, depths, size, stride, amp)
    return Spec(make, "allocated", "V100-32GB", 4, "statistics of SyncBN are those of BatchNorm")


_WIDE, _SQUARE = (512, 1024), (769, 769)
SPECS: dict[str, Spec] = {
    "GM-03": by_adam(_R50, 32),
    "GM-04": by_adam(_R50, 128),
    "GM-06": by_adam(Xception, 128),
    "GM-07": by_adam(make_mobilenet_v2, 32),
    "GM-08": by_adam(make_mobilenet_v2, 128),
    "TM-03": by_timm(_R18, 128),
    "TM-04": by_timm(_R50, 8),
    "TM-05": by_timm(_R50, 32),
    "TM-06": by_timm(_R50, 128),
    "TM-07": by_timm(_R152, 8),
    "TM-09": by_timm(_R152, 128),
    "TM-14": by_timm(make_mobilenet_v3, 32),
    "TM-15": by_timm(make_mobilenet_v3, 128),
    "TM-16": by_timm(make_efficientnet, 8),
    "TM-17": by_timm(make_efficientnet, 32),
    "TM-18": by_timm(make_efficientnet, 128),
    "MM-01": _spec(Basic, (2, 2, 2, 2), _WIDE),
    "MM-02": _spec(Bottleneck, (3, 4, 6, 3), _WIDE),
    "MM-03": _spec(Bottleneck, (3, 4, 23, 3), _WIDE),
    "MM-04": _spec(Basic, (2, 2, 2, 2), _SQUARE),
    "MM-05": _spec(Bottleneck, (3, 4, 6, 3), _SQUARE),
    "MM-07": _spec(Bottleneck, (3, 4, 23, 3), _WIDE, amp=True),
    "MM-08": _spec(Bottleneck, (3, 4, 6, 3), _WIDE, 32),
}
