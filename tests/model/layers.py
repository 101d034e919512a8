"""A model that the tests of this folder share."""

from __future__ import annotations

import torch
from torch import nn


def model_of_many_layers(device: str = "cpu") -> nn.Sequential:
    """Return a model with every kind of layer to initialise; it runs no forward."""
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(3, 4),
            nn.ReLU(),
            nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.BatchNorm1d(4)),
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=4),
            nn.LSTM(2, 3),
            nn.Embedding(5, 2, padding_idx=0),
        )
