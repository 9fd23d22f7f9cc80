"""Score each trajectory of a vocabulary, by one imitation head and four teacher heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

#: What each head says of a trajectory; the last four are those of the teacher table.
HEADS = ("imitation", "no_collision", "on_road", "progress", "comfort")


@torch.no_grad()
def distances(vocabulary: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
    """Return the metres between entries (K, F, 2) and paths (B, F, 2) at five moments, shape (B, K, 5)."""
    every = max(1, vocabulary.shape[1] // 5)
    x, y = ((vocabulary[None, :, every - 1 :: every] - paths[:, None, every - 1 :: every]) ** 2).unbind(-1)
    return (x + y).sqrt()


class SceneEncoder(nn.Module):
    """History and lane raster to one vector a scene."""

    def __init__(self, num_history: int, width: int) -> None:
        super().__init__()
        self.history = nn.Sequential(
            nn.Linear(2 * num_history, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.raster = nn.Sequential(
            nn.Conv2d(3, width // 4, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, width), nn.ReLU(),
        )  # fmt: skip
        self.join = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU())

    def forward(self, history: torch.Tensor, raster: torch.Tensor) -> Any:
        """Return shape (B, 2 x width); history (B, H, 2) in metres, raster (B, 3, R, R) of bytes."""
        seen = torch.cat([self.history(history.flatten(1) / 10), self.raster(raster.float() / 255)], dim=1)
        return self.join(seen)


class TrajectoryScorer(nn.Module):
    """The model: a head scores a trajectory by a query of the scene times a key of the trajectory.

    To this comes how far the trajectory departs from going straight on. ``vocabulary`` has the trajectories (K, F, 2)
    in metres.
    """

    vocabulary: torch.Tensor

    def __init__(self, vocabulary: Any, num_history: int, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("vocabulary", torch.from_numpy(np.array(vocabulary, np.float32)), persistent=False)
        self.scene = SceneEncoder(num_history, width)
        self.entry = nn.Sequential(
            nn.Linear(2 * vocabulary.shape[1], 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.query = nn.Linear(2 * width, len(HEADS) * (width + 1))
        self.departure = nn.Linear(2, len(HEADS))
        with torch.no_grad():  # at first the best is the nearest to going straight on
            self.departure.weight.zero_()[0, 0] = -1.0

    def forward(self, history: torch.Tensor, raster: torch.Tensor) -> Any:
        """Return the heads' scores as log-odds, shape (B, 5, K)."""
        keys = self.entry(self.vocabulary.flatten(1) / 10)
        query, bias = self.query(self.scene(history, raster)).unflatten(1, (len(HEADS), -1)).tensor_split([-1], dim=2)
        steps = torch.arange(1, self.vocabulary.shape[1] + 1, device=history.device)[:, None]
        straight = (history[:, -1] - history[:, -2])[:, None] * steps
        away = distances(self.vocabulary, straight)
        departure = self.departure(torch.stack([away.mean(-1), away[..., -1]], dim=-1)).movedim(-1, 1)
        return query @ keys.T / keys.shape[1] ** 0.5 + bias + departure
