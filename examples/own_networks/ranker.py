"""A transformer that ranks the stocks of a day: each sees its own look-back, then the other stocks of its day.

memfit run systems/memfit_workloads/ranker/config.yaml --set params.model=examples.own_networks.ranker:Ranker
"""

import torch
from torch import nn


class Ranker(nn.Module):
    """Scores (n, num_horizons) of windows (n, lookback, num_features); equal numbers of lists (n,) are one day."""

    def __init__(self, num_features, lookback, num_horizons, width=32, num_heads=4, num_layers=1):
        super().__init__()

        def encoder():
            layer = nn.TransformerEncoderLayer(width, num_heads, 2 * width, batch_first=True, norm_first=True)
            return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

        self.embed = nn.Linear(num_features, width)
        self.position = nn.Parameter(0.02 * torch.randn(lookback, width))
        self.sector = nn.Embedding(65, width)  # the last one is of those that are not known
        self.over_time, self.over_stocks = encoder(), encoder()
        self.heads = nn.Linear(width, num_horizons)

    def forward(self, windows, lists, sectors):
        stocks = self.over_time(self.embed(windows) + self.position)[:, -1] + self.sector(sectors.clamp(-1, 63) % 65)
        others = lists[:, None] != lists[None, :]  # a stock attends to those of its own day
        return self.heads(self.over_stocks(stocks[None], mask=others)[0])
