"""Two branches, the frame and the face, over one image backbone whose weights lie in a file of yours.

The file is torch.save(model.state_dict(), "backbone.pt") of `Backbone`, or of a network of yours in its place.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import interpolate


class Backbone(nn.Module):
    """Pictures (n, 3, size, size) to features (n, 8 * width); GroupNorm, so that a batch may be split."""

    def __init__(self, width):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(1, b), nn.SiLU()) for a, b in pairwise(sizes))
        )

    def forward(self, pictures):
        return self.layers(pictures).mean((2, 3))


class FrameAndFace(nn.Module):
    """Log-odds (n, num_outputs) of frames (n, num_frames, 3, size, size) of bytes.

    ``face`` is where faces are, as shares of the picture: top, left, height and width.
    """

    def __init__(self, num_outputs, backbone, width=16, face=(0.1, 0.25, 0.5, 0.5), frozen=True):
        super().__init__()
        self.face, self.frozen = face, frozen
        self.frame_branch, self.face_branch = Backbone(width), Backbone(width)
        for branch in (self.frame_branch, self.face_branch):
            branch.load_state_dict(torch.load(backbone, weights_only=True))
        self.frame_branch.requires_grad_(not frozen)
        self.head = nn.Sequential(nn.Linear(16 * width, 64), nn.SiLU(), nn.Linear(64, num_outputs))

    def forward(self, frames):
        pictures = frames.flatten(0, 1).float() / 127.5 - 1
        size = pictures.shape[-1]
        top, left, height, width = (round(share * size) for share in self.face)
        faces = interpolate(pictures[:, :, top : top + height, left : left + width], size, mode="bilinear")
        seen = torch.cat([self.frame_branch(pictures), self.face_branch(faces)], dim=1)
        return self.head(seen.unflatten(0, frames.shape[:2]).mean(1))
