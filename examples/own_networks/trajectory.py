"""A planner: each trajectory of the vocabulary asks the history and the map of a scene, and is scored by five heads.

memfit run systems/memfit_workloads/trajectory/config.yaml --set params.model=examples.own_networks.trajectory:Planner
"""

import torch
from torch import nn


class Planner(nn.Module):
    """Log-odds (n, 5, k) of k trajectories: of imitation, no collision, on the road, progress and comfort."""

    def __init__(self, vocabulary, num_history, raster_size, width=32, num_heads=4, num_layers=2):
        super().__init__()
        self.register_buffer("paths", torch.from_numpy(vocabulary).flatten(1) / 10, persistent=False)
        self.history = nn.Linear(2, width)
        self.when = nn.Parameter(0.02 * torch.randn(num_history, width))
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.where = nn.Parameter(0.02 * torch.randn((raster_size // 8) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, num_heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.scene = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.query = nn.Sequential(nn.Linear(self.paths.shape[1], width), nn.ReLU(), nn.Linear(width, width))
        self.ask = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.heads = nn.Linear(2 * width, 5)

    def forward(self, history, raster):
        seen = self.patches(raster.float() / 255).flatten(2).transpose(1, 2) + self.where
        tokens = self.scene(torch.cat([self.history(history / 10) + self.when, seen], dim=1))
        asked = self.query(self.paths).expand(len(history), -1, -1)
        answered, _ = self.ask(asked, tokens, tokens, need_weights=False)
        return self.heads(torch.cat([asked, answered], dim=2)).transpose(1, 2)
