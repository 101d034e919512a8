"""The models have the published numbers of parameters, to the last one, and of layers.

On the meta device, where 15.8 billion parameters take no memory.
"""

from __future__ import annotations

from torch import nn

from examples.models.amoebanet import amoebanetd
from examples.models.gpt import gpt
from examples.models.resnet import resnet101
from examples.models.unet import unet
from procpipe.skip import verify_skippables
from tests.cases import for_each
from tests.examples.shapes import shapes_only


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@for_each(
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
    with shapes_only():
        model = unet(5, num_convs, base_channels, in_channels=3, out_channels=1)
    verify_skippables(model)
    assert num_parameters(model) == expected
    assert len(model) == num_layers


@for_each(
    ("num_cells", "num_filters", "expected", "num_layers"),
    [
        (18, 208, 81_505_540, 24),
        (18, 256, 122_470_120, 24),
        (18, 416, 319_024_120, 24),
        (18, 544, 542_734_840, 24),
        (36, 544, 1_055_832_376, 42),
        (72, 512, 1_844_858_344, 78),
    ],
)
def test_amoebanetd(num_cells: int, num_filters: int, expected: int, num_layers: int) -> None:
    with shapes_only():
        model = amoebanetd(1000, num_cells, num_filters)
    verify_skippables(model)
    assert num_parameters(model) == expected
    assert len(model) == num_layers


def test_resnet101() -> None:
    with shapes_only():
        model = resnet101(1000)
    verify_skippables(model)
    assert num_parameters(model) == 44_549_160
    assert len(model) == 370


def test_gpt() -> None:
    """The small GPT-2, which uses the embedding's weights as the head's, has 124,439,808."""
    with shapes_only():
        model = gpt(50_257, num_layers=12, d_model=768, num_heads=12, context=1_024)
    verify_skippables(model)
    assert num_parameters(model) == 124_439_808 + 50_257 * 768
    assert len(model) == 27
