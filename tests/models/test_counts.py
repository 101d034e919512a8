"""The models have the published numbers of parameters, to the last one, and of layers.

On the meta device, where 15.8 billion parameters take no memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.models.unet import unet
from procpipe.skip import verify_skippables


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("num_convs", "base_channels", "expected", "num_layers"),
    [
        (5, 64, 232_687_328, 241),
        (6, 72, 362_157_516, 285),
        (11, 128, 2_213_834_176, 505),
        (24, 128, 4_993_859_008, 1_077),
        (24, 160, 7_802_903_600, 1_077),
        (48, 160, 15_822_206_000, 2_133),
    ],
)
def test_unet(num_convs: int, base_channels: int, expected: int, num_layers: int) -> None:
    with torch.device("meta"):
        model = unet(5, num_convs, base_channels, in_channels=3, out_channels=1)
    verify_skippables(model)
    assert num_parameters(model) == expected
    assert len(model) == num_layers
