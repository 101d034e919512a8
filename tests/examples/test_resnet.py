"""ResNet-101: the residual that skip tensors carry is the residual of a block in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.resnet import resnet101
from tests.examples.shapes import shapes_only


def test_the_size_and_channels_of_each_section() -> None:
    ends: dict[str, tuple[int, ...]] = {}
    with shapes_only():
        model = resnet101(10)
        x = torch.empty(2, 3, 224, 224)
    for name, layer in model.named_children():
        x = layer(x)
        ends[name] = tuple(x.shape[1:])
    sections = ["conv", "pool", "block1_2_relu3", "block2_3_relu3", "block3_22_relu3"]
    assert [ends[name] for name in [*sections, "block4_2_relu3", "average", "classifier"]] == [
        *((64, 112, 112), (64, 56, 56)),
        *((256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)),
        *((2048, 1, 1), (10,)),
    ]


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    """Return ResNet-101, which takes a while to initialize."""
    torch.manual_seed(0)
    return resnet101(5)


def test_blocks_add_what_their_skip_tensors_carry(model: nn.Sequential) -> None:
    """All sections, and blocks with and without projection, against the formula of a block."""
    model.eval()
    x = image = torch.randn(1, 3, 33, 40)
    with torch.no_grad():
        for name in ("conv", "norm", "relu", "pool"):
            x = model.get_submodule(name)(x)
        for section, num_blocks in enumerate([3, 4, 23, 3], 1):
            for block in range(num_blocks):
                x = one_block(model, f"block{section}_{block}", x)
        expected = model.get_submodule("classifier")(x.mean((2, 3)))
        torch.testing.assert_close(model(image), expected)


def one_block(model: nn.Sequential, name: str, x: Tensor) -> Tensor:
    layers = dict(model.named_children())
    y = x
    for i in (1, 2, 3):
        y = layers[f"{name}_norm{i}"](layers[f"{name}_conv{i}"](F.relu(y) if i > 1 else y))
    projection = layers[f"{name}_add"].get_submodule("projection")
    assert isinstance(projection, nn.Identity) == (not name.endswith("_0"))
    return F.relu(y + projection(x))


def test_every_parameter_gets_a_gradient(model: nn.Sequential) -> None:
    model.train().zero_grad()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
