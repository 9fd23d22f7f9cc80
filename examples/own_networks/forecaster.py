"""A graph attention network (GAT) whose edges change: the day's correlated stocks, and those that it finds alike.

memfit run systems/memfit_workloads/forecaster/config.yaml --set params.model=examples.own_networks.forecaster:Gat
"""

import torch
from torch import nn
from torch.nn.functional import leaky_relu, normalize, one_hot


class Attention(nn.Module):
    """One layer of Velickovic et al., Graph Attention Networks, 2018, equations 1 to 4, with heads side by side."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads, self.weight = num_heads, nn.Linear(width, width)
        self.from_self, self.from_other = (nn.Parameter(0.1 * torch.randn(num_heads, width // num_heads)) for _ in "12")

    def forward(self, stocks, edges):
        """Attend along edges (n, n), which are true where a row hears a column."""
        values = self.weight(stocks).unflatten(1, (self.num_heads, -1))  # n, heads, width of a head
        scores = (values * self.from_self).sum(-1).T[:, :, None] + (values * self.from_other).sum(-1).T[:, None]
        shares = leaky_relu(scores, 0.2).masked_fill(~edges, -1e9).softmax(-1)
        return stocks + torch.einsum("hij,jhd->ihd", shares, values).flatten(1).relu()


class Gat(nn.Module):
    """Scores (n, num_horizons) of the stocks of some days; no edge leaves its day."""

    def __init__(self, num_features, num_horizons, width=32, num_heads=4, num_layers=2, num_alike=3):
        super().__init__()
        self.num_alike = num_alike
        self.look_back = nn.GRU(num_features, width, batch_first=True)
        self.layers = nn.ModuleList(Attention(width, num_heads) for _ in range(num_layers))
        self.heads = nn.Linear(width, num_horizons)

    def forward(self, windows, days, neighbours):
        stocks = self.look_back(windows)[0][:, -1]
        same_day = days[:, None] == days[None, :]
        first = same_day.int().argmax(1, keepdim=True)  # the first row of a row's day
        near = torch.where(neighbours < 0, torch.arange(len(days), device=days.device)[:, None], first + neighbours)
        edges = one_hot(near, len(days)).sum(1) > 0 if near.shape[1] else torch.zeros_like(same_day)
        for layer in self.layers:
            alike = normalize(stocks.detach()) @ normalize(stocks.detach()).T
            closest = alike.masked_fill(~same_day, -2.0).topk(min(1 + self.num_alike, len(days)), dim=1).indices
            found = one_hot(closest, len(days)).sum(1) > 0
            stocks = layer(stocks, (edges | found) & same_day)
        return self.heads(stocks)
