"""A small 3D convolution net for short clips."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


class ClipNet(nn.Module):
    """Tells classes apart by what is in the frames and by what changes between them.

    GroupNorm, because each sample is normed alone: a batch that is split has the same gradient.
    """

    def __init__(self, width: int = 8, num_layers: int = 4, num_outputs: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 6
        for number in range(num_layers):
            out = width << number
            stride = (1, 2, 2) if number < 2 else (2, 2, 2)
            layers += [nn.Conv3d(channels, out, 3, stride, padding=1, bias=False), nn.GroupNorm(4, out), nn.SiLU()]
            channels = out
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(2 * channels, num_outputs)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return log-odds (n, num_outputs) for frames (n, time, 3, height, width) of bytes."""
        frames = frames.float().div(127.5).sub(1).transpose(1, 2)
        steps = torch.cat([torch.zeros_like(frames[:, :, :1]), frames.diff(dim=2)], dim=2)
        found = self.layers(torch.cat([frames, 4 * steps], dim=1)).flatten(2)
        return self.head(torch.cat([found.mean(2), found.amax(2)], dim=1))  # type: ignore[no-any-return]


def hash_of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
